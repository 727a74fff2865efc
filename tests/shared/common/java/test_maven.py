"""Finding the repository for jars."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.java.maven import (
    REPOSITORY_VARIABLE,
    Repository,
    covers_central,
    find_repository,
    home_folder,
    maven_central,
    mirror_of_central,
)

SETTINGS = Path("settings.xml")
SUPER_POM = """<project>
  <repositories>
    <repository><id>other</id><url>https://other.example/</url></repository>
    <repository><id>central</id><url>https://central.example/maven2</url></repository>
  </repositories>
</project>"""


def settings(mirrors: str, servers: str = "", namespace: str = ' xmlns="urn:settings"') -> str:
    return f"<settings{namespace}><mirrors>{mirrors}</mirrors><servers>{servers}</servers></settings>"


def mirror(name: str, mirror_of: str, url: str = "") -> str:
    url = url or f"https://{name}.example/maven"
    return f"<mirror><id>{name}</id><mirrorOf>{mirror_of}</mirrorOf><url>{url}</url></mirror>"


def server(name: str, username: str, password: str) -> str:
    return f"<server><id>{name}</id><username>{username}</username><password>{password}</password></server>"


def installed_maven(folder: Path) -> Path:
    """Create an installed Maven: `mvn`, and a jar with the model that every project inherits from."""
    for name in ("bin", "lib", "conf"):
        (folder / name).mkdir(parents=True)
    (folder / "bin" / "mvn").write_text("#!/bin/sh\n")
    (folder / "bin" / "mvn").chmod(0o755)
    with zipfile.ZipFile(folder / "lib" / "maven-model-builder-3.9.9.jar", "w") as jar:
        jar.writestr("org/apache/maven/model/pom-4.0.0.xml", SUPER_POM)
    return folder


def home(folder: Path, text: str | None = None) -> dict[str, str]:
    """The environment of a user with these settings and without a Maven on PATH."""
    (folder / ".m2").mkdir(parents=True)
    if text is not None:
        (folder / ".m2" / "settings.xml").write_text(text)
    return {"HOME": str(folder), "PATH": ""}


def test_the_variable_has_precedence(tmp_path: Path) -> None:
    """The variable overrides a mirror in settings.xml, and its credentials are not in messages."""
    environ = home(tmp_path, settings(mirror("ours", "*")))
    found = find_repository({**environ, REPOSITORY_VARIABLE: "https://ann:secret@host.example:8443/maven"})
    assert found.url == "https://ann:secret@host.example:8443/maven/"
    assert found.name == f"https://host.example:8443/maven/ ({REPOSITORY_VARIABLE})"


@pytest.mark.parametrize("url", ["host.example/maven", "file:///maven", "https://", "https://a/?b=c", "http://["])
def test_an_invalid_url_is_an_error(url: str) -> None:
    """An invalid URL is an error with the value and the variable."""
    with pytest.raises(JarsUnavailable, match=REPOSITORY_VARIABLE) as raised:
        find_repository({REPOSITORY_VARIABLE: url})
    assert repr(url) in str(raised.value)


@pytest.mark.parametrize("namespace", ["", ' xmlns="urn:settings"'])
def test_a_mirror_of_the_user_with_its_credentials(tmp_path: Path, namespace: str) -> None:
    """A mirror has the credentials of the server with its id, with and without an XML namespace."""
    text = settings(
        mirror("theirs", "external:http:*") + mirror("ours", "*"),
        server("theirs", "bob", "x") + server("ours", "ann", "${env.TOKEN}"),
        namespace,
    )
    found = find_repository({**home(tmp_path, text), "TOKEN": "secret"})
    file = tmp_path / ".m2" / "settings.xml"
    assert found == Repository("https://ours.example/maven/", f"the mirror ours of {file}", "ann", "secret")
    assert "secret" not in repr(found)


def test_a_mirror_of_central_alone_goes_before_a_pattern() -> None:
    """As in Maven, an exact id has precedence over patterns, and of those the first one is used."""
    both = mirror("all", "external:*") + mirror("central-only", "central")
    assert str(mirror_of_central(settings(both), SETTINGS, {})).count("central-only.example") == 1
    patterns = mirror("first", "a,central") + mirror("second", "*")
    assert str(mirror_of_central(settings(patterns), SETTINGS, {})).count("first.example") == 1
    assert mirror_of_central(settings(mirror("other", "*,!central")), SETTINGS, {}) is None
    assert mirror_of_central("<settings/>", SETTINGS, {}) is None


@pytest.mark.parametrize(
    ("mirror_of", "covers"),
    [("*", True), (" central ", True), ("external:*", True), ("!central,*", False), ("external:http:*", False)],
)
def test_patterns_are_mavens(mirror_of: str, covers: bool) -> None:
    """An exception has precedence over a wildcard, and patterns for plain HTTP do not match Maven Central."""
    assert covers_central(mirror_of) is covers


def test_an_encrypted_password_is_an_error() -> None:
    """An encrypted password is an error that names the variable to use instead and not the password."""
    text = settings(mirror("ours", "*"), server("ours", "ann", "{COQLCE6DU6GtcS5P=}"))
    with pytest.raises(JarsUnavailable, match=f"ours .*encrypted.*{REPOSITORY_VARIABLE}") as raised:
        mirror_of_central(text, SETTINGS, {})
    assert "COQLCE" not in str(raised.value)


def test_a_malformed_settings_file_is_an_error(tmp_path: Path) -> None:
    """A malformed settings.xml is an error, since a required mirror might be in it."""
    with pytest.raises(JarsUnavailable, match=r"\.m2/settings\.xml cannot be read"):
        find_repository(home(tmp_path, "<settings>"))


def test_the_installed_maven_has_settings_too(tmp_path: Path) -> None:
    """The settings of the installed Maven are used after the user's."""
    maven = installed_maven(tmp_path / "maven")
    (maven / "conf" / "settings.xml").write_text(settings(mirror("company", "*")))
    environ = {**home(tmp_path / "home"), "PATH": str(maven / "bin")}
    assert find_repository(environ).url == "https://company.example/maven/"
    (tmp_path / "home" / ".m2" / "settings.xml").write_text(settings(mirror("own", "*")))
    assert find_repository(environ).url == "https://own.example/maven/"


@pytest.mark.parametrize("by", ["PATH", "MAVEN_HOME"])
def test_the_address_of_central_comes_from_maven(tmp_path: Path, by: str) -> None:
    """Without a mirror the address is that of the model which all Maven projects inherit."""
    maven = installed_maven(tmp_path / "maven")
    environ = home(tmp_path / "home") | {by: str(maven / "bin" if by == "PATH" else maven)}
    assert find_repository(environ) == Repository("https://central.example/maven2/", "Maven Central")


def test_the_address_of_central_comes_from_ivy(tmp_path: Path) -> None:
    """Without Maven the address comes from the Ivy of pyspark, and without either it is unknown."""
    assert maven_central(None, tmp_path) is None
    (tmp_path / "ivy-0.jar").write_text("no jar")
    with zipfile.ZipFile(tmp_path / "ivy-2.5.3.jar", "w") as jar:
        properties = "ivy.a = b\nivy.ibiblio.default.artifact.root = https://central.example/maven2/\n"
        jar.writestr("org/apache/ivy/core/settings/repository.properties", properties)
    assert maven_central(None, tmp_path) == "https://central.example/maven2/"


def test_no_repository_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, Maven and pyspark the error names the variable and the file."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JarsUnavailable, match=rf"set {REPOSITORY_VARIABLE} .* {tmp_path}/\.m2/settings\.xml"):
        find_repository(home(tmp_path))


def test_an_empty_home_is_not_the_root_folder() -> None:
    """Without HOME the home folder is the system's."""
    assert home_folder({"HOME": ""}) == home_folder({}) != Path("/")
