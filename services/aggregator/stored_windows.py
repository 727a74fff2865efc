"""A store's windows, open and closed, from the lake and the changelog's tail past it.

If the tail changes or closes a live window of the snapshot, the tail counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import datasketches
import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake.window_queries import ClosedWindow
from penstock.shared.common.row_positions import WindowPosition
from penstock.shared.streams.changelog.changelog_reader import Change
from penstock.shared.streams.changelog.format import DELETED, FINAL, AggregationSchema, StateCodec, StoreSchema

CHANGES_MAX = 200_000
"""The most windows of one partition's tail for the queried keys and times. They stay in memory until the answer."""


class FoundWindow(NamedTuple):
    """One window. `status` is open or closed; `results` are by name."""

    partition: int
    start_ms: int
    end_ms: int
    status: str
    results: dict[str, Any]
    key: str | bytes = ""


class TailChange(NamedTuple):
    """A confirmed change of a window in the tail. Its state is by the names of the columns that it was written with."""

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: dict[str, Any]


def decode_change(change: Change) -> TailChange:
    """Return a change with its decoded state. Raises CorruptRecord if the state cannot be decoded."""
    state = {} if change.operation == DELETED else _state_decoder(change.written_as)(change.state)
    return TailChange(change.operation, change.store, change.key, change.start, change.end, state)


class TailChanges:
    """The newest change of each window of the keys that touches `reach` (ms, both inclusive), in a changelog's tail.

    A window is kept once, however often it grew. So a busy key costs memory for its windows, not for its records.
    A window's start never changes and its end only grows. So a window that ends before the reach here ends before it in
    the lake as well. A deletion has no end and is kept, since the window that it deletes in the lake may be in reach.
    `store` is the queried store; None if it is not known yet. Iteration is in log order.
    """

    def __init__(self, keys: KeyRange, reach: tuple[int, int], store: str | None = None) -> None:
        self._keys = keys
        self._reach = reach
        self._store = store
        self._changes: dict[tuple[str, bytes, int, int | None], TailChange] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[TailChange]:
        return iter(self._changes.values())

    def keep(self, change: Change) -> None:
        """Add the next change. Raises ConfigError beyond CHANGES_MAX, CorruptRecord if it cannot be decoded."""
        low, high = self._reach
        if change.start > high or self._store not in (None, change.store) or not self._keys.has(change.key):
            return
        at = (change.store, change.key, change.start)
        # Of one start there is one open window, but several can have closed, with different ends.
        self._changes.pop((*at, None), None)
        if change.operation != DELETED and change.end < low:
            return
        if len(self._changes) == CHANGES_MAX:
            raise ConfigError(
                f"a partition's changelog has over {CHANGES_MAX} windows of these keys and times: query fewer keys "
                "or a shorter time"
            )
        self._changes[*at, change.end if change.operation == FINAL else None] = decode_change(change)


@lru_cache
def _state_decoder(written: StoreSchema) -> Callable[[bytes], dict[str, Any]]:
    columns = written.state_columns()
    codec = StateCodec(columns)
    names = [column.name for column in columns]
    return lambda state: dict(zip(names, codec.unpack(state), strict=True))


def merge(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Sequence[TailChange],
    reach: tuple[int, int],
) -> list[FoundWindow]:
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
            found.append(FoundWindow(partition, change.start, change.end, "closed", results(store, change.state)))
        else:
            open_[change.start] = (change.end, change.state)
    closed = {(one.start_ms, one.end_ms) for one in found}  # a closed sliding window is kept for a while
    found += [
        FoundWindow(partition, start, end, "open", results(store, state))
        for start, (end, state) in open_.items()
        if (start, end) not in closed
    ]
    return [one for one in found if one.end_ms >= reach[0] and one.start_ms <= reach[1]]


def merged(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Iterable[TailChange],
    reach: tuple[int, int],
) -> list[FoundWindow]:
    """Like `merge`, for the store's windows of many keys, each with its key."""
    lives = defaultdict[bytes, list[dict[str, Any]]](list)
    changes_of = defaultdict[bytes, list[TailChange]](list)
    for row in live:
        lives[row["key"]].append(row)
    for change in changes:
        if change.store == store.name:
            changes_of[change.key].append(change)
    found = []
    for raw in {**lives, **changes_of}:
        key: str | bytes = raw.decode() if store.key == "string" else raw
        own = merge(partition, store, lives.get(raw, ()), changes_of.get(raw, ()), reach)
        found += [one._replace(key=key) for one in own]
    return found


def results(store: StoreSchema, state: dict[str, Any]) -> dict[str, Any]:
    """Return the named results of a state by column name. An aggregation without columns in the state is None."""
    return {
        a.name: _aggregation_result(a, {name: state.get(f"{a.name}_{name}") for name, _ in a.state})
        for a in store.shown_aggregations()
    }


def _aggregation_result(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
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


def position_of(one: FoundWindow) -> WindowPosition:
    """Return the window's position in the order of all windows."""
    return WindowPosition(one.start_ms, one.end_ms, one.partition, raw_key(one.key))


def closed_of_lake(store: StoreSchema, row: ClosedWindow) -> FoundWindow:
    """Return a row of the table `closed` as a window."""
    values = {a.name: row.results.get(a.name) for a in store.shown_aggregations()}
    for a in store.shown_aggregations():
        text = values[a.name]
        if a.result == "json" and isinstance(text, str):
            values[a.name] = msgspec.json.decode(text)
    return FoundWindow(row.partition, row.start_ms, row.end_ms, "closed", values, row.key)
