"""Time that advances without records: when, by how much, and how it is stored."""

from __future__ import annotations

import json

from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import PROGRESS, Progress, decode_entry, decode_progress
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.idleness import Idleness
from penstock.shared.streams.task.watermarks import Watermark
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def driver_of(idle_timeout_ms: int | None = 100) -> TopologyTestDriver:
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    grouped.tumbling_window(50, grace=10).aggregate("w", n=Count()).on_close().to("out")
    grouped.session_window(50).aggregate("s", n=Count()).on_close().to("sessions")
    return TopologyTestDriver(builder.build(), idle_timeout_ms=idle_timeout_ms)


def progress(driver: TopologyTestDriver) -> list[Progress]:
    entries = [decode_entry(value) for _, value in driver.changelog]
    return [decode_progress(entry.body) for entry in entries if entry.operation == PROGRESS]


def test_quiet_begins_with_the_last_record() -> None:
    """A record, or an unknown end of the log, restarts the wait. A completed wait starts the next."""
    idle = Idleness(100)
    assert idle.due_ms(0, {"in": 1}, at_end=True) == 0
    assert idle.due_ms(90, {"in": 2}, at_end=True) == 0
    assert idle.due_ms(189, {"in": 2}, at_end=True) == 0
    assert idle.due_ms(190, {"in": 2}, at_end=True) == 100
    assert idle.due_ms(250, {"in": 2}, at_end=False) == 0
    assert idle.due_ms(300, {"in": 2}, at_end=True) == 0
    assert idle.due_ms(400, {"in": 2}, at_end=True) == 100


def test_idle_windows_close() -> None:
    """The windows of an idle topic are closed once, when time has advanced far enough."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    for _ in range(9):
        driver.advance_wall_clock(10)
    assert driver.read("out") == []
    driver.advance_wall_clock(10)
    assert [record.value for record in driver.read("out")] == [b'{"key":"k","start":0,"end":50,"n":1}']
    assert len(driver.read("sessions")) == 1
    assert driver.task.stream_time_ms == 120
    driver.advance_wall_clock(1_000)
    assert (driver.read("out"), driver.task.stream_time_ms) == ([], 1_120)


def test_what_comes_after_an_advance_is_late_for_it() -> None:
    """A record behind a time that idleness advanced is late, also after a crash."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.advance_wall_clock(100)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=30)
    assert len(driver.read("in-late")) == 2
    assert driver.task.stream_time_ms == 120


def test_the_changelog_says_how_much_time_was_moved_on() -> None:
    """Progress records have the sum of all idle time by which the task was advanced, also after a restore."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.advance_wall_clock(100)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=500)
    driver.advance_wall_clock(250)
    assert [one.idle_ms for one in progress(driver)] == [0, 100, 100, 350]


def test_an_operator_has_a_time_of_its_own() -> None:
    """A record without a key moves the task's time and not the windows': an advance moves both."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.pipe("in", key=None, value=b"{}", timestamp=70)
    driver.advance_wall_clock(100)
    (*_, newest) = progress(driver)
    assert (newest.stream_time_ms, newest.operator_times_ms) == (170, {"w": 120, "s": 120})


def test_there_is_no_time_to_move_before_the_first_record() -> None:
    """Idleness does not advance a task without records, nor an operator without keyed records."""
    driver = driver_of()
    driver.advance_wall_clock(1_000)
    assert (driver.task.stream_time_ms, driver.task.needs_commit) == (-1, False)
    driver.pipe("in", key=None, value=b"{}", timestamp=20)
    driver.advance_wall_clock(1_000)
    assert {operator.stream_time_ms for operator in driver.task.times.operators} == {-1}


def test_off_unless_asked_for() -> None:
    """Without the setting time waits for records."""
    driver = driver_of(None)
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.advance_wall_clock(1_000)
    assert driver.task.stream_time_ms == 20


def test_stream_time_punctuation_sees_it() -> None:
    """A STREAM_TIME schedule fires if idleness advances stream time past it."""
    fired: list[int] = []

    class Scheduled(Processor):
        """Notes when it is called."""

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(50, PunctuationType.STREAM_TIME, fired.append)

        def process(self, record: Record) -> None:
            self.context.forward(record)

    builder = StreamsBuilder()
    builder.stream("in").process(Scheduled)
    driver = TopologyTestDriver(builder.build(), idle_timeout_ms=100)
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.advance_wall_clock(100)
    assert fired == [20, 120]


def test_watermarks_are_due_as_often_as_time_may_move() -> None:
    """Watermarks are sent at once, and then as often as time may advance, while everything is read."""
    idle = Idleness(100)
    checks = [(0, False), (10, True), (109, True), (110, False), (150, True), (249, True), (250, True)]
    assert [now for now, at_end in checks if idle.is_watermark_due(now, at_end=at_end)] == [10, 150, 250]


def test_windows_behind_a_repartition_topic_wait_for_their_records() -> None:
    """If idleness closes sessions, their results are not late in the windows behind a repartition topic."""
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(1_000).aggregate("first", n=Count()).on_close()
    windows = sessions.key_by(lambda record: "all", name="all").group_by_key().tumbling_window(10_000)
    windows.aggregate("second", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), idle_timeout_ms=5_000)
    for i in range(40):
        driver.pipe("in", key=b"ann", value=b"{}", timestamp=i * 2_000)
    for _ in range(10):
        driver.advance_wall_clock(5_000)
    assert driver.read("in-late") == []
    results = [json.loads(record.value or b"") for record in driver.read("out")]
    assert [(one["start"], one["n"]) for one in results] == [(start, 5) for start in range(0, 80_000, 10_000)]
    assert driver.metrics()["records"] == 80, "watermarks are not records"


def test_a_mark_that_was_taken_is_not_taken_again() -> None:
    """A watermark advances the position as a record does. Watermarks before the position are skipped."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.task.take_watermark("own", 4, Watermark(0, 1, 50))
    assert (driver.task.sources["own"], driver.task.needs_commit) == (5, True)
    driver.task.take_watermark("own", 3, Watermark(0, 1, 60))
    assert driver.task.sources["own"] == 5
