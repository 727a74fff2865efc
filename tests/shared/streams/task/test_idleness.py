"""Time that advances without records: when, how far operators' times follow, how it is stored, and the watermarks
between tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from zlib import crc32

import msgspec
import pytest

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader
from penstock.shared.streams.changelog.format import PROGRESS, Progress, decode_entry, decode_progress
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext, TimedProcessor
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.idleness import Idleness, advance_idle_time
from penstock.shared.streams.task.inputs import TaskInputs
from penstock.shared.streams.task.operator_times import OperatorTimes
from penstock.shared.streams.task.restore import restore_changes, restore_progress
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.watermarks import (
    HEADER,
    NO_LIMIT,
    Watermark,
    holds_records,
    watermark_of,
    watermark_record,
    watermarks_in,
)
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.manual_clock import ManualClock
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.consumed import as_consumed


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


def test_only_time_in_which_the_end_was_known_is_quiet() -> None:
    """While no fetch is answered, no time counts. The next answer shows that all of it was quiet."""
    idle = Idleness(100)
    for now_ms, age_ms, due_ms in (
        (0, 0, 0),
        (100, 100, 0),
        (500, 500, 0),
        (5_050, 5_060, 0),
        (5_050, 50, 5_000),
        (5_149, 50, 0),
        (5_150, 50, 100),
    ):
        assert idle.due_ms(now_ms, {"in": 1}, at_end=True, age_ms=age_ms) == due_ms


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


class SteppedClock(ManualClock):
    """A clock whose wall clock is set forward by an hour when it reaches 110 ms."""

    def now_ms(self) -> int:
        return super().now_ms() + 3_600_000 * (self.monotonic_ms() >= 110)


def test_a_step_of_the_wall_clock_is_no_idleness() -> None:
    """If the wall clock is set forward, stream time advances by the time that has passed, and not by the step."""
    driver = driver_of()
    driver.clock = SteppedClock()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    for _ in range(20):
        driver.advance_wall_clock(10)
    assert driver.clock.now_ms() == 3_600_200
    assert driver.task.stream_time_ms == 220


def test_a_record_behind_an_idle_advance_is_late() -> None:
    """A record behind a time that idleness advanced is late, also after a crash."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.advance_wall_clock(100)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=30)
    assert len(driver.read("in-late")) == 2
    assert driver.task.stream_time_ms == 120


def test_progress_records_have_the_idle_time() -> None:
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


def test_idleness_is_off_by_default() -> None:
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


@pytest.mark.parametrize("kind", ["session", "tumbling", "hopping", "sliding"])
def test_watermarks_wait_for_updates_that_the_commit_forwards(kind: str) -> None:
    """A window that changed and then closed since the last commit is forwarded only at the commit. Its result is not
    late in the windows behind a repartition topic, nor is the retraction of a session that was merged."""
    builder = StreamsBuilder()
    times = (60_000, 30_000) if kind == "hopping" else (60_000,)
    windows = getattr(builder.stream("in").group_by_key(), f"{kind}_window")(*times).aggregate("first", n=Count())
    # A retraction counts here too.
    updates = windows.on_update().map_values(lambda result: {"n": 1}).key_by(lambda record: "all", name="all")
    updates.group_by_key().tumbling_window(60_000).aggregate("second", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), deduplicate_updates=True, idle_timeout_ms=1_000, commit_each=False)
    driver.pipe("in", key=b"k", value=b"{}", timestamp=1_000)
    driver.commit()
    driver.clock.advance(2_000)
    driver.pipe_columns("in", [(b"k", b"{}", at) for at in (50_000, 80_000, 600_000)])
    driver.commit()
    driver.advance_wall_clock(1_000)
    driver.commit()
    assert driver.read("in-late") == []


def test_a_mark_that_was_taken_is_not_taken_again() -> None:
    """A watermark advances the position as a record does. Watermarks before the position are skipped."""
    driver = driver_of()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.task.take_watermark("own", 4, Watermark(0, 1, 50))
    assert (driver.task.sources["own"], driver.task.needs_commit) == (5, True)
    driver.task.take_watermark("own", 3, Watermark(0, 1, 60))
    assert driver.task.sources["own"] == 5


IDLE_MS = 1_000
TASKS = 2


class Application:
    """All tasks of a topology. Repartition topics are lists here, and `out` has the values of other topics."""

    def __init__(self, build: Callable[[], Topology]) -> None:
        self.now_ms = 0
        self.logs: dict[tuple[str, int], int] = {}
        self.changelogs: list[list[tuple[bytes | None, bytes]]] = [[] for _ in range(TASKS)]
        self.out: dict[str, list[dict[str, object]]] = {}
        self.start(build)

    def start(self, build: Callable[[], Topology]) -> None:
        """Run a topology with the state of the changelogs."""
        self.topology = build().of_application("app")
        self.own = set(self.topology.internal_topics())
        self.tasks = [StreamTask(self.topology, p, application="app") for p in range(TASKS)]
        for task in self.tasks:
            reader = ChangelogReader(partial(restore_changes, task), epoch=task.epoch)
            for offset, (key, value) in enumerate(self.changelogs[task.partition]):
                reader.feed_record(offset, key, value)
            if reader.progress is not None:
                restore_progress(task, reader.progress)
            task.initialize(self.now_ms)
        self.inputs = [TaskInputs(task) for task in self.tasks]
        self.idle = [Idleness(IDLE_MS) for _ in self.tasks]

    def append(self, topic: str, partition: int, record: ProducerRecord) -> None:
        at = self.logs.get((topic, partition), 0)
        self.logs[topic, partition] = at + 1
        row = (record.timestamp or 0, record.key, record.value, record.headers)
        self.inputs[partition].add(Columns.of([ConsumerRecord(topic, partition, at, *row)]))

    def send(self, partition: int, key: str, timestamp: int, topic: str = "in") -> None:
        self.append(topic, partition, ProducerRecord(topic, b'{"n":1}', key.encode(), (), None, timestamp))
        self.settle()

    def settle(self) -> None:
        """Process and commit until there is nothing left to."""
        lags = dict.fromkeys(self.topology.source_topics(), 0)
        for inputs in self.inputs:
            inputs.process(self.now_ms, lags)
        for task in [task for task in self.tasks if task.needs_commit]:
            commit = task.prepare_commit(self.now_ms)
            self.changelogs[task.partition] += commit.changelog
            for record in commit.outputs:
                if record.topic not in self.own:
                    self.out.setdefault(record.topic, []).append(msgspec.json.decode(record.value or b"null"))
                elif record.partition is not None:
                    self.append(record.topic, record.partition, record)
                else:
                    self.append(record.topic, crc32(record.key or b"") % TASKS, record)
            task.commit_succeeded()
        if any(len(group) for inputs in self.inputs for group in inputs._groups):
            self.settle()

    def wait(self, ms: int, at_end: tuple[bool, ...] = (True,) * TASKS) -> None:
        """Let time pass, in which only sources that are read to their end are idle."""
        for _ in range(0, ms, IDLE_MS):
            self.now_ms += IDLE_MS
            for idle, task, is_quiet in zip(self.idle, self.tasks, at_end, strict=True):
                advance_idle_time(idle, task, self.now_ms, at_end=is_quiet, tasks=TASKS)
            self.settle()


def chained() -> Topology:
    """A user's sessions, counted in windows under one key behind a repartition topic."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(3_000)
    counted = windows.aggregate("first", n=Count()).on_close().map_values(lambda session: {"n": session.results["n"]})
    sessions = counted.key_by(lambda record: "all", name="all")
    sessions.group_by_key().tumbling_window(10_000).aggregate("second", n=Count(), sum=Sum("n")).on_close().to("out")
    return builder.build()


def rekeyed() -> Topology:
    """Records by another key, straight into windows."""
    builder = StreamsBuilder()
    stream = builder.stream("in").key_by(lambda record: "all", name="all")
    stream.group_by_key().session_window(2_000).aggregate("second", n=Count()).on_close().to("out")
    return builder.build()


def test_results_of_windows_that_time_closes_are_in_time_for_further_windows() -> None:
    """Sessions that close by time alone are neither late nor missing in the windows behind a repartition topic."""
    app = Application(chained)
    for i in range(40):
        app.send(0, "ann", i * 5_000)
        app.send(1, "bob", i * 5_000 + 1)
    app.wait(60_000)
    assert "in-late" not in app.out
    windows = app.out["out"]
    assert [(one["n"], one["sum"]) for one in windows] == [(4, 4)] * 20
    assert [one["start"] for one in windows] == list(range(0, 200_000, 10_000))


def test_time_waits_for_the_tasks_that_are_not_quiet() -> None:
    """While one task still reads, operators behind all tasks advance at most to that task's watermark."""
    app = Application(chained)
    app.send(0, "ann", 1_000)
    app.send(1, "bob", 2_000)
    app.wait(60_000, at_end=(True, False))
    assert "out" not in app.out, "task 1 may have more of the first ten seconds"
    app.send(1, "bob", 4_000)
    app.wait(60_000)
    assert [(one["start"], one["n"], one["sum"]) for one in app.out["out"]] == [(0, 2, 3)]
    assert "in-late" not in app.out


def test_an_idle_task_does_not_hold_back_others() -> None:
    """The task of an empty partition reports that, and time follows the watermarks of the others."""
    app = Application(chained)
    app.send(1, "bob", 2_000)
    app.wait(60_000)
    assert [one["n"] for one in app.out["out"]] == [1]


def test_records_that_only_got_another_key_are_closed_too() -> None:
    """Without an operator before the repartition topic, the times of the tasks' sources are the watermarks."""
    app = Application(rekeyed)
    app.send(0, "ann", 1_000)
    app.send(1, "bob", 2_500)
    app.wait(5_000)
    assert [(one["start"], one["end"], one["n"]) for one in app.out["out"]] == [(1_000, 2_500, 2)]


def independent() -> Topology:
    """Records of `a` by another key, straight into windows, beside a topic `b` that has nothing to do with them."""
    builder = StreamsBuilder()
    rekeyed_ = builder.stream("a").key_by(lambda record: "all", name="all")
    rekeyed_.group_by_key().tumbling_window(1_000).aggregate("second", n=Count()).on_close().to("out")
    builder.stream("b").to("copies")
    return builder.build()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_watermark_is_the_time_of_its_own_sources(restarts: bool) -> None:
    """A topic whose time is ahead does not make another topic's records late behind a repartition topic, also after a
    restart."""
    app = Application(independent)
    for partition in range(TASKS):
        app.send(partition, "ann", 100, "a")
        app.send(partition, "bob", 90_000, "b")
    if restarts:
        app.start(independent)
    app.wait(IDLE_MS)
    app.send(0, "ann", 200, "a")
    assert "a-late" not in app.out
    app.wait(5_000)
    assert [(one["start"], one["n"]) for one in app.out["out"]] == [(0, TASKS + 1)]


def test_a_restarted_task_waits_for_all_watermarks_again() -> None:
    """Watermarks are not stored, so after a restart no window closes until every task has sent its watermark again."""
    topology = rekeyed().of_application("app")
    task = StreamTask(topology, 0, application="app")
    task.initialize(0)
    (operator,) = task.times.operators
    operator.stream_time_ms = 100
    times = OperatorTimes(topology, {"second": operator, **task._processors})
    topic = "app-all-repartition"
    for watermark, expected in (
        (Watermark(1, 3, 5_000), 100),
        (Watermark(2, 3, NO_LIMIT), 100),
        (Watermark(0, 3, 700), 700),
        (Watermark(0, 3, 600), 700),
        (Watermark(0, 3, 9_000), 5_000),
    ):
        times.take(topic, watermark)
        times.advance(10)
        assert operator.stream_time_ms == expected


def test_only_watermarks_of_tasks_without_records() -> None:
    """If no task has had a record, no time is known, and none is forwarded."""
    topology = rekeyed().of_application("app")
    task = StreamTask(topology, 0, application="app")
    topic = "app-all-repartition"
    assert task.times.watermarks() == {topic: NO_LIMIT}
    task.times.operators[0].stream_time_ms = 100
    task.times.take(topic, Watermark(0, 1, NO_LIMIT))
    task.times.advance(10)
    assert task.times.operators[0].stream_time_ms == 100
    task.times.advance_source("in", 100)
    assert task.times.watermarks() == {topic: 100}


def test_a_forwarding_task_waits_for_all_watermarks() -> None:
    """A task that only forwards records of a repartition topic forwards their watermarks, once it has all of them."""
    builder = StreamsBuilder()
    first = builder.stream("in").key_by(lambda record: "a", name="one").repartition()
    second = first.key_by(lambda record: "b", name="two").repartition()
    second.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build().of_application("app"), 0, application="app")
    task.times.advance_source("in", 50)
    assert task.times.watermarks() == {"app-one-repartition": 50}
    task.times.take("app-one-repartition", Watermark(0, 1, 40))
    assert task.times.watermarks() == {"app-one-repartition": 50, "app-two-repartition": 40}


def test_a_record_that_passes_no_operator_may_have_the_time_of_its_source() -> None:
    """If records of a source reach the topic beside an operator's results, the source's time limits the watermark:
    before the operator has a time, and while its time is ahead, because it follows other tasks."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    again = stream.key_by(lambda record: "a", name="one").group_by_key()
    sessions = again.session_window(10).aggregate("first", n=Count()).on_close().map_values(lambda one: {"n": 1})
    both = stream.merge(sessions).key_by(lambda record: "b", name="two").group_by_key()
    both.session_window(10).aggregate("second", n=Count()).on_close().to("out")
    task = StreamTask(builder.build().of_application("app"), 0, application="app")
    task.initialize(0)
    task.times.advance_source("in", 50)
    task.times.take("app-one-repartition", Watermark(0, 1, NO_LIMIT))
    assert task.times.watermarks()["app-two-repartition"] == 50
    task.times.take("app-one-repartition", Watermark(0, 1, 900))
    task.times.operators[0].advance_time(900)
    assert task.times.watermarks()["app-two-repartition"] == 50


def test_the_watermark_of_a_merged_stream_is_the_highest_time_of_its_sources() -> None:
    """A merged stream has one time, so a source topic that is behind the others, or has no record, does not hold it."""
    builder = StreamsBuilder()
    merged = builder.stream("a").merge(builder.stream("b")).key_by(lambda record: "all", name="all").group_by_key()
    merged.session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build().of_application("app"), 0, application="app")
    for topic, time_ms, expected in (("a", 50, 50), ("b", 90, 90), ("a", 60, 90)):
        task.times.advance_source(topic, time_ms)
        assert task.times.watermarks() == {"app-all-repartition": expected}


@pytest.mark.parametrize(
    ("kind", "expected"), [("session", 100 - 3 - 20), ("tumbling", 100 - 3 - 20), ("sliding", 100 - 3 - 20)]
)
def test_the_earliest_time_of_later_window_results(kind: str, expected: int) -> None:
    """The windows of 20 ms with a grace of 3 ms that are open at time 100 give no result older than that."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    windows = getattr(grouped, f"{kind}_window")(20, grace=3).aggregate("s", n=Count())
    windows.on_close().to("out")
    assert at(100, builder.build()).results_from_ms() == expected


def test_the_earliest_time_of_later_join_results() -> None:
    """A left record without a match is forwarded at its own time, after its window and the grace."""
    builder = StreamsBuilder()
    left = builder.stream("left")
    left.left_join(builder.stream("right"), lambda a, b: [a, b], JoinWindows(5, 7, 3), name="j").to("out")
    assert at(100, builder.build()).results_from_ms() == 100 - 3 - 7 - 5


def at(time_ms: int, topology: Topology) -> TimedProcessor:
    """Return the operator of a topology, advanced to a time."""
    task = StreamTask(topology, 0, application="app")
    task.initialize(0)
    (operator,) = task.times.operators
    operator.advance_time(time_ms)
    return operator


def waiting(kind: str, close_delay_ms: int) -> Topology:
    """Windows of 1 s, or records that are joined with those of the same time, whose results get another key."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    grouped = stream.group_by_key()
    results = {
        "session": lambda: grouped.session_window(1_000, close_delay_ms - 1_000).aggregate("s", n=Count()).on_close(),
        "tumbling": lambda: grouped.tumbling_window(1_000, close_delay_ms).aggregate("s", n=Count()).on_close(),
        "hopping": lambda: grouped.hopping_window(1_000, 500, close_delay_ms).aggregate("s", n=Count()).on_close(),
        "join": lambda: stream.left_join(
            builder.stream("other"), lambda a, b: {"n": 1}, JoinWindows.of(0, close_delay_ms), name="s"
        ),
    }[kind]()
    again = results.map_values(lambda result: {"n": 1}).key_by(lambda record: "all", name="all").group_by_key()
    again.tumbling_window(1_000).aggregate("second", n=Count()).on_close().to("out")
    return builder.build()


WAITING = pytest.mark.parametrize("kind", ["session", "tumbling", "hopping", "join"])


@WAITING
def test_watermarks_follow_what_was_closed(kind: str) -> None:
    """After a change of the grace no watermark is ahead of a result that may still come, nor behind a closed window. It
    stays until an advance closes the windows that are due, or time has caught up."""
    app = Application(lambda: waiting(kind, 10_000))
    app.send(0, "ann", 5_000)
    app.send(0, "ann", 30_000)
    task = app.tasks[0]
    topic = "app-all-repartition"
    watermark = task.times.watermarks()[topic]
    assert watermark == 20_000 - 1_000 * (kind in ("tumbling", "hopping"))
    for close_delay_ms, moved_ms in ((3_000, 8_000), (40_000, 1_000)):
        progress = task.progress_record(0)
        topology = waiting(kind, close_delay_ms).of_application("app")
        task = StreamTask(topology, 0, application="app")
        restore_progress(task, progress)
        task.initialize(0)
        assert task.times.watermarks()[topic] == watermark
        task.advance_time(1_000)
        assert task.times.watermarks()[topic] == (watermark := watermark + moved_ms * (close_delay_ms == 3_000))


@WAITING
def test_results_that_a_shorter_delay_closes_are_in_time_behind_a_topic(kind: str) -> None:
    """The watermarks that a restarted task sends before its first advance do not go past them."""
    app = Application(lambda: waiting(kind, 100_000))
    for timestamp in (1_000, 105_000, 112_000, 131_000):  # the first is closed, so there is time behind the topic
        app.send(0, f"user {timestamp}", timestamp)
    app.start(lambda: waiting(kind, 3_000))
    app.wait(120_000)
    assert "in-late" not in app.out
    assert [one["start"] for one in app.out["out"]] == [1_000, 105_000, 112_000, 131_000]


@pytest.mark.parametrize(("time_ms", "timestamp"), [(70, 70), (-5, 0), (NO_LIMIT, 0)])
def test_a_mark_comes_back_as_it_was_written(time_ms: int, timestamp: int) -> None:
    """A watermark record has no key or value, goes to its partition at a valid timestamp, and is decoded unchanged."""
    watermark = Watermark(1, 4, time_ms)
    record = watermark_record("app-x-repartition", 3, watermark)
    assert (record.key, record.value, record.partition, record.timestamp) == (None, None, 3, timestamp)
    assert watermark_of(record.headers) == watermark


def test_watermarks_among_records() -> None:
    """Watermarks are found at their positions among records. A record without a key and value is not a watermark."""
    watermark = Watermark(0, 2, 5)
    plain = ProducerRecord("t", b"{}", b"k", (("a", b"b"),), 0, 1)
    rows = [
        plain,
        watermark_record("t", 0, watermark),
        ProducerRecord("t", None, None, (), 0, 1),
        watermark_record("t", 0, watermark),
    ]
    columns = Columns.of([as_consumed(record, i) for i, record in enumerate(rows)])
    assert list(watermarks_in(columns)) == [(1, watermark), (3, watermark)]
    assert [holds_records(part) for part in (columns, columns[1:2], columns[2:3])] == [True, False, True]
    assert list(watermarks_in(Columns.of([ConsumerRecord("t", 0, 0, 1, None, None)]))) == []


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b'{"x":' + b"[" * 100_000])
def test_a_watermark_that_cannot_be_read_is_a_corrupt_record(value: bytes) -> None:
    """Its error has the record's coordinates."""
    record = ProducerRecord("t", None, None, ((HEADER, value),), 0, 1)
    with pytest.raises(CorruptRecord, match=f"t-0@7: .*{HEADER}"):
        list(watermarks_in(Columns.of([as_consumed(record, 7)])))
