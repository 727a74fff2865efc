"""The store of windows: the changes of a commit, rejected records, and rows that are evicted and used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.streams.aggregations.aggregation import (
    Aggregate,
    Aggregation,
    Count,
    CountDistinct,
    Max,
    Mean,
    Sum,
)
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowKind, WindowRule
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.streams.windows.window_table import OUTPUTS_MIN, WindowTable


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
def test_a_refused_record_leaves_nothing_behind(kind: WindowKind, batches: list[list[tuple[str, int]]]) -> None:
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


def test_a_sum_that_leaves_64_bits_is_refused_with_all_its_windows() -> None:
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
    assert written(store) == ([], [], [(b"a", 0)])
    take(store, [("a", 28)])
    assert written(store) == ([], [], [(b"a", 28)])
    take(store, [("a", 21)])
    assert written(store) == ([], [(b"a", 28)], [(b"a", 0)])


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
def test_what_a_check_raises_takes_the_record_back(error: Exception) -> None:
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
    values, got = store.columns.take(None, np.array(times))
    taken = store.take(np.array(times), store.index.codes_of([b"k"] * len(times)), values, got)
    assert taken.closed.starts.tolist() == [0, 100_000, 10**12]
    assert taken.late[:, 0].tolist() == [2]


def test_rows_that_were_evicted_are_used_again() -> None:
    """Any number of windows may be loaded from disk and evicted while time stands still, in buckets and on the heap."""
    store = store_of("session", CollectList("n").bind(dict))
    take(store, [("early", 0), ("first", 1_000)])
    for number in range(60):
        for key in range(100):
            start = 10_000 if key % 2 else 990
            store.load(f"{number}-{key}", start, start, [start, 1, (1, 1), (1, 1), ((1,), 1)])
        for key in range(100):
            assert store.evict(f"{number}-{key}") == 1
    assert len(store.table.links) < 4_000
    taken = take(store, [("last", 50_000)])
    assert taken.closed.keys == [b"first"]
    assert len(store) == 1


ENDINGS = ["", "a", "same-beginning-", "same-beginning-and-more-", "\x00", "é"]
"""Endings of keys that differ after more than 8 bytes, are empty, or are prefixes of another."""


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


def test_one_record_may_need_more_than_the_whole_of_an_output() -> None:
    """A record in more windows than an output has room for at first: the output grows until it has."""
    windows = 3 * OUTPUTS_MIN
    store = WindowStore("s", WindowRule("hopping", windows, 0, 1), StateColumns(FUNCTIONS), text_keys=True)
    taken = take(store, [("a", 2 * windows)], updates=True)
    assert taken.updates.starts.tolist() == list(range(windows + 1, 2 * windows + 1))
    assert len(store) == windows


def test_records_that_are_refused_leave_no_rows() -> None:
    """The rows of records that a user's aggregation rejects are used again, for any number of records."""
    store = store_of("session", Aggregate(list, lambda a, b: a, lambda a, b: a, list))

    def fail(states: list[Any]) -> None:
        raise ValueError

    for number in range(6_000):
        times = np.array([number % 7], np.int64)
        values, got = store.columns.take([{"n": 1}], times)
        with pytest.raises(ValueError):
            store.take_one(times, store.index.codes_of([b"k%d" % (number % 5)]), values, got, fail)
    assert len(store) == 0
    assert len(store.table.flags) < 3_000


def test_means_of_large_integers_are_divided_exactly() -> None:
    """The division is that of `Mean.result`, whose results joins and queries get."""
    mean = Mean("n").bind(Whole)
    columns = StateColumns([mean])
    sums = np.array([2**53 + 1, -(2**62) - 3, 7, 0], np.int64)
    counts = np.array([3, 7, 2, 0], np.int64)
    expected = [mean.result((total, n)) for total, n in zip(sums.tolist(), counts.tolist(), strict=True)]
    assert columns.results([sums, counts]) == [expected]
