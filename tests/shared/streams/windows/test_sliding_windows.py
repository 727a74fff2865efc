"""Sliding windows: the rule case by case, then against their definition."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_rule import Emit, WindowRule
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.streams.windows.numbered_records import Value, Window, pipe, rows


def topology_of(difference: int, grace: int = 0, emit: Emit = "on_close") -> Topology:
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=Value).group_by_key()
    ids = Aggregate(list, lambda ids, value: [*ids, value.id], lambda a, b: a + b)
    table = grouped.sliding_window(difference, grace).aggregate("w", ids=ids, n=Count(), who=CountDistinct("id"))
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return builder.build()


def driver_of(difference: int, grace: int = 0, emit: Emit = "on_close") -> TopologyTestDriver:
    """Windows with the ids of their records, and how many there are."""
    return TopologyTestDriver(topology_of(difference, grace, emit))


def out(driver: TopologyTestDriver) -> list[tuple[Window, list[int], int]]:
    """The outputs since the last call: window, ids of its records, timestamp."""
    found = []
    for record in driver.read("out"):
        result = msgspec.json.decode(record.value or b"")
        assert result["n"] == len(result["ids"]) == result["who"]
        found.append(((result["key"], result["start"], result["end"]), result["ids"], record.timestamp or 0))
    return found


def test_a_window_ends_at_each_record_and_one_starts_after_it() -> None:
    """The example of the module: two records within the time difference make three windows."""
    driver = driver_of(10, 100)
    pipe(driver, ("a", 20), ("a", 25))
    assert rows(driver) == {("a", 10, 20): [0], ("a", 21, 31): [1], ("a", 15, 25): [0, 1]}


def test_an_earlier_record_makes_the_window_after_it_from_what_is_there() -> None:
    """A record that comes out of order gets a right window with the later record, and its left one."""
    driver = driver_of(10, 100)
    pipe(driver, ("a", 25), ("a", 20))
    assert rows(driver) == {("a", 15, 25): [0, 1], ("a", 10, 20): [1], ("a", 21, 31): [0]}


def test_records_near_zero_share_their_left_window() -> None:
    """No window starts before 0: records below the difference share the window [0, difference]."""
    driver = driver_of(10, 100)
    pipe(driver, ("a", 6), ("a", 3), ("a", 9))
    assert rows(driver) == {("a", 0, 10): [0, 1, 2], ("a", 4, 14): [0, 2], ("a", 7, 17): [2]}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((0, 5), {(0, 10): [0, 1], (1, 11): [1]}),
        ((6, 6), {(0, 10): [0, 1]}),
        ((5, 0), {(0, 10): [0, 1], (1, 11): [0]}),
        ((10, 5), {(0, 10): [0, 1], (6, 16): [0]}),
        ((0, 10), {(0, 10): [0, 1], (1, 11): [1]}),
        ((0, 11), {(0, 10): [0], (1, 11): [1]}),
        ((20, 9), {(10, 20): [0], (0, 10): [1]}),
        ((19, 9), {(9, 19): [0, 1], (0, 10): [1], (10, 20): [0]}),
    ],
)
def test_the_limits_of_early_records(times: tuple[int, int], expected: dict[tuple[int, int], list[int]]) -> None:
    """A record below the difference is early. One at time 0 and one at the difference are like the others."""
    driver = driver_of(10, 100)
    pipe(driver, *(("a", at) for at in times))
    assert {(start, end): ids for (_, start, end), ids in rows(driver).items()} == expected


@pytest.mark.parametrize(("time", "missed"), [(10, 0), (11, 1), (15, 1), (16, 1), (17, 1)])
def test_a_window_that_begins_at_0_is_open_until_its_end(time: int, missed: int) -> None:
    """The record of another key moves time to the limit."""
    driver = driver_of(10)
    pipe(driver, ("b", time), ("a", 5))
    assert [window for window in rows(driver) if window[0] == "a"] == ([] if missed else [("a", 0, 10)])
    assert driver.task.metrics.missed_windows_total == missed
    assert len(driver.read("in-late")) == missed


def test_a_record_beyond_the_difference_has_no_part_in_the_next_ones_windows() -> None:
    """The window after the first record ends at the second one. It is forwarded once, as the window of the second."""
    driver = driver_of(10, 100, "on_update")
    pipe(driver, ("a", 29), ("a", 40))
    assert out(driver) == [(("a", 19, 29), [0], 29), (("a", 30, 40), [1], 40)]


def test_a_window_of_two_rules_is_forwarded_twice() -> None:
    """If another window shows the record before, Kafka Streams makes the window for each of the two records."""
    driver = driver_of(10, 100, "on_update")
    pipe(driver, ("a", 24), ("a", 29))
    assert len(out(driver)) == 3
    pipe(driver, ("a", 40))
    assert out(driver) == [(("a", 30, 40), [2], 40)] * 2


def test_two_records_of_one_moment_make_no_new_window() -> None:
    """A second record of one timestamp adds no window."""
    driver = driver_of(10, 100)
    pipe(driver, ("a", 20), ("a", 20))
    assert rows(driver) == {("a", 10, 20): [0, 1]}


def test_a_difference_of_zero() -> None:
    """With a time difference of 0 each moment is a window."""
    driver = driver_of(0)
    pipe(driver, ("a", 5), ("a", 5), ("a", 6))
    assert out(driver) == [(("a", 5, 5), [0, 1], 5)]


def test_a_closed_window_still_lends_what_it_holds() -> None:
    """A closed window is kept while a later window can be computed from it, also after a crash."""
    driver = driver_of(10)
    pipe(driver, ("a", 20), ("a", 27))
    assert [w for w, _, _ in out(driver)] == [("a", 10, 20)]
    driver.crash()
    driver.restore()
    pipe(driver, ("a", 30))
    assert rows(driver)[("a", 20, 30)] == [0, 1, 2]
    assert [w for w, _, _ in out(driver)] == [("a", 17, 27)]
    pipe(driver, ("a", 200), ("a", 210))
    assert {w for w in rows(driver) if w[1] < 190} == set()
    driver.crash()
    driver.restore()
    assert {w for w in rows(driver) if w[1] < 190} == set()


def test_late_only_where_no_window_takes_it() -> None:
    """A record behind the close time still counts in windows that end after it. It is late only if there is no such
    window."""
    driver = driver_of(10)
    pipe(driver, ("a", 30), ("a", 25))
    assert driver.read("in-late") == []
    assert (rows(driver)[("a", 20, 30)], driver.task.metrics.missed_windows_total) == ([0, 1], 1)
    pipe(driver, ("a", 18))
    assert len(driver.read("in-late")) == 1
    assert (driver.task.metrics.missed_windows_total, driver.task.metrics.late_total) == (2, 1)


@pytest.mark.parametrize("before", [[], [3]])
def test_an_early_record_opens_no_closed_window_at_0(before: list[int]) -> None:
    """It counts in the windows that are open, and is missed once in the one that starts at 0."""
    driver = driver_of(10)
    pipe(driver, *(("a", at) for at in (*before, 12)))
    assert [w for w, _, _ in out(driver)] == [("a", 0, 10) for _ in before]
    pipe(driver, ("a", 5), ("a", 40))
    assert driver.task.metrics.missed_windows_total == 1
    windows = [("a", 2, 12), *(("a", at + 1, at + 11) for at in before), ("a", 6, 16)]
    assert [w for w, _, _ in out(driver)] == windows


def test_null_keys_and_time_moved_by_hand() -> None:
    """A record without a key does not advance time. Advancing time without a record closes windows."""
    driver = driver_of(10)
    pipe(driver, ("a", 20), (None, 500))
    (operator,) = driver.task.times.operators
    operator.advance_time(20)
    store = driver.task.stores["w"]
    assert len(store.finals()) == 0
    driver.task.advance_time(1)
    operator.advance_time(3)
    assert (store.finals().starts.tolist(), store.finals().closed_at.tolist()) == ([10], [21])


@pytest.mark.parametrize("columns_min", [1, 1 << 30], ids=["in batches", "one by one"])
def test_records_without_a_value_are_skipped_and_counted(columns_min: int) -> None:
    """A record without a value is in no window and does not advance time."""
    builder = StreamsBuilder()
    table = builder.stream("in", value=bytes).group_by_key().sliding_window(10).aggregate("w", n=Count())
    table.on_close().to("out")
    driver = TopologyTestDriver(builder.build(), columns_min=columns_min)
    driver.pipe_columns("in", [(b"a", b"1", 20), (b"a", None, 24), (b"a", b"", 25), (b"a", None, 500)])
    assert {(w.start, w.end): w.states[1] for w in driver.task.stores["w"].rows()} == {
        (10, 20): 1,
        (21, 31): 1,
        (15, 25): 2,
    }
    assert driver.task.metrics.skipped_total == 2


@pytest.mark.parametrize(("difference", "grace", "named"), [(-1, 0, "difference"), (1, -1, "grace")])
def test_windows_reject_what_is_no_duration(difference: int, grace: int, named: str) -> None:
    """A negative difference and a negative grace are rejected."""
    with pytest.raises(ConfigError, match=named):
        WindowRule("sliding", difference, grace)


def test_a_longer_grace_opens_nothing_that_was_closed() -> None:
    """It closes no kept window a second time either. Open windows close by the new grace."""
    first = driver_of(10, 0)
    pipe(first, ("a", 20), ("a", 27))
    assert [w for w, _, _ in out(first)] == [("a", 10, 20)]
    second = driver_of(10, 30)
    second.changelog, second.source_log = first.changelog, first.source_log
    second.restore()
    pipe(second, ("a", 18), ("a", 30))
    assert (len(second.read("in-late")), out(second)) == (0, [])
    assert rows(second)[("a", 10, 20)] == [0], "closed, it takes nothing"
    pipe(second, ("a", 60))
    assert [w for w, _, _ in out(second)] == [("a", 17, 27), ("a", 19, 29)]


@st.composite
def within_grace(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]]]:
    """A grace, and records that are never later than the grace allows."""
    grace = draw(st.sampled_from([0, 5, 30]))
    time, found = 0, []
    for key, step, back in draw(
        st.lists(st.tuples(st.sampled_from("aab"), st.integers(0, 12), st.integers(0, grace)), max_size=40)
    ):
        time += step
        found.append((key, max(0, time - back)))
    return grace, found


def definition(difference: int, given_: list[tuple[str, int]]) -> dict[Window, set[int]]:
    """All non-empty windows that end at a record or start just after one."""
    found: dict[Window, set[int]] = {}
    for key, at in given_:
        for start in (max(0, at - difference), at + 1):
            end = start + difference
            if ids := {i for i, (k, t) in enumerate(given_) if k == key and start <= t <= end}:
                found[(key, start, end)] = ids
    return found


@given(st.sampled_from([0, 1, 7, 20]), within_grace(), st.lists(st.integers(0, 39), max_size=3))
def test_equals_the_definition_over_crashes(
    difference: int, given_: tuple[int, list[tuple[str, int]]], crashes: list[int]
) -> None:
    """Without late records the windows are those of the definition. Each is closed once, and none is lost."""
    grace, records = given_
    driver = driver_of(difference, grace)
    for i, record in enumerate(records):
        if i in crashes:
            driver.crash()
            driver.restore()
        pipe(driver, record)
    wanted, time = definition(difference, records), max([-1, *(at for _, at in records)])
    results = out(driver)
    assert driver.read("in-late") == []
    assert len(results) == len({w for w, _, _ in results})
    assert {w: set(ids) for w, ids, _ in results} == {w: i for w, i in wanted.items() if w[2] < time - grace}
    assert all(timestamp == max(records[i][1] for i in ids) for _, ids, timestamp in results)
    opened = {w: set(ids) for w, ids in rows(driver).items() if w[2] >= time - grace}
    assert opened == {w: i for w, i in wanted.items() if w[2] >= time - grace}


@pytest.mark.parametrize("emit", ["on_update", "on_close"])
def test_a_window_is_kept_as_long_as_a_record_can_reach_it(emit: Emit) -> None:
    """At time 12 the window [6, 9] still shows that [10, 13] was missed. A window that no record can reach is
    removed."""
    driver = driver_of(3, 2, emit)
    pipe(driver, ("a", 9), ("a", 17), ("a", 12))
    assert driver.task.metrics.missed_windows_total == 2
    pipe(driver, ("a", 26))
    assert sorted(start for _, start, _ in rows(driver)) == [23]
