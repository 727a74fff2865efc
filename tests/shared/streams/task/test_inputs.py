"""A task's inputs: the order over partitions, idle partitions, limits and the time of a turn."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.turn_time import PROCESSING_MS_MAX, TurnTime
from penstock.shared.streams.settings import BUFFERED_RECORDS_MAX
from penstock.shared.streams.task.inputs import TaskInputs
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.time_shares import RUN_RECORDS_FIRST
from penstock.shared.streams.task.watermarks import Watermark, watermark_record
from penstock.shared.testing.manual_clock import ManualClock
from tests.consumed import as_consumed


def inputs_of(
    seen: list[tuple[str, int]], max_task_idle_ms: int = 0, max_future_ms: int | None = None
) -> tuple[TaskInputs, StreamTask]:
    """Two merged topics and an independent one; `seen` gets keys and timestamps."""

    def see(record: Record) -> None:
        seen.append((record.key, record.timestamp))

    builder = StreamsBuilder()
    builder.stream("a").merge(builder.stream("b")).peek(see)
    builder.stream("c").peek(see)
    task = StreamTask(builder.build(), 0, application="app", max_future_ms=max_future_ms)
    task.initialize(0)
    return TaskInputs(task, task.topology, max_task_idle_ms), task


def records(topic: str, *timestamps: int) -> Columns:
    key = topic.encode()
    return Columns.of([ConsumerRecord(topic, 0, i, at, key, b"{}") for i, at in enumerate(timestamps)])


def test_each_part_has_its_own_order() -> None:
    """Merged topics are processed by time and wait for each other. An independent topic waits for none."""
    seen: list[tuple[str, int]] = []
    inputs, task = inputs_of(seen)
    for columns in (records("a", 1, 9), records("c", 50)):
        inputs.add(columns)
    inputs.process(0, {"b": 7})
    assert (seen, inputs.holds("a"), inputs.holds("c")) == ([("c", 50)], True, False)
    inputs.add(records("b", 5))
    inputs.process(0, {"b": 0})
    assert seen[1:] == [("a", 1), ("b", 5), ("a", 9)]
    assert task.sources == {"a": 2, "b": 1, "c": 1}


def test_an_idle_partition_is_waited_for() -> None:
    """The other partitions wait for it for `max_task_idle_ms`."""
    seen: list[tuple[str, int]] = []
    inputs, _ = inputs_of(seen, 100)
    inputs.add(records("a", 1))
    for now in (0, 99):
        inputs.process(now, {"b": 0})
    assert seen == []
    inputs.process(100, {"b": 0})
    assert seen == [("a", 1)]


def test_a_topic_is_full_beyond_the_limit() -> None:
    """A topic with more buffered records than the limit is not fetched. After a clear it has none."""
    inputs, _ = inputs_of([])
    inputs.add(records("a", *range(BUFFERED_RECORDS_MAX)))
    assert not inputs.is_full("a")
    inputs.add(records("a", *range(BUFFERED_RECORDS_MAX + 1)))
    assert inputs.is_full("a")
    assert not inputs.is_full("b")
    inputs.clear()
    assert not inputs.holds("a")


def test_a_record_too_far_in_the_future_moves_nothing() -> None:
    """A record further ahead of the clock than `max_future_ms` is a dead letter. The records around it are
    processed."""
    seen: list[tuple[str, int]] = []
    inputs, task = inputs_of(seen, max_future_ms=100)
    inputs.add(records("c", 2_101, 50, 2_100, 9_999, 9_998, 60))
    inputs.process(2_000, {})
    assert seen == [("c", 50), ("c", 2_100), ("c", 60)]
    assert (task.stream_time_ms, task.sources["c"], task.metrics.dead_letters_total) == (2_100, 6, 3)
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in task.prepare_commit(0).outputs]
    assert [(dead_letter.record.offset, dead_letter.stage) for dead_letter in dead_letters] == [
        (i, "deserialize") for i in (0, 3, 4)
    ]
    assert dead_letters[0].message == "c: the record lies 101 ms in the future; max_future_ms=100"
    task.reject(records("c", 1).record(0), DataError("again"))
    assert task.metrics.dead_letters_total == 3


def slow_inputs(ms: int, seen: list[int], **named: Any) -> tuple[TaskInputs, TurnTime]:
    """A task whose records take `ms` each; `seen` gets their timestamps."""
    clock = ManualClock()

    def see(record: Record) -> None:
        seen.append(record.timestamp)
        clock.advance(ms)

    builder = StreamsBuilder()
    builder.stream("a").peek(see)
    builder.stream("b").peek(see)
    task = StreamTask(builder.build(), 0, application="app", **named)
    task.initialize(0)
    return TaskInputs(task, task.topology), TurnTime(clock)


def test_slow_records_take_no_more_than_the_turns_time() -> None:
    """Records that a turn has no time for stay buffered in order, and later turns process them."""
    seen: list[int] = []
    inputs, time = slow_inputs(10, seen)
    inputs.add(records("a", *range(25)))
    turns = []
    while inputs.holds("a"):
        time.begin(inputs.waiting)
        inputs.process(0, {}, time)
        turns.append((len(seen), inputs.is_cut))
    assert turns == [(10, True), (20, True), (25, False)]
    assert seen == list(range(25))


def test_a_part_with_slow_records_leaves_the_others_their_time() -> None:
    """Each part takes a record in every turn, however slow the one before it is."""
    seen: list[int] = []
    inputs, time = slow_inputs(PROCESSING_MS_MAX, seen)
    inputs.add(records("a", *range(5)))
    inputs.add(records("b", *range(100, 105)))
    time.begin(inputs.waiting)
    inputs.process(0, {}, time)
    assert (seen, inputs.is_cut) == ([0, 100], True)
    inputs.clear()
    assert not inputs.is_cut


def test_a_cut_run_may_have_records_from_the_future() -> None:
    """The records after the cut are neither processed nor rejected yet."""
    seen: list[int] = []
    inputs, time = slow_inputs(PROCESSING_MS_MAX, seen, max_future_ms=100)
    inputs.add(records("a", 5, 9_999, 6))
    turns = []
    for _ in range(2):
        time.begin(inputs.waiting)
        inputs.process(0, {}, time)
        turns.append((list(seen), inputs.is_cut))
    assert turns == [([5], True), ([5, 6], False)]


def test_batches_of_columns_are_cut_to_what_there_is_time_for() -> None:
    """A source that is processed in columns gets shorter batches after slow ones, and loses no record."""
    clock, runs = ManualClock(), []

    def decode(topic: str, value: bytes | None) -> Any:
        clock.advance(1)
        return {}

    builder = StreamsBuilder()
    stream = builder.stream("in", value=decode)
    stream.group_by_key().session_window(10_000).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build(), 0, application="app")
    task.initialize(0)
    inputs, time = TaskInputs(task, task.topology), TurnTime(clock)
    inputs.add(Columns.of([ConsumerRecord("in", 0, i, i, b"k", b"{}") for i in range(3_000)]))
    while inputs.holds("in"):
        began_ms, before = clock.monotonic_ms(), task.sources.get("in", 0)
        time.begin(inputs.waiting)
        inputs.process(0, {}, time)
        runs.append((task.sources["in"] - before, clock.monotonic_ms() - began_ms))
    assert runs[0] == (RUN_RECORDS_FIRST, RUN_RECORDS_FIRST)
    assert {took for _, took in runs[1:]} == {PROCESSING_MS_MAX}
    assert [window.states for window in task.stores["s"].rows()] == [[3_000]]


def test_punctuation_goes_by_the_time_of_all_topics() -> None:
    """A STREAM_TIME schedule sees records of two topics in one order of time, and fires once over a gap."""
    called: list[int] = []
    _, task = inputs_of([])
    inputs = TaskInputs(task, task.topology)
    task.schedule(10, PunctuationType.STREAM_TIME, called.append)
    inputs.add(records("a", 20, 142, 155, 160))
    inputs.add(records("b", 25, 145, 159, 161))
    inputs.process(0, {"a": 0, "b": 0})
    assert called == [20, 142, 155, 160]


def test_watermarks_are_taken_among_records() -> None:
    """A watermark of another task is passed to no node. A turn that ends before it keeps it."""
    seen: list[tuple[str, int]] = []
    clock = ManualClock()

    def see(record: Record) -> None:
        seen.append((record.key, record.timestamp))
        clock.advance(PROCESSING_MS_MAX)

    builder = StreamsBuilder()
    builder.stream("in").key_by(lambda record: record.key, name="x").repartition().peek(see)
    task = StreamTask(builder.build().of_application("app"), 0, application="app")
    task.initialize(0)
    inputs, time = TaskInputs(task, task.topology), TurnTime(clock)
    own = "app-x-repartition"
    watermarks = [watermark_record(own, 0, Watermark(p, 2, 50)) for p in range(2)]
    rows = [
        (b"a", b"{}", ()),
        (None, None, watermarks[0].headers),
        (None, None, ()),
        (None, None, watermarks[1].headers),
    ]
    inputs.add(Columns.of([ConsumerRecord(own, 0, i, 9, *row) for i, row in enumerate(rows)]))
    positions = []
    while inputs.holds(own):
        time.begin(inputs.waiting)
        inputs.process(0, {}, time)
        positions.append(task.sources[own])
    assert positions == [1, 3, 4]
    assert seen == [("a", 9), (None, 9)]
    assert task.times._watermarks == {own: {0: Watermark(0, 2, 50), 1: Watermark(1, 2, 50)}}


def test_a_record_that_blocks_the_heartbeats_is_logged() -> None:
    """The record that takes long is the last of its run, so the log names it."""
    clock = ManualClock()

    def wait(record: Record) -> None:
        clock.advance(500 if record.timestamp == 7 else 1)

    builder = StreamsBuilder()
    builder.stream("in").peek(wait)
    task = StreamTask(builder.build(), 3, application="app")
    task.initialize(0)
    inputs, time = TaskInputs(task, task.topology, blocking_ms_max=506), TurnTime(clock)
    with capture_logs() as logs:
        for _ in range(2):
            inputs.add(records("in", *range(20)))
            time.begin(inputs.waiting)
            inputs.process(0, {}, time)
    assert [(line["step"], line["ms"]) for line in logs if "heartbeats" in line["event"]] == [
        ("8 records up to in-3@7", 507)
    ]
