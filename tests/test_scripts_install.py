"""scripts/install itself, run on a copy of the tree, with stand-ins on PATH for programs that take minutes.

The stand-in for Python creates environments, records pip's arguments, and finds jars at once; the code that looks for a
Java is the real one. apt-get and brew install a `java` where the real ones would. PATH has only these and a few plain
tools.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 120  # a run takes less than a second, but not on a busy machine
TOOLS = (
    "awk",
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "env",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sed",
    "sh",
    "tail",
)
DIGEST = "sha256sum" if shutil.which("sha256sum") else "shasum"
# Java's default folders and the platform are the test's own.
FINDER = """
import os, pathlib
from penstock.shared.common.java import installed_java as java
place = pathlib.Path(os.environ["PLACES"])
java._LINUX_FOLDER, java._BREW_PREFIXES, java._MAC_JAVA_HOME = place / "jvm", (place / "brew",), place / "java_home"
raise SystemExit(java.main(os.environ["PLATFORM"]))
"""
PYTHON = """#!/bin/sh
echo "python $*" >>"$PLACES/calls"
case "$*" in
  *"sys.version_info <"*) [ ! -e "$PLACES/old_python" ] ;;
  *"import ensurepip, venv"*) [ ! -e "$PLACES/no_venv" ] ;;
  *"sys.version.split"*) echo 3.12.1 ;;
  *sys.version_info*) echo 3.12 ;;
  --version) echo "Python 3.12.1" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip config list") cat "$PLACES/pip_config" 2>/dev/null ;;
  "-m uv pip install "*) if [ -e "$PLACES/no_uv" ]; then echo "error: uv knows no proxy" >&2; exit 1; fi ;;
  "-m pip "*)
    if [ -p "$PLACES/hold" ]; then echo "pip is held" >&2; read -r forever <"$PLACES/hold"; fi
    if [ -e "$PLACES/no_network" ]; then echo "ERROR: Could not find a version that satisfies httpx" >&2; exit 1; fi ;;
  "-m penstock.shared.common.java.installed_java") exec "$REAL_PYTHON" -c "$(cat "$PLACES/finder")" ;;
  "-m penstock jars kafka" | "-m penstock jars spark")
    if [ -e "$PLACES/no_network" ]; then echo "penstock: no jars: no network" >&2; exit 1; fi
    jars="$HOME/.cache/penstock/$4"
    mkdir -p "$jars" && : >"$jars/one.jar"
    echo "$jars" ;;
  "-m penstock.shared.streams.compile_kernels") ;;
  "-m penstock jars kafka --class-archive" | "-m penstock jars spark --class-archive") [ ! -e "$PLACES/no_archive" ] ;;
  *) echo "not a question of scripts/install: $*" >&2; exit 99 ;;
esac
"""
JAVA = """#!/bin/sh
echo 'openjdk version "{version}" 2025-04-15' >&2
case "$1" in -XshowSettings*) echo "    java.home = {home}" >&2 ;; esac
"""
APT_INSTALL = "apt-get install -y --no-install-recommends"
APT = f"apt-get update && {{ {APT_INSTALL} openjdk-17-jre-headless || {APT_INSTALL} openjdk-21-jre-headless; }}"
INSTALLER = """#!/bin/sh
echo "{name} $*" >>"$PLACES/calls"
case "$*" in *"{missing}"*) exit 100 ;; *install*) mkdir -p "{to}" && cp -R "$PLACES/spare/." "{to}" ;; esac
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def java(home: Path, version: str) -> Path:
    """A `java` of this version, in a runtime's usual layout."""
    return executable(home / "bin" / "java", JAVA.format(version=version, home=home))


@dataclass
class Machine:
    """A machine with a copy of the tree: its commands on PATH, its user, and the calls of the stand-ins."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree, self.bin = self.folder / "a tree", self.folder / "bin"  # with a space, as some users' paths have
        (self.tree / "scripts").mkdir(parents=True)
        (self.tree / "penstock").symlink_to(ROOT / "penstock")  # has the code that looks for a Java
        for name in ("scripts/install", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, self.tree / name)
        self.bin.mkdir()
        for tool in (*TOOLS, DIGEST):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        executable(self.bin / "python3", PYTHON)
        (self.folder / "finder").write_text(FINDER, encoding="utf-8")
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(self.folder / "home"),
            "PLACES": str(self.folder),
            "PLATFORM": "linux",
            "REAL_PYTHON": sys.executable,
        }
        self.is_user(1000)

    def is_user(self, uid: int) -> None:
        executable(self.bin / "id", f"#!/bin/sh\necho {uid}\n")

    def has_java(self, version: str = "17.0.15") -> Path:
        """Put a Java on PATH."""
        home = self.folder / f"java-{version}"
        java(home, version)
        (self.bin / "java").unlink(missing_ok=True)
        (self.bin / "java").symlink_to(home / "bin" / "java")
        return home

    def has_installer(self, name: str, to: Path, *, missing: str = "-") -> None:
        """Put an apt-get or brew on PATH that installs a Java 17 into a folder; it lacks the package `missing`."""
        java(self.folder / "spare", "17.0.15").write_text(JAVA.format(version="17.0.15", home=to), encoding="utf-8")
        executable(self.bin / name, INSTALLER.format(name=name, to=to, missing=missing))

    def set_condition(self, name: str, is_so: bool = True) -> None:
        """Set a condition of the machine that the stand-ins check: no_network, old_python, no_venv."""
        if is_so:
            (self.folder / name).touch()
        else:
            (self.folder / name).unlink()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.tree / "scripts" / "install"), *arguments],
            env=self.environment | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def install(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run the script; return its exit status and standard error. Standard output must be empty."""
        process = self.start(*arguments, **variables)
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        assert output == ""
        return process.returncode, errors

    def calls(self, *of: str) -> list[str]:
        """The calls of stand-ins since the last time that start with one of these."""
        path = self.folder / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if line.startswith(of)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_is_set_up_once(machine: Machine) -> None:
    """The first run installs everything from the lock with hashes; the second runs no pip and prints nothing."""
    home = machine.has_java()
    status, output = machine.install()
    assert status == 0, output
    assert "making .venv with Python 3.12.1" in output
    calls = machine.calls("python -m")
    pip = [line for line in calls if line.startswith("python -m pip install")]
    (uv,) = [line for line in calls if line.startswith("python -m uv")]
    assert uv.endswith(" --require-hashes --no-build-isolation -r requirements.lock")
    assert ["--require-hashes" in line for line in pip] == [True, False]
    assert pip[-1].endswith(" --no-deps --no-build-isolation -e .")
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"
    assert machine.install() == (0, "")
    assert machine.calls("python -m") == []


@pytest.mark.parametrize(
    "why", ["global.index-url='https://index.example/simple'", "env.proxy='http://proxy:3128'", "no_uv"]
)
def test_pip_is_used_if_uv_cannot(machine: Machine, why: str) -> None:
    """pip installs the lock if pip's settings name an index or a proxy, or if uv fails."""
    machine.has_java()
    if why == "no_uv":
        machine.set_condition(why)
    else:
        (machine.folder / "pip_config").write_text(f"global.timeout='60'\n{why}\n", encoding="utf-8")
    status, output = machine.install()
    assert status == 0, output
    assert ("uv failed" in output) == (why == "no_uv")
    calls = machine.calls("python -m")
    assert any("pip install" in line and line.endswith("--no-build-isolation -r requirements.lock") for line in calls)
    assert any(line.startswith("python -m uv") for line in calls) == (why == "no_uv")


def test_a_missing_class_archive_is_no_failure(machine: Machine) -> None:
    """If Java cannot write a class archive, the script says so and succeeds."""
    machine.has_java()
    machine.set_condition("no_archive")
    status, output = machine.install()
    assert status == 0
    assert "none for kafka" in output
    assert "none for spark" in output
    assert machine.install() == (0, "")


def test_a_changed_lock_is_noticed(machine: Machine) -> None:
    """A changed lock is installed into the existing environment, which is not recreated."""
    machine.has_java()
    assert machine.install()[0] == 0
    machine.calls()
    with (machine.tree / "requirements.lock").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    status, output = machine.install()
    assert status == 0
    assert "installing the packages of requirements.lock" in output
    assert "making .venv" not in output
    assert len(machine.calls("python -m pip install", "python -m uv pip install")) == 3
    assert machine.install() == (0, "")


@pytest.mark.parametrize("was_whole", [False, True])
def test_an_incomplete_environment_is_recreated(machine: Machine, was_whole: bool) -> None:
    """An environment that a killed run left is recreated, even if the lock is changed back."""
    machine.has_java()
    lock = machine.tree / "requirements.lock"
    wanted = lock.read_text(encoding="utf-8")
    if was_whole:
        assert machine.install()[0] == 0
        lock.write_text(wanted + "# changed\n", encoding="utf-8")
    os.mkfifo(machine.folder / "hold")
    process = machine.start()
    assert process.stderr is not None
    assert "pip is held\n" in process.stderr
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_SECONDS)
    (machine.folder / "hold").unlink()
    lock.write_text(wanted, encoding="utf-8")
    left = machine.tree / ".venv" / "left-over"
    left.touch()
    status, output = machine.install()
    assert status == 0, output
    assert "making .venv" in output
    assert not left.exists()
    assert machine.install() == (0, "")


def test_a_moved_tree_is_set_up_again(machine: Machine) -> None:
    """After the tree is moved the environment is recreated, since its commands contain its path."""
    machine.has_java()
    assert machine.install()[0] == 0
    machine.tree = machine.tree.rename(machine.folder / "elsewhere")
    status, output = machine.install()
    assert (status, "making .venv" in output) == (0, True)


def test_a_missing_jar_or_java_is_replaced(machine: Machine) -> None:
    """A missing jar is fetched again, and a missing Java is looked for again, without running pip."""
    home = machine.has_java()
    assert machine.install()[0] == 0
    (jar, *_) = (machine.folder / "home").rglob("one.jar")
    jar.unlink()
    machine.calls()
    assert machine.install()[0] == 0
    assert jar.exists()
    shutil.rmtree(home)
    newer = machine.has_java("21.0.7")
    assert machine.install()[0] == 0
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{newer}'\n"
    assert machine.calls("python -m pip", "python -m venv") == []


def test_apt_installs_a_missing_java_for_root(machine: Machine) -> None:
    """For root, apt installs a Java, or the next version if the distribution lacks the first, and it is used."""
    machine.is_user(0)
    home = machine.folder / "jvm" / "java-21-openjdk"
    machine.has_installer("apt-get", home, missing="openjdk-17")
    status, output = machine.install()
    assert status == 0, output
    assert machine.calls("apt-get") == [
        "apt-get update",
        f"{APT_INSTALL} openjdk-17-jre-headless",
        f"{APT_INSTALL} openjdk-21-jre-headless",
    ]
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"


def test_brew_installs_a_missing_java(machine: Machine) -> None:
    """Without apt, Homebrew installs a Java, which is found although Homebrew does not link it."""
    home = machine.folder / "brew" / "opt" / "openjdk@17"
    machine.has_installer("brew", home)
    status, output = machine.install(PLATFORM="darwin")
    assert status == 0, output
    assert machine.calls("brew") == ["brew install openjdk@17"]
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"


def machine_without_means(machine: Machine, means: str) -> Mapping[str, str]:
    if means in ("apt", "switched off"):
        machine.has_installer("apt-get", machine.folder / "jvm" / "java-17")
    if means == "switched off":
        machine.is_user(0)
        return {"PENSTOCK_NO_INSTALL": "1"}
    if means == "dnf":
        executable(machine.bin / "dnf", "#!/bin/sh\nexit 1\n")
    return {}


@pytest.mark.parametrize(
    ("means", "command"),
    [
        ("apt", f"  sudo sh -c '{APT}'"),
        ("switched off", f"  {APT}"),
        ("dnf", "sudo dnf install java-17-openjdk-headless"),
        ("none", "there is neither apt nor brew to install it with. Install it, then try again."),
    ],
)
def test_a_java_that_cannot_be_installed_prints_the_command(machine: Machine, means: str, command: str) -> None:
    """Without root, permission or an installer, the script prints the command, runs nothing and exits with status 1."""
    status, output = machine.install(**machine_without_means(machine, means))
    assert status == 1
    assert output.splitlines()[-1].endswith(command)
    assert "Java runtime" in output
    assert machine.calls("apt-get", "dnf") == []
    machine.has_java()
    assert machine.install()[0] == 0, "the packages are there: only Java was missing"
    assert machine.calls("python -m pip", "python -m venv") == []


@pytest.mark.parametrize("version", ["11.0.2", "25.0.1"])
def test_a_java_of_an_unsupported_version_is_an_error(machine: Machine, version: str) -> None:
    """A Java that is too old or too new is an error with its version and path."""
    machine.has_java(version)
    status, output = machine.install()
    assert status == 1
    assert f"Java 17 to 22 is needed, but {machine.bin / 'java'} (PATH) is Java {version.split('.')[0]}." in output


def test_a_failed_installer_is_reported(machine: Machine) -> None:
    """If apt fails, the last line names the command."""
    machine.is_user(0)
    machine.has_installer("apt-get", machine.folder / "jvm" / "java-17", missing="update")
    status, output = machine.install()
    assert status == 1
    assert output.splitlines()[-1] == f"penstock: that failed. Run it by hand, then try again:  {APT}"


def test_without_network(machine: Machine) -> None:
    """Without a network the errors of pip and of the jars are printed with what to do, and a later run succeeds."""
    machine.has_java()
    machine.set_condition("no_network")
    status, output = machine.install()
    assert status == 1
    assert output.splitlines()[-2:] == [
        "ERROR: Could not find a version that satisfies httpx",
        "penstock: pip failed; the lines above say why. Run scripts/install again when that is fixed.",
    ]
    machine.set_condition("no_network", False)
    assert machine.install()[0] == 0
    machine.set_condition("no_network")
    shutil.rmtree(machine.folder / "home")
    status, output = machine.install()
    assert (status, output.splitlines()[-1]) == (1, "penstock: no jars: no network")
    machine.set_condition("no_network", False)
    assert machine.install()[0] == 0


@pytest.mark.parametrize(("argument", "status"), [("--hepl", 2), ("now", 2), ("--help", 0), ("-h", 0)])
def test_it_takes_no_arguments(machine: Machine, argument: str, status: int) -> None:
    """An unknown argument exits with status 2 and help with 0, both with the same text and without changes."""
    assert machine.install(argument)[0] == status
    output = machine.install(argument)[1]
    assert output.startswith("Sets this checkout up: ")
    assert "PENSTOCK_NO_INSTALL" in output
    assert not (machine.tree / ".venv").exists()
    assert machine.calls() == []


def test_an_unsupported_python_is_an_error(machine: Machine) -> None:
    """A Python that is too old is an error; a missing venv module prints the command to install it."""
    machine.set_condition("old_python")
    status, output = machine.install()
    assert (status, output.startswith("penstock: no Python 3.11 or newer on PATH")) == (1, True)
    named = str(machine.bin / "python3")
    assert machine.install(PYTHON=named) == (1, f"penstock: PYTHON={named}: not a Python 3.11 or newer\n")
    machine.set_condition("old_python", False)
    machine.set_condition("no_venv")
    machine.has_installer("apt-get", machine.folder / "nowhere")
    status, output = machine.install()
    assert status == 1
    assert "apt-get install -y --no-install-recommends python3.12-venv" in output
    assert not (machine.tree / ".venv").exists()
