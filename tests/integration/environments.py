"""Virtual environments that hold an installed Penstock, and nothing of the checkout or of the development tools.

Penstock comes from a wheel that is built from the checkout once a test run. Its dependencies are hard links to the
packages that scripts/install put into this environment: the files that a package index serves, without the download.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
LOCK = ROOT / "deploy" / "requirements.lock"
# Without the commands of this environment, if it is activated.
SYSTEM_PATH = os.pathsep.join(p for p in os.environ["PATH"].split(":") if Path(p) != Path(sys.executable).parent)


def install_tool(*arguments: str | Path) -> None:
    """Run a module of this environment that builds or installs. Raises AssertionError with its output if it fails."""
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pinned(lock: Path) -> dict[str, str]:
    """The version of each package that the lock pins for this Python, by canonical name."""
    marked = re.findall(r"^([\w.-]+)==([^ ]+)(?: ; (.+?))? \\$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(n): version for n, version, marker in marked if not marker or Marker(marker).evaluate()}


def required(distribution_name: str, extras: Iterable[str] = ()) -> dict[str, str]:
    """The version of everything that a distribution requires, directly or not, by canonical name.

    The versions are those of this environment. Packages that no metadata names are left out.
    """
    found: dict[str, str] = {}
    todo = [(distribution_name, extra) for extra in ("", *extras)]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed != distribution_name:  # not an extra that refers to the same distribution
                found[needed] = distribution(needed).version
            for wanted in {(needed, e) for e in ("", *requirement.extras)} - seen:
                seen.add(wanted)
                todo.append(wanted)
    return found


def link(name: str, version: str, python: Path) -> None:
    """Hard-link a distribution of this environment into another one. The shebang of its commands is changed."""
    assert distribution(name).version == version, f"{name}: the two locks differ, or scripts/install was not run"
    _link_files(_files(name), Path(sys.prefix), python)


@functools.cache
def _files(name: str) -> list[Path]:
    """The files of a distribution of this environment, and the byte code of its modules."""
    listed = [Path(os.path.normpath(str(file.locate()))) for file in distribution(name).files or ()]
    compiled = [bytecode(path) for path in listed if path.suffix == ".py"]
    return [path for path in {*listed, *compiled} if path.is_file()]


def _link_files(paths: Iterable[Path], here: Path, python: Path) -> None:
    """Link files of the environment `here` into that of `python`. Links keep times, so byte code stays valid."""
    there = python.parent.parent
    targets = {path: there / path.relative_to(here) for path in paths}
    for folder in {target.parent for target in targets.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    for path, target in targets.items():
        _link(path, here, target, python)


def bytecode(path: Path) -> Path:
    """The file of a module's byte code."""
    return path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"


def _link(path: Path, here: Path, target: Path, python: Path) -> None:
    if path.parent.name == "bin" and path.read_bytes().startswith(b"#!" + os.fsencode(here)):
        target.write_bytes(b"\n".join([b"#!" + os.fsencode(python), *path.read_bytes().split(b"\n")[1:]]))
        shutil.copymode(path, target)
        return
    try:
        os.link(path, target)
    except OSError:  # on another file system
        shutil.copy2(path, target)


class Environments:
    """Makes virtual environments with Penstock's wheel. All processes of a test run share `folder`.

    The wheel is built, installed and compiled once. Every environment gets these files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def wheel(self) -> Path:
        """Penstock's wheel, built from the checkout."""
        with self._once("wheel_is_built") as is_first:
            if is_first:
                options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
                install_tool("pip", "wheel", *options, "--wheel-dir", self._folder / "wheel", ROOT)
        (wheel,) = (self._folder / "wheel").glob("penstock-*.whl")
        return wheel

    def make(self, folder: Path, dependencies: dict[str, str]) -> Path:
        """Make `folder`/venv with these versions of packages and Penstock's wheel, and return the path of its Python.

        It has neither pip nor setuptools, which would provide modules that no dependency names. Raises AssertionError
        if a dependency that the wheel requires is missing.
        """
        first = self._installed()
        python = _make_venv(folder, dependencies)
        owned = [first.with_name("penstock"), *_site_packages(first).glob("penstock*/**/*")]
        _link_files(filter(Path.is_file, owned), first.parent.parent, python)
        install_tool("uv", "pip", "check", "--quiet", "--python", python)
        return python

    def _installed(self) -> Path:
        """The Python of the environment that Penstock is linked from, with byte code and kernels."""
        wheel, python = self.wheel, self._folder / "venv" / "bin" / "python"
        with self._once("wheel_is_installed") as is_first:
            if is_first:
                _make_venv(self._folder, required("penstock", ["streams"]))
                options = ("--quiet", "--no-index", "--no-cache", "--compile-bytecode")
                install_tool("uv", "pip", "install", *options, "--python", python, wheel)
                link_kernels(python)
        return python

    @contextmanager
    def _once(self, name: str) -> Iterator[bool]:
        """Yield whether this process is the first to do this work; others wait until it is done."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield not (self._folder / name).exists()
            (self._folder / name).touch()


def link_kernels(python: Path) -> None:
    """Give the installed wheel the kernels that scripts/install has compiled, with the modules that they belong to."""
    package = _site_packages(python) / "penstock"
    indexes = [path for room in ("shared", "services") for path in (ROOT / room).rglob("*.nbi")]
    modules = {path.parent.parent / f"{path.name.partition('.')[0]}.py" for path in indexes}
    for module in filter(Path.is_file, modules):  # the cache of a module that was moved stays
        target = package / module.relative_to(ROOT)
        target.with_name("__pycache__").mkdir(exist_ok=True)
        for path in (module, bytecode(module), *module.parent.glob(f"__pycache__/{module.stem}.*.nb[ci]")):
            _link(path, ROOT, package / path.relative_to(ROOT), python)


def _site_packages(python: Path) -> Path:
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return site


def _make_venv(folder: Path, dependencies: dict[str, str]) -> Path:
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    for name, version in dependencies.items():
        link(name, version, python)
    return python


def run_python(python: Path, code: str, *arguments: str) -> str:
    """Run code in a Python that imports neither the checkout nor the user's packages, and return its output."""
    command = [python, "-I", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=python.parent).stdout.strip()


def distributions(python: Path) -> set[str]:
    """The canonical names of the distributions that are installed in an environment."""
    listed = run_python(
        python, "from importlib.metadata import distributions as d; print(*(x.name for x in d()), sep='\\n')"
    )
    return {canonicalize_name(name) for name in listed.split()}


def inherited() -> dict[str, str]:
    """The variables of this process that an installed command needs to find jars and Java."""
    return {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG", "XDG_CACHE_HOME") if name in os.environ}


@contextmanager
def started(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in `folder` and write its output to the file `output` there.

    It is killed on exit if it still runs.
    """
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            command, env=inherited() | environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def get(url: str) -> str:
    """Fetch a URL and return the body as text."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())
