"""Finds the Maven repository for jars in the user's own settings.

This module contains no address. It looks in this order:

1. `PENSTOCK_MAVEN_REPOSITORY`, the base URL of a repository.
2. A mirror of Maven Central in the user's `~/.m2/settings.xml` or in the settings of the installed Maven, with the
   credentials that `<servers>` in either file has for the mirror's id.
3. Maven Central, at the address in the installed Maven, or in the Ivy that comes with pyspark.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from xml.etree import ElementTree

from penstock.shared.common.errors import JarsUnavailable

REPOSITORY_VARIABLE = "PENSTOCK_MAVEN_REPOSITORY"
# Every Maven has this id for Maven Central.
CENTRAL = "central"
# Only this much of a settings.xml is read. A real one is far smaller.
_SETTINGS_CHARACTERS_MAX = 1 << 20
# Every Maven project inherits from this POM, which has Maven Central's address.
_SUPER_POM = "org/apache/maven/model/pom-4.0.0.xml"
_IVY_PROPERTIES = "org/apache/ivy/core/settings/repository.properties"
_IVY_ROOT = "ivy.ibiblio.default.artifact.root"


@dataclass(frozen=True, slots=True)
class Repository:
    """A Maven repository: its base URL, which ends with `/`, and its credentials.

    `source` says in messages where the URL was found: an environment variable, a mirror in a file, or Maven Central.
    """

    url: str
    source: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name for messages: the URL without credentials, and the setting that it comes from."""
        parts = urlsplit(self.url)
        shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return f"{shown} ({self.source})"


def home_folder(environ: Mapping[str, str]) -> Path:
    """The user's home folder, which has Maven's `.m2`: `HOME`, or the system's entry for the user."""
    home = environ.get("HOME", "")
    if not home:
        # If `HOME` is empty, Path.home() returns the root folder.
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    return Path(home or "/")


def find_repository(environ: Mapping[str, str]) -> Repository:
    """The first repository that the module's search order finds: the user's own, or else Maven Central.

    Raises JarsUnavailable if not even Maven Central's address is found, if the URL is not http(s), or if a settings
    file cannot be used.
    """
    if url := environ.get(REPOSITORY_VARIABLE):
        return _parse_repository(url, REPOSITORY_VARIABLE)
    maven = maven_home(environ)
    files = [home_folder(environ) / ".m2" / "settings.xml"]
    if maven is not None:
        files.append(maven / "conf" / "settings.xml")
    texts = {file: text for file in files if (text := _read_settings_file(file)) is not None}
    if (found := mirror_of_central(texts, environ)) is not None:
        return found
    known = maven_central(maven, _ivy_folder())
    if known is None:
        raise JarsUnavailable(
            f"no Maven repository is known here: set {REPOSITORY_VARIABLE} to the base URL of Maven Central or of a "
            f"mirror, or name a mirror in {files[0]}"
        )
    return _parse_repository(known, "Maven Central")


def maven_home(environ: Mapping[str, str]) -> Path | None:
    """The folder of the installed Maven: `MAVEN_HOME`, or the one of the `mvn` on PATH; None without Maven."""
    homes = [Path(environ["MAVEN_HOME"])] if environ.get("MAVEN_HOME") else []
    if mvn := shutil.which("mvn", path=environ.get("PATH", "")):
        home = Path(mvn).resolve().parent.parent
        # Homebrew's `mvn` is a script that calls the Maven in libexec.
        homes += [home, home / "libexec"]
    return next((home for home in homes if (home / "lib").is_dir()), None)


def maven_central(maven: Path | None, ivy_folder: Path | None) -> str | None:
    """Maven Central's address in the installed Maven, or in the Ivy in a folder of jars; None if neither has it."""
    builders = [] if maven is None else [*(maven / "lib").glob("maven-model-builder-*.jar")]
    # Maven 4 has the POM in this jar.
    builders += [] if maven is None else [*(maven / "lib").glob("maven-impl-*.jar")]
    for jar in builders:
        if (text := _read_jar_member(jar, _SUPER_POM)) is not None:
            model = ElementTree.fromstring(text)  # noqa: S314  (a file of the installed Maven)
            for repository in model.findall("{*}repositories/{*}repository"):
                if _element_text(repository, "id") == CENTRAL and (url := _element_text(repository, "url")):
                    return url
    for jar in () if ivy_folder is None else sorted(ivy_folder.glob("ivy-*.jar")):
        found = re.search(
            rf"^{re.escape(_IVY_ROOT)}\s*=\s*(\S+)", _read_jar_member(jar, _IVY_PROPERTIES) or "", re.MULTILINE
        )
        if found:
            return found[1]
    return None


def mirror_of_central(texts: Mapping[Path, str], environ: Mapping[str, str]) -> Repository | None:
    """The mirror of Maven Central in `texts`, the text of each settings.xml, the user's first; None if there is none.

    As in Maven, the files are merged, and a mirror whose `mirrorOf` is exactly `central` precedes one with a pattern.
    Raises JarsUnavailable for invalid XML, a URL that is not http(s) or has a query or a fragment, an environment
    variable of the server's credentials that is not set, or a password that only Maven can decrypt.
    """
    settings = {file: _parse_settings(file, text) for file, text in texts.items()}
    mirrors = _merge_elements(settings, "{*}mirrors/{*}mirror")
    servers = _merge_elements(settings, "{*}servers/{*}server")
    exact = [one for one in mirrors if _element_text(one[1], "mirrorOf") == CENTRAL]
    for file, mirror in exact or (one for one in mirrors if covers_central(_element_text(one[1], "mirrorOf"))):
        name = _element_text(mirror, "id")
        source = f"the mirror {name} of {file}"
        url = _interpolate_variables(_element_text(mirror, "url"), environ)
        found = next((one for one in servers if name and _element_text(one[1], "id") == name), None)
        if found is None:
            return _parse_repository(url, source)
        server_file, server = found
        username = _interpolate_variables(_element_text(server, "username"), environ)
        password = _interpolate_variables(_element_text(server, "password"), environ)
        if unset := re.search(r"\$\{env\.[^}]+\}", username + password):
            raise JarsUnavailable(f"the server {name} in {server_file} uses {unset[0]}, which is not set")
        if re.fullmatch(r".*\{.+\}.*", password):
            raise JarsUnavailable(
                f"the password of the server {name} in {server_file} is encrypted, which only Maven can read: set "
                f"{REPOSITORY_VARIABLE} to the mirror's URL with the credentials in it (https://USER:PASSWORD@HOST/…)"
            )
        return _parse_repository(url, source, username or None, password or None)
    return None


def _parse_settings(file: Path, text: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)  # noqa: S314  (the user's own file)
    except ElementTree.ParseError as e:
        raise JarsUnavailable(f"{file} cannot be read: {e}; fix it, or set {REPOSITORY_VARIABLE}") from None


def _merge_elements(settings: Mapping[Path, ElementTree.Element], path: str) -> list[tuple[Path, ElementTree.Element]]:
    """The elements of all files, each with its file. An element replaces those with its id in later files."""
    merged = list[tuple[Path, ElementTree.Element]]()
    for file, root in settings.items():
        names = {_element_text(element, "id") for _, element in merged}
        merged += [(file, one) for one in root.findall(path) if _element_text(one, "id") not in names]
    return merged


def covers_central(mirror_of: str) -> bool:
    """Whether a `mirrorOf` covers Maven Central, which is external and has an https address.

    >>> [covers_central(p) for p in ("*", "central", "external:*", "a, central", "*,!central", "external:http:*", "a")]
    [True, True, True, True, False, False, False]
    """
    patterns = [pattern.strip() for pattern in mirror_of.split(",")]
    return f"!{CENTRAL}" not in patterns and any(pattern in ("*", CENTRAL, "external:*") for pattern in patterns)


def _parse_repository(url: str, source: str, username: str | None = None, password: str | None = None) -> Repository:
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
    except ValueError:
        is_web = False
    if not is_web:
        # The message must not show the credentials.
        shown = url.rpartition("@")[2]
        raise JarsUnavailable(f"{source}: not the http or https base URL of a Maven repository: {shown!r}")
    return Repository(url if url.endswith("/") else f"{url}/", source, username, password)


def _interpolate_variables(text: str, environ: Mapping[str, str]) -> str:
    """Replace Maven's `${env.NAME}` and `${user.home}`; unknown names are not changed."""

    def variable_value(found: re.Match[str]) -> str:
        name = found[1]
        if name == "user.home":
            return str(home_folder(environ))
        return environ.get(name.removeprefix("env."), found[0]) if name.startswith("env.") else found[0]

    return re.sub(r"\$\{([^}]+)\}", variable_value, text)


def _element_text(element: ElementTree.Element, name: str) -> str:
    return (element.findtext(f"{{*}}{name}") or "").strip()


def _read_settings_file(file: Path) -> str | None:
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(_SETTINGS_CHARACTERS_MAX)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise JarsUnavailable(f"{file} cannot be read: {e}; fix it, or set {REPOSITORY_VARIABLE}") from None


def _read_jar_member(jar: Path, name: str) -> str | None:
    """The text of one file in a jar of Maven or Ivy, such as its default settings; None if it cannot be read."""
    try:
        with zipfile.ZipFile(jar) as archive:
            return archive.read(name).decode()
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError, EOFError, RuntimeError, zlib.error):
        return None


def _ivy_folder() -> Path | None:
    """The folder of pyspark's jars; None without pyspark.

    One of the jars is Ivy, whose settings have Maven Central's address. pyspark is not imported.
    """
    folders: Iterator[Path] = (
        Path(folder, "jars")
        for spec in (importlib.util.find_spec("pyspark"),)
        for folder in ((spec and spec.submodule_search_locations) or ())
    )
    return next(folders, None)
