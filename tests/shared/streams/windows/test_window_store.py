"""The store of windows: the changes of a commit, rejected records, rows and keys that are used again, and outputs with
as little room as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.shared.common.errors import DataError
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.row_positions import key_hash
from penstock.shared.streams.aggregations.aggregation import (
    Aggregate,
    Aggregation,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Sum,
)
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows import window_table
from penstock.shared.streams.windows.key_index import SLOTS_MIN, KeyIndex
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowKind, WindowRule
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.streams.windows.window_table import OUTPUTS_MIN, ROWS_MIN, WindowTable
from tests.property_tests import examples


class Whole(msgspec.Struct):
    """A value with an integer."""

    n: int


RULES: dict[WindowKind, WindowRule] = {
    "session": WindowRule("session", 10, 5),
    "tumbling": WindowRule("tumbling", 10, 5, 10),
    "hopping": WindowRule("hopping", 10, 5, 4),
    "sliding": WindowRule("sliding", 10, 5),
}
kinds = st.sampled_from(sorted(RULES))
FUNCTIONS: list[Aggregation[Any]] = [Latest(), Count(), Sum("n").bind(dict), Max("n").bind(dict)]


def store_of(kind: WindowKind, *more: Aggregation[Any]) -> WindowStore:
    return WindowStore("s", RULES[kind], StateColumns([*FUNCTIONS, *more]), text_keys=True)


@pytest.mark.parametrize("kind", ["session", "tumbling"])
def test_a_restore_forgets_the_keys_of_closed_windows(kind: WindowKind) -> None:
    """A restore and a standby do not commit, and still keep few keys without a window."""
    store = WindowStore("s", RULES[kind], StateColumns([Count()]), text_keys=True)
    for batch in range(3 * window_table.IDLE_KEYS_MIN // 100):
        keys = PackedBytes.of([b"%d-%d" % (batch, i) for i in range(100) for _ in range(2)])
        starts = np.full(200, batch, np.int64)
        is_live = np.tile([True, False], 100)
        is_live[-1] = True  # the last key keeps its window
        store.replay(keys, starts, starts, is_live, lambda indexes: [np.ones(len(indexes), np.int64)])
    assert (len(store), len(store.index) <= window_table.IDLE_KEYS_MIN + 100) == (batch + 1, True)
    assert [window.key for window in store.rows()] == [f"{one}-99" for one in range(batch + 1)]


def test_a_change_is_of_the_window_with_its_start() -> None:
    """A restore replaces or removes the window that a change names, and no other."""
    store = WindowStore("s", RULES["tumbling"], StateColumns([Count()]), text_keys=True)
    for start, count in ((0, 1), (10, 2), (10, 3)):
        store.load("a", start, start + 9, [count])
    store.unload("a", 5)
    assert [(row.start, row.states) for row in store.rows()] == [(0, [1]), (10, [3])]
    store.unload("a", 0)
    assert [row.start for row in store.rows()] == [10]


@pytest.mark.parametrize("removed", [(0, 10, 30), (10, 0, 30)])
def test_a_removed_window_leaves_the_others_of_its_key_and_of_other_keys(removed: Sequence[int]) -> None:
    """Whichever window of each key is removed first."""
    store = WindowStore("s", RULES["tumbling"], StateColumns([Count()]), text_keys=True)
    # All rows of the table are used.
    keys = [f"{i}" for i in range(ROWS_MIN // 4)]
    for start in (0, 10, 20, 30):
        for key in keys:
            store.load(key, start, start + 9, [1])
    for start in removed:
        for key in keys:
            store.unload(key, start)
    assert [[row.start for row in store.rows_of(key)] for key in keys] == [[20]] * len(keys)


def take(store: WindowStore, records: Sequence[tuple[str, int]], **how: Any) -> Any:
    """Adds (key, timestamp) records whose value is their timestamp."""
    times = np.array([at for _, at in records], np.int64)
    values, got = store.columns.take([{"n": at} for _, at in records], times)
    codes = store.index.codes_of([key.encode() for key, _ in records])
    return (
        store.take_one(times, codes, values, got, lambda states: None, **how)
        if how.pop("one", 0)
        else store.take(times, codes, values, got, **how)
    )


def live(store: WindowStore) -> list[Any]:
    return sorted(tuple(row) for row in store.rows())


def written(store: WindowStore) -> tuple[list[Any], list[Any], list[Any]]:
    """Commits and returns the closed, deleted and live windows of the commit, by key and start."""
    finals, gone, changed = store.finals(), store.deleted(), store.live()
    found = [
        sorted(zip(keys, starts, strict=True))
        for keys, starts in ((finals.keys, finals.starts.tolist()), gone, (changed.keys, changed.starts.tolist()))
    ]
    store.committed()
    return found[0], found[1], found[2]


records = st.lists(
    st.lists(st.tuples(st.sampled_from("aab"), st.integers(0, 60)), min_size=1, max_size=12), min_size=1, max_size=6
)


@given(kinds, records)
def test_the_changelog_holds_what_the_store_holds(kind: WindowKind, batches: list[list[tuple[str, int]]]) -> None:
    """Finals and deletions, then live windows of every commit, applied in order, are the store's live windows."""
    store, log = store_of(kind), set[Any]()
    for number, batch in enumerate(batches):
        take(store, [(key, at + number * 10) for key, at in batch])
        finals, gone, changed = written(store)
        log = (log - {*finals, *gone}) | {*changed}
        assert log == {(row.key.encode(), row.start) for row in store.rows()}
    assert len(store) == len(log)


@given(kinds, records, st.integers(0, 5))
def test_a_store_that_was_put_back_goes_on_as_the_first(
    kind: WindowKind, batches: list[list[tuple[str, int]]], at: int
) -> None:
    """Windows and times, loaded into another store, are its complete state."""
    first = store_of(kind, CollectList("n").bind(dict))
    for number, batch in enumerate(batches):
        batch = [(key, time + number * 10) for key, time in batch]
        if number == at:
            second = store_of(kind, CollectList("n").bind(dict))
            for row in list(first.rows())[::-1]:
                second.load(row.key, row.start, row.end, row.states)
            second.begin(first.stream_time_ms, first.close_time_ms)
            first.committed()
            taken = take(first, batch), take(second, batch)
            assert [sorted(one.closed.tuples()) for one in taken[:1]] == [
                sorted(one.closed.tuples()) for one in taken[1:]
            ]
            assert taken[0].late.tolist() == taken[1].late.tolist()
            first = second
        else:
            take(first, batch)
        assert len(live(first)) == len(first)


class Failing:
    """An aggregator that raises for some values after it has changed its argument."""

    def __call__(self, state: list[int], value: Any) -> list[int]:
        state.append(value["n"])
        if value["n"] % 7 == 3:
            raise ValueError("no sevenths")
        return state


@given(kinds, records)
def test_a_rejected_record_leaves_nothing_behind(kind: WindowKind, batches: list[list[tuple[str, int]]]) -> None:
    """Windows, sketches, times and the changes of the commit are those without the record."""
    own = Aggregate(list, Failing(), lambda a, b: a + b)
    stores = [store_of(kind, own, CountDistinct("n").bind(dict)) for _ in range(2)]
    for number, batch in enumerate(batches):
        for key, at in batch:
            at += number * 10
            record = [(key, at)]
            if at % 7 == 3:
                before = written_of(stores[0])
                try:
                    late = take(stores[0], record, one=1).late
                except ValueError:
                    assert written_of(stores[0]) == before
                else:
                    assert len(late), "no window took it, so that nothing could refuse it"
                    take(stores[1], record, one=1)
            else:
                closed = [take(store, record, one=1).closed.keys for store in stores]
                assert closed[0] == closed[1]
        assert written_of(stores[0]) == written_of(stores[1])
        assert written(stores[0]) == written(stores[1])


def written_of(store: WindowStore) -> Any:
    """Everything observable of a store; of a sketch its estimate."""
    rows = [
        (*row[:3], [a.result(x) for a, x in zip(store.columns.aggregations, row[3], strict=True)])
        for row in live(store)
    ]
    finals, gone, changed = store.finals(), store.deleted(), store.live()
    keys = [sorted(zip(part.keys, part.starts.tolist(), strict=True)) for part in (finals, changed)]
    gone_rows = gone[0].tolist(), gone[1].tolist()
    return rows, keys, gone_rows, store.stream_time_ms, store.close_time_ms, len(store)


def test_a_record_that_no_aggregation_takes_was_late_in_the_same_way() -> None:
    """A late record is reported with its time and without windows, and does not advance any time."""
    store = store_of("session")
    taken = take(store, [("a", 50), ("b", 20), ("c", 70)])
    assert taken.late.tolist() == [[1, 35, 50, 0]]
    assert (store.stream_time_ms, store.close_time_ms) == (70, 55)


def test_a_kernel_that_finds_no_room_for_a_late_record_changes_nothing() -> None:
    """Without room for late records, the kernel stops before a record that would only make the window after it."""
    store = store_of("sliding")
    take(store, [("a", 25), ("b", 35)])
    table, times = store.table, np.array([20], np.int64)
    table.meta[k.LATE] = len(table.late)
    values, _ = store.columns.take([{"n": 20}], times)
    before = table.meta.copy(), live(store)
    table.logs_updates = True
    assert table._run_kernel(times, store.index.codes_of([b"a"]), values, 0, True) == k.FULL
    before[0][k.PROCESSED] = 0
    assert (table.meta.tolist(), live(store)) == (before[0].tolist(), before[1])
    table.clear()
    assert take(store, [("a", 20)]).late.tolist() == [[0, 30, 35, 0]]
    assert [row.start for row in store.rows_of("a")] == [15, 21]


def test_a_sum_that_leaves_64_bits_is_rejected_with_all_its_windows() -> None:
    """If a sum would overflow in any window of a record, the record changes none of its windows."""
    store = WindowStore("s", WindowRule("hopping", 10, 100, 5), StateColumns([Sum("n").bind(_Value)]), text_keys=False)
    big = 2**62
    for at, n, done in ((12, big, 1), (7, big - 1, 1), (3, 5, 1), (8, 5, 0)):
        values, got = store.columns.take([_Value(n)], np.array([at]))
        taken = store.take(np.array([at]), store.index.codes_of([b"k"]), values, got)
        assert (taken.count, taken.rejected_by) == (done, None if done else 0)
    assert [(row.start, row.states[0][0]) for row in store.rows_of(b"k")] == [(0, big + 4), (5, 2**63 - 1), (10, big)]


class _Value:
    n: int

    def __init__(self, n: int) -> None:
        self.n = n


def test_came_and_went_leaves_nothing() -> None:
    """A session that was merged away within a commit writes no deletion. One that the last commit wrote does."""
    store = store_of("session")
    take(store, [("a", 0), ("a", 14), ("a", 7)])
    assert [row.states[:2] for row in store.rows()] == [[14, 3]]
    assert written(store) == ([], [], [(b"a", 0)])
    take(store, [("a", 28)])
    assert written(store) == ([], [], [(b"a", 28)])
    take(store, [("a", 21)])
    assert written(store) == ([], [(b"a", 28)], [(b"a", 0)])


@pytest.mark.parametrize("count", [window_table.ROWS_MIN + more for more in (-1, 0, 1)])
def test_the_windows_of_a_key_are_in_order_of_start(count: int) -> None:
    """They may be just as many as are read at once."""
    store = WindowStore("s", RULES["tumbling"], StateColumns([Count()]), text_keys=True)
    for start in range(0, 10 * count, 10):
        store.load("a", start, start + 9, [1])
    assert [row.start for row in store.rows_of("a")] == list(range(0, 10 * count, 10))


def test_a_retained_window_that_came_and_went_leaves_nothing() -> None:
    """A window that was closed, retained and removed within a commit writes no deletion."""
    store = store_of("sliding")
    take(store, [("a", 20), ("a", 1_000)])
    assert written(store) == ([(b"a", 10)], [], [(b"a", 990)])
    take(store, [("a", 2_000)])
    assert written(store) == ([(b"a", 990)], [(b"a", 990)], [(b"a", 1_990)])


def test_a_start_that_moved_is_deleted_under_the_one_that_was_committed() -> None:
    """If a session's start moves, its changelog entry under the committed start is deleted, also if the session closes
    in the same commit."""
    store = store_of("session")
    take(store, [("a", 20)])
    written(store)
    take(store, [("a", 12), ("a", 9)])
    assert written(store) == ([], [(b"a", 20)], [(b"a", 9)])
    take(store, [("a", 5), ("b", 99)])
    assert written(store) == ([(b"a", 5)], [(b"a", 9)], [(b"b", 99)])


def test_rows_outputs_and_keys_grow_as_needed() -> None:
    """Thousands of windows opened, updated and closed by one batch."""
    store = store_of("session", CountDistinct("n").bind(dict))
    taken = take(store, [(f"k{i}", i % 9) for i in range(5_000)] + [("z", 1_000), ("z", 2_000)], updates=True)
    assert (len(taken.closed), len(taken.updates), len(store)) == (5_001, 5_002, 1)
    assert taken.closed_by.tolist() == [5_000] * 5_000 + [5_001]
    order = list(zip(taken.closed.ends.tolist(), taken.closed.starts.tolist(), taken.closed.keys, strict=True))
    assert order == sorted(order)
    store.committed()
    take(store, [("y", 2_001)])
    store.committed()
    assert len(store.index) == 2


@pytest.mark.parametrize("error", [DataError("x"), KeyError("y")])
def test_an_error_of_a_check_undoes_the_record(error: Exception) -> None:
    """If the check of the new state raises, the record is undone."""
    store = store_of("tumbling", CollectList("n").bind(dict))

    def check(states: list[Any]) -> None:
        assert states[-1] == ((5,), 1)
        raise error

    values, got = store.columns.take([{"n": 5}], np.array([5]))
    with pytest.raises(type(error)):
        store.take_one(np.array([5]), store.index.codes_of([b"k"]), values, got, check)
    assert (live(store), store.stream_time_ms, store.close_time_ms) == ([], -1, None)


def test_the_wheel_finds_what_is_far_ahead() -> None:
    """Windows that end further ahead than the wheel is wide, and times that leap over it."""
    table = WindowTable(WindowRule("tumbling", 10, 0, 10), [(k.COUNT, 0, -1)], 1)
    store = WindowStore("s", table.rule, StateColumns([Count()]), text_keys=True)
    times = [5, 100_000, 50, 10**12, 10**12 + 7, 3 * 10**12]
    values, got = store.columns.take([None] * len(times), np.array(times))
    taken = store.take(np.array(times), store.index.codes_of([b"k"] * len(times)), values, got)
    assert taken.closed.starts.tolist() == [0, 100_000, 10**12]
    assert taken.late[:, 0].tolist() == [2]


@pytest.mark.parametrize("numbers", [[1.0, math.nan, 2.0], [math.nan, 2.0], [2.0, 1.0, math.nan], [1.0, 2.0, 1.0]])
def test_nan_is_the_greatest_number_of_a_window(numbers: list[float]) -> None:
    """A window has the results that the functions have without a kernel."""
    functions: list[Aggregation[Any]] = [Min("n").bind(dict), Max("n").bind(dict)]
    store = WindowStore("s", RULES["tumbling"], StateColumns(functions), text_keys=True)
    times = np.zeros(len(numbers), np.int64)
    for order in (numbers, numbers[::-1]):
        values, got = store.columns.take([{"n": number} for number in order], times)
        store.take(times, store.index.codes_of([str(order).encode()] * len(order)), values, got)
        (row,) = store.rows_of(str(order))
        for function, state in zip(functions, row.states, strict=True):
            expected = function.initial()
            for number in order:
                expected = function.add(expected, {"n": number})
            assert repr(function.result(state)) == repr(function.result(expected))


@pytest.mark.parametrize("target", [499, 1_023, 1_273, 2_047, 2_300])
def test_time_that_leaps_over_many_windows_closes_them_all(target: int) -> None:
    """Each has a bucket of its own, and the time is then in another bucket."""
    rule = WindowRule("tumbling", 10, 5_110, 10)
    assert rule.bucket_ms == 10
    store = WindowStore("s", rule, StateColumns(FUNCTIONS), text_keys=True)
    starts = list(range(0, 5_000, 10))
    take(store, [("a", start) for start in starts])
    assert store.advance(10 * target + 9 + rule.grace_ms).closed.starts.tolist() == [
        start for start in starts if start < 10 * target
    ]
    assert store.advance(10**6).closed.starts.tolist() == ([4_990] if target == 499 else [])


def test_rows_that_were_evicted_are_used_again() -> None:
    """Any number of windows may be loaded from disk and evicted while time stands still, in buckets and on the heap."""
    store = store_of("session", CollectList("n").bind(dict))
    take(store, [("early", 0), ("first", 1_000)])
    store.load("kept", 985, 985, [985, 1, (1, 1), (1, 1), ((1,), 1)])
    for number in range(60):
        for key in range(100):
            start = 10_000 if key % 2 else 985
            store.load(f"{number}-{key}", start, start, [start, 1, (1, 1), (1, 1), ((1,), 1)])
        for key in range(100):
            assert store.evict(f"{number}-{key}") == 1
    assert len(store.table.links) < 4_000
    taken = take(store, [("last", 50_000)])
    assert taken.closed.keys == [b"kept", b"first"]
    assert len(store) == 1


ENDINGS = ["", "a", "same-beginning-", "same-beginning-and-more-", "\x00", "é"]
"""Endings of keys that differ after more than 8 bytes, are empty, or are prefixes of another."""


def test_keys_close_in_order_however_alike_their_beginnings_are() -> None:
    """The bytes behind a beginning that all keys but one share do not decide before it does."""
    keys = ["ab10", *(f"aa{i}" for i in range(20, 50))]
    store = WindowStore("s", WindowRule("tumbling", 10, 100, 10), StateColumns([Count()]), text_keys=True)
    take(store, [*((key, 0) for key in keys), *((key, 10) for key in reversed(keys))])
    for end in (10, 20):
        assert store.advance(end + 100).closed.keys.tolist() == [key.encode() for key in sorted(keys)]


@pytest.mark.parametrize("count", [2, 9, 257, 3_000])
def test_many_windows_close_in_order_of_end_start_and_key(count: int) -> None:
    """However many are due at once, and however far into them their keys are the same."""
    random = np.random.default_rng(count)
    numbers, ends = random.integers(0, count, (2, count)).tolist()
    records = [(f"key-{ENDINGS[n % len(ENDINGS)]}{n}", e % 30) for n, e in zip(numbers, ends, strict=True)]
    store = WindowStore("s", WindowRule("session", 1, 40), StateColumns(FUNCTIONS), text_keys=True)
    take(store, records)
    live = list(store.rows())
    closed = store.advance(1_000).closed
    order = sorted((row.end, row.start, row.key.encode()) for row in live)
    assert list(zip(closed.ends.tolist(), closed.starts.tolist(), closed.keys.tolist(), strict=True)) == order
    assert len(order) > count // 3
    assert len(store) == 0


class _DecodedKeys(WindowStore):
    """A store that counts the windows that it turns into objects, by their keys."""

    decoded = 0

    def key_of(self, raw: bytes) -> str | bytes:
        self.decoded += 1
        return super().key_of(raw)


def test_a_reader_of_one_window_does_not_wait_for_all() -> None:
    """`rows` turns few more windows into objects than were read."""
    store = _DecodedKeys("s", RULES["session"], StateColumns(FUNCTIONS), text_keys=True)
    take(store, [(f"k{i}", 0) for i in range(500)])
    store.decoded = 0
    assert next(store.rows()).start == 0
    assert store.decoded <= 100


def test_one_record_may_need_more_than_the_whole_of_an_output() -> None:
    """A record in more windows than an output has room for at first: the output grows until it has."""
    windows = 3 * OUTPUTS_MIN
    store = WindowStore("s", WindowRule("hopping", windows, 0, 1), StateColumns(FUNCTIONS), text_keys=True)
    taken = take(store, [("a", 2 * windows)], updates=True)
    assert taken.updates.starts.tolist() == list(range(windows + 1, 2 * windows + 1))
    assert len(store) == windows


def test_records_that_are_rejected_leave_no_rows() -> None:
    """The rows of records that a user's aggregation rejects are used again, for any number of records."""
    store = store_of("session", Aggregate(list, lambda a, b: a, lambda a, b: a, list))

    def fail(states: list[Any]) -> None:
        raise ValueError

    for number in range(3_000):
        times = np.array([number % 7], np.int64)
        values, got = store.columns.take([{"n": 1}], times)
        with pytest.raises(ValueError):
            store.take_one(times, store.index.codes_of([b"k%d" % (number % 5)]), values, got, fail)
    assert len(store) == 0
    assert len(store.table.flags) < 1_500


def test_means_of_large_integers_are_divided_exactly() -> None:
    """The division is that of `Mean.result`, whose results joins and queries get."""
    mean = Mean("n").bind(Whole)
    columns = StateColumns([mean])
    sums = np.array([2**53 + 1, -(2**62) - 3, 7, 0], np.int64)
    counts = np.array([3, 7, 2, 0], np.int64)
    expected = [mean.result((total, n)) for total, n in zip(sums.tolist(), counts.tolist(), strict=True)]
    assert columns.results([sums, counts]) == [expected]


def test_a_batchs_updates_name_their_records_and_a_mean_counts_all_numbers() -> None:
    """The last record merges two sessions with a number each, and retracts both."""
    store = WindowStore("s", RULES["session"], StateColumns([Mean("n").bind(Whole)]), text_keys=True)
    times = np.array([0, 14, 7], np.int64)
    values, got = store.columns.take([Whole(4), Whole(6), Whole(11)], times)
    outcome = store.take(times, store.index.codes_of([b"a"] * 3), values, got, updates=True)
    assert outcome.updates_by.tolist() == [0, 1, 2, 2, 2]
    assert outcome.is_retracted.tolist() == [False, False, True, True, False]
    assert [row.states for row in store.rows()] == [[(21, 3)]]


@pytest.mark.parametrize("first", [0, 50], ids=["early", "later"])
def test_a_batchs_updates_have_the_objects_of_one_by_one(first: int) -> None:
    """A record that comes out of order makes the window after it, with the objects of the later records."""
    records = [("a", first + 5), ("a", first + 2), ("a", first + 4), ("a", first + 3)]
    batch, single = (store_of("sliding", CollectList("n").bind(dict)) for _ in range(2))
    at_once = list(take(batch, records, updates=True).updates.tuples())
    one_by_one = [update for one in records for update in take(single, [one], updates=True).updates.tuples()]
    assert at_once == one_by_one
    assert len(at_once) > len(records)


TABLE_RULES: dict[WindowKind, WindowRule] = {
    "session": WindowRule("session", 10, 5),
    "tumbling": WindowRule("tumbling", 10, 5, 10),
    "hopping": WindowRule("hopping", 10, 5, 2),
    "sliding": WindowRule("sliding", 10, 5),
    "table": WindowRule("table"),
}
WINDOWS: list[WindowKind] = ["session", "tumbling", "hopping", "sliding"]


class Number(NamedTuple):
    """A value whose sum is one of integers."""

    n: int


NUMBERS: list[Aggregation[Any]] = [Latest(), Count(), Sum("n").bind(Number), Max("n").bind(Number)]
SUM = 2
BIG = 2**62


def store_of_numbers(kind: WindowKind, *more: Aggregation[Any]) -> WindowStore:
    return WindowStore("s", TABLE_RULES[kind], StateColumns([*NUMBERS, *more]), text_keys=True)


def take_numbers(
    store: WindowStore, records: Sequence[tuple[str, int, int]], *, one: bool = False, updates: bool = False
) -> Any:
    """Process (key, timestamp, number) records, or one that may be rejected."""
    times = np.array([at for _, at, _ in records], np.int64)
    values, got = store.columns.take([Number(n) for _, _, n in records], times)
    codes = store.index.codes_of([key.encode() for key, _, _ in records])
    if one:
        return store.take_one(times, codes, values, got, lambda states: None, updates=updates)
    return store.take(times, codes, values, got, updates=updates)


def rows(store: WindowStore) -> list[Any]:
    return sorted(tuple(row) for row in store.rows())


# --- a record that is taken back ---


def fail_on_odd(state: list[int], value: Number) -> list[int]:
    """An aggregator of the user's own."""
    if value.n % 2:
        raise ValueError("odd")
    return [*state, value.n]


def own() -> Aggregate:
    return Aggregate(list, fail_on_odd, lambda a, b: a + b)


@pytest.mark.parametrize("kind", TABLE_RULES)
def test_a_window_accepted_after_a_rejection_is_written_once(kind: WindowKind) -> None:
    """A new row uses the row of a rejected record. A commit has each window once, however many records were
    rejected."""
    store = store_of_numbers(kind, own())
    for failures in (1, 2, 5):
        for number in range(failures):
            feed_odd(store, "a", 20 + number % 2)
        take_numbers(store, [("a", 20, 2)], one=True)
        live = store.live()
        written = list(zip(live.keys.tolist(), live.starts.tolist(), strict=True))
        assert written == sorted(set(written), key=written.index)
        assert sorted(start for _, start in written) == sorted(row.start for row in store.rows())
        store.committed()
        assert len(store.live()) == 0


def feed_odd(store: WindowStore, key: str, at: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        take_numbers(store, [(key, at, 1)], one=True)


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_row_of_a_closed_window_is_listed_once_despite_rejections(kind: WindowKind) -> None:
    """In one commit a window is closed, a rejected record uses its row for a while, and then another window does."""
    store = store_of_numbers(kind, own())
    take_numbers(store, [("a", 20, 2)], one=True)
    store.advance(1_000)
    feed_odd(store, "a", 1_000)
    store.advance(2_000)
    take_numbers(store, [("a", 2_000, 2), ("b", 2_000, 4)])
    live = store.live()
    written = sorted(zip(live.keys.tolist(), live.starts.tolist(), strict=True))
    assert written == sorted((row.key.encode(), row.start) for row in store.rows())
    store.committed()
    assert len(store.live()) == 0


@pytest.mark.parametrize("kind", WINDOWS)
def test_hundreds_of_rejections_list_no_row_twice(kind: WindowKind) -> None:
    """The list of changes has as many entries as there are rows, so a row is in it once between commits."""
    store = store_of_numbers(kind, own())
    table = store.table
    for number in range(3 * ROWS_MIN):
        now = 1_000 + 200 * number
        take_numbers(store, [(f"k{number % 5}", now, 2)], one=True)
        store.advance(now + 100)
        for n in range(number % 3):
            feed_odd(store, f"k{n}", now + 100)
        listed = table.changed[: table.meta[k.CHANGED]].tolist()
        assert table.meta[k.CHANGED] <= len(table.changed)
        assert len(listed) == len(set(listed))
        assert all(table.flags[row] & k.LISTED for row in listed)


@pytest.mark.parametrize("kind", TABLE_RULES)
@pytest.mark.parametrize("updates", [False, True])
def test_a_sum_that_overflows_beside_a_users_aggregate_moves_nothing(kind: WindowKind, updates: bool) -> None:
    """A kernel rejects the record before it changes anything: no window closes, no time advances, and no row
    changes."""
    store, rule = store_of_numbers(kind, own()), TABLE_RULES[kind]
    take_numbers(store, [("b", 94 if kind == "session" else 96, 2)], one=True)
    take_numbers(store, [("a", 100, BIG)], one=True)
    times, before = (store.stream_time_ms, store.close_time_ms), rows(store)
    at = 100 + (rule.span_ms if kind in ("session", "sliding") else 9)
    taken = take_numbers(store, [("a", at, BIG)], one=True, updates=updates)
    assert (taken.count, taken.rejected_by) == (0, SUM)
    assert (len(taken.closed), len(taken.updates), len(taken.late), taken.missed) == (0, 0, 0, 0)
    assert ((store.stream_time_ms, store.close_time_ms), rows(store)) == (times, before)
    assert len(store.finals()) == 0
    taken = take_numbers(store, [("c", at, 2)], one=True, updates=updates)
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
        taken = take_numbers(store, records, updates=updates)
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
    unused: int,
) -> set[str]:
    """Require outputs that begin with this room, and grow by that, to equal outputs with enough room.

    Rows and due times that are not in use have the number `unused`, which no kernel may read.
    Returns the outputs that had to grow.
    """
    own = [CollectList("n").bind(Number)] if has_objects else []
    guard = Guard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_table, "OUTPUTS_MIN", size)
        patch.setattr(window_table, "grown_array", guard.array)
        tight = store_of_numbers(kind, *own)
        for name, extra in zip(OUTPUTS, more, strict=True):
            assert len(getattr(tight.table, name)) in (size, 0)
            for one in (name, OF_ONE_SIZE.get(name, name)):
                array = getattr(tight.table, one)
                setattr(tight.table, one, guard.array(array, len(array) + extra))
        tight.table.cells[:, k.LINK_CELLS :] = unused
        tight.table._dues[:] = unused
        sizes = {name: len(getattr(tight.table, name)) for name in OUTPUTS}
        of_tight = all_that_comes(tight, plan, updates=updates)
        guard.require_whole()
    assert of_tight == all_that_comes(store_of_numbers(kind, *own), plan, updates=updates)
    return {name for name, given in sizes.items() if len(getattr(tight.table, name)) != given}


extras = st.lists(st.integers(0, 6), min_size=len(OUTPUTS), max_size=len(OUTPUTS))


@pytest.mark.parametrize("kind", TABLE_RULES)
@settings(max_examples=examples(50))
@given(
    plan=batches,
    size=st.integers(1, 4),
    more=extras,
    updates=st.booleans(),
    has_objects=st.booleans(),
    unused=st.sampled_from([0, BIG]),
)
def test_outputs_of_any_size_hold_the_same(
    kind: WindowKind,
    plan: list[list[tuple[str, int, int]]],
    size: int,
    more: list[int],
    updates: bool,
    has_objects: bool,
    unused: int,
) -> None:
    """With hardly any room a kernel stops in time, writes only to its own memory, and continues."""
    require_same(kind, plan, size, more, updates=updates, has_objects=has_objects, unused=unused)


STEPS = [
    *[("a", 3), ("a", 5), ("a", -3), ("b", -2)],
    *[("a", 20), ("b", 0), ("a", 13), ("b", 0)],
    *[("a", -5), ("b", -5), ("a", 0), ("a", 30)],
    ("a", 40),
]
ONE_BY_ONE = [[(key, step, number)] for number, (key, step) in enumerate(STEPS)]
"""Joined sessions that a commit had, closed windows, and in sliding windows a record that makes three of them."""
ROOM_MAX = 30
"""More rows of an output than one record needs."""


@pytest.mark.parametrize("kind", TABLE_RULES)
def test_each_output_may_be_the_one_that_is_full(kind: WindowKind) -> None:
    """A record is not begun if any single output array lacks room for it."""
    for at, name in enumerate(OUTPUTS):
        for room in range(ROOM_MAX):
            more = [60] * len(OUTPUTS)
            more[at] = room
            unused = BIG if room % 2 else 0
            grown = require_same(kind, ONE_BY_ONE, 1, more, updates=True, has_objects=True, unused=unused)
            if name not in grown:
                break  # with more room, nothing differs
        else:
            raise AssertionError(f"{name} grew with room for {ROOM_MAX} rows")


LIMITS: dict[WindowKind, tuple[list[int], int, dict[int, int]]] = {
    "session": ([0, 20], 10, {k.FREE: 1, k.HEAP: 1, k.DELETED: 1, k.STEPS: 3, k.UPDATES: 3}),
    "tumbling": ([], 13, {k.FREE: 1, k.HEAP: 1, k.LATE: 1, k.STEPS: 3, k.UPDATES: 1}),
    "hopping": ([13], 12, {k.FREE: 5, k.HEAP: 5, k.LATE: 1, k.STEPS: 15, k.UPDATES: 5}),
    "sliding": ([25], 20, {k.FREE: 3, k.HEAP: 3, k.LATE: 1, k.STEPS: 10, k.UPDATES: 4}),
    "table": ([], 0, {k.FREE: 1, k.STEPS: 3, k.UPDATES: 1}),
}
"""Of each kind: the records before, a record, and how many rows and how much room of each output it must find."""
ROOMS = {k.LATE: "late", k.DELETED: "deleted", k.UPDATES: "updates", k.STEPS: "steps", k.HEAP: "_heap"}


@pytest.mark.parametrize(("kind", "output"), [(kind, output) for kind in LIMITS for output in LIMITS[kind][2]])
def test_a_kernel_takes_a_record_for_which_there_is_just_enough_room(kind: WindowKind, output: int) -> None:
    """With less room for one of the outputs, it takes nothing of the record."""
    before, at, limits = LIMITS[kind]
    store = store_of_numbers(kind, CollectList("n").bind(Number))
    take_numbers(store, [("a", time, 1) for time in before])
    table, times = store.table, np.array([at], np.int64)
    table.logs_updates = True
    values, _ = store.columns.take([Number(1)], times)
    codes, live = store.index.codes_of([b"a"]), rows(store)
    table._see_keys()
    for missing, result in ((1, k.ROWS if output == k.FREE else k.FULL), (0, k.DONE)):
        needed = limits[output] - missing
        table.meta[output] = needed if output == k.FREE else len(getattr(table, ROOMS[output])) - needed
        assert table._run_kernel(times, codes, values, 0, False) == result
        assert (rows(store) == live) == bool(missing)


def test_only_a_record_that_missed_a_window_is_noted() -> None:
    """It is noted as accepted if another window has it."""
    store = store_of("hopping")
    taken = take(store, [("a", 21), ("a", 13), ("a", 14), ("a", 2)])
    assert (taken.late.tolist(), taken.missed) == ([[1, 16, 21, 1], [3, 16, 21, 0]], 2)


names = st.binary(max_size=20) | st.sampled_from([b"a", b"b", b"", b"a\0"])


@given(st.lists(st.tuples(st.lists(names | st.none(), max_size=30), st.sets(names)), max_size=8))
def test_numbers_are_kept_until_their_keys_go(rounds: list[tuple[list[bytes | None], set[bytes]]]) -> None:
    """A key keeps its number while it exists, no other key has that number, and its bytes are returned unchanged."""
    index, known = KeyIndex(), dict[bytes, int]()
    for keys, gone in rounds:
        codes = index.codes_of(keys).tolist()
        for key, code in zip(keys, codes, strict=True):
            assert code == -1 if key is None else known.setdefault(key, code) == code
        assert len(set(known.values())) == len(known) == len(index)
        assert index.keys(np.array(list(known.values()), np.int32)) == list(known)
        is_used = np.zeros(index.capacity, np.bool_)
        is_used[[code for key, code in known.items() if key not in gone]] = True
        index.release(np.array([known[key] for key in gone if key in known], np.int64), is_used)
        known = {key: code for key, code in known.items() if key not in gone}
        assert [index.code(key) for key in gone] == [-1] * len(gone)
        assert [index.code(key) for key in known] == list(known.values())
        for key, code in known.items():
            hash_ = key_hash(key)
            assert code in index.codes_between(hash_, hash_)
            assert code not in index.codes_between(0, hash_ - 1) if hash_ else True


def test_room_is_used_again() -> None:
    """The size of the index depends on the keys in use, not on all keys seen."""
    index = KeyIndex()
    for number in range(200):
        keys: list[bytes | None] = [b"key-%d-%d" % (number, i) for i in range(SLOTS_MIN)]
        codes = index.codes_of(keys)
        index.release(codes, np.zeros(index.capacity, np.bool_))
    assert len(index) == 0
    assert index.capacity < 2 * SLOTS_MIN
    assert len(index.arena) < 50_000
