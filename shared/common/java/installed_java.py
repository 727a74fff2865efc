"""Finds the Java that runs Kafka and Spark, and says how to install one if there is none.

Locations are tried in order: `JAVA_HOME`, `PATH`, then the folders of macOS, Homebrew and distributions. The first Java
with a version between `VERSION_MIN` and `VERSION_MAX` is used. Other versions are remembered, so that the error can
list which version was found where.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.common.errors import ConfigError, JavaNotFound, WrongJava

# Spark 4.0 and Kafka 4.1 need at least this version.
VERSION_MIN = 17
# Kafka 4.1 runs on newer versions. But the Hadoop client of Spark 4.0 calls Subject.getSubject for the user's name:
# Java 23 supports the call only if a security manager is allowed, Java 24 not at all.
VERSION_MAX = 22
NEEDED = f"Java {VERSION_MIN} to {VERSION_MAX} is needed"
# A cold JVM on a busy machine needs a few seconds. A JVM that hangs must not block the caller.
VERSION_TIMEOUT_SECONDS = 20
_MAC_JAVA_HOME = Path("/usr/libexec/java_home")
_LINUX_FOLDER = Path("/usr/lib/jvm")
_BREW_PREFIXES = (Path("/opt/homebrew"), Path("/usr/local"), Path("/home/linuxbrew/.linuxbrew"))
_HINT = "Install one: "
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime whose version is known. `found_by` is how it was found: JAVA_HOME, PATH, …"""

    executable: Path
    version: int
    found_by: str

    @property
    def home(self) -> Path:
        """The value of `JAVA_HOME` for this runtime."""
        return self.executable.resolve().parent.parent


def find_java(environ: Mapping[str, str] | None = None, *, platform: str = sys.platform) -> Java:
    """The first Java with a supported version.

    Raises WrongJava if only other versions are found, JavaNotFound if no Java is found that runs. Both messages say
    how to install the right one.
    """
    environ = os.environ if environ is None else environ
    rejected: list[str] = []
    seen_any = False
    looked_at: set[Path] = set()
    for found_by, executable in _java_candidates(environ, platform):
        if executable.resolve() in looked_at:
            # Distributions link one Java under several names.
            continue
        looked_at.add(executable.resolve())
        version = read_version(executable)
        if version is None:
            rejected.append(f"{executable} ({found_by}) does not run")
            continue
        if VERSION_MIN <= version <= VERSION_MAX:
            return Java(executable, version, found_by)
        seen_any = True
        rejected.append(f"{executable} ({found_by}) is Java {version}")
    hint = _HINT + install_command(platform)
    if seen_any:
        raise WrongJava(f"{NEEDED}, but {'; '.join(rejected)}. {hint}")
    looked = f" ({'; '.join(rejected)})" if rejected else ""
    raise JavaNotFound(f"{NEEDED} and none was found by JAVA_HOME or PATH{looked}. {hint}")


def parse_version(output: str) -> int | None:
    """The major version in the output of `java -version`; None if there is none.

    >>> parse_version('openjdk version "17.0.15" 2025-04-15')
    17
    >>> parse_version('java version "1.8.0_402"')
    8
    """
    match = _VERSION.search(output)
    return int(match.group(1)) if match else None


def read_version(executable: Path) -> int | None:
    """The major version of a `java` executable; None if it does not run or its output is not understood."""
    try:
        response = subprocess.run(
            [executable, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(response.stderr + response.stdout) if response.returncode == 0 else None


def install_command(platform: str) -> str:
    """The command that installs Java on this platform."""
    if platform == "darwin":
        return f"brew install openjdk@{VERSION_MIN}"
    sudo = "" if os.geteuid() == 0 else "sudo "
    package = f"openjdk-{VERSION_MIN}-jre-headless"
    return f"{sudo}apt-get install -y {package} (or your distribution's package of Java {VERSION_MIN})"


def _java_candidates(environ: Mapping[str, str], platform: str) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    # shutil.which searches the process's own PATH for None, and nothing for an empty string.
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(on_path)
    if platform == "darwin":
        yield from _mac_candidates()
    yield from _brew_candidates()
    for executable in sorted(_LINUX_FOLDER.glob("*/bin/java")):
        yield str(_LINUX_FOLDER), executable


def _mac_candidates() -> Iterator[tuple[str, Path]]:
    if _MAC_JAVA_HOME.exists():
        command = [str(_MAC_JAVA_HOME), "-v", str(VERSION_MIN)]
        try:
            response = subprocess.run(
                command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        if response.returncode == 0:
            yield str(_MAC_JAVA_HOME), Path(response.stdout.strip()) / "bin" / "java"


def _brew_candidates() -> Iterator[tuple[str, Path]]:
    for prefix in _BREW_PREFIXES:
        # Homebrew's openjdk is keg-only: installed, but linked into no folder of PATH.
        for formula in (f"openjdk@{VERSION_MIN}", "openjdk@21", "openjdk"):
            executable = prefix / "opt" / formula / "bin" / "java"
            if executable.exists():
                yield "Homebrew", executable


def main(platform: str = sys.platform) -> int:
    """Print the path of the `java` executable found, for scripts/install. An error is one line on standard error.

    The error does not contain an install command, since the script prints the one that fits this machine.
    """
    try:
        print(find_java(platform=platform).executable)
    except ConfigError as e:
        print(f"penstock: {str(e).partition(_HINT)[0].rstrip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
