"""The files of an application's tables, in a local folder or an object store: counting and removing them.

Object stores are reached through deltalake, with the same options as the tables. So a removal needs no other options
than a read. An object store has no folders: all objects whose names begin with `<lake>/<application>/` are removed,
several in parallel. A removal that fails can be tried again. Everything here blocks: call it with `asyncio.to_thread`.

Hadoop's S3 connector writes empty objects for folders, with names that end in `/` (`state/`). They are not removed,
because deltalake's file API cannot name them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileType

from penstock.shared.common.errors import ConfigError, LakeNotRemoved
from penstock.shared.common.lake.delta_tables import DELTA_ERRORS, one_line
from penstock.shared.common.lake.location import local_folder, table_uri

# Deletions run at the same time, since an object store takes up to tens of ms for each.
DELETIONS_AT_ONCE = 16
WITH_STORES = ("closed", "late")
"""The folders that contain a table for each store."""


class TableFiles(NamedTuple):
    """A table's files: data and log, including files that no version refers to any more."""

    files: int
    size_bytes: int


class ApplicationFiles(NamedTuple):
    """The files in an application's folder `root` (a path or a URI) by table: `state`, `closed/visits` and so on."""

    root: str
    tables: dict[str, TableFiles]


def find_files(
    lake: str, application: str, storage_options: Mapping[str, str] | None = None
) -> ApplicationFiles | None:
    """Count an application's files in a lake. Returns None if it has no local folder, or no object in an object store.

    Raises ConfigError if the location is invalid, the local folder is a symbolic link, or the object store cannot be
    opened. Raises LakeNotRemoved if the files or objects cannot be listed.
    """
    root = table_uri(lake, application)
    folder = local_folder(root)
    if folder is None:
        sizes = _list_objects(root, storage_options)
        return ApplicationFiles(root, by_table(sizes.items())) if sizes else None
    require_no_link(folder)
    try:
        if not folder.is_dir():
            return None
        return ApplicationFiles(str(folder), by_table(_walk_files(folder)))
    except OSError as e:
        raise LakeNotRemoved(f"{folder} cannot be listed: {e}") from e


def remove_files(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> None:
    """Remove an application's local folder, or, in an object store, all its objects that exist at the call.

    Raises ConfigError as `find_files` does. Raises LakeNotRemoved if the objects cannot be listed, or if files remain.
    """
    root = table_uri(lake, application)
    folder = local_folder(root)
    if folder is None:
        objects = list(_list_objects(root, storage_options))
        delete_all(root, objects, _open_storage(root, storage_options).delete_file)
    else:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content. Does nothing if there is no folder.

    Raises ConfigError if it is a symbolic link, LakeNotRemoved if a part of it remains.
    """
    require_no_link(folder)
    try:
        shutil.rmtree(folder)
    except OSError as e:
        if folder.exists():
            raise LakeNotRemoved(f"{folder} is not removed, or not all of it: {e}; run it again") from e


def by_table(sizes: Iterable[tuple[str, int]]) -> dict[str, TableFiles]:
    """The count and total size of files by table; each file is given by its path below the application's folder.

    >>> by_table([("state/_delta_log/0.json", 70), ("state/partition=0/x.parquet", 30), ("late/visits/y.parquet", 5)])
    {'late/visits': TableFiles(files=1, size_bytes=5), 'state': TableFiles(files=2, size_bytes=100)}
    """
    tables: dict[str, TableFiles] = {}
    for path, size_bytes in sizes:
        first, *rest = path.split("/")
        table = f"{first}/{rest[0]}" if first in WITH_STORES and len(rest) > 1 else first
        before = tables.get(table, TableFiles(0, 0))
        tables[table] = TableFiles(before.files + 1, before.size_bytes + size_bytes)
    return dict(sorted(tables.items()))


def delete_all(root: str, paths: Iterable[str], delete: Callable[[str], None]) -> None:
    """Delete all paths, several in parallel.

    LakeNotRemoved names the first path, in the order of `paths`, that could not be deleted, and gives the number of
    those that were.
    """
    left = list(paths)
    with ThreadPoolExecutor(DELETIONS_AT_ONCE) as pool:
        deletions = {path: pool.submit(delete, path) for path in left}
        for path, deletion in deletions.items():
            try:
                deletion.result()
            except DELTA_ERRORS as e:
                pool.shutdown(cancel_futures=True)
                done = sum(not one.cancelled() and one.exception() is None for one in deletions.values())
                raise LakeNotRemoved(
                    f"{root}/{path} is not removed: {one_line(e)}; {done} of {len(left)} files are: run it again"
                ) from e


def require_no_link(folder: Path) -> None:
    """Raises ConfigError if the folder is a symbolic link, which `remove_folder` does not remove."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a symbolic link: remove what it leads to, and the link")


def _open_storage(root: str, storage_options: Mapping[str, str] | None) -> DeltaStorageHandler:
    try:
        return DeltaStorageHandler(root, dict(storage_options) if storage_options else None)
    except DELTA_ERRORS as e:
        raise ConfigError(f"lake {root!r}: {one_line(e)}") from e


def _list_objects(root: str, storage_options: Mapping[str, str] | None) -> dict[str, int]:
    """The objects below a URI by their relative path, with their sizes in bytes; none that stands for a folder."""
    store = _open_storage(root, storage_options)
    try:
        found = store.get_file_info_selector(FileSelector("", allow_not_found=True, recursive=True))
    except DELTA_ERRORS as e:
        raise LakeNotRemoved(f"{root} cannot be listed: {one_line(e)}") from e
    # An object that stands for a folder is listed under the folder's name. Its deletion would delete another object.
    folders = {"", *(one.path for one in found if one.type == FileType.Directory)}
    return {one.path: one.size or 0 for one in found if one.type == FileType.File and one.path not in folders}


def _walk_files(folder: Path) -> Iterator[tuple[str, int]]:
    def fail(error: OSError) -> None:
        # A folder that was removed meanwhile has no files. Without this, `os.walk` leaves out what it cannot read.
        if not isinstance(error, FileNotFoundError):
            raise error

    for at, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = Path(at, name)
            try:
                yield path.relative_to(folder).as_posix(), path.lstat().st_size
            except FileNotFoundError:
                continue
