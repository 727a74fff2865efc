"""Reading the stores of running tasks: by key, by a range of keys, by time; and what an answer reflects.

An answer comes from the tasks that run here, and of a global table from the instance's copy. It says which partitions
it is of and up to which source offsets: what lies before them is in it. A key's rows are of the moment between two
records of each task. More than a key is walked in slices, between which the tasks go on: each row is as it was when its
slice came, so that it may reflect later records than the position says. What a task has not committed yet may be in it.

A key is text, or bytes as they are: text is UTF-8 in a store of bytes, and bytes are in a store of text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from shared.common.errors import ConfigError
from shared.streams.global_table import GlobalTableRows
from shared.streams.state.persistent_stores import PersistentStore
from shared.streams.state.store import LiveRow
from shared.streams.stream_task import StreamTask
from shared.streams.time_windows import LATEST
from shared.streams.topology import KeyType, StoreBuilder, Topology

QUERY_ROWS_MAX = 10_000  # of one answer; narrower questions have the rest
SLICE_ROWS = 2_000
"""Rows that are looked at in one go: some milliseconds, in which no record is processed."""


class StoreQuery(NamedTuple):
    """Which rows: those of a key, or of keys from `key_from` to `key_to`, whose window overlaps the time.

    Bounds are inclusive; None leaves one open. Times are ms since the epoch.
    """

    key: str | bytes | None = None
    key_from: str | bytes | None = None
    key_to: str | bytes | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    rows_max: int = QUERY_ROWS_MAX


class StoreAnswer(msgspec.Struct, frozen=True):
    """Rows by partition; `position` is the next offset to read of each source topic, by partition.

    `is_cut` says that there were more rows than were asked for.
    """

    store: str
    kind: str
    rows: list[dict[str, Any]]
    position: dict[int, dict[str, int]]
    is_cut: bool = False


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
    them) and their results by name, tables `value`; a global table's have no `partition`.
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
    kind, found, is_cut = builder.schema.kind, dict[int, list[dict[str, Any]]](), False
    position = {partition: dict(task.sources) for partition, task in sorted(tasks.items())}
    wanted = _Range.of(query, builder.schema.key)
    for partition, task in sorted(tasks.items()):
        if tasks.get(partition) is not task:
            continue
        room = query.rows_max - sum(map(len, found.values()))
        own = found[partition] = []
        for rows in _slices(task.stores[store], wanted):
            own += ({"partition": partition, **_plain(row, builder)} for row in rows if _overlaps(row, kind, query))
            if len(own) > room:
                is_cut = True
                del own[room:]
                break
            yield
            if tasks.get(partition) is not task:
                break
        if is_cut:
            break
    there = [partition for partition in position if partition in tasks]
    told = [row for partition in there for row in found.get(partition, ())]
    return StoreAnswer(store, kind, told, {partition: position[partition] for partition in there}, is_cut)


def _read_table(table: GlobalTableRows, query: StoreQuery) -> Generator[None, None, StoreAnswer]:
    position = {partition: {table.topic: at} for partition, at in sorted(table.position.items())}
    found: list[dict[str, Any]] = []
    for rows in _slices(table, _Range.of(query, table.key_type)):
        found += ({"key": row.key, "value": row.states[0]} for row in rows)
        if len(found) > query.rows_max:
            break
        yield
    cut = found[: query.rows_max]
    return StoreAnswer(table.name, "global table", cut, position, is_cut=len(cut) < len(found))


def _slices(store: Any, wanted: _Range) -> Iterator[list[LiveRow]]:
    """The rows of a range of keys; empty slices among them are of keys that are not wanted."""
    if wanted.key is not None:
        yield [row for row in store.rows_of(wanted.key) if wanted.has(row.key)]
        return
    if isinstance(store, PersistentStore | GlobalTableRows):
        rows: Iterable[LiveRow] = store.rows()
        while looked_at := list(islice(rows, SLICE_ROWS)):
            yield [row for row in looked_at if wanted.has(row.key)]
        return
    keys = store.keys()
    while some := list(islice(keys, SLICE_ROWS)):
        yield [row for key in some if wanted.has(key) for row in store.rows_of(key)]


def _overlaps(row: LiveRow, kind: str, query: StoreQuery) -> bool:
    if kind != "table":
        last = row.end - 1 if kind in ("tumbling", "hopping") else row.end
        if (query.from_ms is not None and last < query.from_ms) or (
            query.to_ms is not None and row.start > query.to_ms
        ):
            return False
    return not getattr(row, "closed", False)  # a sliding window that is kept for what it holds


def _key(key: str | bytes, key_type: KeyType) -> str | bytes:
    if key_type == "bytes":
        return key.encode() if isinstance(key, str) else key
    try:
        return key.decode() if isinstance(key, bytes) else key
    except UnicodeDecodeError:
        raise ConfigError(f"the store's keys are text, and {key!r} is not UTF-8") from None


def _plain(row: LiveRow, builder: StoreBuilder) -> dict[str, Any]:
    if builder.schema.kind == "table":
        return {"key": row.key, "value": row.states[0]}
    named = zip(builder.schema.aggregations, builder.aggregations, row.states, strict=True)
    results = {schema.name: aggregation.result(state) for schema, aggregation, state in named if schema.name != LATEST}
    return {"key": row.key, "start": row.start, "end": row.end, **results}
