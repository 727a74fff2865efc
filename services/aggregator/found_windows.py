"""A store's windows, open and closed, from the lake and the changelog's tail past it.

If the tail changes or closes a live window of the snapshot, the tail counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import datasketches
import msgspec

from penstock.shared.common.continuation import WindowPlace
from penstock.shared.common.key_range import raw_key
from penstock.shared.common.lake import ClosedWindow
from penstock.shared.streams.aggregations.latest import shown
from penstock.shared.streams.changelog.format import DELETED, FINAL, AggregationSchema, StateCodec, StoreSchema
from penstock.shared.streams.changelog.reader import Change


class Found(NamedTuple):
    """One window. `status` is open or closed; `results` are by name."""

    partition: int
    start_ms: int
    end_ms: int
    status: str
    results: dict[str, Any]
    key: str | bytes = ""


class Told(NamedTuple):
    """A confirmed change of a window in the tail. Its state is by the names of the columns that it was written with."""

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: dict[str, Any]


def told(change: Change) -> Told:
    """Return a change with its decoded state. Raises CorruptRecord if the state cannot be decoded."""
    state = {} if change.operation == DELETED else _codec(change.written_as)(change.state)
    return Told(change.operation, change.store, change.key, change.start, change.end, state)


@lru_cache
def _codec(written: StoreSchema) -> Callable[[bytes], dict[str, Any]]:
    columns = written.state_columns()
    codec, names = StateCodec(columns), [column.name for column in columns]
    return lambda state: dict(zip(names, codec.unpack(state), strict=True))


def merge(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Sequence[Told],
    reach: tuple[int, int],
) -> list[Found]:
    """Return a partition's open windows, and those that were closed past the snapshot.

    `live` are the key's windows in the snapshot; `changes` are the key's changes in the tail, in log order.
    """
    open_ = {row["start_ms"]: (row["end_ms"], row["state"]) for row in live if row["partition"] == partition}
    found = []
    for change in changes:
        if change.operation == DELETED:
            open_.pop(change.start, None)
            continue
        if change.operation == FINAL:
            open_.pop(change.start, None)
            found.append(Found(partition, change.start, change.end, "closed", results(store, change.state)))
        else:
            open_[change.start] = (change.end, change.state)
    closed = {(one.start_ms, one.end_ms) for one in found}  # a closed sliding window is kept for a while
    found += [
        Found(partition, start, end, "open", results(store, state))
        for start, (end, state) in open_.items()
        if (start, end) not in closed
    ]
    return [one for one in found if one.end_ms >= reach[0] and one.start_ms <= reach[1]]


def merged(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Iterable[Told],
    reach: tuple[int, int],
) -> list[Found]:
    """Like `merge`, for the store's windows of many keys, each with its key."""
    lives, told_of = defaultdict[bytes, list[dict[str, Any]]](list), defaultdict[bytes, list[Told]](list)
    for row in live:
        lives[row["key"]].append(row)
    for change in changes:
        if change.store == store.name:
            told_of[change.key].append(change)
    found = []
    for raw in {**lives, **told_of}:
        key: str | bytes = raw.decode() if store.key == "string" else raw
        own = merge(partition, store, lives.get(raw, ()), told_of.get(raw, ()), reach)
        found += [one._replace(key=key) for one in own]
    return found


def results(store: StoreSchema, state: dict[str, Any]) -> dict[str, Any]:
    """Return the named results of a state by column name. An aggregation without columns in the state is None."""
    return {a.name: _result(a, {name: state.get(f"{a.name}_{name}") for name, _ in a.state}) for a in shown(store)}


def _result(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
    if None in state.values():
        return None
    match aggregation.function:
        case "count":
            return state["n"]
        case "sum" | "min" | "max" as function:
            return state[function] if state["n"] else None
        case "mean":
            return state["sum"] / state["n"] if state["n"] else None
        case "first" | "last" if aggregation.result != "json":
            return state["value"] if state["at_ms"] >= 0 else None
        case "count_distinct":
            return round(datasketches.hll_sketch.deserialize(state["hll"]).get_estimate())
    text = state.get("json")
    return msgspec.json.decode(text) if text else None


def place_of(one: Found) -> WindowPlace:
    """Return the window's position in the order of all windows."""
    return WindowPlace(one.start_ms, one.end_ms, one.partition, raw_key(one.key))


def closed_of_lake(store: StoreSchema, row: ClosedWindow) -> Found:
    """Return a row of the table `closed` as a window."""
    values = {a.name: row.results.get(a.name) for a in shown(store)}
    for a in shown(store):
        text = values[a.name]
        if a.result == "json" and isinstance(text, str):
            values[a.name] = msgspec.json.decode(text)
    return Found(row.partition, row.start_ms, row.end_ms, "closed", values, row.key)
