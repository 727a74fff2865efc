"""Finding a Java, with launchers that print different versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.common.errors import JavaNotFound, WrongJava
from penstock.shared.common.java import installed_java as finder
from penstock.shared.common.java.installed_java import find_java, install_command, parse_version, read_version


@pytest.fixture(autouse=True)
def _own_folder_of_javas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the Javas of this machine."""
    monkeypatch.setattr(finder, "_LINUX_FOLDER", tmp_path / "jvm")
    monkeypatch.setattr(finder, "_BREW_PREFIXES", ())


def launcher(folder: Path, version: str, status: int = 0) -> Path:
    """A `java` that prints what a real one of that version prints."""
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\nexit {status}\n")
    java.chmod(0o755)
    return java


@pytest.mark.parametrize(
    ("message", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_version_is_read_from_what_java_prints(message: str, version: int | None) -> None:
    """The major version is read in the old and the new numbering, and after other output of the JVM."""
    assert parse_version(message) == version


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    """JAVA_HOME has precedence over PATH if both have a suitable version."""
    java = launcher(tmp_path / "home" / "bin", "21.0.1")
    launcher(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}, platform="linux")
    assert (found.executable, found.version, found.found_by) == (java, 21, "JAVA_HOME")
    assert found.home == tmp_path / "home"


def test_an_old_java_home_is_passed_over(tmp_path: Path) -> None:
    """An old JAVA_HOME does not hide a suitable Java on PATH."""
    launcher(tmp_path / "home" / "bin", "11.0.2")
    launcher(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}, platform="linux")
    assert (found.version, found.found_by) == (17, "PATH")


def test_printed_for_the_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts/install the launcher alone is printed, or the error on standard error without a command."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    java = launcher(tmp_path, "11.0.2")
    assert finder.main() == 1
    message = f"penstock: Java 17 to 22 is needed, but {java} (PATH) is Java 11.\n"
    assert capsys.readouterr() == ("", message)
    launcher(tmp_path, "17.0.15")
    assert finder.main() == 0
    assert capsys.readouterr() == (f"{java}\n", "")


def test_homebrews_java_is_found_outside_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Homebrew's openjdk is found, although it is in no folder of PATH."""
    monkeypatch.setattr(finder, "_BREW_PREFIXES", (tmp_path / "brew",))
    java = launcher(tmp_path / "brew" / "opt" / "openjdk@17" / "bin", "17.0.15")
    found = find_java({"PATH": ""}, platform="linux")
    assert (found.executable, found.found_by) == (java, "Homebrew")


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.7", "22.0.2"])
def test_supported_versions(tmp_path: Path, version: str) -> None:
    """The versions that Kafka, Spark and Spark's Hadoop client all support are accepted."""
    launcher(tmp_path, version)
    assert find_java({"PATH": str(tmp_path)}, platform="linux").version == int(version.split(".")[0])


@pytest.mark.parametrize("version", ["1.8.0_402", "16.0.2", "23.0.1", "24", "25.0.1"])
def test_unsupported_versions(tmp_path: Path, version: str) -> None:
    """Older and newer versions are an error with the range, the found version, and the command that installs one."""
    java = launcher(tmp_path, version)
    major = parse_version(f'version "{version}"')
    with pytest.raises(WrongJava) as e:
        find_java({"PATH": str(tmp_path)}, platform="linux")
    assert str(e.value).startswith(f"Java 17 to 22 is needed, but {java} (PATH) is Java {major}. Install one: ")
    assert "apt-get install -y openjdk-17-jre-headless" in str(e.value)


def test_an_installed_java_is_found_behind_a_newer_one(tmp_path: Path) -> None:
    """The distribution's folder of Javas is searched too, since PATH has only the newest one."""
    launcher(tmp_path / "path", "25.0.1")
    java = launcher(tmp_path / "jvm" / "java-21-openjdk" / "bin", "21.0.7")
    found = find_java({"PATH": str(tmp_path / "path")}, platform="linux")
    assert (found.executable, found.version) == (java, 21)


def test_one_java_by_two_names_is_named_once(tmp_path: Path) -> None:
    """A launcher that both JAVA_HOME and PATH lead to is named once."""
    launcher(tmp_path / "home" / "bin", "11.0.2")
    with pytest.raises(WrongJava) as e:
        find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "home" / "bin")}, platform="linux")
    assert str(e.value).count("is Java 11") == 1


def test_wrong_java_names_version_path_and_command(tmp_path: Path) -> None:
    """The error has the version, its path, and the command that installs the right one."""
    java = launcher(tmp_path, "11.0.2")
    with pytest.raises(WrongJava) as e:
        find_java({"PATH": str(tmp_path)}, platform="linux")
    assert f"{java} (PATH) is Java 11" in str(e.value)
    assert "apt-get install -y openjdk-17-jre-headless" in str(e.value)


def test_a_missing_java_is_an_error_with_the_command(tmp_path: Path) -> None:
    """Without a Java the error has the command, and a missing PATH is not replaced by the process's own."""
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME.*openjdk-17-jre-headless"):
        find_java({"PATH": str(tmp_path)}, platform="linux")
    with pytest.raises(JavaNotFound):
        find_java({}, platform="linux")


def test_java_home_without_a_java_is_named(tmp_path: Path) -> None:
    """A JAVA_HOME without a Java is named in the error."""
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME\) does not run"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": ""}, platform="linux")


def test_a_launcher_that_fails_has_no_version(tmp_path: Path) -> None:
    """A launcher with a status other than 0 has no version, such as the placeholder of macOS."""
    assert read_version(launcher(tmp_path, "17.0.1", status=1)) is None


@pytest.mark.parametrize("script", ["#!/bin/sh\nexec sleep 100\n", "not a program"], ids=["hangs", "cannot start"])
def test_a_java_home_tool_that_fails_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """If the tool of macOS hangs or cannot be started, the other places are searched."""
    tool = tmp_path / "java_home"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setattr(finder, "_MAC_JAVA_HOME", tool)
    monkeypatch.setattr(finder, "VERSION_TIMEOUT_SECONDS", 1)
    java = launcher(tmp_path / "jvm" / "17" / "bin", "17.0.1")
    assert find_java({}, platform="darwin").executable == java


def test_install_command_is_the_platforms() -> None:
    """The command uses Homebrew on macOS and apt elsewhere."""
    assert install_command("darwin") == "brew install openjdk@17"
    assert "apt-get install -y openjdk-17-jre-headless" in install_command("linux")
