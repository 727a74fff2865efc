"""The table's rows after rejected records, and outputs with as little room as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.shared.streams.aggregations.aggregation import Aggregate, Aggregation, Count, Max, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows import window_table
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowKind, WindowRule
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.streams.windows.window_table import ROWS_MIN
from tests.property_tests import examples

RULES: dict[WindowKind, WindowRule] = {
    "session": WindowRule("session", 10, 5),
    "tumbling": WindowRule("tumbling", 10, 5, 10),
    "hopping": WindowRule("hopping", 10, 5, 2),
    "sliding": WindowRule("sliding", 10, 5),
    "table": WindowRule("table"),
}
WINDOWS: list[WindowKind] = ["session", "tumbling", "hopping", "sliding"]
kinds = st.sampled_from(sorted(RULES))


class Value(NamedTuple):
    """A value whose sum is one of integers."""

    n: int


NUMBERS: list[Aggregation[Any]] = [Latest(), Count(), Sum("n").bind(Value), Max("n").bind(Value)]
SUM = 2
BIG = 2**62


def store_of(kind: WindowKind, *more: Aggregation[Any]) -> WindowStore:
    return WindowStore("s", RULES[kind], StateColumns([*NUMBERS, *more]), text_keys=True)


def take(
    store: WindowStore, records: Sequence[tuple[str, int, int]], *, one: bool = False, updates: bool = False
) -> Any:
    """Process (key, timestamp, number) records, or one that may be rejected."""
    times = np.array([at for _, at, _ in records], np.int64)
    values, got = store.columns.take([Value(n) for _, _, n in records], times)
    codes = store.index.codes_of([key.encode() for key, _, _ in records])
    if one:
        return store.take_one(times, codes, values, got, lambda states: None, updates=updates)
    return store.take(times, codes, values, got, updates=updates)


def rows(store: WindowStore) -> list[Any]:
    return sorted(tuple(row) for row in store.rows())


# --- a record that is taken back ---


def fail_on_odd(state: list[int], value: Value) -> list[int]:
    """An aggregator of the user's own."""
    if value.n % 2:
        raise ValueError("odd")
    return [*state, value.n]


def own() -> Aggregate:
    return Aggregate(list, fail_on_odd, lambda a, b: a + b)


@pytest.mark.parametrize("kind", RULES)
def test_what_was_refused_is_written_once_when_it_is_taken(kind: WindowKind) -> None:
    """A new row uses the row of a rejected record. A commit has each window once, however many records were
    rejected."""
    store = store_of(kind, own())
    for failures in (1, 2, 5):
        for number in range(failures):
            feed_odd(store, "a", 20 + number % 2)
        take(store, [("a", 20, 2)], one=True)
        live = store.live()
        written = list(zip(live.keys.tolist(), live.starts.tolist(), strict=True))
        assert written == sorted(set(written), key=written.index)
        assert sorted(start for _, start in written) == sorted(row.start for row in store.rows())
        store.committed()
        assert len(store.live()) == 0


def feed_odd(store: WindowStore, key: str, at: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        take(store, [(key, at, 1)], one=True)


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_row_of_a_closed_window_is_listed_once_whoever_is_refused_it(kind: WindowKind) -> None:
    """In one commit a window is closed, a rejected record uses its row for a while, and then another window does."""
    store = store_of(kind, own())
    take(store, [("a", 20, 2)], one=True)
    store.advance(1_000)
    feed_odd(store, "a", 1_000)
    store.advance(2_000)
    take(store, [("a", 2_000, 2), ("b", 2_000, 4)])
    live = store.live()
    written = sorted(zip(live.keys.tolist(), live.starts.tolist(), strict=True))
    assert written == sorted((row.key.encode(), row.start) for row in store.rows())
    store.committed()
    assert len(store.live()) == 0


@pytest.mark.parametrize("kind", WINDOWS)
def test_hundreds_of_refusals_list_no_row_twice(kind: WindowKind) -> None:
    """The list of changes has as many entries as there are rows, so a row is in it once between commits."""
    store = store_of(kind, own())
    table = store.table
    for number in range(3 * ROWS_MIN):
        now = 1_000 + 200 * number
        take(store, [(f"k{number % 5}", now, 2)], one=True)
        store.advance(now + 100)
        for n in range(number % 3):
            feed_odd(store, f"k{n}", now + 100)
        listed = table.changed[: table.meta[k.CHANGED]].tolist()
        assert table.meta[k.CHANGED] <= len(table.changed)
        assert len(listed) == len(set(listed))
        assert all(table.flags[row] & k.LISTED for row in listed)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("updates", [False, True])
def test_a_sum_that_overflows_beside_a_users_aggregate_moves_nothing(kind: WindowKind, updates: bool) -> None:
    """A kernel rejects the record before it changes anything: no window closes, no time advances, and no row
    changes."""
    store, rule = store_of(kind, own()), RULES[kind]
    take(store, [("b", 94 if kind == "session" else 96, 2)], one=True)
    take(store, [("a", 100, BIG)], one=True)
    times, before = (store.stream_time_ms, store.close_time_ms), rows(store)
    at = 100 + (rule.span_ms if kind in ("session", "sliding") else 9)
    taken = take(store, [("a", at, BIG)], one=True, updates=updates)
    assert (taken.count, taken.rejected_by) == (0, SUM)
    assert (len(taken.closed), len(taken.updates), len(taken.late), taken.missed) == (0, 0, 0, 0)
    assert ((store.stream_time_ms, store.close_time_ms), rows(store)) == (times, before)
    assert len(store.finals()) == 0
    taken = take(store, [("c", at, 2)], one=True, updates=updates)
    assert (b"b" in taken.closed.keys.tolist()) == (kind != "table"), "what the record would have closed"


# --- outputs without room to spare ---

OUTPUTS = ("late", "closed", "deleted", "updates", "steps", "_heap", "_pending")
OF_ONE_SIZE = {"_heap": "_dues", "_pending": "_spare"}

steps = st.one_of(st.integers(-12, 25), st.sampled_from([11, -6, 0, 1]))
batches = st.lists(
    st.lists(st.tuples(st.sampled_from("aaabc"), steps, st.integers(-3, 9)), min_size=1, max_size=12),
    min_size=1,
    max_size=6,
)


def all_that_comes(store: WindowStore, plan: list[list[tuple[str, int, int]]], *, updates: bool) -> list[Any]:
    """The accepted, closed, updated and late windows of each batch, in order; then the changes of a commit, every
    fourth batch."""
    seen, now = [], 0
    for number, batch in enumerate(plan):
        records = [(key, max(0, now + step), n) for key, step, n in batch]
        now = max(now, *(at for _, at, _ in records))
        taken = take(store, records, updates=updates)
        seen.append((taken.count, taken.rejected_by, taken.late.tolist(), taken.missed))
        seen.append((list(taken.closed.tuples()), taken.closed_by.tolist()))
        seen.append((list(taken.updates.tuples()), taken.updates_by.tolist(), taken.is_retracted.tolist()))
        seen.append((rows(store), len(store), store.stream_time_ms, store.close_time_ms))
        if number % 4 == 3:
            gone, starts = store.deleted()
            seen.append(sorted(zip(gone.tolist(), starts.tolist(), strict=True)))
            seen.append((sorted(store.finals().tuples()), sorted(store.live().tuples())))
            store.committed()
    closed = store.advance(10_000).closed
    return [*seen, list(closed.tuples()), len(store)]


BEHIND, GUARD = 32, 0x5B
"""So many rows of such bytes lie behind every array of a table: no kernel may have written there."""


class Guard:
    """Adds guard bytes behind a table's arrays and detects writes to them."""

    def __init__(self) -> None:
        self._given: list[tuple[NDArray[Any], int]] = []

    def array(self, array: NDArray[Any], size: int, fill: int = 0) -> NDArray[Any]:
        """Make an array larger, as the table itself does."""
        whole = np.frombuffer(
            bytearray([GUARD]) * ((size + BEHIND) * math.prod(array.shape[1:]) * array.itemsize), array.dtype
        ).reshape(size + BEHIND, *array.shape[1:])
        whole[len(array) : size] = fill
        whole[: len(array)] = array
        self._given.append((whole, size))
        return whole[:size]

    def require_whole(self) -> None:
        """Nothing was written behind an array."""
        for whole, size in self._given:
            assert not whole[size:].tobytes().strip(bytes([GUARD]))


def require_same(
    kind: WindowKind,
    plan: list[list[tuple[str, int, int]]],
    size: int,
    more: list[int],
    *,
    updates: bool,
    has_objects: bool,
) -> None:
    """Require outputs that begin with this room, and grow by that, to equal outputs with enough room."""
    own = [CollectList("n").bind(Value)] if has_objects else []
    guard = Guard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_table, "OUTPUTS_MIN", size)
        patch.setattr(window_table, "grown_array", guard.array)
        tight = store_of(kind, *own)
        for name, extra in zip(OUTPUTS, more, strict=True):
            assert len(getattr(tight.table, name)) in (size, 0)
            for one in (name, OF_ONE_SIZE.get(name, name)):
                array = getattr(tight.table, one)
                setattr(tight.table, one, guard.array(array, len(array) + extra))
        of_tight = all_that_comes(tight, plan, updates=updates)
        guard.require_whole()
    assert of_tight == all_that_comes(store_of(kind, *own), plan, updates=updates)


extras = st.lists(st.integers(0, 6), min_size=len(OUTPUTS), max_size=len(OUTPUTS))


@pytest.mark.parametrize("kind", RULES)
@settings(max_examples=examples(50))
@given(plan=batches, size=st.integers(1, 4), more=extras, updates=st.booleans(), has_objects=st.booleans())
def test_outputs_of_any_size_hold_the_same(
    kind: WindowKind,
    plan: list[list[tuple[str, int, int]]],
    size: int,
    more: list[int],
    updates: bool,
    has_objects: bool,
) -> None:
    """With hardly any room a kernel stops in time, writes only to its own memory, and continues."""
    require_same(kind, plan, size, more, updates=updates, has_objects=has_objects)


STEPS = [
    *[("a", 3), ("a", 5), ("a", -3), ("b", -2)],
    *[("a", 20), ("b", 0), ("a", 13), ("b", 0)],
    *[("a", -5), ("b", -5), ("a", 0), ("a", 30)],
    ("a", 40),
]
ONE_BY_ONE = [[(key, step, number)] for number, (key, step) in enumerate(STEPS)]
"""Joined sessions that a commit had, closed windows, and in sliding windows a record that makes three of them."""
ROOM_MAX = {"steps": 30}
"""The most rows of an output that one record needs, if more than 12."""


@pytest.mark.parametrize("kind", RULES)
def test_each_output_may_be_the_one_that_is_full(kind: WindowKind) -> None:
    """A record is not begun if any single output array lacks room for it."""
    for at, name in enumerate(OUTPUTS):
        for room in range(ROOM_MAX.get(name, 12)):
            more = [60] * len(OUTPUTS)
            more[at] = room
            require_same(kind, ONE_BY_ONE, 1, more, updates=True, has_objects=True)
