"""First, Last and the collections: the values that they keep, their order and their limit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

Moment = tuple[int, Any]


def fold(aggregation: Aggregation[Any], *moments: Moment) -> Any:
    """Return the state after the field `x` had these values at these times."""
    state = aggregation.initial()
    for at, value in moments:
        state = aggregation.add_at(state, {"x": value}, at)
    return state


def result(aggregation: Aggregation[Any], *moments: Moment) -> Any:
    return aggregation.result(fold(aggregation, *moments))


def test_first_and_last_go_by_event_time() -> None:
    """First and Last compare timestamps. The order of arrival decides only between equal timestamps. None is not a
    value."""
    moments = [(5, None), (20, "b"), (10, "a"), (10, "c"), (20, "d"), (30, None)]
    assert (result(First("x"), *moments), result(Last("x"), *moments)) == ("a", "d")
    assert (result(First("x")), result(Last("x"), (1, None))) == (None, None)


def test_without_timestamps_all_is_one_moment() -> None:
    """`add` keeps the first or the last value in the order of arrival."""
    first, last = First("x"), Last("x")
    assert first.result(first.add(first.add(first.initial(), {"x": 1}), {"x": 2})) == 1
    assert last.result(last.add(last.add(last.initial(), {"x": 1}), {"x": 2})) == 2


def test_a_list_keeps_the_order_and_the_limit() -> None:
    """Values stay in the order of arrival. Values beyond the limit are counted and left out."""
    state = fold(CollectList("x", limit=3), (0, 3), (1, None), (2, 1), (3, 3), (4, 9))
    assert (CollectList("x").result(state), state[1]) == ([3, 1, 3], 4)


def test_a_set_keeps_each_value_once() -> None:
    """Values are compared by their JSON, so 1 and true are two values, and equal objects are one."""
    state = fold(
        CollectSet("x", limit=4), *((0, v) for v in (1, True, {"a": 1, "b": 2}, 1, {"b": 2, "a": 1}, "s", "t"))
    )
    assert (CollectSet("x").result(state), state[1]) == ([1, True, {"a": 1, "b": 2}, "s"], 7)


@pytest.mark.parametrize("make", [CollectList, CollectSet])
def test_a_limit_below_one_is_refused(make: Any) -> None:
    """A collection without room for a value is invalid."""
    with pytest.raises(ConfigError, match="limit must"):
        make("x", 0)


def test_what_has_no_json_is_refused() -> None:
    """A value without JSON becomes a dead letter before it is added to a window."""
    with pytest.raises(DataError, match="has no JSON"):
        fold(CollectSet("x"), (0, object()))
    with pytest.raises(DataError, match="no field 'x'"):
        First("x").add_at((-1, None), {}, 0)


values = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5) | st.text(max_size=2)), max_size=15)
EACH = [First("x"), Last("x"), CollectList("x", 4), CollectSet("x", 3)]


@pytest.mark.parametrize("aggregation", EACH)
@given(values, st.integers(0, 15))
def test_merged_equals_sequential(aggregation: Aggregation[Any], moments: list[Moment], cut: int) -> None:
    """Two merged parts equal the whole, also after each was converted to columns. The empty state is neutral."""
    a, b, whole = fold(aggregation, *moments[:cut]), fold(aggregation, *moments[cut:]), fold(aggregation, *moments)
    kept = aggregation.merge(*(aggregation.from_columns(aggregation.to_columns(s)) for s in (a, b)))
    assert aggregation.merge(a, b) == whole == kept
    assert aggregation.merge(whole, aggregation.initial()) == whole == aggregation.merge(aggregation.initial(), whole)


@given(st.permutations([(i, f"v{i}") for i in range(6)]))
def test_first_and_last_do_not_depend_on_arrival(moments: list[Moment]) -> None:
    """The result is the same in any order of records with different times."""
    assert (result(First("x"), *moments), result(Last("x"), *moments)) == ("v0", "v5")


def test_in_a_session() -> None:
    """Sessions that merge keep the first and last of both, and the earlier one's list before the later one's."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 100)
    table = windows.aggregate("s", a=First("x"), z=Last("x"), all=CollectList("x"), each=CollectSet("x"))
    table.on_update().to("out")
    driver = TopologyTestDriver(builder.build())
    for at, x in ((40, 4), (20, 2), (21, 2), (30, 3)):
        driver.pipe("in", key=b"k", value=b'{"x":%d}' % x, timestamp=at)
        driver.crash()
        driver.restore()
    got = msgspec.json.decode(driver.read("out")[-1].value or b"")
    assert {n: got[n] for n in ("a", "z", "all", "each")} == {"a": 2, "z": 4, "all": [2, 2, 4, 3], "each": [2, 4, 3]}
