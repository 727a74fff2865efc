"""A task's inputs: which record is next, when a partition keeps the others waiting, limits, and the time of a turn."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.errors import ConfigError, DataError, ProcessingFailed
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.turn_time import PROCESSING_MS_MAX, TurnTime
from penstock.shared.streams.settings import BUFFERED_RECORDS_MAX
from penstock.shared.streams.task.inputs import TaskInputs
from penstock.shared.streams.task.partition_group import NEVER_WAIT, PartitionGroup, RecordQueue
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.time_shares import RUN_RECORDS_FIRST, RUN_RECORDS_MAX, RUN_RECORDS_MIN, RunLength
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
    return TaskInputs(task, max_task_idle_ms), task


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


def test_a_record_too_far_in_the_future_keeps_no_topic_waiting() -> None:
    """A record that will be rejected has no place in the order of timestamps, so the records behind it keep theirs."""
    seen: list[tuple[str, int]] = []
    inputs, task = inputs_of(seen, max_future_ms=100)
    inputs.add(records("a", 1, 9_999, 3, 150, 9_999))
    inputs.add(records("b", 2, 9_998, 9_997, 4, 5, 151))
    inputs.process(50, {"a": 0, "b": 0})
    assert seen == [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 5), ("a", 150)]
    assert (task.stream_time_ms, task.sources, task.metrics.dead_letters_total) == (150, {"a": 5, "b": 6}, 5)


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
    return TaskInputs(task), TurnTime(clock)


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
    inputs, time = TaskInputs(task), TurnTime(clock)
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
    inputs = TaskInputs(task)
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
    inputs, time = TaskInputs(task), TurnTime(clock)
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_record_that_blocks_the_heartbeats_is_logged(fails: bool) -> None:
    """The record that takes long is the last of its run, so the log names it, also if it fails."""
    clock = ManualClock()

    def wait(record: Record) -> None:
        clock.advance(500 if record.timestamp == 7 else 1)
        if fails and record.timestamp == 7:
            raise MemoryError

    builder = StreamsBuilder()
    builder.stream("in").peek(wait)
    task = StreamTask(builder.build(), 3, application="app")
    task.initialize(0)
    inputs, time = TaskInputs(task, blocking_ms_max=506), TurnTime(clock)
    inputs.add(records("in", *range(20)))
    with capture_logs() as logs, pytest.raises(MemoryError) if fails else nullcontext():
        while inputs.holds("in"):
            time.begin(inputs.waiting)
            inputs.process(0, {}, time)
    assert [(line["step"], line["ms"]) for line in logs if "heartbeats" in line["event"]] == [
        ("8 records up to in-3@7", 507)
    ]


def test_a_punctuation_that_blocks_the_heartbeats_and_fails_is_logged() -> None:
    """A punctuation after the last record of a run names that record."""
    clock = ManualClock()

    def fail(now_ms: int) -> None:
        clock.advance(500)
        raise ConfigError("punctuation")

    builder = StreamsBuilder()
    builder.stream("in").peek(lambda record: None)
    task = StreamTask(builder.build(), 3, application="app")
    task.initialize(0)
    task.schedule(10, PunctuationType.STREAM_TIME, fail)
    inputs, time = TaskInputs(task, blocking_ms_max=400), TurnTime(clock)
    inputs.add(records("in", 20))
    time.begin(inputs.waiting)
    with capture_logs() as logs, pytest.raises(ProcessingFailed, match=r"punctuation after in-0@0"):
        inputs.process(0, {}, time)
    assert [line["step"] for line in logs if "heartbeats" in line["event"]] == ["1 records up to in-3@0"]


NOTHING_MORE = {"a": 0, "b": 0}


def columns(topic: str, *timestamps: int, first: int = 0) -> Columns:
    return Columns.of([ConsumerRecord(topic, 0, first + i, at, None, None) for i, at in enumerate(timestamps)])


def group_of(max_task_idle_ms: int = 0, **timestamps: tuple[int, ...]) -> PartitionGroup:
    group = PartitionGroup(["a", "b"], max_task_idle_ms)
    for topic, times in timestamps.items():
        group.queues[topic].add(columns(topic, *times))
    return group


def taken(group: PartitionGroup) -> list[tuple[str, int]]:
    """All buffered records in the order of processing, by topic and timestamp."""
    found = []
    while len(group):
        run = group.next_run()
        found += [(run.topic, at) for at in run.timestamps.tolist()]
    return found


def test_the_lowest_timestamp_is_next() -> None:
    """The record with the lowest timestamp is next. Records of one partition stay in the order of offsets."""
    group = group_of(a=(1, 5, 3), b=(2, 4, 6))
    assert taken(group) == [("a", 1), ("b", 2), ("b", 4), ("a", 5), ("a", 3), ("b", 6)]
    assert len(group) == 0


def test_of_equal_times_the_first_topic_is_next() -> None:
    """Of equal timestamps the first topic is next, so that a replay has the same order."""
    assert taken(group_of(a=(1, 2), b=(1, 1, 2))) == [("a", 1), ("b", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_run_is_as_long_as_the_order_allows() -> None:
    """Records of one partition that follow each other are handed out together."""
    group = group_of(a=(1, 2, 3, 9), b=(5,))
    assert [len(group.next_run()) for _ in range(3)] == [3, 1, 1]


def test_a_run_ends_at_the_nearest_of_the_other_partitions() -> None:
    """Of three partitions the second lowest timestamp limits the run, whichever topic it is of."""
    times = {"a": (1, 2, 3, 10), "b": (5, 6), "c": (2, 2, 6)}
    for topics in (["a", "b", "c"], ["c", "b", "a"]):
        group = PartitionGroup(topics, NEVER_WAIT)
        for topic in topics:
            group.queues[topic].add(columns(topic, *times[topic]))
        merged = [(at, topics.index(topic), topic) for topic, own in times.items() for at in own]
        assert taken(group) == [(topic, at) for at, _, topic in sorted(merged)]


def test_of_several_partitions_the_one_with_a_record_to_reject_is_next() -> None:
    """Its record goes first, although the second lowest timestamp is of a third partition."""
    group = PartitionGroup(["a", "b", "c"], NEVER_WAIT)
    for topic, times in {"a": (2,), "b": (3,), "c": (99, 1)}.items():
        group.queues[topic].add(columns(topic, *times))
    runs = [group.next_run(latest_ms=10) for _ in range(4)]
    assert [(run.topic, run.timestamps.tolist()) for run in runs] == [("c", [99]), ("c", [1]), ("a", [2]), ("b", [3])]


def test_a_record_out_of_order_does_not_wait() -> None:
    """The head of a partition decides, not the records behind it: an old record behind a new one waits with it."""
    assert taken(group_of(a=(10, 1), b=(5,))) == [("b", 5), ("a", 10), ("a", 1)]


def test_nothing_at_hand_is_not_ready() -> None:
    """Without a buffered record a group is never ready."""
    assert not group_of().is_ready(0, NOTHING_MORE)
    assert not group_of(NEVER_WAIT).is_ready(0, NOTHING_MORE)


def test_all_partitions_at_hand_are_ready() -> None:
    """With a buffered record of each partition no further knowledge is needed."""
    assert group_of(a=(1,), b=(2,)).is_ready(0, {})


@pytest.mark.parametrize("lags", [{}, {"b": None}, {"b": 3}])
def test_a_partition_that_may_have_more_is_waited_for(lags: dict[str, int | None]) -> None:
    """If a partition has records at the broker, or that is unknown, the others wait without limit."""
    group = group_of(a=(1,))
    assert not group.is_ready(0, lags)
    assert not group.is_ready(10**9, lags)
    assert group.is_ready(10**9, {"b": 0})


def test_max_task_idle_is_waited_for_a_record_to_be_written() -> None:
    """The wait for a partition begins when it is known to be read to its end, and again after each of its records."""
    group = group_of(100, a=(1,))
    assert [group.is_ready(now, {"b": 0}) for now in (1_000, 1_099, 1_100)] == [False, False, True]
    group.queues["b"].add(columns("b", 5))
    assert group.is_ready(1_101, {})
    assert taken(group) == [("a", 1), ("b", 5)]
    group.queues["a"].add(columns("a", 7, first=1))
    assert [group.is_ready(now, {"b": 0}) for now in (2_000, 2_100)] == [False, True]
    assert not group.is_ready(2_101, {"b": 4})
    assert [group.is_ready(now, {"b": 0}) for now in (2_102, 2_201, 2_202)] == [False, False, True]


@pytest.mark.parametrize("max_task_idle_ms", [0, 100])
def test_a_clock_that_is_set_back_makes_no_partition_wait_longer(max_task_idle_ms: int) -> None:
    """If the clock is set back, the wait for an empty partition begins again, and takes no longer than another one."""
    group = group_of(max_task_idle_ms, a=(1,))
    group.is_ready(5_000, {"b": 0})
    assert group.is_ready(1_000, {"b": 0}) == (max_task_idle_ms == 0)
    assert group.is_ready(1_100, {"b": 0})


def test_never_waiting() -> None:
    """With -1 buffered records are processed at once."""
    assert group_of(NEVER_WAIT, b=(1,)).is_ready(0, {"a": 50})


def test_records_are_at_hand_once() -> None:
    """Records that were added before are skipped, until the queue is cleared."""
    queue = RecordQueue()
    assert repr(queue) == "RecordQueue(0 records, next 0)"
    queue.add(columns("a", 1, 2, 3))
    queue.add(columns("a", 1, 2, 3))
    queue.add(columns("a", 3, 4, first=2))
    assert (len(queue), queue.take_until(None).offsets.tolist()) == (4, [0, 1, 2])
    assert repr(queue) == "RecordQueue(1 records, next 4)"
    queue.clear()
    assert repr(queue) == "RecordQueue(0 records, next 0)"
    queue.add(columns("a", 1))
    assert (len(queue), queue.head_ms()) == (1, 1)


def test_a_fetch_of_any_size_is_taken_as_a_whole() -> None:
    """Without a limit a run has all records of a fetch, and the next fetch follows it."""
    queue = RecordQueue()
    queue.add(columns("a", *range(BUFFERED_RECORDS_MAX)))
    queue.add(columns("a", 5, first=BUFFERED_RECORDS_MAX))
    assert len(queue.take_until(None)) == BUFFERED_RECORDS_MAX
    assert (len(queue), queue.head_ms()) == (1, 5)


def test_a_group_can_be_cleared() -> None:
    """After a clear nothing is buffered and no wait has begun."""
    group = group_of(100, a=(1,))
    assert not group.is_ready(0, {"b": 0})
    group.clear()
    group.queues["a"].add(columns("a", 1))
    assert not group.is_ready(100, {"b": 0})


times = st.lists(st.integers(0, 20), max_size=12)


@given(times, times, st.integers(1, 4))
def test_equals_taking_one_by_one(a: list[int], b: list[int], size: int) -> None:
    """Runs have the order of comparing the two heads record by record, however records were added."""
    group = PartitionGroup(["a", "b"], NEVER_WAIT)
    for topic, own in (("a", a), ("b", b)):
        for at in range(0, len(own), size):
            group.queues[topic].add(columns(topic, *own[at : at + size], first=at))
    expected, left, right = [], list(a), list(b)
    while left or right:
        if left and (not right or left[0] <= right[0]):
            expected.append(("a", left.pop(0)))
        else:
            expected.append(("b", right.pop(0)))
    assert taken(group) == expected


def test_a_queue_knows_its_bytes() -> None:
    """The bytes are those of the buffered records, however they were added, processed and put back."""
    for seed in range(200):
        chance = random.Random(seed)
        left = [chance.randrange(40) for _ in range(chance.randint(2, 12))]
        values = [ConsumerRecord("a", 0, 2 * i, i, b"k", b"x" * size) for i, size in enumerate(left)]
        queue, cut = RecordQueue(), chance.randrange(1, len(left))
        for part in (values[:cut], values[cut:]):
            queue.add(Columns.of(part))
        while left:
            if chance.random() < 0.5:
                assert queue.bytes == sum(left) + len(left)
            run = queue.take_until(None, chance.randint(1, 5))
            done = chance.randint(0, len(run))
            if done < len(run):
                queue.put_back(run[done:])
            del left[:done]
        assert queue.bytes == 0
        queue.add(Columns.of([ConsumerRecord("a", 0, 100, 0, None, b"xyz")]))
        assert queue.bytes == 3
        queue.clear()
        queue.add(Columns.of([ConsumerRecord("a", 0, 50, 0, None, b"xy")]))
        assert queue.bytes == 2


def test_a_queue_that_is_never_empty_keeps_only_the_sizes_of_its_records() -> None:
    """If a partition is never read to its end, the memory for the sizes of its records does not grow."""
    queue = RecordQueue()
    queue.add(columns("a", 0))
    for offset in range(1, 100):
        queue.add(columns("a", offset, first=offset))
        queue.take_until(None)
        assert queue.bytes == 0, "these records have neither key nor value"
        assert len(queue._sized) == len(queue) == 1


def test_runs_grow_while_they_are_cheap_and_shrink_when_they_are_not() -> None:
    """A full slice that was fast makes the next one larger. A slow one makes it smaller, down to a limit."""
    length = RunLength()
    length.adapt(RUN_RECORDS_FIRST - 1, 0, 100)
    assert length.records_max == RUN_RECORDS_FIRST, "it was no full run"
    length.adapt(RUN_RECORDS_FIRST, 25, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST
    length.adapt(4 * RUN_RECORDS_FIRST, 100, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST
    length.adapt(4 * RUN_RECORDS_FIRST, 1_000, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST // 10
    for _ in range(4):
        length.adapt(RUN_RECORDS_MAX, 0, 100)
    assert length.records_max == RUN_RECORDS_MAX
    length.adapt(1, 60_000, 100)
    assert length.records_max == RUN_RECORDS_MIN
