"""scripts/install itself, run on a copy of the tree where PATH leads to stand-ins for what takes minutes.

The stand-in for Python makes environments, takes notes of what pip is asked, and finds jars at once; what looks for a
Java is the real code. apt-get and brew put a `java` where theirs would. Nothing else is on PATH but a few plain tools.
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
TIMEOUT_SECONDS = 120  # nothing here takes a second of its own; a busy machine does
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
# Java's places that no variable names are the test's own, and so is the platform.
FINDER = """
import os, pathlib
from penstock.shared.common.java import installed_java as java
place = pathlib.Path(os.environ["PLACES"])
java._LINUX_FOLDER, java._BREW_PREFIXES, java._MAC_JAVA_HOME = place / "jvm", (place / "brew",), place / "java_home"
raise SystemExit(java.main(os.environ["PLATFORM"]))
"""
PYTHON = """#!/bin/sh
echo "python $*" >>"$PLACES/asked"
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
  "-m penstock.shared.streams.windows.compile_kernels") ;;
  "-m penstock jars spark --class-archive") [ ! -e "$PLACES/no_archive" ] ;;
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
echo "{name} $*" >>"$PLACES/asked"
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
    """A machine with a copy of the tree: what is on PATH, who the user is, and what was asked of the stand-ins."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree, self.bin = self.folder / "a tree", self.folder / "bin"  # a path with a space in it, as people have
        for room in ("penstock", "shared"):  # the script runs penstock.shared.common.java.installed_java
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / room, self.tree / room, symlinks=True, ignore=ignored)
        (self.tree / "scripts").mkdir()
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
        """A Java on PATH."""
        home = self.folder / f"java-{version}"
        java(home, version)
        (self.bin / "java").unlink(missing_ok=True)
        (self.bin / "java").symlink_to(home / "bin" / "java")
        return home

    def has_installer(self, name: str, to: Path, *, missing: str = "-") -> None:
        """apt-get or brew, which installs a Java 17 to a folder; it does not have the package `missing`."""
        java(self.folder / "spare", "17.0.15").write_text(JAVA.format(version="17.0.15", home=to), encoding="utf-8")
        executable(self.bin / name, INSTALLER.format(name=name, to=to, missing=missing))

    def now(self, name: str, is_so: bool = True) -> None:
        """Something about the machine that the stand-ins heed: no_network, old_python, no_venv."""
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
        """Exit status and all that was printed, which is never on standard output."""
        process = self.start(*arguments, **variables)
        output, said = process.communicate(timeout=TIMEOUT_SECONDS)
        assert output == ""
        return process.returncode, said

    def asked(self, *of: str) -> list[str]:
        """What was asked of stand-ins since the last time, as far as it starts with one of these."""
        path = self.folder / "asked"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if line.startswith(of)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_is_set_up_once(machine: Machine) -> None:
    """The first run makes everything from the lock with hashes; the second asks nothing of pip and prints nothing."""
    home = machine.has_java()
    status, said = machine.install()
    assert status == 0, said
    assert "making .venv with Python 3.12.1" in said
    asked = machine.asked("python -m")
    pip = [line for line in asked if line.startswith("python -m pip install")]
    (uv,) = [line for line in asked if line.startswith("python -m uv")]
    assert uv.endswith(" --require-hashes --no-build-isolation -r requirements.lock")
    assert ["--require-hashes" in line for line in pip] == [True, False]
    assert pip[-1].endswith(" --no-deps --no-build-isolation -e .")
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"
    assert machine.install() == (0, "")
    assert machine.asked("python -m") == []


@pytest.mark.parametrize(
    "why", ["global.index-url='https://index.example/simple'", "env.proxy='http://proxy:3128'", "no_uv"]
)
def test_pip_where_uv_would_not_do(machine: Machine, why: str) -> None:
    """Where pip is told another index or a proxy in its own settings, and where uv fails, pip installs the lock."""
    machine.has_java()
    if why == "no_uv":
        machine.now(why)
    else:
        (machine.folder / "pip_config").write_text(f"global.timeout='60'\n{why}\n", encoding="utf-8")
    status, said = machine.install()
    assert status == 0, said
    assert ("penstock: uv failed; trying with pip" in said) == (why == "no_uv")
    asked = machine.asked("python -m")
    assert any("pip install" in line and line.endswith("--no-build-isolation -r requirements.lock") for line in asked)
    assert any(line.startswith("python -m uv") for line in asked) == (why == "no_uv")


def test_a_class_archive_is_no_condition(machine: Machine) -> None:
    """Where Java cannot write one, that is said, and everything else is set up."""
    machine.has_java()
    machine.now("no_archive")
    status, said = machine.install()
    assert status == 0
    assert "penstock: there is none; Spark starts without it" in said
    assert machine.install() == (0, "")


def test_a_changed_lock_is_noticed(machine: Machine) -> None:
    """Another lock is installed into the environment that is there, which is not made anew; then all is quiet again."""
    machine.has_java()
    assert machine.install()[0] == 0
    machine.asked()
    with (machine.tree / "requirements.lock").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    status, said = machine.install()
    assert status == 0
    assert "installing the packages of requirements.lock" in said
    assert "making .venv" not in said
    assert len(machine.asked("python -m pip install", "python -m uv pip install")) == 3
    assert machine.install() == (0, "")


@pytest.mark.parametrize("was_whole", [False, True])
def test_a_half_made_environment_is_made_again(machine: Machine, was_whole: bool) -> None:
    """What a run leaves that is killed while pip works is made anew, even where the lock is then put back."""
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
    status, said = machine.install()
    assert status == 0, said
    assert "making .venv" in said
    assert not left.exists()
    assert machine.install() == (0, "")


def test_a_moved_tree_is_set_up_anew(machine: Machine) -> None:
    """An environment has its path in its commands: after the tree is moved, it is made again."""
    machine.has_java()
    assert machine.install()[0] == 0
    machine.tree = machine.tree.rename(machine.folder / "elsewhere")
    status, said = machine.install()
    assert (status, "making .venv" in said) == (0, True)


def test_what_was_lost_is_made_good(machine: Machine) -> None:
    """A jar that is gone is fetched again, a Java that is gone is looked for again; neither touches the packages."""
    home = machine.has_java()
    assert machine.install()[0] == 0
    (jar, *_) = (machine.folder / "home").rglob("one.jar")
    jar.unlink()
    machine.asked()
    assert machine.install()[0] == 0
    assert jar.exists()
    shutil.rmtree(home)
    newer = machine.has_java("21.0.7")
    assert machine.install()[0] == 0
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{newer}'\n"
    assert machine.asked("python -m pip", "python -m venv") == []


def test_apt_installs_a_missing_java_for_root(machine: Machine) -> None:
    """Root gets a Java by apt, the next version where the distribution lacks the first, and it is the one used."""
    machine.is_user(0)
    home = machine.folder / "jvm" / "java-21-openjdk"
    machine.has_installer("apt-get", home, missing="openjdk-17")
    status, said = machine.install()
    assert status == 0, said
    assert machine.asked("apt-get") == [
        "apt-get update",
        f"{APT_INSTALL} openjdk-17-jre-headless",
        f"{APT_INSTALL} openjdk-21-jre-headless",
    ]
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"


def test_brew_installs_a_missing_java(machine: Machine) -> None:
    """Without apt, Homebrew installs it, and it is found although Homebrew links it nowhere."""
    home = machine.folder / "brew" / "opt" / "openjdk@17"
    machine.has_installer("brew", home)
    status, said = machine.install(PLATFORM="darwin")
    assert status == 0, said
    assert machine.asked("brew") == ["brew install openjdk@17"]
    assert (machine.tree / ".venv/java.env").read_text(encoding="utf-8") == f"export JAVA_HOME='{home}'\n"


def machine_without_means(machine: Machine, means: str) -> Mapping[str, str]:
    if means in ("apt", "told not to"):
        machine.has_installer("apt-get", machine.folder / "jvm" / "java-17")
    if means == "told not to":
        machine.is_user(0)
        return {"PENSTOCK_NO_INSTALL": "1"}
    if means == "dnf":
        executable(machine.bin / "dnf", "#!/bin/sh\nexit 1\n")
    return {}


@pytest.mark.parametrize(
    ("means", "command"),
    [
        ("apt", f"  sudo sh -c '{APT}'"),
        ("told not to", f"  {APT}"),
        ("dnf", "sudo dnf install java-17-openjdk-headless"),
        ("none", "there is neither apt nor brew to install it with. Install it, then try again."),
    ],
)
def test_what_cannot_be_installed_is_said(machine: Machine, means: str, command: str) -> None:
    """No root, no leave or no installer: the exact command is printed, nothing is run, and the exit status is 1."""
    status, said = machine.install(**machine_without_means(machine, means))
    assert status == 1
    assert said.splitlines()[-1].endswith(command)
    assert "a Java runtime for Kafka and Spark is missing" in said
    assert machine.asked("apt-get", "dnf") == []
    machine.has_java()
    assert machine.install()[0] == 0, "the packages are there: only Java was missing"
    assert machine.asked("python -m pip", "python -m venv") == []


@pytest.mark.parametrize("version", ["11.0.2", "25.0.1"])
def test_a_java_of_another_version_does_not_do(machine: Machine, version: str) -> None:
    """One that is too old or too new is named with its version and its place, and one that does is asked for."""
    machine.has_java(version)
    status, said = machine.install()
    assert status == 1
    assert f"Java 17 to 22 is needed, but {machine.bin / 'java'} (PATH) is Java {version.split('.')[0]}." in said


def test_an_installer_that_fails_is_said(machine: Machine) -> None:
    """When apt fails, the command that failed is the last line, and the next run goes on from there."""
    machine.is_user(0)
    machine.has_installer("apt-get", machine.folder / "jvm" / "java-17", missing="update")
    status, said = machine.install()
    assert status == 1
    assert said.splitlines()[-1] == f"penstock: that failed. Run it by hand, then try again:  {APT}"


def test_without_network(machine: Machine) -> None:
    """pip's own words come with what to do, then the jars' own; once there is a network, the next run goes through."""
    machine.has_java()
    machine.now("no_network")
    status, said = machine.install()
    assert status == 1
    assert said.splitlines()[-2:] == [
        "ERROR: Could not find a version that satisfies httpx",
        "penstock: pip failed; the lines above say why. Run scripts/install again when that is fixed.",
    ]
    machine.now("no_network", False)
    assert machine.install()[0] == 0
    machine.now("no_network")
    shutil.rmtree(machine.folder / "home")
    status, said = machine.install()
    assert (status, said.splitlines()[-1]) == (1, "penstock: no jars: no network")
    machine.now("no_network", False)
    assert machine.install()[0] == 0


@pytest.mark.parametrize(("argument", "status"), [("--hepl", 2), ("now", 2), ("--help", 0), ("-h", 0)])
def test_it_takes_no_arguments(machine: Machine, argument: str, status: int) -> None:
    """An unknown argument is refused with 2 before anything is done; help is the same text with 0."""
    assert machine.install(argument)[0] == status
    said = machine.install(argument)[1]
    assert said.startswith("Sets this checkout up: ")
    assert "PENSTOCK_NO_INSTALL" in said
    assert not (machine.tree / ".venv").exists()
    assert machine.asked() == []


def test_python_that_does_not_do(machine: Machine) -> None:
    """Too old a Python, or PYTHON that names one, is said; a missing venv module is installed as Java would be."""
    machine.now("old_python")
    status, said = machine.install()
    assert (status, said.startswith("penstock: no Python 3.11 or newer on PATH")) == (1, True)
    named = str(machine.bin / "python3")
    assert machine.install(PYTHON=named) == (1, f"penstock: PYTHON={named}: not a Python 3.11 or newer\n")
    machine.now("old_python", False)
    machine.now("no_venv")
    machine.has_installer("apt-get", machine.folder / "nowhere")
    status, said = machine.install()
    assert status == 1
    assert "apt-get install -y --no-install-recommends python3.12-venv" in said
    assert not (machine.tree / ".venv").exists()
