"""What a task's inputs hand it, and when."""

from __future__ import annotations

from shared.common.records import Columns, ConsumerRecord
from shared.streams.dsl import StreamsBuilder
from shared.streams.processor import Record
from shared.streams.stream_task import StreamTask
from shared.streams.task_inputs import BUFFERED_RECORDS_MAX, TaskInputs


def inputs_of(seen: list[tuple[str, int]], max_task_idle_ms: int = 0) -> tuple[TaskInputs, StreamTask]:
    """Two topics that are merged, and one that has nothing to do with them; `seen` gets keys and timestamps."""

    def see(record: Record) -> None:
        seen.append((record.key, record.timestamp))

    builder = StreamsBuilder()
    builder.stream("a").merge(builder.stream("b")).peek(see)
    builder.stream("c").peek(see)
    task = StreamTask(builder.build(), 0, application="app")
    task.initialize(0)
    return TaskInputs(task, task.topology, max_task_idle_ms), task


def records(topic: str, *timestamps: int) -> Columns:
    key = topic.encode()
    return Columns.of([ConsumerRecord(topic, 0, i, at, key, b"{}") for i, at in enumerate(timestamps)])


def test_each_part_has_its_own_order() -> None:
    """Topics that meet are taken by time and wait for each other; one that meets none waits for nothing."""
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
    """`max_task_idle_ms` holds the others back for that long."""
    seen: list[tuple[str, int]] = []
    inputs, _ = inputs_of(seen, 100)
    inputs.add(records("a", 1))
    for now in (0, 99):
        inputs.process(now, {"b": 0})
    assert seen == []
    inputs.process(100, {"b": 0})
    assert seen == [("a", 1)]


def test_a_paused_task_processes_nothing() -> None:
    """What comes while a task is paused waits, and its topics are full."""
    seen: list[tuple[str, int]] = []
    inputs, _ = inputs_of(seen)
    inputs.is_paused = True
    inputs.add(records("c", 1))
    inputs.process(0, {})
    assert (seen, inputs.is_full("c"), inputs.is_full("a")) == ([], True, True)
    assert repr(inputs).endswith("paused)")
    inputs.is_paused = False
    inputs.process(0, {})
    assert (seen, inputs.is_full("c")) == ([("c", 1)], False)


def test_a_topic_is_full_beyond_the_limit() -> None:
    """More than the limit of one topic's records at hand means that no more should be fetched; cleared, none are."""
    inputs, _ = inputs_of([])
    inputs.add(records("a", *range(BUFFERED_RECORDS_MAX)))
    assert not inputs.is_full("a")
    inputs.add(records("a", *range(BUFFERED_RECORDS_MAX + 1)))
    assert inputs.is_full("a")
    assert not inputs.is_full("b")
    inputs.clear()
    assert not inputs.holds("a")
