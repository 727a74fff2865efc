"""The files that connectors may read and write: folders and object stores listed in `connect.files.allowed`.

Without this limit, a client that may create a connector could read and write every file of the worker's user. An entry
is an absolute path of a folder, or a URL such as `s3://bucket/folder`. Either allows everything below it.

A path is compared after every link and `..` in it is resolved. `open` and `write_whole` then open the folders between
the allowed one and the file one by one, without following links. So they also reject a link that is made after the
comparison.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_def import invalid
from penstock.shared.connect.redaction import without_passwords

FILES_ALLOWED = "connect.files.allowed"
AMBIGUOUS_URL = "a URL must not have '..', '::', '#', a backslash or control characters"
LOCAL_SCHEMES = ("file", "local")
CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs", "az", "azure", "adl", "oci")
"""Schemes in which the container may stand before `@`, as in `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH`."""
# The process's umask still applies, as for any other file.
FILE_MODE = 0o666
FOLDER_MODE = 0o777


class LocalPath(NamedTuple):
    """A file or folder of this machine: an allowed folder without links, and the names from there on."""

    folder: Path
    below: tuple[str, ...]

    @property
    def path(self) -> str:
        return str(self.folder.joinpath(*self.below))


class AllowedFiles:
    """The folders and URLs that are allowed. Each method raises ConfigError for a path or URL outside them."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.allowed: tuple[str, ...] = tuple(allowed)

    def __repr__(self) -> str:
        return f"AllowedFiles({', '.join(self.allowed) or 'none'})"

    def resolved(self, setting: str, given: str) -> str:
        """Return the form in which to use a connector's path or URL: an absolute path without links, or the unchanged
        URL.

        The ConfigError names the connector's `setting`.
        """
        path = local_path(setting, given)
        if path is not None:
            return self._allowed_path(setting, path).path
        if not is_unambiguous_url(given):
            raise invalid(setting, without_passwords(given), AMBIGUOUS_URL)
        if not any("://" in entry and _url_is_below(given, entry) for entry in self.allowed):
            raise self._file_not_allowed_error(setting, given)
        return given

    def contains(self, path: str) -> bool:
        """Return whether a file or folder of this machine is allowed."""
        try:
            self._allowed_path("", path)
        except ConfigError:
            return False
        return True

    def check(self, settings: Iterable[str], props: Mapping[str, str]) -> None:
        """Raises ConfigError if one of these settings names a path or URL that is not allowed."""
        for name in settings:
            if given := props.get(name):
                self.resolved(name, given)

    def open(self, setting: str, given: str, mode: str) -> IO[Any]:
        """Open a local file: `rb` to read, `a` to append text in UTF-8. Raises OSError as `open` does."""
        path = self._allowed_local_file(setting, given)
        folder = _open_folder(path.folder, path.below[:-1], make=False)

        def open_in_folder(_: str, flags: int) -> int:
            return os.open(path.below[-1], flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)

        try:
            if "b" in mode:
                return open(path.path, mode, opener=open_in_folder)
            return open(path.path, mode, encoding="utf-8", newline="", opener=open_in_folder)
        finally:
            os.close(folder)

    def write_whole(self, setting: str, given: str, data: bytes) -> None:
        """Write a file atomically and create missing folders. Raises OSError as `open` does.

        The file is on the disk when this method returns: a sink then commits the offsets of its records.
        """
        path = self._allowed_local_file(setting, given)
        name = path.below[-1]
        beside = path.below[-1] + ".new"
        folder = _open_folder(path.folder, path.below[:-1], make=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(beside, flags, FILE_MODE, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)

    def _allowed_local_file(self, setting: str, given: str) -> LocalPath:
        path = local_path(setting, given)
        if path is None:
            raise invalid(setting, without_passwords(given), "must be a file of this machine")
        local = self._allowed_path(setting, path)
        if not local.below:
            raise invalid(setting, given, "a folder, not a file")
        return local

    def _allowed_path(self, setting: str, path: str) -> LocalPath:
        if "\0" in path:
            raise invalid(setting, path, "must not have a NUL character")
        real = Path(os.path.realpath(path))
        for entry in self.allowed:
            if "://" in entry:
                continue
            folder = Path(os.path.realpath(entry))
            if real.is_relative_to(folder):
                return LocalPath(folder, real.relative_to(folder).parts)
        raise self._file_not_allowed_error(setting, path)

    def _file_not_allowed_error(self, setting: str, given: str) -> ConfigError:
        shown = without_passwords(given)
        why = f"not allowed by the worker's {FILES_ALLOWED}={','.join(self.allowed)}"
        if not self.allowed:
            why = f"this worker does not allow files: set {FILES_ALLOWED} in the worker's properties"
        return invalid(setting, shown, why)


def local_path(setting: str, given: str) -> str | None:
    """Return the path that a path, a `file://` URL or a `local://` URL names, or None for any other URL.

    Text without `://` is a path. Raises ConfigError, which names the setting, if a `file://` or `local://` URL is
    malformed, or has a query, a fragment, or a host except localhost.

    >>> local_path("url", "out/x"), local_path("url", "file:///out/a%20b"), local_path("url", "s3://bucket/x")
    ('out/x', '/out/a b', None)
    """
    scheme, separator, _ = given.partition("://")
    if not separator:
        return given
    if scheme.lower() not in LOCAL_SCHEMES:
        return None
    try:
        parts = urlsplit(given)
    except ValueError as e:
        raise invalid(setting, given, f"not a URL: {e}") from None
    if parts.netloc not in ("", "localhost"):
        raise invalid(setting, given, f"a file URL must begin with file:///, got the host {parts.netloc!r}")
    if "?" in given or "#" in given:
        # `parts` does not show an empty query or fragment.
        raise invalid(setting, given, "a file URL must not have '?' or '#': write them as %3F and %23")
    return url2pathname(parts.path)


def is_unambiguous_url(url: str) -> bool:
    """Return whether every library reads the same file from a connector's URL.

    Only such a URL can be compared with the allowed ones. Libraries treat `..` and control characters differently, and
    `::` makes fsspec open one URL through another.

    >>> is_unambiguous_url("s3://bucket/a/b"), is_unambiguous_url("s3://bucket/a/%2e%2e/b")
    (True, False)
    """
    path = unquote(url.partition("://")[2].partition("?")[0])
    return (
        url == url.strip()
        and not any(char in "\\#" or ord(char) < 32 for char in url + path)
        and not {".", ".."} & set(path.split("/"))
        and "::" not in url
    )


def _url_is_below(url: str, allowed: str) -> bool:
    """Return whether a URL is an allowed one, or below it.

    >>> [_url_is_below("s3://bucket/a/b", allowed) for allowed in ("s3://bucket/a", "s3://bucket/a/", "s3://", "s3://b")]
    [True, True, True, False]
    """
    scheme, rest = _parts_to_compare(url)
    allowed_scheme, allowed_rest = _parts_to_compare(allowed)
    return scheme == allowed_scheme and (not allowed_rest or f"{rest}/".startswith(f"{allowed_rest}/"))


def _parts_to_compare(url: str) -> tuple[str, str]:
    """Return the parts of a URL that are compared with those of an allowed one: the scheme, and the host with the path.

    Credentials, parameters and a trailing slash are removed. Text before `@` is not credentials in CONTAINER_SCHEMES.
    """
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    if scheme.lower() not in CONTAINER_SCHEMES:
        host = host.rpartition("@")[2]
    return scheme.lower(), unquote(host + slash + path).rstrip("/")


def are_allowed_files(name: str, value: Any) -> None:
    """Validate `connect.files.allowed`: absolute folders, and URLs that do not name this machine."""
    for entry in value or ():
        if "://" in entry:
            if local_path(name, entry) is not None:
                raise invalid(name, entry, "a folder of this machine must be written as a path")
            if not is_unambiguous_url(entry):
                raise invalid(name, entry, AMBIGUOUS_URL)
        elif not Path(entry).is_absolute():
            raise invalid(name, entry, "must be an absolute path, or a URL such as s3://bucket/folder")


def _open_folder(folder: Path, below: Sequence[str], *, make: bool) -> int:
    """Open the folder at the path `below` in an allowed `folder`, and return its descriptor.

    With `make`, missing folders are created. Raises OSError if a folder of `below` is a link.
    """
    if make:
        # The loop makes each missing folder, also the allowed folder itself and folders above it, and syncs each entry.
        existing = next(one for one in (folder, *folder.parents) if one.exists())
        below = (*folder.relative_to(existing).parts, *below)
        folder = existing
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    at = os.open(folder, flags)
    try:
        for name in below:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, FOLDER_MODE, dir_fd=at)
                # Another task may have just made the folder, and not have synced its entry yet.
                os.fsync(at)
            # O_NOFOLLOW: a link that was made after the path was compared must not lead elsewhere.
            following = os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = following
    except BaseException:
        os.close(at)
        raise
    return at
