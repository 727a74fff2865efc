"""Reading the stores of running tasks: by key, by a range of keys, by time; and what an answer reflects.

An answer comes from the tasks that run here. It is of the moment between two records of each task, and says which
partitions it is of and up to which source offsets: what lies before them is in it, what lies at or after them is not.
What a task has not committed yet may be in it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from shared.common.errors import ConfigError
from shared.streams.state.store import LiveRow
from shared.streams.stream_task import StreamTask
from shared.streams.time_windows import LATEST
from shared.streams.topology import StoreBuilder, Topology

QUERY_ROWS_MAX = 10_000  # of one answer; narrower questions have the rest


class StoreQuery(NamedTuple):
    """Which rows: those of a key, or of keys from `key_from` to `key_to`, whose window overlaps the time.

    Bounds are inclusive; None leaves one open. Times are ms since the epoch.
    """

    key: str | None = None
    key_from: str | None = None
    key_to: str | None = None
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


def read_store(
    tasks: Mapping[int, StreamTask], store: str, query: StoreQuery, topology: Topology | None = None
) -> StoreAnswer:
    """Live windows, or a table's rows, of the tasks' stores of that name; ConfigError where it cannot be asked for.

    `topology` says which stores there are where no task runs here; by default it is that of the tasks. Rows have
    `partition` and `key`; windows `start` and `end` (ms, as the window's kind has them) and their results by name,
    tables `value`.
    """
    topologies = [topology] if topology is not None else [task.topology for task in tasks.values()]
    builder = next((each.stores[store] for each in topologies if store in each.stores), None)
    if builder is None:
        raise ConfigError(f"no task that runs here has a store {store!r}")
    if builder.schema.kind == "join":
        raise ConfigError(f"store {store!r} holds what a join remembers, which is nothing to be read")
    if not 1 <= query.rows_max <= QUERY_ROWS_MAX:
        raise ConfigError(f"rows_max must be from 1 to {QUERY_ROWS_MAX}, got {query.rows_max}")
    found: list[dict[str, Any]] = []
    position = {partition: dict(task.sources) for partition, task in sorted(tasks.items())}
    for partition, task in sorted(tasks.items()):
        for row in _rows(task, builder, query):
            if len(found) == query.rows_max:
                return StoreAnswer(store, builder.schema.kind, found, position, is_cut=True)
            found.append({"partition": partition, **_plain(row, builder)})
    return StoreAnswer(store, builder.schema.kind, found, position)


def _rows(task: StreamTask, builder: StoreBuilder, query: StoreQuery) -> Iterator[LiveRow]:
    store, schema = task.stores[builder.schema.name], builder.schema
    rows: Iterable[LiveRow] = store.rows() if query.key is None else store.rows_of(_key(query.key, schema.key))
    low, high = (None if bound is None else _key(bound, schema.key) for bound in (query.key_from, query.key_to))
    for row in rows:
        if (low is not None and row.key < low) or (high is not None and row.key > high):
            continue
        if schema.kind != "table":
            last = row.end - 1 if schema.kind in ("tumbling", "hopping") else row.end
            if (query.from_ms is not None and last < query.from_ms) or (
                query.to_ms is not None and row.start > query.to_ms
            ):
                continue
        if not getattr(row, "closed", False):  # a sliding window that is kept for what it holds
            yield row


def _key(key: str, key_type: str) -> str | bytes:
    return key.encode() if key_type == "bytes" else key


def _plain(row: LiveRow, builder: StoreBuilder) -> dict[str, Any]:
    if builder.schema.kind == "table":
        return {"key": row.key, "value": row.states[0]}
    named = zip(builder.schema.aggregations, builder.aggregations, row.states, strict=True)
    results = {schema.name: aggregation.result(state) for schema, aggregation, state in named if schema.name != LATEST}
    return {"key": row.key, "start": row.start, "end": row.end, **results}
