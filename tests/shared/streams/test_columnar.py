"""Aggregations in bulk: what one by one makes of the same values."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Aggregate, Count, Max, Mean, Min, Sum
from penstock.shared.streams.columnar import StateColumns, Unfit
from penstock.shared.streams.latest import Latest


class Value(msgspec.Struct):
    """Numbers of both types, one of which may be missing."""

    n: int
    ms: float | None


KINDS = [Count(), *(kind(field).bind(Value) for kind in (Sum, Mean, Min, Max) for field in ("n", "ms"))]
numbers = st.integers(-(2**40), 2**40)
halves = st.one_of(st.none(), st.integers(-1000, 1000).map(lambda n: n / 2))


@given(st.lists(st.tuples(numbers, halves), min_size=1, max_size=20), st.data())
def test_runs_equal_one_by_one(pairs: list[tuple[int, float | None]], data: st.DataObject) -> None:
    """Each run's states and results are those of its values added one by one, merged with what a store has or not."""
    values = [Value(n, ms) for n, ms in pairs]
    first = sorted({0, *data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5))})
    columns = StateColumns.of(KINDS)
    assert columns is not None
    stored = columns.closed(
        columns.reduce(columns.take(values, np.arange(len(values))), np.array(first), np.arange(len(values)))
    )
    are_stored = np.ones(len(first), np.bool_)
    again = columns.closed(columns.merge(columns.opened(list(stored)), np.array([0]), are_stored))
    parts = [values[a:b] for a, b in zip(first, [*first[1:], len(values)], strict=True)]
    for reduced, runs in ((stored, parts), (again, [values])):
        for run, *own in zip(runs, *(column.tolist() for column in reduced), strict=True):
            assert columns.states(own) == [state_of(a, run) for a in KINDS]
        results = columns.results(reduced)
        assert [list(r) for r in zip(*results, strict=True)] == [
            [a.result(state_of(a, run)) for a in KINDS] for run in runs
        ]


odd_floats = st.sampled_from([None, math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5])


@given(st.lists(odd_floats, min_size=1, max_size=12), st.sets(st.integers(0, 11), max_size=4))
def test_the_least_and_greatest_of_odd_floats(floats: list[float | None], cuts: set[int]) -> None:
    """NaN, the infinities, both zeros and none: the same as one by one, however they fall into runs."""
    values = [Value(0, ms) for ms in floats]
    first = sorted({0, *(cut for cut in cuts if cut < len(values))})
    columns = StateColumns([Min("ms").bind(Value), Max("ms").bind(Value)])
    taken = columns.take(values, np.arange(len(values)))
    stored = columns.closed(columns.reduce(taken, np.array(first), np.arange(len(values))))
    merged = columns.closed(columns.merge(columns.opened(stored), np.array([0]), np.ones(len(first), np.bool_)))
    expected = [state_of(a, values) for a in columns.aggregations]
    assert repr(columns.states([column.tolist()[0] for column in merged])) == repr(
        [(float(number), n) if n else (0.0, 0) for number, n in expected]
    )


@pytest.mark.filterwarnings("error")
def test_a_sum_beyond_all_numbers_is_silent() -> None:
    """It is infinite, and then none, as one by one: nothing is written to the log of it."""
    columns = StateColumns([Sum("ms").bind(Value)])
    taken = columns.take([Value(0, ms) for ms in (1e308, 1e308, math.inf, -math.inf)], np.arange(4))
    assert repr(columns.reduce(taken, np.array([0, 2]), np.arange(4))[0].tolist()) == "[inf, nan]"


def state_of(aggregation: Any, values: list[Value]) -> Any:
    state = aggregation.initial()
    for value in values:
        state = aggregation.add(state, value)
    return state


def test_the_latest_time_is_the_highest_of_a_run() -> None:
    """It is taken of the records' timestamps, whatever their order."""
    columns = StateColumns.of([Latest(), Count()])
    assert columns is not None
    taken = columns.take(None, np.array([5, 9, 7, 3]))
    assert [c.tolist() for c in columns.reduce(taken, np.array([0, 3]), np.arange(4))] == [[9, 3], [3, 1]]
    assert columns.sums == []


def test_what_has_no_columns() -> None:
    """A store with functions of a user's own is none of columns, and neither is one of nothing."""
    other = Aggregate(int, lambda state, value: state, lambda a, b: a)
    for aggregations in ([Count(), other], []):
        assert StateColumns.of(aggregations) is None


@pytest.mark.parametrize("value", ["1", 1.5, None, 2**70, [], True])
def test_what_is_refused_one_by_one_is_unfit(value: Any) -> None:
    """A batch with a value that an aggregation refuses is unfit, and no other."""
    aggregation = Sum("n").bind(Value)
    columns = StateColumns([aggregation])
    given_value = {"n": value}
    by_field = Value(value, None) if not isinstance(value, dict) else given_value
    try:
        expected: Any = aggregation.add(aggregation.initial(), by_field)
    except Exception:
        with pytest.raises(Unfit):
            columns.take([by_field], np.array([0]))
    else:
        assert columns.states([c.tolist()[0] for c in columns.closed(columns.take([by_field], np.array([0])))]) == [
            expected
        ]


def test_magnitudes() -> None:
    """Sums of int64 are what can overflow: their magnitudes are known, those of floats and counts are not asked for."""
    columns = StateColumns([Count(), Sum("n").bind(Value), Sum("ms").bind(Value)])
    taken = columns.take([Value(n, 1e300) for n in (-(2**40), 2**40, -3)], np.arange(3))
    assert columns.magnitude(taken) == 2.0**41 + 3
    codes = np.array([2, 2, 0])
    assert columns.magnitudes(taken, codes, 4).tolist() == [3, 0, 2.0**41, 0]
    assert columns.largest(taken, codes, 4).tolist() == [3, 0, 2.0**40, 0]
