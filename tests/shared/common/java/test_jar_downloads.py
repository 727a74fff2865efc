"""Locks of jars, their download from a real HTTP server in this process, and the repository that is found for them."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI, Response

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.java import jars
from penstock.shared.common.java.jars import (
    LOCK_FILE,
    Jar,
    JarSet,
    announcement,
    cache_root,
    fetch_jars,
    missing_jars,
    read_jar_set,
)
from penstock.shared.common.java.maven import (
    REPOSITORY_VARIABLE,
    Repository,
    covers_central,
    find_repository,
    home_folder,
    maven_central,
    mirror_of_central,
)
from tests.integration.certificates import serving_with_trust

A, B = b"a" * 300_000, b"b" * 1_000


def locked(path: str, content: bytes) -> Jar:
    return Jar(path, len(content), hashlib.sha256(content).hexdigest())


JAR_A, JAR_B = locked("org/a/a/1/a-1.jar", A), locked("org/b/b_2.13/2/b_2.13-2.jar", B)
WANTED = JarSet("Thing 1", "thing-1", ("org.a:a:1",), (JAR_A, JAR_B))


@dataclass
class Web:
    """A repository: `files` by path below /maven/, error statuses that come first, and the received requests."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: {JAR_A.path: A, JAR_B.path: B})
    responses: dict[str, list[int]] = field(default_factory=dict)
    cut_after: dict[str, int] = field(default_factory=dict)
    knows_ranges: bool = True
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.removeprefix("/maven/")
        requested_range = handler.headers.get("range")
        self.requests.append((name, requested_range, handler.headers.get("authorization")))
        if self.responses.get(name):
            handler.send_error(self.responses[name].pop(0))
        elif name not in self.files:
            handler.send_error(404)
        else:
            first = (
                int(requested_range.removeprefix("bytes=").rstrip("-")) if requested_range and self.knows_ranges else 0
            )
            rest = self.files[name][first:]
            handler.send_response(206 if first else 200)
            handler.send_header("content-length", str(len(rest)))
            handler.end_headers()
            handler.wfile.write(rest[: self.cut_after.pop(name, len(rest))])
            handler.close_connection = True


@pytest.fixture
def web() -> Iterator[Web]:
    """A server on its own thread."""
    repository = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repository.respond(self)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, since it would hide the test's output."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore errors, since a client that fails closes its other connections."""

    with Server(("127.0.0.1", 0), Handler) as served:
        repository.url = f"http://127.0.0.1:{served.server_port}/maven"
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield repository
        finally:
            served.shutdown()
            thread.join()


@pytest.fixture
def environ(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user with an empty cache, whose repository is the server."""
    monkeypatch.setattr(jars, "RETRY_BACKOFF", ExponentialBackoff(0, 0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return {"XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": web.url}


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"XDG_CACHE_HOME": "/var/cache/me", "HOME": "/home/me"}, "/var/cache/me/penstock"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/penstock"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/penstock"),
        ({"HOME": "/home/me"}, "/home/me/.cache/penstock"),
    ],
)
def test_cache_follows_the_xdg_specification(environ: dict[str, str], root: str) -> None:
    """The cache is in XDG_CACHE_HOME if that is absolute, else in ~/.cache."""
    assert cache_root(environ) == Path(root)


def test_a_lock_is_read(tmp_path: Path) -> None:
    """A lock round-trips as JSON, and a file's name is the last part of its path."""
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(WANTED))
    assert read_jar_set(tmp_path / "x.json") == WANTED
    assert [jar.name for jar in WANTED.jars] == ["a-1.jar", "b_2.13-2.jar"]


def has(key: str, value: object) -> Callable[[dict[str, object]], None]:
    return lambda jar: jar.update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        has("path", "../../etc/x/x.jar"),
        has("path", "org/a/../1/a-1.jar"),
        has("path", "/org/a/1/a-1.jar"),
        has("path", "https://host/org/a/1/a-1.jar"),
        has("path", "org/a/1/a-1.pom"),
        has("path", "org/b/b_2.13/2/b_2.13-2.jar"),
        has("size", 0),
        has("sha256", "0" * 40),
        has("sha1", "0" * 40),
        lambda jar: jar.pop("sha256"),
    ],
)
def test_an_invalid_lock_is_an_error(tmp_path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Paths outside of the repository, and entries without size or checksum, are an error with the lock's name."""
    raw = msgspec.to_builtins(WANTED)
    change(raw["jars"][0])
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(raw))
    with pytest.raises(ValueError, match=r"x\.json: "):
        read_jar_set(tmp_path / "x.json")


@pytest.mark.parametrize("data", [b"{", b"\xff", b'{"x":' + b"[" * 100_000])
def test_a_file_that_is_not_json_is_an_error(data: bytes, tmp_path: Path) -> None:
    """A file that is not JSON, or nested too deeply, is an error with its name."""
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.json: "):
        read_jar_set(tmp_path / "x.json")


async def test_missing_jars_are_downloaded(web: Web, environ: dict[str, str], tmp_path: Path) -> None:
    """Missing, lost and truncated jars are downloaded, and complete ones are not."""
    assert announcement(WANTED, environ) == (
        f"downloading Thing 1 from {web.url}/ (PENSTOCK_MAVEN_REPOSITORY) into {tmp_path}/penstock/thing-1"
    )
    folder = await fetch_jars(WANTED, environ)
    assert folder == tmp_path / "penstock" / "thing-1"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a-1.jar": A, "b_2.13-2.jar": B}
    assert sorted(web.requests) == [(JAR_A.path, None, None), (JAR_B.path, None, None)]
    assert announcement(WANTED, environ) is None
    assert await fetch_jars(WANTED, {**environ, "PENSTOCK_MAVEN_REPOSITORY": "not asked"}) == folder
    (folder / JAR_B.name).write_bytes(B[:-1])
    assert missing_jars(WANTED, environ) == [JAR_B]
    await fetch_jars(WANTED, environ)
    assert web.requests[2:] == [(JAR_B.path, None, None)]
    assert sorted(path.name for path in folder.parent.iterdir()) == [LOCK_FILE, "thing-1"]


async def test_a_partial_file_is_continued(web: Web, environ: dict[str, str]) -> None:
    """Only the rest of a partial file is requested, and the checksum covers the whole."""
    part = cache_root(environ) / "thing-1" / "a-1.jar.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(A[:200_000])
    folder = await fetch_jars(WANTED, environ)
    assert (JAR_A.path, "bytes=200000-", None) in web.requests
    assert (folder / JAR_A.name).read_bytes() == A
    assert not part.exists()


async def test_a_connection_that_breaks_is_continued(web: Web, environ: dict[str, str]) -> None:
    """After a lost connection the next attempt continues where it ended."""
    web.cut_after[JAR_A.path] = 250_000
    folder = await fetch_jars(WANTED, environ)
    assert [requested_range for name, requested_range, _ in web.requests if name == JAR_A.path] == [
        None,
        "bytes=250000-",
    ]
    assert (folder / JAR_A.name).read_bytes() == A


@pytest.mark.parametrize("knows_ranges", [True, False])
async def test_a_partial_file_of_something_else_is_started_over(
    web: Web, environ: dict[str, str], knows_ranges: bool
) -> None:
    """A wrong partial file costs at most one attempt, and a repository without ranges sends the whole file."""
    web.knows_ranges = knows_ranges
    part = cache_root(environ) / "thing-1" / "a-1.jar.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"?" * 1_000)
    folder = await fetch_jars(WANTED, environ)
    ranges = [ranges for name, ranges, _ in web.requests if name == JAR_A.path]
    assert ranges == (["bytes=1000-", None] if knows_ranges else ["bytes=1000-"])
    assert (folder / JAR_A.name).read_bytes() == A


@pytest.mark.parametrize("content", [b"x" * len(A), A + b"x", A[:-1]], ids=["other", "longer", "shorter"])
async def test_a_jar_with_a_wrong_checksum_is_an_error(web: Web, environ: dict[str, str], content: bytes) -> None:
    """The error has jar, repository and the variable to change it, and no file remains."""
    web.files[JAR_A.path] = content
    with pytest.raises(JarsUnavailable, match=f"{JAR_A.path}.*{web.url}/") as raised:
        await fetch_jars(WANTED, environ)
    assert "Name another repository by PENSTOCK_MAVEN_REPOSITORY" in str(raised.value)
    assert not list(cache_root(environ).rglob("a-1.jar*"))
    assert len([name for name, *_ in web.requests if name == JAR_A.path]) == 1
    web.files[JAR_A.path] = A
    assert (await fetch_jars(WANTED, environ) / JAR_A.name).read_bytes() == A


@pytest.mark.parametrize(("status", "words"), [(404, "404 Not Found"), (401, "401 Unauthorized")])
async def test_permanent_errors_are_not_retried(web: Web, environ: dict[str, str], status: int, words: str) -> None:
    """A permanent error of the repository is in the message, and no folder remains."""
    web.responses = {jar.path: [status] for jar in WANTED.jars}
    web.files.clear()
    with pytest.raises(JarsUnavailable, match=rf"answers {words}") as raised:
        await fetch_jars(WANTED, environ)
    assert "PENSTOCK_MAVEN_REPOSITORY" in str(raised.value)
    assert len(web.requests) <= len(WANTED.jars)
    assert [path.name for path in cache_root(environ).iterdir()] == [LOCK_FILE]


async def test_temporary_errors_are_retried(web: Web, environ: dict[str, str]) -> None:
    """A temporary error is retried up to the limit."""
    web.responses[JAR_B.path] = [503] * (jars.ATTEMPTS_MAX - 1)
    await fetch_jars(WANTED, environ)
    web.responses[JAR_B.path] = [503] * jars.ATTEMPTS_MAX
    (cache_root(environ) / "thing-1" / JAR_B.name).unlink()
    with pytest.raises(JarsUnavailable, match=r"b_2\.13-2\.jar.*503"):
        await fetch_jars(WANTED, environ)


async def test_a_refused_connection_is_named(web: Web, environ: dict[str, str]) -> None:
    """A refused connection is an error with jar and repository."""
    environ["PENSTOCK_MAVEN_REPOSITORY"] = "http://127.0.0.1:1/maven/"
    with pytest.raises(
        JarsUnavailable,
        match=r"Thing 1.*\.jar.*http://127\.0\.0\.1:1/maven/",
    ):
        await fetch_jars(WANTED, environ)
    assert web.requests == []
    assert [path.name for path in cache_root(environ).iterdir()] == [LOCK_FILE]


async def test_a_repository_with_a_certificate_of_an_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jars are downloaded over TLS if the system trusts the authority of the repository's certificate."""
    monkeypatch.setattr(jars, "RETRY_BACKOFF", ExponentialBackoff(0, 0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    app = FastAPI()
    app.get("/{path:path}")(lambda path: Response({JAR_A.path: A, JAR_B.path: B}[path]))
    async with serving_with_trust(app, tmp_path, monkeypatch) as server:
        client_tls()
        # Now the context alone trusts the authority, as with the system's own files.
        monkeypatch.delenv("SSL_CERT_FILE")
        environ = {"XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": server.url}
        await fetch_jars(WANTED, environ)
        assert missing_jars(WANTED, environ) == []


async def test_credentials_of_the_variable_are_sent(web: Web, environ: dict[str, str]) -> None:
    """Credentials in the URL are sent as basic authentication."""
    environ["PENSTOCK_MAVEN_REPOSITORY"] = web.url.replace("//", "//ann:sec%2Fret@")
    await fetch_jars(WANTED, environ)
    assert {sent for *_, sent in web.requests} == {f"Basic {base64.b64encode(b'ann:sec/ret').decode()}"}


async def test_credentials_of_the_settings_are_sent(web: Web, environ: dict[str, str], tmp_path: Path) -> None:
    """Credentials of the server with the mirror's id are sent."""
    del environ["PENSTOCK_MAVEN_REPOSITORY"]
    environ["HOME"] = str(tmp_path / "home")
    (tmp_path / "home" / ".m2").mkdir(parents=True)
    (tmp_path / "home" / ".m2" / "settings.xml").write_text(
        f"<settings><mirrors><mirror><id>m</id><mirrorOf>*</mirrorOf><url>{web.url}</url></mirror></mirrors>"
        "<servers><server><id>m</id><username>ann</username><password>secret</password></server></servers></settings>"
    )
    await fetch_jars(WANTED, environ)
    assert {sent for *_, sent in web.requests} == {f"Basic {base64.b64encode(b'ann:secret').decode()}"}


async def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A cache that cannot be written is an error with the folder and the variable that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JarsUnavailable, match=r"file/penstock.*XDG_CACHE_HOME"):
        await fetch_jars(WANTED, {"XDG_CACHE_HOME": str(tmp_path / "file")})


async def test_a_full_disk_is_an_error_before_the_download(tmp_path: Path) -> None:
    """Without enough free space the error has the free and the required space, and nothing is downloaded."""
    huge = msgspec.structs.replace(WANTED, jars=(msgspec.structs.replace(JAR_A, size=1 << 60),))
    with pytest.raises(JarsUnavailable, match=r"Thing 1.*1099511627792 MiB"):
        await fetch_jars(huge, {"XDG_CACHE_HOME": str(tmp_path)})


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
    assert str(mirror_of_central({SETTINGS: settings(both)}, {})).count("central-only.example") == 1
    patterns = mirror("first", "a,central") + mirror("second", "*")
    assert str(mirror_of_central({SETTINGS: settings(patterns)}, {})).count("first.example") == 1
    assert mirror_of_central({SETTINGS: settings(mirror("other", "*,!central"))}, {}) is None
    assert mirror_of_central({SETTINGS: "<settings/>"}, {}) is None


@pytest.mark.parametrize(
    ("mirror_of", "covers"),
    [("*", True), (" central ", True), ("external:*", True), ("!central,*", False), ("external:http:*", False)],
)
def test_patterns_are_mavens(mirror_of: str, covers: bool) -> None:
    """An exception has precedence over a wildcard, and patterns for plain HTTP do not match Maven Central."""
    assert covers_central(mirror_of) is covers


def test_a_variable_that_is_not_set_is_an_error() -> None:
    """The error names the variable of the server's password."""
    text = settings(mirror("ours", "*"), server("ours", "ann", "${env.SECRET}"))
    with pytest.raises(JarsUnavailable, match=r"server ours .*\{env.SECRET\}"):
        mirror_of_central({SETTINGS: text}, {})


def test_the_error_for_an_invalid_url_has_no_credentials() -> None:
    """An address without `https://` is rejected, and its credentials are not shown."""
    with pytest.raises(JarsUnavailable, match=r"'host/maven'$"):
        mirror_of_central({SETTINGS: settings(mirror("ours", "*", url="ann:secret@host/maven"))}, {})


def test_an_encrypted_password_is_an_error() -> None:
    """An encrypted password is an error that names the variable to use instead and not the password."""
    text = settings(mirror("ours", "*"), server("ours", "ann", "{COQLCE6DU6GtcS5P=}"))
    with pytest.raises(JarsUnavailable, match=f"ours .*encrypted.*{REPOSITORY_VARIABLE}") as raised:
        mirror_of_central({SETTINGS: text}, {})
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


def test_both_settings_files_are_merged(tmp_path: Path) -> None:
    """As in Maven, both files together are one list of mirrors and one of servers. The user's come first.

    An element of the user's file replaces one of the installed Maven with the same id.
    """
    maven = installed_maven(tmp_path / "maven")
    of_maven = maven / "conf" / "settings.xml"
    of_user = tmp_path / "home" / ".m2" / "settings.xml"
    environ = {**home(tmp_path / "home"), "PATH": str(maven / "bin")}
    of_maven.write_text(settings(mirror("ours", "*"), server("ours", "all", "x")))
    of_user.write_text(settings("", server("ours", "ann", "secret")))
    ours = Repository("https://ours.example/maven/", f"the mirror ours of {of_maven}", "ann", "secret")
    assert find_repository(environ) == ours
    of_maven.write_text(settings(mirror("exact", "central") + mirror("ours", "*"), server("own", "all", "x")))
    of_user.write_text(settings(mirror("own", "*")))
    assert find_repository(environ).url == "https://exact.example/maven/"
    of_user.write_text(settings(mirror("own", "*") + mirror("exact", "other")))
    own = Repository("https://own.example/maven/", f"the mirror own of {of_user}", "all", "x")
    assert find_repository(environ) == own


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
        jar.writestr("org/apache/ivy/core/settings/repository.properties", properties, zipfile.ZIP_DEFLATED)
    written = (tmp_path / "ivy-2.5.3.jar").read_bytes()
    data_begins = written.index(b"repository.properties") + len("repository.properties")
    (tmp_path / "ivy-1.jar").write_bytes(written[:data_begins] + b"\xff" + written[data_begins + 1 :])
    assert maven_central(None, tmp_path) == "https://central.example/maven2/"


def test_no_repository_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, Maven and pyspark the error names the variable and the file."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JarsUnavailable, match=rf"set {REPOSITORY_VARIABLE} .* {tmp_path}/\.m2/settings\.xml"):
        find_repository(home(tmp_path))


def test_an_empty_home_is_not_the_root_folder() -> None:
    """Without HOME the home folder is the system's."""
    assert home_folder({"HOME": ""}) == home_folder({}) != Path("/")
