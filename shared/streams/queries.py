"""Reading the stores of running tasks: by key, by a range of keys, by time; and what an answer reflects.

An answer comes from the tasks that run here, and of a global table from the instance's copy. It says which partitions
it is of and up to which source offsets: what lies before them is in it. A key's rows are of the moment between two
records of each task. More than a key is walked in slices, between which the tasks go on: each row is as it was when its
slice came, so that it may reflect later records than the position says. What a task has not committed yet may be in it.

Rows come by partition, and within it by hash of the key, key and start, whatever keeps them: it is the order in which
they are on disk. So an answer that is cut goes on after its last row, here or where the partition has gone meanwhile,
and a row that is there all the time is given once. In memory the first rows of that order are looked for among all.

A key is text, or bytes as they are: text is UTF-8 in a store of bytes, and bytes are in a store of text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.shared.common.continuation import RowOrder, RowPlace, key_hash, row_order
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import raw_key
from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.changelog.format import StoreSchema
from penstock.shared.streams.runtime.global_table import GlobalTableRows
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state.store import LiveRow
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import KeyType, StoreBuilder, Topology

QUERY_ROWS_MAX = 10_000  # of one answer; narrower questions have the rest
SLICE_ROWS = 2_000
"""Rows that are looked at in one go: some milliseconds, in which no record is processed."""


class StoreQuery(NamedTuple):
    """Which rows: those of a key, or of keys from `key_from` to `key_to`, whose window overlaps the time.

    Bounds are inclusive; None leaves one open. Times are ms since the epoch. `after` leaves out all up to that row.
    """

    key: str | bytes | None = None
    key_from: str | bytes | None = None
    key_to: str | bytes | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    rows_max: int = QUERY_ROWS_MAX
    after: RowPlace | None = None


class StoreAnswer(msgspec.Struct, frozen=True):
    """Rows by partition; `position` is the next offset to read of each source topic, by partition.

    `last` is the place of the last row, where there are more than were asked for.
    """

    store: str
    kind: str
    key_type: KeyType
    rows: list[dict[str, Any]]
    position: dict[int, dict[str, int]]
    last: RowPlace | None = None


class _Range(NamedTuple):
    """The query's keys as a store has them."""

    key: Any
    low: Any
    high: Any

    @classmethod
    def of(cls, query: StoreQuery, key_type: KeyType) -> _Range:
        return cls(*(None if k is None else _key(k, key_type) for k in (query.key, query.key_from, query.key_to)))

    def has(self, key: Any) -> bool:
        return not ((self.low is not None and key < self.low) or (self.high is not None and key > self.high))


Tasks = Mapping[int, StreamTask]


def read_in_slices(
    tasks: Tasks,
    store: str,
    query: StoreQuery,
    topology: Topology | None = None,
    tables: Mapping[str, GlobalTableRows] | None = None,
) -> Generator[None, None, StoreAnswer]:
    """Live windows, or a table's rows, of the tasks' stores of that name; ConfigError where it cannot be asked for.

    It stops after every slice; a task that leaves `tasks` meanwhile is left out of the answer.

    `topology` says which stores there are where no task runs here; by default it is that of the tasks. `tables` are the
    instance's global tables. Rows have `partition` and `key`; windows `start` and `end` (ms, as the window's kind has
    them) and their results by name, aggregates the results alone, tables `value`; a global table's have no `partition`.
    """
    if not 1 <= query.rows_max <= QUERY_ROWS_MAX:
        raise ConfigError(f"rows_max must be from 1 to {QUERY_ROWS_MAX}, got {query.rows_max}")
    if tables is not None and store in tables:
        return (yield from _read_table(tables[store], query))
    topologies = [topology] if topology is not None else [task.topology for task in tasks.values()]
    builder = next((each.stores[store] for each in topologies if store in each.stores), None)
    if builder is None:
        raise ConfigError(f"no task that runs here has a store {store!r}")
    if builder.schema.kind == "join":
        raise ConfigError(f"store {store!r} holds what a join remembers, which is nothing to be read")
    kind, key_type = builder.schema.kind, builder.schema.key
    position = {partition: dict(task.sources) for partition, task in sorted(tasks.items())}
    wanted = _Range.of(query, key_type)
    pages: dict[int, _Page] = {}
    room = query.rows_max
    for partition, task in sorted(tasks.items()):
        if tasks.get(partition) is not task or (query.after is not None and partition < query.after.partition):
            continue
        page = pages[partition] = _Page(partition, builder, query, room)
        for _ in page.read(task.stores[store], wanted):
            yield
            if tasks.get(partition) is not task:
                break
        room -= len(page.rows)
        if page.has_more:
            break
    found = [row for page in pages.values() for row in page.rows]
    last = place_of_row(found[-1]) if any(page.has_more for page in pages.values()) else None
    told = [row for row in found if row["partition"] in tasks]
    at = {partition: offsets for partition, offsets in position.items() if partition in tasks}
    return StoreAnswer(store, kind, key_type, told, at, last)


def _read_table(table: GlobalTableRows, query: StoreQuery) -> Generator[None, None, StoreAnswer]:
    position = {partition: {table.topic: at} for partition, at in sorted(table.position.items())}
    page = _Page(None, None, query, query.rows_max)
    yield from page.read(table, _Range.of(query, table.key_type))
    last = place_of_row(page.rows[-1]) if page.has_more else None
    return StoreAnswer(table.name, "global table", table.key_type, page.rows, position, last)


class _Page:
    """The first rows of a partition in their order, as many as there is room for, of those that are wanted.

    `builder` and `partition` are None of a global table.
    """

    def __init__(self, partition: int | None, builder: StoreBuilder | None, query: StoreQuery, room: int) -> None:
        self._partition, self._builder, self._query, self._room = partition, builder, query, room
        self._after: RowOrder | None = None
        if query.after is not None and query.after.partition == (partition or 0):
            self._after = row_order(query.after.key, query.after.start)
        self._bound: RowOrder | None = None
        """Of the last row that has a place yet, once there are enough."""
        self._found: list[tuple[RowOrder, dict[str, Any]]] = []
        self.rows: list[dict[str, Any]] = []
        self.has_more = False

    def read(self, store: Any, wanted: _Range) -> Iterator[None]:
        """Find the rows; it stops after every slice."""
        if wanted.key is not None:
            self._take(row for row in store.rows_of(wanted.key) if wanted.has(row.key))
        elif isinstance(store, PersistentStore):
            after = None if self._after is None else self._query.after
            in_memory, on_disk = store.walk(None if after is None else (after.key, after.start))
            for slice_ in _slices(iter(in_memory)):
                self._take(row for row in slice_ if wanted.has(row.key))
                yield
            for slice_ in _slices(on_disk):
                self._take(row for row in slice_ if wanted.has(row.key))
                self._settle()
                if self._bound is not None and _order_of(slice_[-1]) > self._bound:
                    break
                yield
        else:
            for keys in _slices(store.keys()):
                own = [key for key in keys if wanted.has(key) and self._may_have(key_hash(raw_key(key)))]
                self._take(_rows_of(store, own))
                yield
        self._settle()
        self.has_more = len(self._found) > self._room
        self.rows = [row for _, row in self._found[: self._room]]

    def _may_have(self, hash_: int) -> bool:
        return (self._after is None or hash_ >= self._after[0]) and (self._bound is None or hash_ <= self._bound[0])

    def _take(self, rows: Iterable[LiveRow]) -> None:
        for row in rows:
            order = _order_of(row)
            if self._after is not None and order <= self._after:
                continue
            if (self._bound is None or order < self._bound) and self._overlaps(row):
                self._found.append((order, self._plain(row)))
                if len(self._found) >= 2 * (self._room + 1) + SLICE_ROWS:
                    self._settle()

    def _settle(self) -> None:
        """Keep the first rows, and one more that says whether there are others."""
        self._found.sort(key=itemgetter(0))
        del self._found[self._room + 1 :]
        if len(self._found) > self._room:
            self._bound = self._found[-1][0]

    def _overlaps(self, row: LiveRow) -> bool:
        return self._builder is None or _overlaps(row, self._builder.schema, self._query)

    def _plain(self, row: LiveRow) -> dict[str, Any]:
        if self._builder is None:
            return {"key": row.key, "value": row.states[0]}
        return {"partition": self._partition, **_plain(row, self._builder)}


RowT = TypeVar("RowT")


def _slices(rows: Iterator[RowT]) -> Iterator[list[RowT]]:
    while some := list(islice(rows, SLICE_ROWS)):
        yield some


def _rows_of(store: Any, keys: Iterable[Any]) -> Iterator[LiveRow]:
    return (row for key in keys for row in store.rows_of(key))


def _order_of(row: LiveRow) -> RowOrder:
    return row_order(raw_key(row.key), row.start)


def place_of_row(row: Mapping[str, Any]) -> RowPlace:
    """The place of an answer's row, with its key as the store has it."""
    return RowPlace(row.get("partition", 0), raw_key(row["key"]), row.get("start", 0))


def _overlaps(row: LiveRow, schema: StoreSchema, query: StoreQuery) -> bool:
    if not schema.is_table:
        last = row.end - 1 if schema.kind in ("tumbling", "hopping") else row.end
        if (query.from_ms is not None and last < query.from_ms) or (
            query.to_ms is not None and row.start > query.to_ms
        ):
            return False
    return not getattr(row, "closed", False)  # a sliding window that is kept for what it holds


def _key(key: str | bytes, key_type: KeyType) -> str | bytes:
    if key_type == "bytes":
        return raw_key(key)
    try:
        return key.decode() if isinstance(key, bytes) else key
    except UnicodeDecodeError:
        raise ConfigError(f"the store's keys are text, and {key!r} is not UTF-8") from None


def _plain(row: LiveRow, builder: StoreBuilder) -> dict[str, Any]:
    if builder.schema.kind == "table":
        return {"key": row.key, "value": row.states[0]}
    named = zip(builder.schema.aggregations, builder.aggregations, row.states, strict=True)
    results = {schema.name: aggregation.result(state) for schema, aggregation, state in named if schema.name != LATEST}
    bounds = {} if builder.schema.is_table else {"start": row.start, "end": row.end}
    return {"key": row.key, **bounds, **results}
