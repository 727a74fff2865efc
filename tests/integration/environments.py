"""Virtual environments that hold an installed Penstock and nothing of the checkout or of the developers.

The wheel is built from the checkout, once a process, and installed by uv. Its dependencies are hard links to the
packages that scripts/install put into this environment: the same files that a package index serves,
without the download.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
# Without the developers' commands, if their environment is activated.
SYSTEM_PATH = os.pathsep.join(p for p in os.environ["PATH"].split(":") if Path(p) != Path(sys.executable).parent)


def install_tool(*arguments: str | Path) -> None:
    """Run a module of this environment that builds or installs. AssertionError with its message if it fails."""
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pinned(lock: Path) -> dict[str, str]:
    """Version by canonical name of each package that the lock pins for this Python."""
    marked = re.findall(r"^([\w.-]+)==([^ ]+)(?: ; (.+?))? \\$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(n): version for n, version, marker in marked if not marker or Marker(marker).evaluate()}


def required(distribution_name: str, extras: Iterable[str] = ()) -> dict[str, str]:
    """Version by canonical name of everything that a distribution requires, directly or not, by its own metadata.

    The versions are those of this environment. Packages that are here but that no metadata names are left out.
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
            if needed != distribution_name:  # an extra that names others of the same distribution
                found[needed] = distribution(needed).version
            for wanted in {(needed, e) for e in ("", *requirement.extras)} - seen:
                seen.add(wanted)
                todo.append(wanted)
    return found


def link(name: str, version: str, python: Path) -> None:
    """Give another environment a distribution of this one, file by file; commands start the other one's Python."""
    found = distribution(name)
    assert found.version == version, f"{name}: the two locks differ, or scripts/install was not run"
    here, there = Path(sys.prefix), python.parent.parent
    for file in found.files or ():
        path = Path(os.path.normpath(str(file.locate())))
        if path.suffix == ".pyc" or not path.is_file():
            continue
        target = there / path.relative_to(here)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "bin" and path.read_bytes().startswith(b"#!" + os.fsencode(here)):
            target.write_bytes(b"\n".join([b"#!" + os.fsencode(python), *path.read_bytes().split(b"\n")[1:]]))
            shutil.copymode(path, target)
            continue
        try:
            os.link(path, target)
        except OSError:  # on another disk
            shutil.copy2(path, target)


@functools.cache
def _wheels() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="penstock-wheel-")  # removed when the process ends
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    install_tool("pip", "wheel", *options, "--wheel-dir", folder.name, ROOT)
    return folder


def build_wheel() -> Path:
    """Penstock's wheel, built from the checkout."""
    (wheel,) = Path(_wheels().name).glob("penstock-*.whl")
    return wheel


def make_environment(folder: Path, dependencies: dict[str, str]) -> Path:
    """Make `folder`/venv with these versions of packages, and with Penstock's wheel; the path of its Python.

    It has neither pip nor setuptools, which would provide modules that no dependency names.
    """
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    for name, version in dependencies.items():
        link(name, version, python)
    # With dependencies, but without an index: uv fails if one that the wheel requires is missing.
    options = ("--quiet", "--no-cache", "--no-index", "--offline")
    install_tool("uv", "pip", "install", "--python", python, *options, build_wheel())
    return python


def ask(python: Path, code: str, *arguments: str) -> str:
    """What a Python prints that sees neither the checkout nor the user's own packages."""
    command = [python, "-I", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=python.parent).stdout.strip()


def distributions(python: Path) -> set[str]:
    """The canonical names of what is installed in an environment."""
    listed = ask(python, "from importlib.metadata import distributions as d; print(*(x.name for x in d()), sep='\\n')")
    return {canonicalize_name(name) for name in listed.split()}


def inherited() -> dict[str, str]:
    """The variables of this process that an installed command may see: they say where jars and Java are."""
    return {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG", "XDG_CACHE_HOME") if name in os.environ}


@contextmanager
def started(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a folder of its own, its output in `output` there; killed at the end if it still runs."""
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
    """What an HTTP address answers, as text."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
