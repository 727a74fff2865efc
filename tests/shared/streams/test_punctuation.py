"""Punctuation schedules are called on their grids, also after gaps and restores, as docs/streams.md says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, IllegalState, RecordTooLarge
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import (
    SWEEP_MIN,
    PunctuationQueue,
    PunctuationType,
    Schedule,
    Start,
    TaskSchedules,
    grids_bytes_max_of,
)
from penstock.shared.streams.record import Record
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.documents import DOCS, blocks, names_of

STREAM, WALL = PunctuationType.STREAM_TIME, PunctuationType.WALL_CLOCK_TIME

OnInit = Callable[[ProcessorContext], None]


class _Scheduling(Processor):
    """Runs a test's function in `init`."""

    def __init__(self, on_init: OnInit) -> None:
        self._on_init = on_init

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._on_init(context)

    def process(self, record: Record) -> None:
        self.context.forward(record)


def topology(on_init: OnInit) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").process(lambda: _Scheduling(on_init)).to("out")
    return builder.build()


def pipe(driver: TopologyTestDriver, *timestamps: int) -> None:
    for timestamp in timestamps:
        driver.pipe("in", key=b"k", value=b"{}", timestamp=timestamp)


# --- the queue ---


def test_calls_once_an_interval() -> None:
    """A schedule is called at its due time and not before, then one interval later."""
    queue, called = PunctuationQueue(), []
    queue.schedule(100, 100, called.append)
    fired = [queue.may_punctuate(now) for now in (99, 100, 199, 200)]
    assert (fired, called) == ([False, True, False, True], [100, 200])


@pytest.mark.parametrize(
    ("interval_ms", "first_ms", "now_ms", "next_ms"),
    [(5, 5, 21, 25), (5, 5, 25, 30), (5, 0, 0, 5), (100, 0, 1_001, 1_100), (7, 3, 9, 10), (7, 3, 10, 17)],
)
def test_missed_intervals_collapse(interval_ms: int, first_ms: int, now_ms: int, next_ms: int) -> None:
    """However many intervals were missed, there is one call, and the next due time is the next grid point after now."""
    queue, called = PunctuationQueue(), []
    schedule = queue.schedule(interval_ms, first_ms, called.append)
    assert queue.may_punctuate(now_ms)
    assert (called, schedule.due_ms) == ([now_ms], next_ms)
    assert not queue.may_punctuate(now_ms)


def test_time_that_stands_or_goes_back_calls_nothing() -> None:
    """A second look at the same or an earlier moment finds nothing due."""
    queue, called = PunctuationQueue(), []
    queue.schedule(10, 10, called.append)
    assert [queue.may_punctuate(now) for now in (15, 15, 3)] == [True, False, False]


def test_earliest_first() -> None:
    """Several schedules that are due are called in order of their due times, and ties in order of scheduling."""
    queue, called = PunctuationQueue(), []
    for name, due in (("c", 30), ("a", 10), ("b", 20), ("a2", 10)):
        queue.schedule(100, due, lambda _, name=name: called.append(name))
    assert queue.next_due_ms() == 10
    queue.may_punctuate(30)
    assert called == ["a", "a2", "b", "c"]


def test_cancelled_is_never_called() -> None:
    """A schedule cancelled before it is due is not called and no longer counts as due."""
    queue, called = PunctuationQueue(), []
    schedule = queue.schedule(10, 10, called.append, "mine")
    queue.schedule(10, 50, called.append)
    schedule.cancel()
    assert (queue.next_due_ms(), queue.grids_ms()) == (50, {})
    assert not queue.may_punctuate(20)
    assert called == []


def test_cancel_from_within_the_callback() -> None:
    """A callback may cancel its own schedule: that call is the last."""
    queue, called = PunctuationQueue(), []

    def last(now_ms: int) -> None:
        called.append(now_ms)
        schedule.cancel()

    schedule = queue.schedule(10, 10, last)
    assert [queue.may_punctuate(now) for now in (10, 20)] == [True, False]
    assert (called, queue.next_due_ms()) == ([10], None)


def test_cancel_of_another_from_within_a_callback() -> None:
    """A callback may cancel a schedule that is due in the same turn, which is then not called."""
    queue, called = PunctuationQueue(), []
    others: list[Schedule] = []
    queue.schedule(10, 10, lambda _: others[0].cancel())
    others.append(queue.schedule(10, 10, called.append))
    assert queue.may_punctuate(10)
    assert called == []


def test_schedule_from_within_a_callback() -> None:
    """A schedule that a callback creates fires in the same turn if it is due, otherwise later."""
    queue, called = PunctuationQueue(), []

    def more(now_ms: int) -> None:
        once.cancel()
        queue.schedule(10, now_ms, lambda now: called.append(("now", now)))
        queue.schedule(10, now_ms + 1, lambda now: called.append(("later", now)))

    once = queue.schedule(10, 10, more)
    queue.may_punctuate(10)
    assert called == [("now", 10)]
    queue.may_punctuate(11)
    assert called == [("now", 10), ("later", 11)]


def test_repr_shows_what_waits() -> None:
    """The queue prints its live schedules, earliest first; of those due at one time, the first one made."""
    queue = PunctuationQueue()
    queue.schedule(10, 20, print, "b")
    queue.schedule(10, 10, print, "a")
    queue.schedule(10, 5, print, "gone").cancel()
    queue.schedule(10, 20, print)
    assert repr(queue) == "PunctuationQueue([(10, 'a'), (20, 'b'), (20, None)])"


@given(st.integers(1, 50), st.integers(0, 100), st.lists(st.integers(0, 60), max_size=40))
def test_always_on_the_grid(interval_ms: int, first_ms: int, steps: list[int]) -> None:
    """For any sequence of times, a callback is called exactly if a grid point has passed since the last call."""
    queue, called, expected = PunctuationQueue(), [], []
    schedule = queue.schedule(interval_ms, first_ms, called.append)
    now, due = 0, first_ms
    for step in steps:
        now += step
        queue.may_punctuate(now)
        if now >= due:
            expected.append(now)
            while due <= now:
                due += interval_ms
    assert called == expected
    assert schedule.due_ms == due


# --- in a task ---


def test_stream_time_fires_with_the_first_record() -> None:
    """A STREAM_TIME schedule is first due at 0: the first record calls it, then multiples of its interval do."""
    called: list[int] = []
    driver = TopologyTestDriver(topology(lambda context: context.schedule(10, STREAM, called.append) and None))
    driver.advance_wall_clock(1_000)
    assert called == []
    pipe(driver, 5, 9, 10, 4, 27, 29, 30)
    assert called == [5, 10, 27, 30]


def test_wall_clock_is_first_due_one_interval_from_now() -> None:
    """A WALL_CLOCK_TIME schedule counts from the moment of scheduling, and records do not drive it."""
    called: list[int] = []
    driver = TopologyTestDriver(
        topology(lambda context: context.schedule(10, WALL, called.append) and None), now_ms=1_003
    )
    pipe(driver, 5_000)
    for _ in range(3):
        driver.advance_wall_clock(9)
    assert called == [1_021, 1_030]


@pytest.mark.parametrize(("type_", "expected"), [(STREAM, [37, 47]), (WALL, [37, 47])])
def test_start_fixes_the_grid(type_: PunctuationType, expected: list[int]) -> None:
    """With `start` a schedule of either type is first due then, and its grid runs from there."""
    called: list[int] = []
    driver = TopologyTestDriver(topology(lambda context: context.schedule(10, type_, called.append, start=37) and None))
    for now in range(1, 50):
        if type_ is STREAM:
            pipe(driver, now)
        else:
            driver.advance_wall_clock(1)
    assert called == expected


def test_start_in_the_past_keeps_its_grid() -> None:
    """A start in the past causes one call at once, and later calls are on its grid."""
    called: list[int] = []
    driver = TopologyTestDriver(
        topology(lambda context: context.schedule(10, WALL, called.append, start=3) and None), now_ms=1_000
    )
    driver.advance_wall_clock(1)
    for _ in range(4):
        driver.advance_wall_clock(3)
    assert called == [1_001, 1_004, 1_013]


def test_timedelta_and_ms_are_the_same() -> None:
    """An interval is given as timedelta or as ms."""
    called: list[int] = []
    driver = TopologyTestDriver(topology(lambda c: c.schedule(timedelta(seconds=1), WALL, called.append) and None))
    driver.advance_wall_clock(999)
    driver.advance_wall_clock(1)
    assert called == [1_000]


@pytest.mark.parametrize("interval", [0, -5, timedelta(0), timedelta(microseconds=500), timedelta(microseconds=1_500)])
def test_task_rejects_an_interval_that_is_not_a_whole_ms(interval: timedelta | int) -> None:
    """An interval below 1 ms, or not a whole number of milliseconds, is rejected."""
    with pytest.raises(ConfigError, match="at least 1"):
        TopologyTestDriver(topology(lambda context: context.schedule(interval, WALL, print) and None))


WRONG: list[tuple[str, Callable[[ProcessorContext], object]]] = [
    ("schedule: interval must be", lambda c: c.schedule("5", WALL, print)),  # type: ignore[arg-type]
    ("schedule: type must be PunctuationType.STREAM_TIME or", lambda c: c.schedule(5, "STREAM_TIME", print)),  # type: ignore[arg-type]
    ("schedule: type must be .* got None", lambda c: c.schedule(5, None, print)),  # type: ignore[arg-type]
    ("schedule: callback must be callable, got None", lambda c: c.schedule(5, WALL, None)),  # type: ignore[arg-type]
    ("schedule: name must be text", lambda c: c.schedule(5, WALL, print, name=3)),  # type: ignore[arg-type]
    ("schedule: name must be text without '/'", lambda c: c.schedule(5, WALL, print, name="a/b")),
    ("schedule: start must be", lambda c: c.schedule(5, WALL, print, start=-1)),
    ("schedule: start must be .* time zone", lambda c: c.schedule(5, WALL, print, start=datetime(2026, 1, 1))),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=range(len(WRONG)))
def test_invalid_arguments_of_schedule_are_rejected(message: str, call: Callable[[ProcessorContext], object]) -> None:
    """An invalid argument of schedule() raises a ConfigError that names it."""
    with pytest.raises(ConfigError, match=message):
        TopologyTestDriver(topology(lambda context: call(context) and None))


@pytest.mark.parametrize("start", [1_000, timedelta(seconds=1), datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)])
def test_start_as_number_timedelta_and_datetime(start: Start) -> None:
    """A start may be a number, a timedelta or a datetime, and means the same time."""
    due: list[int] = []
    TopologyTestDriver(topology(lambda c: due.append(c.schedule(10, STREAM, print, start=start).due_ms)))
    assert due == [1_000]


def test_a_processor_has_no_context_while_it_is_made() -> None:
    """`self.context` in `__init__` raises IllegalState with an explanation. Other missing attributes raise
    AttributeError."""

    class Early(Processor):
        def __init__(self) -> None:
            self.context.schedule(5, STREAM, print)

    builder = StreamsBuilder()
    builder.stream("in").process(Early)
    with pytest.raises(IllegalState, match=r"init\(\)"):
        TopologyTestDriver(builder.build())
    with pytest.raises(AttributeError, match="'other'"):
        Processor().other  # noqa: B018


def test_a_context_that_was_kept() -> None:
    """A context that is used outside the task's callbacks neither schedules nor forwards."""
    kept: list[ProcessorContext] = []
    driver = TopologyTestDriver(topology(kept.append))
    pipe(driver, 1)
    with pytest.raises(IllegalState, match=r"schedule\(\)"):
        kept[0].schedule(5, STREAM, print)
    with pytest.raises(IllegalState, match=r"forward\(\)"):
        kept[0].forward(Record("k", {}, 1))


def test_scheduling_before_init_is_rejected() -> None:
    """A task that is not initialized rejects schedules."""
    task = StreamTask(topology(lambda context: None), 0, application="a")
    with pytest.raises(IllegalState, match="init"):
        task.schedule(10, WALL, print)


def test_a_callback_may_forward_and_needs_a_commit() -> None:
    """Records that a wall-clock callback forwards are written by the next commit, which is needed even without an input
    record."""

    def on_init(context: ProcessorContext) -> None:
        context.schedule(10, WALL, lambda now: context.forward(Record("tick", {"now": now}, now)))

    driver = TopologyTestDriver(topology(on_init), commit_each=False)
    assert not driver.task.needs_commit
    driver.advance_wall_clock(9)
    assert not driver.task.needs_commit
    driver.advance_wall_clock(1)
    assert driver.task.needs_commit
    driver.commit()
    assert [(r.key, r.value, r.timestamp) for r in driver.read("out")] == [(b"tick", b'{"now":10}', 10)]


def test_stream_time_is_evaluated_after_each_record() -> None:
    """In one poll of several records a STREAM_TIME callback runs between them, after the record that made it due."""

    def on_init(context: ProcessorContext) -> None:
        context.schedule(10, STREAM, lambda now: context.forward(Record("tick", None, now)), start=10)

    driver = TopologyTestDriver(topology(on_init))
    driver.pipe_columns("in", [(b"a", b"{}", 9), (b"b", b"{}", 10), (b"c", b"{}", 11), (b"d", b"{}", 30)])
    assert [r.key for r in driver.read("out")] == [b"a", b"b", b"tick", b"c", b"d", b"tick"]


@pytest.mark.parametrize("type_", [STREAM, WALL])
def test_named_grids_survive_a_restore(type_: PunctuationType) -> None:
    """A named schedule continues its grid after a restore. An unnamed one starts a new grid."""
    named: list[int] = []
    unnamed: list[int] = []

    def on_init(context: ProcessorContext) -> None:
        context.schedule(100, type_, named.append, name="mine")
        context.schedule(100, type_, unnamed.append)

    driver = TopologyTestDriver(topology(on_init), now_ms=7)
    pipe(driver, 50)
    driver.advance_wall_clock(150)
    assert (named, unnamed) == (([50], [50]) if type_ is STREAM else ([157], [157]))
    driver.crash()
    driver.restore()
    assert (
        driver.task.prepare_commit(0).changelog[-1][1].count(b'every 100 ms)":%d' % (100 if type_ is STREAM else 207))
        == 1
    )
    named.clear()
    unnamed.clear()
    pipe(driver, 60)
    driver.advance_wall_clock(60)  # now 217: past the named grid's 207, not past 157 + 100
    assert (named, unnamed) == (([], [60]) if type_ is STREAM else ([217], []))


def test_a_restored_grid_is_taken_up_once() -> None:
    """A name that is cancelled and scheduled again starts a new grid: the restored one was used up."""
    called: list[int] = []
    schedules: list[Schedule] = []

    def on_init(context: ProcessorContext) -> None:
        schedules.append(context.schedule(100, WALL, called.append, name="mine"))

    driver = TopologyTestDriver(topology(on_init))
    pipe(driver, 1)
    driver.crash()
    driver.restore()
    driver.advance_wall_clock(450)
    assert called == [450]
    schedules[-1].cancel()
    again = driver.task.schedule(100, WALL, called.append, name="mine")
    assert again.due_ms == 550


def test_a_cancelled_name_leaves_no_grid() -> None:
    """A named schedule that was restored and then cancelled is not kept with the progress any more."""
    schedules: list[Schedule] = []
    driver = TopologyTestDriver(topology(lambda c: schedules.append(c.schedule(100, WALL, print, name="mine"))))
    pipe(driver, 1)
    driver.crash()
    driver.restore()
    schedules[-1].cancel()
    assert b'"grids_ms":{}' in driver.task.prepare_commit(0).changelog[-1][1]


def test_a_name_not_yet_scheduled_again_keeps_its_grid() -> None:
    """A restored grid whose schedule does not exist yet survives further commits."""
    driver = TopologyTestDriver(topology(lambda context: None))
    driver.task.schedule(100, WALL, print, name="mine")
    pipe(driver, 1)
    driver.crash()
    driver.restore()
    pipe(driver, 2)
    driver.crash()
    driver.restore()
    assert driver.task.schedule(100, WALL, print, name="mine").due_ms == 100


def test_a_grid_of_a_name_that_is_not_used_again_is_forgotten() -> None:
    """A commit leaves a restored grid out once its next point has passed by more than the interval."""
    driver = TopologyTestDriver(topology(lambda context: None))
    driver.task.schedule(100, WALL, print, name="once")
    pipe(driver, 1)
    driver.crash()
    driver.restore()
    for passed_ms, is_kept in ((200, True), (1, False)):
        driver.advance_wall_clock(passed_ms)
        assert bool(driver.task.progress_record(driver.clock.now_ms()).grids_ms) is is_kept


def test_wall_clock_keeps_its_grid_over_gaps() -> None:
    """Several missed grid points cause one call, and later calls stay on the grid."""
    called: list[int] = []
    queue = PunctuationQueue()
    queue.schedule(10, 1_010, called.append)
    for now in (1_009, 1_100, 1_101, 1_110, 1_122, 1_129, 1_130, 1_235, 1_236, 1_240):
        queue.may_punctuate(now)
    assert called == [1_100, 1_110, 1_122, 1_130, 1_235, 1_240]


@pytest.mark.parametrize(("interval", "type_"), [(20, WALL), (10, STREAM)])
def test_a_schedule_that_is_another_than_before_begins_a_grid_of_its_own(interval: int, type_: PunctuationType) -> None:
    """A restored grid is discarded if the schedule's type or interval has changed."""
    driver = TopologyTestDriver(topology(lambda context: None), now_ms=1_000)
    driver.task.schedule(10, WALL, print, name="mine")
    pipe(driver, 1)
    driver.crash()
    driver.restore()
    assert driver.task.schedule(interval, type_, print, name="mine").due_ms == (0 if type_ is STREAM else 1_020)
    assert b"wall_clock_time, every 10 ms" not in driver.task.prepare_commit(0).changelog[-1][1]


def test_a_name_is_rejected_while_its_node_has_a_schedule_of_it() -> None:
    """A node rejects a second schedule of the same name, unless the first one is cancelled."""

    def on_init(context: ProcessorContext) -> None:
        context.schedule(5, WALL, print, name="mine").cancel()
        context.schedule(6, WALL, print, name="mine")
        context.schedule(7, STREAM, print, name="mine")

    with pytest.raises(ConfigError, match=r"'process-\d+'.*'mine'"):
        TopologyTestDriver(topology(on_init))


def test_one_processor_in_two_nodes_has_two_grids() -> None:
    """Schedule names belong to a node: two nodes restore their own grids under the same name."""
    due: list[int] = []

    class Named(Processor):
        def init(self, context: ProcessorContext) -> None:
            due.append(context.schedule(100, WALL, print, start=10 * (1 + len(due) % 2), name="mine").due_ms)

        def process(self, record: Record) -> None:
            pass

    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream.process(Named)
    stream.process(Named)
    driver = TopologyTestDriver(builder.build())
    driver.advance_wall_clock(50)
    driver.crash()
    driver.restore()
    assert due == [10, 20, 110, 120]


def test_the_first_grid_is_committed_before_anything_happens() -> None:
    """An application that restarts more often than its interval still fires its schedule."""
    called: list[int] = []
    driver = TopologyTestDriver(topology(lambda c: c.schedule(10, WALL, called.append, name="mine") and None))
    for _ in range(5):
        driver.advance_wall_clock(7)
        driver.crash()
        driver.restore()
    assert called == [14, 21, 35]
    assert not driver.task.needs_commit


# --- the stream time of sub-topologies ---


class _Ticking(Processor):
    """Notes each punctuation of a STREAM_TIME schedule, and the stream time at each record."""

    def __init__(self, ticks: list[int], times: list[int]) -> None:
        self._ticks = ticks
        self._times = times

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        context.schedule(1_000, STREAM, self._ticks.append, name="tick")

    def process(self, record: Record) -> None:
        self._times.append(self.context.stream_time_ms)
        self.context.forward(record)


def test_a_sub_topologys_stream_time_is_that_of_its_own_topics() -> None:
    """Records of another sub-topology's topic, far ahead, drive no schedule, also after a restore."""
    ticks, times = list[int](), list[int]()
    builder = StreamsBuilder()
    builder.stream("carts").process(lambda: _Ticking(ticks, times)).to("out")
    builder.stream("audit").to("audit-copy")
    driver = TopologyTestDriver(builder.build())
    for topic, timestamp in (("carts", 100), ("audit", 90_000), ("carts", 200)):
        driver.pipe(topic, key=b"a", value=b"{}", timestamp=timestamp)
    driver.crash()
    driver.restore()
    for topic, timestamp in (("audit", 91_000), ("carts", 1_500)):
        driver.pipe(topic, key=b"a", value=b"{}", timestamp=timestamp)
    assert (ticks, times) == ([100, 1_500], [100, 200, 1_500])
    assert driver.task.stream_time_ms == 91_000


def test_records_of_a_repartition_topic_drive_no_schedule_above_it() -> None:
    """Each side of a repartition topic has its own stream time, however far ahead the other one is."""
    above, below, times = list[int](), list[int](), list[int]()
    builder = StreamsBuilder()
    stream = builder.stream("in").process(lambda: _Ticking(above, times))
    ahead = stream.map(lambda record: Record("x", record.value, record.timestamp + 50_000))
    counts = ahead.group_by_key().tumbling_window(1_000).aggregate("w", n=Count()).on_update()
    counts.process(lambda: _Ticking(below, [])).to("out")
    pipe(driver := TopologyTestDriver(builder.build()), 100, 200, 1_500)
    assert (above, below, times) == ([100, 1_500], [50_100, 51_500], [100, 200, 1_500])
    assert driver.task.metrics.dead_letters_total == 0


def test_an_idle_repartition_topics_time_follows_the_watermarks() -> None:
    """Without a record, the stream time behind a repartition topic follows the watermarks, not the clock."""
    above, below = list[int](), list[int]()
    builder = StreamsBuilder()
    stream = builder.stream("in").process(lambda: _Ticking(above, []))
    early = stream.map(lambda record: Record("x", record.value, record.timestamp - 90))
    counts = early.group_by_key().tumbling_window(1_000).aggregate("w", n=Count()).on_update()
    counts.process(lambda: _Ticking(below, [])).to("out")
    pipe(driver := TopologyTestDriver(builder.build(), idle_timeout_ms=500), 100)
    for _ in range(3):
        driver.advance_wall_clock(500)
    assert (above, below) == ([100, 1_100], [10, 1_100])


def test_no_result_in_sight_moves_no_repartition_topics_time() -> None:
    """Without a record in its source topics, a task has no time to report. Records of punctuations have their own."""

    def send_clock(context: ProcessorContext) -> None:
        context.schedule(100, WALL, lambda now_ms: context.forward(Record("x", {}, now_ms)))

    builder = StreamsBuilder()
    stream = builder.stream("in").process(lambda: _Scheduling(send_clock))
    windows = stream.key_by(lambda record: "x").group_by_key().tumbling_window(1_000).aggregate("w", n=Count())
    windows.on_close().to("out")
    driver = TopologyTestDriver(builder.build(), idle_timeout_ms=500)
    for _ in range(12):
        driver.advance_wall_clock(100)
    assert max(driver.task.times.source_times_ms.values()) == 1_200


def test_an_unused_grid_is_kept_until_its_own_stream_time_has_passed_it() -> None:
    """Of restored schedules that are not scheduled again, those of a sub-topology without records stay."""
    times = {"x": 200}

    def time_of(topics: Iterable[str]) -> int:
        return max(times.get(topic, -1) for topic in topics)

    schedules = TaskSchedules({"a": ("x",), "b": ("y",), "a/b": ("y",)}, ("x", "y"), GRIDS_BYTES_MAX, time_of)
    schedules.restore({f"{node}/mine (stream_time, every 10 ms)": 100 for node in ("a", "b", "a/b", "gone")})
    assert list(schedules.grids_ms(0)) == ["b/mine (stream_time, every 10 ms)", "a/b/mine (stream_time, every 10 ms)"]


TOPICS = ("in",)
GRIDS_BYTES_MAX = grids_bytes_max_of(1024 * 1024)


def task_schedules(grids_bytes_max: int = GRIDS_BYTES_MAX, times_ms: Sequence[int] = (0,)) -> TaskSchedules:
    """The stream time is the last of `times_ms`."""
    return TaskSchedules({"n": TOPICS}, TOPICS, grids_bytes_max, lambda _: times_ms[-1])


def add_schedule(schedules: TaskSchedules, name: str, start: int = 10**9, interval: int = 1) -> Schedule:
    at_node = {"now_ms": 0, "start": start, "name": name, "node": "n"}
    return schedules.schedule(interval, PunctuationType.STREAM_TIME, lambda _: None, **at_node)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [3, 100, 300])
def test_cancelled_schedules_are_forgotten(count: int) -> None:
    """However many schedules are made and cancelled, also far ahead, only active ones are kept."""
    schedules = task_schedules()
    kept = [add_schedule(schedules, f"kept-{i:03}") for i in range(count)]
    for i in range(5_000):
        add_schedule(schedules, f"timer-{i}").cancel()
        assert len(schedules._named) == count
        assert len(schedules.stream_time[TOPICS]._heap) <= max(SWEEP_MIN, 2 * count)
    assert sorted(schedules.grids_ms(0)) == [f"n/kept-{i:03} (stream_time, every 1 ms)" for i in range(count)]
    assert not any(schedule.cancelled for schedule in kept)


def test_cancelled_schedules_are_removed_when_their_number_has_doubled() -> None:
    """A removal looks at every schedule, so the next one waits until there are twice as many as were kept."""
    schedules = task_schedules()
    for i in range(SWEEP_MIN):
        add_schedule(schedules, f"kept-{i}")
    sizes = []
    for i in range(SWEEP_MIN + 1):
        add_schedule(schedules, f"timer-{i}").cancel()
        sizes.append(len(schedules.stream_time[TOPICS]._heap))
    assert sizes == [*range(SWEEP_MIN + 1, 2 * SWEEP_MIN + 1), SWEEP_MIN + 1]


def test_the_grids_of_a_task_are_limited() -> None:
    """A named schedule must fit into the progress record. One that is cancelled or outdated leaves its room."""
    grid_bytes = len('"n/\\u0000é1 (stream_time, every 1 ms)":9223372036854775807,'.encode())
    schedules = task_schedules(2 * grid_bytes - 1)
    first = add_schedule(schedules, "\0é1")
    with pytest.raises(RecordTooLarge, match=r"'n': schedule '\\x00é2'.* 1 named"):
        add_schedule(schedules, "\0é2")
    first.cancel()
    add_schedule(schedules, "\0é2", start=10)
    first.cancel()
    with pytest.raises(RecordTooLarge):
        add_schedule(schedules, "\0é1")
    # Restored grids continue although the limit is lower now. They count until they are outdated, and their names fit
    # again after a cancellation, also with a longer interval.
    after = task_schedules(grid_bytes, times := [0])
    after.restore({**schedules.grids_ms(0), "n/\0é3 (stream_time, every 1 ms)": 20})
    taken_up = add_schedule(after, "\0é2")
    assert taken_up.due_ms == 10
    taken_up.cancel()
    taken_up = add_schedule(after, "\0é2", start=30)
    for time, is_room in ((21, False), (22, True)):
        times.append(time)
        with nullcontext() if is_room else pytest.raises(RecordTooLarge):
            add_schedule(after, "\0é4")
    longer = task_schedules(0)
    longer.restore({"n/x (stream_time, every 1 ms)": 1})
    for _ in range(2):
        add_schedule(longer, "x", interval=10).cancel()


def test_a_schedule_continues_a_grid_that_a_commit_left_out() -> None:
    """After a long outage, the first commit may come before a name is scheduled again. Its grid must be committed."""
    schedules = task_schedules()
    schedules.restore({MINE: 100})
    assert schedules.grids_ms(1_000) == {}
    assert wall_clock_due(schedules) == 100
    assert schedules.has_new_grid
    assert schedules.grids_ms(1_000) == {MINE: 100}


def test_an_outdated_grid_is_kept_while_there_is_room() -> None:
    """A schedule that another is added before continues its grid, although commits leave it out already."""
    schedules = task_schedules(times_ms=(1_000,))
    schedules.restore({"n/mine (stream_time, every 1 ms)": 6})
    add_schedule(schedules, "other")
    assert add_schedule(schedules, "mine").due_ms == 6


def test_a_schedule_finds_its_restored_grid_by_its_whole_name() -> None:
    """It forgets no grid whose name only begins as its own, and looks at no other: a task may have thousands."""
    schedules = task_schedules()
    schedules.restore({"n/mine (stream_time, every 9 ms)": 5, "n/mine (2) (stream_time, every 1 ms)": 6})
    assert add_schedule(schedules, "mine", start=10).due_ms == 10
    assert add_schedule(schedules, "mine (2)", start=10).due_ms == 6


def test_a_clock_that_was_ahead_stops_no_wall_clock_schedule() -> None:
    """A restored time two days ahead is due on its grid within an interval. A given start stays."""
    now, interval, day = 1_800_000_000_000, 300_000, 86_400_000
    wall = {"node": None, "callback": lambda _: None, "type_": PunctuationType.WALL_CLOCK_TIME}

    def due(schedules: TaskSchedules, now_ms: int, start: int | None) -> Schedule:
        return schedules.schedule(interval, now_ms=now_ms, start=start, name="compaction", **wall)  # type: ignore[arg-type]

    ahead, schedules = task_schedules(), task_schedules()
    was = due(ahead, now + 2 * day + 7, None).due_ms
    schedules.restore(ahead.grids_ms(0))
    now_due = due(schedules, now, None).due_ms
    assert now < now_due <= now + interval
    assert (was - now_due) % interval == 0
    planned = task_schedules()
    planned.restore(ahead.grids_ms(0))
    assert due(planned, now, was).due_ms == was


MINE = "mine (wall_clock_time, every 300 ms)"


def wall_clock_due(
    schedules: TaskSchedules, now_ms: int = 1_000, start: Start = None, name: str | None = "mine"
) -> int:
    of = PunctuationType.WALL_CLOCK_TIME
    return schedules.schedule(300, of, lambda _: None, now_ms=now_ms, start=start, name=name, node=None).due_ms


@pytest.mark.parametrize(
    ("restored", "start", "due"),
    [
        (1_300, None, 1_300),
        (1_301, None, 1_001),
        (1_600, None, 1_300),
        (1_601, None, 1_001),
        (500, None, 500),
        (0, None, 0),
        (2_000, 2_000, 2_000),
        (2_001, 2_000, 1_701),
        (2_300, 2_000, 2_000),
        (1_700, 1_100, 1_100),
        (1_300, 1_299, 1_300),
    ],
)
def test_a_restored_wall_clock_grid_is_due_within_an_interval(restored: int, start: int | None, due: int) -> None:
    """It stays on its grid: at most one interval ahead, or at its start, and in the past if it was missed."""
    schedules = task_schedules()
    schedules.restore({MINE: restored, "mine2 (stream_time, every 7 ms)": 6})
    assert wall_clock_due(schedules, start=start) == due
    assert schedules.grids_ms(0) == {MINE: due, "mine2 (stream_time, every 7 ms)": 6}


def test_a_new_grid_is_to_be_committed() -> None:
    """Only a named schedule without a restored grid is a new grid to commit."""
    schedules = task_schedules()
    schedules.restore({MINE: 1_100})
    wall_clock_due(schedules, name=None)
    wall_clock_due(schedules)
    assert not schedules.has_new_grid
    wall_clock_due(schedules, name="other")
    assert schedules.has_new_grid
    schedules.restore({"third (wall_clock_time, every 300 ms)": 1_100})
    wall_clock_due(schedules, name="third")
    assert schedules.has_new_grid
    with pytest.raises(ConfigError, match="'mine'"):
        wall_clock_due(schedules)


def test_a_stream_time_grid_is_restored_as_it_was() -> None:
    """A stream-time grid is restored unchanged, however far ahead it is."""
    schedules = task_schedules()
    schedules.restore({"n/mine (stream_time, every 1 ms)": 10**12})
    assert add_schedule(schedules, "mine").due_ms == 10**12
    assert not schedules.has_new_grid


@pytest.mark.parametrize("start", [0, 0.0, timedelta(0), datetime(1970, 1, 1, tzinfo=UTC)])
def test_a_start_may_be_the_epoch(start: Any) -> None:
    """A start at the epoch is in the past, so the schedule is due at once."""
    assert wall_clock_due(task_schedules(), start=start) == 0


LATE_START = datetime(9999, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
"""A float of its milliseconds would lose its microsecond."""


@pytest.mark.parametrize(
    "start",
    [-1, True, 5.5, math.inf, math.nan, "5", timedelta(microseconds=1_500), timedelta(milliseconds=-1), LATE_START],
)
def test_a_start_that_is_not_a_whole_ms(start: Any) -> None:
    """The error has the value and the valid ones."""
    with pytest.raises(ConfigError, match="start must"):
        wall_clock_due(task_schedules(), start=start)


def test_a_name_is_text() -> None:
    """An empty one would be no name."""
    for name in ("", 3):
        with pytest.raises(ConfigError, match="name must be text"):
            wall_clock_due(task_schedules(), name=name)  # type: ignore[arg-type]


def test_a_callback_of_the_tasks_owner_is_checked() -> None:
    """The task's owner must give a function, like a processor."""
    driver = TopologyTestDriver(topology(lambda context: None))
    with pytest.raises(ConfigError, match="callback"):
        driver.task.schedule(10, WALL, None)  # type: ignore[arg-type]


def test_many_that_live_are_all_called() -> None:
    """Removing cancelled schedules keeps all others, in their order."""
    queue, called = PunctuationQueue(), []
    for i in range(10 * SWEEP_MIN):
        made = queue.schedule(10**9, 1_000 - i, lambda _, i=i: called.append(i))  # type: ignore[misc]
        if i % 3:
            made.cancel()
    queue.may_punctuate(1_000)
    assert called == [i for i in reversed(range(10 * SWEEP_MIN)) if i % 3 == 0]


DOCUMENT = DOCS / "streams.md"
DOCUMENT_TEXT = DOCUMENT.read_text(encoding="utf-8")


class GivenSchedules(Processor):
    """Creates the given schedules, and forwards the time of each call."""

    def __init__(self, *schedules: tuple[Any, ...], **named: Any) -> None:
        self._schedules, self._named = schedules, named

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        for interval, kind in self._schedules:
            context.schedule(interval, kind, self.call, **self._named)

    def process(self, record: Record) -> None:
        """Ignores records: only the schedules forward."""

    def call(self, now_ms: int) -> None:
        self.context.forward(Record("now", {"at": now_ms}, now_ms))


def driver_of_schedules(*schedules: tuple[Any, ...], **named: Any) -> TopologyTestDriver:
    builder = StreamsBuilder()
    builder.stream("in").process(lambda: GivenSchedules(*schedules, **named)).to("out")
    return TopologyTestDriver(builder.build())


def call_times(driver: TopologyTestDriver, *stream_times: int, wall_ms: int = 0) -> list[int | None]:
    for at in stream_times:
        driver.pipe("in", key=b"a", value=b"{}", timestamp=at)
    if wall_ms:
        driver.advance_wall_clock(wall_ms)
    return [record.timestamp for record in driver.read("out")]


def test_the_blocks_of_the_document_run() -> None:
    """Each topology of the document can be built, and the cart example writes the notes that the document shows."""
    shown = names_of(DOCUMENT)
    assert len(blocks(DOCUMENT)) == 5
    assert [note[0] for note in shown["notes"]] == [b"ann", b"all"]


def test_a_cart_that_closes_cancels_its_schedule() -> None:
    """Cancelling the handle that `schedule` returned ends the calls."""
    shown = names_of(DOCUMENT)
    driver = TopologyTestDriver(shown["builder"].build())
    driver.pipe("cart-events", key=b"ann", value=b'{"closes": true}', timestamp=0)
    driver.advance_wall_clock(600_000)
    assert driver.read("cart-notes") == []


def test_grids_without_a_start() -> None:
    """Without a start, a stream-time grid begins at 0 and a wall-clock grid one interval from now."""
    assert call_times(driver_of_schedules((5, STREAM))) == []
    assert call_times(driver_of_schedules((5, STREAM)), 0, 4, 5) == [0, 5]
    driver = driver_of_schedules((5, WALL))
    assert (call_times(driver, wall_ms=4), call_times(driver, wall_ms=1)) == ([], [5])


def test_missed_points_are_one_call() -> None:
    """Several missed grid points cause one call, and the grid stays the same."""
    driver = driver_of_schedules((5, STREAM), start=5)
    assert call_times(driver, 4, 21, 24, 25) == [21, 25]


@pytest.mark.parametrize(("name", "after"), [("n", [1_000]), (None, [])])
def test_a_named_grid_survives(name: str | None, after: list[int]) -> None:
    """A named grid survives a restart. An unnamed grid begins one interval after the restart."""
    driver = driver_of_schedules((1_000, WALL), name=name)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.advance_wall_clock(500)
    driver.crash()
    driver.restore()
    assert call_times(driver, wall_ms=500) == after


def test_schedules_that_the_document_forbids_are_rejected() -> None:
    """An invalid argument of `schedule` is rejected by its name, and so is a call outside the task's callbacks."""
    for schedule, named, argument in (
        ((0, STREAM), {}, "interval"),
        ((timedelta(microseconds=1_500), STREAM), {}, "interval"),
        ((5, "stream_time"), {}, "type"),
        ((5, WALL), {"start": datetime(2024, 1, 1)}, "start"),
        ((5, WALL), {"start": -1}, "start"),
    ):
        with pytest.raises(ConfigError, match=f"schedule: {argument}"):
            driver_of_schedules(schedule, **named)
    with pytest.raises(ConfigError, match="'n'"):
        driver_of_schedules((5, STREAM), (5, WALL), name="n")
    made: list[GivenSchedules] = []

    def supplier() -> GivenSchedules:
        made.append(GivenSchedules((5, STREAM)))
        return made[-1]

    builder = StreamsBuilder()
    builder.stream("in").process(supplier).to("out")
    TopologyTestDriver(builder.build())
    kept = made[-1]
    with pytest.raises(IllegalState, match="schedule"):
        kept.context.schedule(5, STREAM, kept.call)
    with pytest.raises(IllegalState, match="init"):
        GivenSchedules().context.schedule(5, STREAM, kept.call)


def test_settings_that_the_document_names_exist() -> None:
    """Each `streams.` setting that the document names exists."""
    named = set(re.findall(r"`streams\.([a-z_]+)", DOCUMENT_TEXT))
    assert len(named) > 10
    assert named - StreamsSettings.model_fields.keys() == set()
