"""Queries of the stores of running tasks: by key, by key range, by time.

A response has the rows of the tasks that run on this instance, or of the instance's copy of a global table. The
response lists its partitions, each with a position: source offsets before which all records are reflected in the rows.
Rows are read in slices, and the tasks process records between the slices. So a row may also reflect records after the
position. A query of one key that reads few rows is answered at once, while the tasks process no record. A response may
include changes that are not committed yet.

Rows are ordered by partition, then by hash of the key, key and start. All kinds of stores, on disk and in memory, use
this order. So a query whose response was cut can continue after its last row, even on another instance that has taken
over the partition. A row that exists during the whole query is returned once. A page of a query without bounds makes
objects of about as many rows as it has; with bounds, it reads on until it has found its rows. Stores of windows in
memory also compare the hashes of all their keys for each slice.

A query's key is text or bytes. For a store with bytes as keys, text is encoded as UTF-8. For a store with text as keys,
bytes are decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import key_in_store_type, raw_key
from penstock.shared.common.row_positions import KEY_HASHES, RowOrder, RowPosition, key_hash, row_order
from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.runtime.global_tables import GlobalTableRows
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.state_store import StateStoreRow, is_open
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import KeyType, Topology

# A response has at most this many rows. Queries with `StoreQuery.after` return the rest.
QUERY_ROWS_MAX = 10_000
SLICE_ROWS = 2_000
"""About the most rows that are read at once. Reading them takes some milliseconds, in which no record is processed."""


class StoreQuery(NamedTuple):
    """Selects rows of a store: of one `key` or a range of keys, and of these the windows in a range of time.

    A field that is None sets no bound.
    """

    key: str | bytes | None = None
    key_from: str | bytes | None = None
    """The lowest key, inclusive."""
    key_to: str | bytes | None = None
    """The highest key, inclusive."""
    from_ms: int | None = None
    """Windows that end before it are left out, in ms since the epoch. Rows without a window are selected at any
    time."""
    to_ms: int | None = None
    """Windows that begin after it are left out, in ms since the epoch."""
    rows_max: int = QUERY_ROWS_MAX
    """The most rows of a response, from 1 to QUERY_ROWS_MAX."""
    after: RowPosition | None = None
    """The position up to which rows are skipped, inclusive."""


class StoreResponse(msgspec.Struct, frozen=True):
    """Rows in order. `position` has for each partition the next offset to read of each source topic.

    If there are more rows than requested, `last` identifies the last row, for `StoreQuery.after`. Otherwise it is None.
    """

    store: str
    kind: str
    key_type: KeyType
    rows: list[dict[str, Any]]
    position: dict[int, dict[str, int]]
    last: RowPosition | None = None


class _Range(NamedTuple):
    """The query's keys in the store's type of keys."""

    key: Any
    low: Any
    high: Any

    @classmethod
    def of(cls, query: StoreQuery, key_type: KeyType) -> _Range:
        return cls(*(None if k is None else _query_key(k, key_type) for k in (query.key, query.key_from, query.key_to)))

    def has(self, key: Any) -> bool:
        return not ((self.low is not None and key < self.low) or (self.high is not None and key > self.high))


Tasks = Mapping[int, StreamTask]


def read_in_slices(
    tasks: Tasks,
    store: str,
    query: StoreQuery,
    topology: Topology,
    tables: Mapping[str, GlobalTableRows],
) -> Generator[None, None, StoreResponse]:
    """Read open windows or a table's rows from the tasks' stores of that name, or from the global table of that name.

    The generator yields after every slice, and returns the response. A task that leaves `tasks` meanwhile is left out
    of it. `topology` is that of the tasks.

    A row has `key`, and `partition` unless it is of a global table. Windows also have `start` and `end` (ms, as the
    window's kind defines them). Rows of tables have `value`, those of aggregations their results by name.

    Raises ConfigError if no store has the name, if it is a join's store, if `rows_max` is out of range, or if a key of
    the query is not UTF-8 although the store's keys are text.
    """
    if not 1 <= query.rows_max <= QUERY_ROWS_MAX:
        raise ConfigError(f"rows_max must be from 1 to {QUERY_ROWS_MAX}, got {query.rows_max}")
    if store in tables:
        return (yield from _read_table(tables[store], query))
    if (builder := topology.stores.get(store)) is None:
        raise ConfigError(f"the topology has no store {store!r}")
    if builder.schema.kind == "join":
        raise ConfigError(f"store {store!r} holds the records of a join and cannot be queried")
    kind = builder.schema.kind
    key_type = builder.schema.key
    # Taken before the first row is read, so rows may reflect more records than the position, but never fewer.
    position = {partition: dict(task.sources) for partition, task in sorted(tasks.items())}
    wanted = _Range.of(query, key_type)
    pages: dict[int, _StoreQueryPage] = {}
    remaining = query.rows_max
    for partition, task in sorted(tasks.items()):
        # Tasks continue between slices. One that has left may have another owner by now, with newer rows.
        if tasks.get(partition) is not task or (query.after is not None and partition < query.after.partition):
            continue
        page = _StoreQueryPage(partition, builder, query, remaining)
        pages[partition] = page
        for _ in page.read(task.stores[store], wanted):
            yield
            if tasks.get(partition) is not task:
                break
        remaining -= len(page.rows)
        if page.has_more:
            break
    found = [row for page in pages.values() for row in page.rows]
    last = query_position(found[-1]) if any(page.has_more for page in pages.values()) else None
    rows = [row for row in found if row["partition"] in tasks]
    at = {partition: offsets for partition, offsets in position.items() if partition in tasks}
    return StoreResponse(store, kind, key_type, rows, at, last)


def _read_table(table: GlobalTableRows, query: StoreQuery) -> Generator[None, None, StoreResponse]:
    position = {partition: {table.topic: at} for partition, at in sorted(table.position.items())}
    page = _StoreQueryPage(None, None, query, query.rows_max)
    yield from page.read(table, _Range.of(query, table.key_type))
    last = query_position(page.rows[-1]) if page.has_more else None
    return StoreResponse(table.name, "global table", table.key_type, page.rows, position, last)


class _StoreQueryPage:
    """The first `rows_max` rows, in order, that a query selects from one partition.

    `builder` describes the store. `builder` and `partition` are None for a global table, which has neither.
    """

    def __init__(self, partition: int | None, builder: StoreBuilder | None, query: StoreQuery, rows_max: int) -> None:
        self._partition = partition
        self._builder = builder
        self._query = query
        self._rows_max = rows_max
        self.rows: list[dict[str, Any]] = []
        self.has_more = False

    def read(self, store: Any, wanted: _Range) -> Iterator[None]:
        """Find the rows that the query selects in a task's store or a global table; yields between slices."""
        after = self._query.after
        at = None if after is None or after.partition != (self._partition or 0) else (after.key, after.start)
        has_windows = self._builder is not None and not self._builder.schema.is_table
        reader = _StoreReader(store, has_windows, wanted, at, min(SLICE_ROWS, self._rows_max + 1))
        read = 0
        for slice_ in reader.slices():
            self.rows += map(self._row_as_dict, filter(self._row_matches, slice_))
            self.has_more = len(self.rows) > self._rows_max
            if self.has_more:
                break
            read += len(slice_)
            if wanted.key is None or read >= SLICE_ROWS:
                yield
        del self.rows[self._rows_max :]

    def _row_matches(self, row: StateStoreRow) -> bool:
        if self._builder is None:
            return True
        return is_open(row) and _overlaps_queried_time(row, self._builder.schema, self._query)

    def _row_as_dict(self, row: StateStoreRow) -> dict[str, Any]:
        if self._builder is None:
            return {"key": row.key, "value": row.states[0]}
        return {"partition": self._partition, **_store_row_as_dict(row, self._builder)}


class _StoreReader:
    """Reads the rows of a store whose keys are wanted, in order, in slices. The store may change between two slices.

    The next slice begins after the position that the last one reached, whatever rows the store has by then.
    """

    def __init__(
        self, store: Any, has_windows: bool, wanted: _Range, after: tuple[bytes, int] | None, slice_rows: int
    ) -> None:
        self._store = store
        self._has_windows = has_windows
        self._wanted = wanted
        self._after = after
        self._slice_rows = slice_rows
        """About the most rows of the next slice. It grows to SLICE_ROWS, so that a small page costs little."""

    def slices(self) -> Iterator[list[StateStoreRow]]:
        """Yield slices of rows; some may be empty."""
        if self._wanted.key is not None:
            yield from self._slices_of_key(self._wanted.key)
            return
        low = 0 if self._after is None else key_hash(self._after[0])
        while low < KEY_HASHES:
            # Hashes are spread evenly, so the keys of about `_slice_rows` rows have a hash in this range.
            high = min(low + KEY_HASHES * self._slice_rows // max(len(self._store), 1), KEY_HASHES - 1)
            rows, end = self._read_slice(low, high)
            low = high + 1 if end is None else key_hash(end[0])
            self._after = end or self._after
            self._slice_rows = min(SLICE_ROWS, 2 * self._slice_rows)
            yield rows

    def _slices_of_key(self, key: Any) -> Iterator[list[StateStoreRow]]:
        is_complete = not self._wanted.has(key)
        while not is_complete:
            rows, is_complete = self._rows_of(key)
            self._slice_rows = min(SLICE_ROWS, 2 * self._slice_rows)
            self._after = _position_of(rows[-1]) if rows else self._after
            yield rows

    def _read_slice(self, low: int, high: int) -> tuple[list[StateStoreRow], tuple[bytes, int] | None]:
        """Return the next rows of keys with these hashes, and the position reached, or None at the end of the range."""
        on_disk: list[StateStoreRow] = []
        reached = None
        if isinstance(self._store, PersistentStore):
            on_disk, reached = self._store.read_disk(low, high, self._after, self._slice_rows, self._wanted.has)
            high = high if reached is None else key_hash(reached[0])
        rows, is_complete = self._rows_in_memory(low, high)
        ends = [] if reached is None else [reached]
        if not is_complete:
            ends.append(_position_of(rows[-1]))
        rows = sorted(rows + on_disk, key=_row_order_of) if rows and on_disk else rows or on_disk
        if not ends:
            return rows, None
        # Memory and disk were both read up to here. The rows after it are read again with the next slice.
        end = min(ends, key=lambda at: row_order(*at))
        return rows[: bisect_right(rows, row_order(*end), key=_row_order_of)], end

    def _rows_in_memory(self, low: int, high: int) -> tuple[list[StateStoreRow], bool]:
        """Return the next rows of the keys in memory with these hashes, and whether they are the last ones."""
        keys = self._store.keys_between(low, high)
        hashed = sorted((key_hash(raw := raw_key(key)), raw, key) for key in keys if self._wanted.has(key))
        rows: list[StateStoreRow] = []
        for _, same_hash in groupby(hashed, itemgetter(0)):
            if len(rows) >= self._slice_rows:
                return rows, False
            same = [key for _, _, key in same_hash]
            own, is_complete = self._rows_of(same[0]) if len(same) == 1 else (self._rows_of_keys(same), True)
            rows += own
            if not is_complete:
                return rows, False
        return rows, True

    def _rows_of(self, key: Any) -> tuple[list[StateStoreRow], bool]:
        """Return the next rows of a key, and whether they are its last ones."""
        raw = raw_key(key)
        start = None
        if self._after is not None and self._after[0] == raw:
            start = self._after[1]
        elif self._after is not None and key_hash(self._after[0]) == key_hash(raw):
            return self._rows_of_keys([key]), True
        if not self._has_windows:
            return (self._store.rows_of(key) if start is None else []), True
        rows = self._store.rows_after(key, start, self._slice_rows)
        return rows, len(rows) < self._slice_rows

    def _rows_of_keys(self, keys: list[Any]) -> list[StateStoreRow]:
        """Return all next rows of keys with the same hash, in order: a start may be compared with a part of a key."""
        rows = sorted((row for key in keys for row in self._store.rows_of(key)), key=_row_order_of)
        return [row for row in rows if self._after is None or _row_order_of(row) > row_order(*self._after)]


def _position_of(row: StateStoreRow) -> tuple[bytes, int]:
    return raw_key(row.key), row.start


def _row_order_of(row: StateStoreRow) -> RowOrder:
    return row_order(raw_key(row.key), row.start)


def query_position(row: Mapping[str, Any]) -> RowPosition:
    """Return the position of a row in a query's response, after which the query continues."""
    return RowPosition(row.get("partition", 0), raw_key(row["key"]), row.get("start", 0))


def _overlaps_queried_time(row: StateStoreRow, schema: StoreSchema, query: StoreQuery) -> bool:
    if schema.is_table:
        return True
    # Queries of the lake (`window_queries`) have the same rule, for all kinds of windows.
    return (query.from_ms is None or row.end >= query.from_ms) and (query.to_ms is None or row.start <= query.to_ms)


def _query_key(key: str | bytes, key_type: KeyType) -> str | bytes:
    own: str | bytes = key_in_store_type(key, key_type == "string")
    if key_type == "string" and isinstance(own, bytes):
        raise ConfigError(f"the store's keys are text, and {key!r} is not UTF-8")
    return own


def _store_row_as_dict(row: StateStoreRow, builder: StoreBuilder) -> dict[str, Any]:
    if builder.schema.kind == "table":
        return {"key": row.key, "value": row.states[0]}
    bounds = {} if builder.schema.is_table else {"start": row.start, "end": row.end}
    return {"key": row.key, **bounds, **results_of(row, builder)}


def results_of(row: StateStoreRow, builder: StoreBuilder) -> dict[str, Any]:
    """Return the results of a row's aggregations by their names."""
    named = zip(builder.schema.aggregations, builder.aggregations, row.states, strict=True)
    return {schema.name: aggregation.result(state) for schema, aggregation, state in named if schema.name != LATEST}
