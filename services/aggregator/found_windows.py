"""A store's windows, open and closed, from what the lake has and what the changelog says past it.

A live window of the snapshot that the tail changes or closes is the tail's.
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
    """One window: `status` is open or closed, `results` are by name."""

    partition: int
    start_ms: int
    end_ms: int
    status: str
    results: dict[str, Any]
    key: str | bytes = ""


class Told(NamedTuple):
    """A confirmed change of the key, as the tail has it: its state by columns, those it was written with."""

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: dict[str, Any]


def told(change: Change) -> Told:
    """A change with its state decoded as what it was written; CorruptRecord where that cannot be read."""
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
    """A partition's open windows, and those that were closed past the snapshot.

    `live` are the snapshot's windows of the key; `changes` are the key's in the tail, in log order.
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
    closed = {(one.start_ms, one.end_ms) for one in found}  # a sliding window that was closed is kept for a while
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
    """As `merge`, of the store's windows of many keys, each with its key."""
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
    """The named results of a state, by its columns' names; an aggregation that it has no columns for is None."""
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
    """Where it is among all others."""
    return WindowPlace(one.start_ms, one.end_ms, one.partition, raw_key(one.key))


def closed_of_lake(store: StoreSchema, row: ClosedWindow) -> Found:
    """A row of `closed`."""
    values = {a.name: row.results.get(a.name) for a in shown(store)}
    for a in shown(store):
        text = values[a.name]
        if a.result == "json" and isinstance(text, str):
            values[a.name] = msgspec.json.decode(text)
    return Found(row.partition, row.start_ms, row.end_ms, "closed", values, row.key)
