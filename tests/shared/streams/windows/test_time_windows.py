"""Tumbling and hopping windows: the rule case by case, then against a brute-force model."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.late_record_headers import CLOSE_TIME_MS, LATENESS_MS, STORE, STREAM_TIME_MS
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.windows.window_rule import WINDOWS_MAX, Emit, hopping_windows
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.streams.windows.numbered_records import Value, Window, pipe, rows


def driver_of(
    size: int, advance: int, grace: int = 0, emit: Emit = "on_close", *, commit_each: bool = True, dedupe: bool = False
) -> TopologyTestDriver:
    """Windows with the ids of their records in order of arrival."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=Value).group_by_key()
    ids = Aggregate(list, lambda ids, value: [*ids, value.id], lambda a, b: a + b)
    table = grouped.hopping_window(size, advance, grace).aggregate("w", ids=ids, n=Count())
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return TopologyTestDriver(
        builder.build(), commit_each=commit_each, deduplicate_updates=dedupe, errors=ErrorHandlers()
    )


def out(driver: TopologyTestDriver) -> list[tuple[Window, list[int], int]]:
    """The outputs since the last call: window, ids of its records, timestamp."""
    found = []
    for record in driver.read("out"):
        result = msgspec.json.decode(record.value or b"")
        assert result["n"] == len(result["ids"])
        assert set(result) == {"key", "start", "end", "ids", "n"}
        found.append(((result["key"], result["start"], result["end"]), result["ids"], record.timestamp or 0))
    return found


def late(driver: TopologyTestDriver) -> int:
    return len(driver.read("in-late"))


def test_the_end_is_not_in_the_window() -> None:
    """A record at a window's end belongs to the next one, one at its start to it."""
    driver = driver_of(10, 10, grace=100)
    pipe(driver, ("a", 9), ("a", 10), ("a", 19))
    assert rows(driver) == {("a", 0, 10): [0], ("a", 10, 20): [1, 2]}


def test_hopping_windows_overlap() -> None:
    """A record belongs to each window that contains its timestamp. No window starts below 0."""
    driver = driver_of(10, 4, grace=100)
    pipe(driver, ("a", 9), ("a", 1))
    assert rows(driver) == {("a", 0, 10): [0, 1], ("a", 4, 14): [0], ("a", 8, 18): [0]}


def test_an_advance_that_does_not_divide_the_size() -> None:
    """Starts are multiples of the advance, whatever the size."""
    starts = []
    for at in (0, 3, 10, 11, 12):
        driver = driver_of(10, 4, grace=100)
        pipe(driver, ("a", at))
        starts.append([start for _, start, _ in sorted(rows(driver))])
    assert starts == [[0], [0], [4, 8], [4, 8], [4, 8, 12]]


def test_a_window_closes_at_its_end_and_the_grace() -> None:
    """A window accepts records until stream time reaches its end plus the grace, and is then forwarded once."""
    driver = driver_of(10, 10, grace=5)
    pipe(driver, ("a", 1), ("b", 14), ("a", 2))
    assert (out(driver), late(driver)) == ([], 0)
    pipe(driver, ("b", 15), ("a", 3))
    assert (out(driver), late(driver)) == ([(("a", 0, 10), [0, 2], 2)], 1)


def test_the_result_has_the_highest_timestamp() -> None:
    """A result's timestamp is that of the latest of its records, not of the last to come."""
    driver = driver_of(10, 10, grace=5, emit="on_update")
    pipe(driver, ("a", 7), ("a", 3))
    assert [timestamp for _, _, timestamp in out(driver)] == [7, 7]


def test_a_record_too_late_for_some_counts_in_the_others() -> None:
    """A record that misses only some of its windows is not late. Each missed window is counted."""
    driver = driver_of(10, 5, grace=0)
    pipe(driver, ("a", 12), ("a", 8))
    assert rows(driver) == {("a", 5, 15): [0, 1], ("a", 10, 20): [0]}
    assert (late(driver), driver.task.metrics.missed_windows_total, driver.task.metrics.late_total) == (0, 1, 0)
    pipe(driver, ("a", 20), ("a", 9))
    assert (late(driver), driver.task.metrics.missed_windows_total, driver.task.metrics.late_total) == (1, 3, 1)


def test_a_late_record_has_its_close_time() -> None:
    """The late topic gets the record with its store, the close time and the stream time."""
    driver = driver_of(10, 10, grace=5)
    pipe(driver, ("a", 30), ("a", 7))
    (record,) = driver.read("in-late")
    headers = {
        name: value for name, value in record.headers if name in (STORE, LATENESS_MS, CLOSE_TIME_MS, STREAM_TIME_MS)
    }
    assert headers == {STORE: b"w", CLOSE_TIME_MS: b"25", STREAM_TIME_MS: b"30", LATENESS_MS: b"18"}


def test_null_keys_are_skipped_and_counted() -> None:
    """A record without a key moves no time and is in no window."""
    driver = driver_of(10, 10)
    pipe(driver, ("a", 0), (None, 100), ("a", 1))
    assert (out(driver), rows(driver)) == ([], {("a", 0, 10): [0, 2]})
    assert driver.task.metrics.skipped_total == 1


def test_closed_windows_come_in_order_of_start_and_key() -> None:
    """The windows that one record closes are forwarded by start, then by key."""
    driver = driver_of(10, 10)
    pipe(driver, ("b", 12), ("b", 14), ("a", 13), ("a", 100))
    assert [window for window, _, _ in out(driver)] == [("a", 10, 20), ("b", 10, 20)]


def test_on_update_reduced_to_the_last_of_a_commit() -> None:
    """In production each window is forwarded once in a commit, with its content at that time."""
    driver = driver_of(10, 10, 0, "on_update", commit_each=False, dedupe=True)
    pipe(driver, ("a", 0), ("a", 5), ("a", 11), ("a", 12))
    driver.commit()
    assert [(window, ids) for window, ids, _ in out(driver)] == [(("a", 0, 10), [0, 1]), (("a", 10, 20), [2, 3])]


def test_advance_time_closes_without_a_record() -> None:
    """Advancing time without a record closes windows, and time never goes back."""
    driver = driver_of(10, 10)
    pipe(driver, ("a", 0))
    (operator,) = driver.task.times.operators
    operator.advance_time(9)
    operator.advance_time(3)
    assert (len(rows(driver)), operator.stream_time_ms) == (1, 9)
    driver.task.advance_time(1)
    assert (len(rows(driver)), operator.stream_time_ms) == (0, 10)


def test_a_rejected_record_is_in_no_window() -> None:
    """If one aggregation rejects a record for one of its windows, no window and no sketch has it."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().hopping_window(10, 5, 100)
    aggregations = {"who": CountDistinct("who"), "n": Count(), "total": Sum("id"), "what": CountDistinct("what")}
    windows.aggregate("w", **aggregations).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"id":1,"who":"x","what":"1"}', timestamp=7)
    before = [record.value for record in driver.read("out")]
    driver.pipe("in", key=b"a", value=b'{"id":"no","who":"y","what":"2"}', timestamp=7)
    driver.pipe("in", key=b"a", value=b'{"id":2,"who":"z"}', timestamp=7)
    assert len(driver.read("in-dlq")) == 2
    driver.pipe("in", key=b"a", value=b'{"id":0,"who":"x","what":"1"}', timestamp=7)
    after = [record.value for record in driver.read("out")]
    assert after == [(value or b"").replace(b'"n":1', b'"n":2') for value in before]


@pytest.mark.parametrize(
    ("size", "advance", "grace", "named"),
    [
        (0, 1, 0, "window size"),
        (10, 0, 0, "window advance"),
        (10, 11, 0, "window advance"),
        (10, 10, -1, "tumbling grace"),
        (WINDOWS_MAX + 1, 1, 0, f"more than {WINDOWS_MAX} windows"),
    ],
)
def test_windows_reject_what_is_no_window(size: int, advance: int, grace: int, named: str) -> None:
    """A size below 1 ms, an advance above the size, a negative grace and too many windows for a record are rejected."""
    with pytest.raises(ConfigError, match=named):
        hopping_windows(size, advance, grace)


keys = st.sampled_from(["a", "a", "b", None])
records = st.lists(st.tuples(keys, st.integers(0, 120)), max_size=40)
shapes = st.sampled_from([(10, 10), (10, 5), (10, 4), (7, 3), (1, 1)])


def model(size: int, advance: int, grace: int, given_: list[tuple[str | None, int]]) -> Any:
    """All windows that ever were with their ids, those that are closed, missed windows, late records."""
    windows: dict[Window, list[int]] = defaultdict(list)
    time, missed, late_ = -1, 0, 0
    for id_, (key, at) in enumerate(given_):
        if key is None:
            continue
        time = max(time, at)
        starts = [s for s in range(0, at + 1, advance) if s <= at < s + size]
        taken = [s for s in starts if s + size > time - grace]
        for start in taken:
            windows[(key, start, start + size)].append(id_)
        missed, late_ = missed + len(starts) - len(taken), late_ + (not taken)
    return windows, {w for w in windows if w[2] <= time - grace}, missed, late_


@given(shapes, st.sampled_from([0, 3, 20]), records, st.lists(st.integers(0, 39), max_size=3))
def test_equals_brute_force_over_crashes(
    shape: tuple[int, int], grace: int, given_: list[tuple[str | None, int]], crashes: list[int]
) -> None:
    """Windows, lateness and results are the brute-force model's, also where the task is lost between two records."""
    windows, closed, missed, late_ = model(*shape, grace, given_)
    on_close, on_update = driver_of(*shape, grace), driver_of(*shape, grace, "on_update", dedupe=True)
    for driver in (on_close, on_update):
        counted = late_counted = 0
        for i, record in enumerate(given_):
            if i in crashes:
                counted += driver.task.metrics.missed_windows_total
                driver.crash()
                driver.restore()
            pipe(driver, record)
        late_counted = late(driver)
        assert (counted + driver.task.metrics.missed_windows_total, late_counted) == (missed, late_)
        assert rows(driver) == {w: ids for w, ids in windows.items() if w not in closed}
    results = out(on_close)
    assert sorted(w for w, _, _ in results) == sorted(closed)
    assert all(windows[w] == ids and timestamp == max(given_[i][1] for i in ids) for w, ids, timestamp in results)
    assert {w: ids for w, ids, _ in out(on_update)} == windows
