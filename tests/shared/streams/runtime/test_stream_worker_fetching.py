"""The partitions that a worker fetches from, given the records that its tasks have buffered."""

from __future__ import annotations

from typing import Any

from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.owned_task import RunningTask
from penstock.shared.streams.runtime.stream_worker import pause_full_partitions
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask
from tests.shared.streams.runtime.test_owned_task import owned_of

SIZE = 100


class Fetching:
    """A consumer's partitions, and which of them are paused."""

    def __init__(self, *partitions: TopicPartition) -> None:
        self._assigned, self._paused = frozenset(partitions), set[TopicPartition]()

    def assignment(self) -> frozenset[TopicPartition]:
        return self._assigned

    def paused(self) -> frozenset[TopicPartition]:
        return frozenset(self._paused)

    def pause(self, at: TopicPartition) -> None:
        assert at not in self._paused
        self._paused.add(at)

    def resume(self, at: TopicPartition) -> None:
        self._paused.remove(at)


def task_of(partition: int) -> RunningTask:
    """A task that merges two topics."""
    builder, settings = StreamsBuilder(), StreamsSettings()
    builder.stream("a").merge(builder.stream("b")).to("out")
    owned = owned_of(partition)
    owned.begin(StreamTask(builder.build(), partition, application="app"), settings)
    assert owned.running is not None
    return owned.running


def records(topic: str, partition: int, number: int) -> Columns:
    values = [ConsumerRecord(topic, partition, i, i, None, b"x" * SIZE) for i in range(number)]
    return Columns.of(values)


def test_bytes_of_all_tasks_hold_the_fetching_up() -> None:
    """Partitions with buffered records are not fetched until enough of them are processed. A partition without buffered
    records is fetched, because the others may wait for it."""
    ready = {p: task_of(p) for p in (0, 1)}
    at = {(topic, p): TopicPartition(topic, p) for topic in ("a", "b") for p in ready}
    consumer: Any = Fetching(*at.values())
    for p, running in ready.items():
        running.inputs.add(records("a", p, 5))
    pause_full_partitions(ready, consumer, 10 * SIZE)
    assert consumer.paused() == frozenset()
    pause_full_partitions(ready, consumer, 10 * SIZE - 1)
    assert consumer.paused() == {at["a", 0], at["a", 1]}
    ready[0].inputs.process(0, {"b": 0})
    pause_full_partitions(ready, consumer, 10 * SIZE - 1)
    assert consumer.paused() == frozenset()
