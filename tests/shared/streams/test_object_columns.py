"""Columns of objects: what one by one makes of the same values, and what they do not share."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Aggregate, Aggregation, Count, CountDistinct, Max, Sum
from penstock.shared.streams.collecting import CollectList, CollectSet, First, Last
from penstock.shared.streams.columnar import StateColumns, Unfit
from penstock.shared.streams.object_columns import object_columns
from penstock.shared.streams.quantiles import Quantiles


class Value(msgspec.Struct):
    """Fields of the kinds that these aggregations take, any of which may be missing."""

    page: Any = None
    ms: float | None = None
    at: float | None = None


KINDS: list[Aggregation[Any]] = [
    *(kind("page").bind(Value) for kind in (First, Last, CollectList, CollectSet, CountDistinct)),
    *(kind("page", limit=3).bind(Value) for kind in (CollectList, CollectSet)),
    Quantiles("ms", (0.0, 0.5, 1.0)).bind(Value),
    Max("at").bind(Value),
    Count(),
]
pages = st.one_of(st.none(), st.sampled_from(["a", "b", "ü"]), st.integers(0, 3), st.just(True), st.just(1.0))
numbers = st.one_of(st.none(), st.integers(-9, 9))
values = st.builds(Value, pages, st.one_of(numbers, st.just(float("nan"))), numbers)
records = st.lists(st.tuples(st.integers(0, 20), values), min_size=1, max_size=25)


def state_of(aggregation: Aggregation[Any], came: list[tuple[int, Value]]) -> Any:
    state = aggregation.initial()
    for at, value in came:
        state = aggregation.add_at(state, value, at)
    return state


def same(aggregation: Aggregation[Any], one: Any, other: Any) -> bool:
    """Of sketches the results are compared, which are exact for so few values, of all others the states."""
    return bool(aggregation.result(one) == aggregation.result(other)) if aggregation.in_place else bool(one == other)


@given(records, st.data())
def test_runs_equal_one_by_one(come: list[Any], data: st.DataObject) -> None:
    """Runs are what their values are one by one in the order of arrival."""
    columns = StateColumns.of(KINDS)
    assert columns is not None
    times = np.array([at for at, _ in come])
    order = np.argsort(times, kind="stable")
    taken = [column[order] for column in columns.take([value for _, value in come], times)]
    first = np.array(sorted({0, *data.draw(st.lists(st.integers(0, len(come) - 1), max_size=3))}))
    closed = columns.closed(columns.reduce(taken, first, order))
    for places, *cells in zip(np.split(order, first[1:]), *closed, strict=True):
        for aggregation, state in zip(KINDS, columns.states(cells), strict=True):
            assert same(aggregation, state, state_of(aggregation, [come[p] for p in sorted(places.tolist())]))


@given(records, records, st.data())
def test_what_a_store_has_goes_before_what_comes(stored: list[Any], come: list[Any], data: st.DataObject) -> None:
    """A stored window with the runs that it joins is what its records and theirs are one by one."""
    columns = StateColumns.of(KINDS)
    assert columns is not None
    states = columns.values([state_of(a, stored) for a in KINDS])
    had = [np.full(1, None) if t == "object" else np.zeros(1, t) for t in columns.types]
    for column, cell in zip(had, states, strict=True):
        column[0] = cell
    times = np.array([at for at, _ in come])
    order = np.argsort(times, kind="stable")
    taken = [column[order] for column in columns.take([value for _, value in come], times)]
    first = np.array(sorted({0, *data.draw(st.lists(st.integers(0, len(come) - 1), max_size=3))}))
    runs = columns.reduce(taken, first, order)
    place = data.draw(st.integers(0, len(first)))  # of the stored window among the runs, in order of start
    had = columns.opened(had)
    group = [np.concatenate((run[:place], own, run[place:])) for run, own in zip(runs, had, strict=True)]
    merged = columns.closed(columns.merge(group, np.array([0]), np.arange(len(first) + 1) == place))
    for aggregation, state in zip(KINDS, columns.states([c[0] for c in merged]), strict=True):
        assert same(aggregation, state, state_of(aggregation, [*stored, *come]))


@given(st.lists(records, min_size=1, max_size=4))
def test_states_come_back_from_the_changelog(windows: list[list[Any]]) -> None:
    """Columns as the changelog has them are those of `to_columns`, and give the same states again."""
    columns = StateColumns.of(KINDS)
    assert columns is not None
    states = [[state_of(a, came) for a in KINDS] for came in windows]
    cells = [np.full(len(windows), None) if t == "object" else np.zeros(len(windows), t) for t in columns.types]
    for number, own in enumerate(states):
        for column, cell in zip(cells, columns.values(own), strict=True):
            column[number] = cell
    written = columns.to_changelog(cells)
    plain = [c.tolist() if isinstance(c, np.ndarray) else c for c in written]
    for read, own in zip(zip(*plain, strict=True), states, strict=True):
        at = 0
        for aggregation, state in zip(KINDS, own, strict=True):
            row = read[at : at + len(aggregation.state_columns)]
            at += len(row)
            assert same(aggregation, aggregation.from_columns(row), state)
    again = columns.from_changelog(written)
    for number, own in enumerate(states):
        found = columns.states([column[number] for column in again])
        assert all(same(a, one, other) for a, one, other in zip(KINDS, found, own, strict=True))
    results = [list(row) for row in zip(*columns.results(again), strict=True)]
    assert results == [[a.result(s) for a, s in zip(KINDS, own, strict=True)] for own in states]


class Page(enum.StrEnum):
    """Text of a type of its own."""

    HOME = "home"


@pytest.mark.parametrize("kind", [First, Last, CollectList, CollectSet, CountDistinct, Quantiles])
@pytest.mark.parametrize("value", [1, 2**63, 10**400, 1.5, "x", "\ud800", None, Page.HOME, object(), {"a": object()}])
def test_what_is_refused_one_by_one_is_unfit(kind: Any, value: Any) -> None:
    """A batch with a value that an aggregation refuses is unfit, and no other."""
    aggregation = kind("x")
    columns = StateColumns([aggregation])
    batch, times = [{"x": 1}, {"x": value}], np.array([1, 2])
    try:
        expected = state_of(aggregation, [(1, batch[0]), (2, batch[1])])  # type: ignore[list-item]
    except Exception:
        with pytest.raises(Unfit):
            columns.take(batch, times)
    else:
        runs = columns.reduce(columns.take(batch, times), np.array([0]), np.arange(2))
        (state,) = columns.states([c[0] for c in columns.closed(runs)])
        assert same(aggregation, state, expected)
    with pytest.raises(Unfit):
        columns.take([{"x": 1}, {}], times)


def test_many_values_are_counted_within_the_sketches_bounds() -> None:
    """Where sketches estimate, so they do in bulk: distinct values within 7 %, ranks within 2 %."""
    many = np.random.default_rng(7).permutation(20_000)
    records_ = [{"x": f"user-{i}", "ms": float(i)} for i in many.tolist()]
    columns = StateColumns([CountDistinct("x"), Quantiles("ms", (0.1, 0.5, 0.9))])
    runs = columns.reduce(columns.take(records_, many), np.array([0]), np.arange(len(many)))
    (distinct,), (quantiles,) = columns.results(columns.closed(runs))
    assert distinct == pytest.approx(20_000, rel=0.07)
    assert quantiles == pytest.approx([2_000, 10_000, 18_000], abs=400)


def test_a_state_that_changes_in_place_is_nobody_elses() -> None:
    """What one window's sketch takes is in no other window of the batch, and not in what went into it."""
    kind = object_columns(CountDistinct("x"))
    assert kind is not None
    first = np.array([0, 2, 3])
    runs = kind.reduce(kind.take([{"x": i} for i in range(4)], np.arange(4)), first, np.arange(4))
    one, two, three = kind.closed(runs)[0].tolist()
    stored = np.full(3, None)
    stored[:2] = [one, two]
    stored[2] = runs[0][2]
    (merged,) = kind.merge([stored], np.array([0]), np.array([True, True, False]))
    assert [kind.results([np.array([s, None])[:1]]) for s in (one, two, three, merged[0])] == [[2], [1], [1], [4]]


def test_who_has_columns() -> None:
    """A user's own functions have none; a subclass may do otherwise than its parent, so it has none either."""

    class Newest(Last):
        """The last one, by a rule of its own."""

        def _replaces(self, new_ms: int, old_ms: int) -> bool:
            return True

    own = Aggregate(int, lambda state, value: state, lambda a, b: a)
    assert [StateColumns.of([Count(), a]) for a in (own, Newest("x"))] == [None, None]
    in_order = [StateColumns([a]).in_order for a in (Sum("x"), First("x"), Quantiles("x"), CollectSet("x"))]
    assert in_order == [False, False, False, True]
