"""Jars that no Python package contains, downloaded once per user from a Maven repository.

A jar set is a lock file (JSON) beside the code that uses it. It lists jars, each with its path in a Maven repository,
its size and its SHA-256. Nothing is resolved at run time; `scripts/lock_jars.py` makes the locks. A set has one folder
in `~/.cache/penstock` (or `$XDG_CACHE_HOME/penstock`). A download is checked by size and SHA-256 before it is renamed
to the jar's name, so a jar with its final name is complete. A broken download leaves a file that ends in `.part`, and
the next one continues it. One process downloads at a time; the others wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.file_lock import FileLock
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.java.maven import REPOSITORY_VARIABLE, Repository, find_repository, home_folder
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.log import get_logger

if TYPE_CHECKING:
    import httpx

log = get_logger(__name__)

LOCK_FILE = "download.lock"
# The download of another process may take minutes on a slow connection.
LOCK_TIMEOUT_MS = 900_000
LOCK_POLL_MS = 50
# This many jars are downloaded in parallel. Most are small, so the latency of requests dominates.
DOWNLOADS_MAX = 6
# A jar is requested at most this many times. Each request continues where the one before it ended, if it can.
ATTEMPTS_MAX = 4
RETRY_BACKOFF = ExponentialBackoff(200, 5_000)
CONNECT_TIMEOUT_S = 30.0
# A request fails after this long without a byte. The whole jar may take minutes on a slow connection.
SILENCE_TIMEOUT_S = 60.0
# A download must leave this much free space on the disk.
SPARE_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 1 << 20
# Another attempt may get another status than these.
_RETRIED = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_FORBIDDING = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Jar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a Maven repository: `path` is relative to the repository, `size` in bytes, `sha256` in hex."""

    path: Annotated[str, msgspec.Meta(pattern=r"^(?:[\w+-][\w.+-]*/){3,}[\w+-][\w.+-]*\.jar$")]
    size: Annotated[int, msgspec.Meta(gt=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.rpartition("/")[2]


class JarSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lock file: `jars` are the jars of `roots` (`group:artifact:version`) and of all their runtime dependencies.

    Jars of `excluded` (`group:artifact`, or `group:*`) are left out: another package provides them. `title` is for
    messages. `folder` names the set's folder in the cache, such as `kafka-4.1.1`.
    """

    title: str
    folder: Annotated[str, msgspec.Meta(pattern=r"^[\w-][\w.-]*$")]
    roots: tuple[str, ...]
    jars: Annotated[tuple[Jar, ...], msgspec.Meta(min_length=1)]
    excluded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len({jar.name for jar in self.jars}) < len(self.jars):
            raise ValueError("two jars have one name, and they share a folder")


def read_jar_set(path: Path) -> JarSet:
    """The lock file at `path`. Raises ValueError with the path if the file is not a lock."""
    try:
        return decode_json(path.read_bytes(), JarSet)
    except InvalidJson as e:
        raise ValueError(f"{path}: {e}") from None


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this user's downloads: `$XDG_CACHE_HOME/penstock`, or `~/.cache/penstock`."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is ignored.
    root = Path(base) if base.startswith("/") else home_folder(environ) / ".cache"
    return root / "penstock"


def missing_jars(wanted: JarSet, environ: Mapping[str, str] | None = None) -> list[Jar]:
    """The jars of a set that are not in the cache, or have another size there."""
    folder = cache_root(environ) / wanted.folder

    def is_jar_downloaded(jar: Jar) -> bool:
        try:
            return (folder / jar.name).stat().st_size == jar.size
        except OSError:
            return False

    return [jar for jar in wanted.jars if not is_jar_downloaded(jar)]


def announcement(wanted: JarSet, environ: Mapping[str, str] | None = None) -> str | None:
    """A line on what `fetch_jars` will download, with source and target; None if the jars are in the cache."""
    environ = os.environ if environ is None else environ
    if not missing_jars(wanted, environ):
        return None
    folder = cache_root(environ) / wanted.folder
    return f"downloading {wanted.title} from {find_repository(environ).name} into {folder}"


async def fetch_jars(wanted: JarSet, environ: Mapping[str, str] | None = None) -> Path:
    """Download the jars that are not in the cache, and return the folder that holds all of them.

    The first download takes from seconds to minutes. The next call continues a cancelled download. Raises
    JarsUnavailable.
    """
    environ = os.environ if environ is None else environ
    root = cache_root(environ)
    folder = root / wanted.folder
    missing = missing_jars(wanted, environ)
    if not missing:
        return folder
    try:
        _check_space(root, sum(jar.size for jar in missing))
        repository = find_repository(environ)
        async with _download_lock(root):
            # Another process may have downloaded the jars meanwhile.
            if missing := missing_jars(wanted, environ):
                log.info("downloading", what=wanted.title, repository=repository.name, folder=str(folder))
                folder.mkdir(exist_ok=True)
                try:
                    await _download_jars(wanted, missing, repository, folder)
                finally:
                    with contextlib.suppress(OSError):
                        # `rmdir` removes the folder only if it is empty.
                        folder.rmdir()
    except OSError as e:
        raise JarsUnavailable(_explain_os_error(e, root, wanted)) from None
    return folder


def _check_space(root: Path, needed: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed + SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {needed + SPARE_BYTES >> 20} MiB needed", str(root))


@contextlib.asynccontextmanager
async def _download_lock(root: Path) -> AsyncIterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_MS / 1000
    lock = FileLock(root / LOCK_FILE)
    try:
        while not lock.try_acquire():
            if time.monotonic() >= deadline:
                raise JarsUnavailable(
                    f"another process has been downloading jars into {root} for {LOCK_TIMEOUT_MS // 1000} s"
                )
            await asyncio.sleep(LOCK_POLL_MS / 1000)
        yield
    finally:
        lock.release()


async def _download_jars(wanted: JarSet, jars: Sequence[Jar], repository: Repository, folder: Path) -> None:
    """Fetch the jars, the largest first. The first failure ends all other downloads.

    Raises the error of this failure: JarsUnavailable or OSError.
    """
    # The import takes a tenth of a second, which a start with cached jars saves.
    import httpx

    auth = None if repository.username is None else (repository.username, repository.password or "")
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
    headers = {"accept-encoding": "identity", "user-agent": "penstock"}
    turns = asyncio.Semaphore(DOWNLOADS_MAX)
    async with httpx.AsyncClient(
        auth=auth, timeout=timeout, headers=headers, verify=client_tls(), follow_redirects=True
    ) as client:

        async def fetch_in_turn(jar: Jar) -> None:
            async with turns:
                await _fetch_jar(client, jar, _PartialJar(folder, jar), wanted, repository)

        try:
            async with asyncio.TaskGroup() as group:
                for jar in sorted(jars, key=lambda jar: -jar.size):
                    group.create_task(fetch_in_turn(jar))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


class _AttemptFailed(Exception):
    """A failure that another attempt may avoid."""


class _WrongContent(Exception):
    """The response is not the locked jar: it has other bytes, or a status such as 404."""


async def _fetch_jar(
    client: httpx.AsyncClient, jar: Jar, part: _PartialJar, wanted: JarSet, repository: Repository
) -> None:
    """Download one jar to its set's folder, in at most ATTEMPTS_MAX requests. Raises JarsUnavailable or OSError."""
    why = ""
    for attempt in range(ATTEMPTS_MAX):
        if attempt:
            await asyncio.sleep(RETRY_BACKOFF.wait_ms(attempt) / 1000)
        was_resumed = part.begin() > 0
        try:
            await _request_jar(client, repository.url + jar.path, part)
            part.finish()
            return
        except _AttemptFailed as e:
            why = str(e)
        except _WrongContent as e:
            part.delete()
            why = str(e)
            # A resumed download is tried again, because its earlier bytes may be wrong.
            if not was_resumed:
                break
        finally:
            part.close()
    raise JarsUnavailable(
        f"{wanted.title} must be downloaded once, and {jar.path} could not be downloaded from "
        f"{repository.name}: {why}. Name another repository by {REPOSITORY_VARIABLE}"
    )


async def _request_jar(client: httpx.AsyncClient, url: str, part: _PartialJar) -> None:
    """Download the bytes that the part file lacks, or the whole jar if the repository does not support ranges.

    Raises _AttemptFailed if another request may succeed, otherwise _WrongContent.
    """
    import httpx

    headers = {"range": f"bytes={part.size}-"} if part.size else {}
    try:
        async with client.stream("GET", url, headers=headers) as response:
            status = f"{response.status_code} {response.reason_phrase}"
            # There are three cases:
            # 1. Another attempt may get another response. A range that the server rejects (416) fails this attempt.
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.delete()
            if response.status_code in (*_RETRIED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
                raise _AttemptFailed(f"it answers {status}")
            # 2. The repository does not have the jar, or does not allow access.
            if response.status_code not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                hint = ", so it wants other credentials" if response.status_code in _FORBIDDING else ""
                raise _WrongContent(f"it answers {status}{hint}")
            # 3. The jar, or the rest of it. A repository that does not support ranges sends all of it.
            if response.status_code == HTTPStatus.OK:
                part.restart()
            async for chunk in response.aiter_bytes():
                part.write(chunk)
    except (httpx.TransportError, httpx.TooManyRedirects) as e:
        raise _AttemptFailed(f"it cannot be reached ({e or type(e).__name__})") from None


class _PartialJar:
    """The beginning of a jar, in its own file (`.part`), with the SHA-256 of its bytes."""

    def __init__(self, folder: Path, jar: Jar) -> None:
        self._jar = jar
        self._target = folder / jar.name
        self._path = folder / f"{jar.name}.part"
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.size = 0

    def begin(self) -> int:
        """Open the jar's part file and read it. Returns the number of bytes that need no download."""
        self._file = self._path.open("a+b")
        self._digest = hashlib.sha256()
        self.size = 0
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            self._digest.update(chunk)
            self.size += len(chunk)
        if self.size >= self._jar.size:
            self.restart()
        return self.size

    def restart(self) -> None:
        """Drop the bytes of the jar's part file, since the download starts again from the jar's beginning."""
        assert self._file is not None
        self._file.truncate(0)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises _WrongContent if there are more than the jar has."""
        assert self._file is not None
        self.size += len(chunk)
        if self.size > self._jar.size:
            raise _WrongContent(f"it sends more than the {self._jar.size} bytes that are locked")
        self._digest.update(chunk)
        self._file.write(chunk)

    def finish(self) -> None:
        """Rename the part file to the jar's name. Raises _WrongContent if its size or SHA-256 is wrong."""
        assert self._file is not None
        if self.size < self._jar.size:
            raise _WrongContent(f"it sends {self.size} of the {self._jar.size} bytes that are locked")
        if self._digest.hexdigest() != self._jar.sha256:
            raise _WrongContent(f"its SHA-256 is {self._digest.hexdigest()}, and {self._jar.sha256} is locked")
        self._file.flush()
        # Otherwise a crash of the machine could leave the jar's name without its bytes.
        os.fsync(self._file.fileno())
        self._path.replace(self._target)

    def delete(self) -> None:
        """Remove the jar's part file."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the jar's part file; an empty one is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self.size == 0:
                self.delete()


def _explain_os_error(e: OSError, root: Path, wanted: JarSet) -> str:
    path = e.filename or root
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space for the jars of {wanted.title}: {path}: {e.strerror}"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"the cache folder {root} cannot be written ({path}: {e.strerror}); set XDG_CACHE_HOME to one that can"
    return f"the jars of {wanted.title}: {path}: {e.strerror}"
