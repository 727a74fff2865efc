"""One task's rows in RocksDB, with the checkpoint of the changelog that they reflect.

The database holds only confirmed changes. Rows are written in one batch with the checkpoint, which has their changelog
offset. So after a crash of the process or the machine, the database has the state at that offset, and only later
records of the log have to be read.

A row's key in the database is its store's number, its key's hash (the prefix for the filter), its key and its start.
Queries return rows in this order. Stores of windows and joins also have an index by end. An index entry may be before
its row's end: a session that grows is not written to the index each time. When such an entry becomes due, it is moved
to the row's end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    SliceTransform,
    WriteBatch,
    WriteBufferManager,
)

from penstock.shared.common.errors import StateStoreFailed
from penstock.shared.common.log import get_logger
from penstock.shared.common.row_positions import KEY_HASHES, key_hash, start_bytes
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state_store import NEVER

log = get_logger(__name__)

FORMAT_VERSION = 2
# This share of the memory is for unflushed rows. The rest is for blocks, indexes and filters.
WRITE_BUFFER_SHARE = 0.25
# Beyond this, a task's rows are flushed. A start after a crash reads unflushed rows from the write-ahead log.
WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024
BLOOM_BITS_PER_KEY = 10
OPEN_FILES_MAX = 256
LOG_FILES_MAX = 2
# A commit looks up the previous values of at most this many rows at once.
WRITE_ROWS_MAX = 4_096
# An iteration reads at most this many rows at once.
PAGE_ROWS = 1_000

META = b"M"
ROW = b"R"
DUE = b"E"
_HEAD = struct.Struct(">cBI")
PREFIX_BYTES = _HEAD.size
# Numbers are stored with a shift, so that the bytes sort as the numbers do.
_NUMBER = struct.Struct(">Q")
_SHIFT = 1 << 63
_ENDS = struct.Struct(">qq")

RowId = tuple[int, bytes, int]
"""A store's number, a key, a start."""


class StoredRow(NamedTuple):
    """A row's end in ms and its states' bytes."""

    end: int
    state: bytes


class Meta(msgspec.Struct):
    """The metadata of the rows; `checkpoint` is None while they are incomplete."""

    format: int = FORMAT_VERSION
    checkpoint: Checkpoint | None = None
    counts: dict[int, int] = {}


class RocksMemory:
    """Holds and limits the memory that all databases of an instance share: blocks from disk, and unflushed rows."""

    def __init__(self, bytes_max: int) -> None:
        self.cache = Cache(bytes_max)
        size = int(bytes_max * WRITE_BUFFER_SHARE)
        self.buffers = WriteBufferManager.new_write_buffer_manager_with_cache(size, False, self.cache)

    def options(self) -> Options:
        """Return options for one database."""
        blocks = BlockBasedOptions()
        blocks.set_block_cache(self.cache)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
        # Otherwise a file's filter is one block, and with little memory each look-up of a key would read all of it.
        blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
        blocks.set_partition_filters(True)
        blocks.set_pin_top_level_index_and_filter(True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_prefix_extractor(SliceTransform.create_fixed_prefix(PREFIX_BYTES))
        options.set_write_buffer_manager(self.buffers)
        options.set_write_buffer_size(WRITE_BUFFER_BYTES_MAX)
        options.set_max_open_files(OPEN_FILES_MAX)
        options.set_keep_log_file_num(LOG_FILES_MAX)
        return options


class _FolderErrors:
    """Raises every error inside it as StateStoreFailed with the folder, since RocksDB's errors have no classes."""

    __slots__ = ("_folder",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, StateStoreFailed):
            raise StateStoreFailed(f"the state in {self._folder} cannot be used: {error}") from error


class RocksDb:
    """The rows of one task's stores. Its methods raise StateStoreFailed if the disk or RocksDB fails."""

    def __init__(self, folder: Path, memory: RocksMemory) -> None:
        self.folder = folder
        self._memory = memory
        self._errors = _FolderErrors(folder)
        self._in_prefix = ReadOptions()
        self._in_order = ReadOptions()
        self._in_prefix.set_prefix_same_as_start(True)
        self._in_order.set_total_order_seek(True)
        self._db = self._open_database()
        self.is_new = True
        """Whether nothing was ever written."""
        self._meta = self._read_meta()

    def __repr__(self) -> str:
        return f"RocksDb({self.folder}, {self._meta.counts} rows, {self._meta.checkpoint})"

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Which changelog records are in the rows; None while the rows are incomplete."""
        return self._meta.checkpoint

    def count(self, store: int) -> int:
        """Return the number of a store's rows."""
        return self._meta.counts.get(store, 0)

    def close(self) -> None:
        """Close the database; a second call does nothing."""
        with self._errors, suppress(DbClosedError):
            self._db.close()

    def clear(self) -> None:
        """Delete all rows."""
        with self._errors:
            self._db.close()
            Rdict.destroy(str(self.folder), self._memory.options())
        self._db = self._open_database()
        self._meta = Meta()
        self.is_new = True

    # --- reading ---

    def row(self, store: int, key: bytes, start: int) -> StoredRow | None:
        """Return one row, or None."""
        with self._errors:
            value = self._db.get(_row_key(store, key, start))
        return None if value is None else _unpack_row(value)

    def rows_of(
        self, store: int, key: bytes, after: int | None = None, limit: int | None = None
    ) -> list[tuple[int, StoredRow]]:
        """Return a key's rows with their starts, in order: at most `limit`, and only starts after `after`."""
        begin = _row_key_prefix(store, key) + key
        with self._errors:
            rows = self._db.iter(self._in_prefix)
        return list(islice(self._key_rows(rows, begin, None if after is None else begin + start_bytes(after)), limit))

    def latest_rows_of(
        self, store: int, key: bytes, start_max: int, end_max: int, limit: int
    ) -> list[tuple[int, StoredRow]]:
        """Return a key's last rows with their starts, in order: at most `limit`.

        They start at `start_max` or earlier, and end at `end_max` or earlier.
        """
        begin = _row_key_prefix(store, key) + key
        found: list[tuple[int, StoredRow]] = []
        with self._errors:
            rows = self._db.iter(self._in_order)
            rows.seek_for_prev(begin + start_bytes(start_max))
            while len(found) < limit and rows.valid() and (at := rows.key()).startswith(begin):
                if len(at) == len(begin) + _NUMBER.size and (row := _unpack_row(rows.value())).end <= end_max:
                    found.append((_unpack_ordered_number(at, len(begin)), row))
                rows.prev()
            rows.status()
        return found[::-1]

    def rows_of_many(self, store: int, keys: Iterable[bytes]) -> Iterator[tuple[bytes, list[tuple[int, StoredRow]]]]:
        """As `rows_of`, for many keys. Yields each key with its rows.

        Keys are read in their order on disk, so that a block that has several of the keys is read only once.
        """
        with self._errors:
            rows = self._db.iter(self._in_prefix)
        for begin, key in sorted((_row_key_prefix(store, key) + key, key) for key in keys):
            yield key, list(self._key_rows(rows, begin))

    def _key_rows(self, rows: RdictIter, begin: bytes, after: bytes | None = None) -> Iterator[tuple[int, StoredRow]]:
        whole = len(begin)
        with self._errors:
            rows.seek(begin if after is None else after + b"\0")
            while rows.valid():
                at: bytes = rows.key()
                if not at.startswith(begin):
                    break
                # Otherwise it is a longer key that begins with this one and has the same hash.
                if len(at) == whole + _NUMBER.size:
                    yield _unpack_ordered_number(at, whole), _unpack_row(rows.value())
                rows.next()
            # An iterator is invalid at its end, and after an error. Only `status` raises the error.
            rows.status()

    def rows(self, store: int) -> Iterator[tuple[bytes, int, StoredRow]]:
        """Yield (key, start, row) for the rows of a store, in the order of key hash, key and start.

        Changes during the iteration may or may not be seen.
        """
        # Pages, so that an iteration that is abandoned leaves nothing open.
        page = self.rows_between(store, 0, KEY_HASHES - 1, None, PAGE_ROWS)
        while page:
            yield from page
            after = page[-1][:2]
            page = self.rows_between(store, 0, KEY_HASHES - 1, after, PAGE_ROWS) if len(page) == PAGE_ROWS else []

    def rows_between(
        self, store: int, low: int, high: int, after: tuple[bytes, int] | None, limit: int
    ) -> list[tuple[bytes, int, StoredRow]]:
        """Return (key, start, row) for at most `limit` rows, in the order of key hash, key and start.

        The hashes of their keys are from `low` to `high`. If `after` is given, only rows after this key and start are
        returned.
        """
        first = _HEAD.pack(ROW, store, low)
        if after is not None:
            first = max(first, _row_key(store, *after) + b"\0")
        last = _HEAD.pack(ROW, store, high)
        found: list[tuple[bytes, int, StoredRow]] = []
        with self._errors:
            rows = self._db.iter(self._in_order)
            rows.seek(first)
            while len(found) < limit and rows.valid() and (at := rows.key())[:PREFIX_BYTES] <= last:
                start = _unpack_ordered_number(at, len(at) - _NUMBER.size)
                found.append((at[PREFIX_BYTES : -_NUMBER.size], start, _unpack_row(rows.value())))
                rows.next()
            rows.status()
        return found

    def take_due(self, store: int, since: int, limit: int) -> tuple[set[bytes], int]:
        """Return the keys of rows that end from `since` (inclusive) to `limit` (exclusive), and the next end.

        The next end is the least end in the index from `limit` on, or 2**63 if there is none. The returned rows stay in
        the index until a commit removes them.
        """
        own = DUE + bytes((store,))
        keys = set()
        batch = WriteBatch(raw_mode=True)
        upcoming = -NEVER
        with self._errors:
            entries = self._db.iter(self._in_order)
            entries.seek(own + start_bytes(since))
            while entries.valid() and (at := entries.key()).startswith(own):
                listed = _unpack_ordered_number(at, 2)
                start = _unpack_ordered_number(at, 10)
                key = at[18:]
                if listed >= limit:
                    upcoming = min(upcoming, listed)
                    break
                # There are three cases:
                # 1. The row is gone: delete the entry.
                # 2. The row has grown and is not due yet: move the entry to its present end.
                # 3. The row is due. The entry stays until the row is removed by a commit (`_put_row`).
                row = self.row(store, key, start)
                if row is None or row.end >= limit:
                    batch.delete(at)
                if row is not None and row.end >= limit:
                    batch.put(_row_key(store, key, start), _ENDS.pack(row.end, row.end) + row.state)
                    batch.put(_due_key(store, row.end, start, key), b"")
                    upcoming = min(upcoming, row.end)
                elif row is not None:
                    keys.add(key)
                entries.next()
            entries.status()
            if len(batch):
                self._db.write(batch)
        return keys, upcoming

    # --- writing ---

    def write(
        self,
        rows: Mapping[RowId, StoredRow | None],
        checkpoint: Checkpoint | None,
        *,
        indexed: Iterable[int] = (),
        due: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Write rows and the checkpoint atomically; a row that is None is removed.

        `indexed` are the stores that have an index by end. `due` has for each store the end up to which its index was
        searched. Return by how much each store's number of rows has changed.
        """
        due = due or {}
        indexed = frozenset(indexed)
        changed = dict[int, int]()
        counts = dict(self._meta.counts)
        batch = WriteBatch(raw_mode=True)
        keyed_rows = sorted((_row_key(*id_), id_) for id_ in rows)
        for first in range(0, len(keyed_rows), WRITE_ROWS_MAX):
            some = keyed_rows[first : first + WRITE_ROWS_MAX]
            with self._errors:
                before = self._db.get([at for at, _ in some])
            for (at, id_), old in zip(some, before or (), strict=True):
                store = id_[0]
                more = _put_row(batch, at, id_, rows[id_], old, due.get(store, NEVER) if store in indexed else None)
                changed[store] = changed.get(store, 0) + more
        for store, more in changed.items():
            counts[store] = counts.get(store, 0) + more
        meta = Meta(checkpoint=checkpoint, counts=counts)
        # In the same batch as the rows, so that after a crash rows and checkpoint belong together.
        batch.put(META, msgspec.msgpack.encode(meta))
        with self._errors:
            self._db.write(batch)
        self._meta = meta
        self.is_new = False
        return changed

    # --- inside ---

    def _open_database(self) -> Rdict:
        with self._errors:
            try:
                return Rdict(str(self.folder), self._memory.options())
            except Exception as e:
                # RocksDB's errors have no classes. The changelog has everything that a corrupt database had, so begin
                # with an empty one.
                if not str(e).startswith("Corruption"):
                    raise
                log.error(
                    "the state's files are damaged, so all state is restored", folder=str(self.folder), error=str(e)
                )
                Rdict.destroy(str(self.folder), self._memory.options())
                return Rdict(str(self.folder), self._memory.options())

    def _read_meta(self) -> Meta:
        with self._errors:
            found = self._db.get(META)
        self.is_new = found is None
        try:
            meta = Meta() if found is None else msgspec.msgpack.decode(found, type=Meta)
        except msgspec.MsgspecError:
            meta = Meta(format=0)
        # Rows of another format have no checkpoint, so they are deleted and restored.
        return meta if meta.format == FORMAT_VERSION else Meta()


def _put_row(
    batch: WriteBatch, at: bytes, id_: RowId, row: StoredRow | None, old: bytes | None, due: int | None
) -> int:
    """Put one row into a batch of RocksDB and update its index entry, or delete both if `row` is None.

    `old` is the stored row, or None. `due` is None if the store has no index. Otherwise the index was searched up to
    `due`, and entries before `due` are not found any more. An old entry before `due` or after the row's new end is
    replaced. Any other stays: `take_due` finds it in time, and moves it to the row's end. Return the change in the
    number of rows.
    """
    store, key, start = id_
    listed = None if old is None or due is None else _ENDS.unpack_from(old)[0]
    if row is None:
        batch.delete(at)
        if listed is not None:
            batch.delete(_due_key(store, listed, start, key))
        return 0 if old is None else -1
    # An old entry at or before the row's end is found in time, and `take_due` moves it.
    stays = listed is not None and due is not None and due <= listed <= row.end
    if due is not None and not stays:
        if listed is not None:
            batch.delete(_due_key(store, listed, start, key))
        batch.put(_due_key(store, row.end, start, key), b"")
    batch.put(at, _ENDS.pack(listed if stays and listed is not None else row.end, row.end) + row.state)
    return 1 if old is None else 0


def _unpack_row(value: bytes) -> StoredRow:
    return StoredRow(_ENDS.unpack_from(value)[1], value[_ENDS.size :])


def _unpack_ordered_number(data: bytes, at: int) -> int:
    found: int = _NUMBER.unpack_from(data, at)[0]
    return found - _SHIFT


def _row_key_prefix(store: int, key: bytes) -> bytes:
    return _HEAD.pack(ROW, store, key_hash(key))


def _row_key(store: int, key: bytes, start: int) -> bytes:
    return _row_key_prefix(store, key) + key + start_bytes(start)


def _due_key(store: int, end: int, start: int, key: bytes) -> bytes:
    return DUE + bytes((store,)) + start_bytes(end) + start_bytes(start) + key
