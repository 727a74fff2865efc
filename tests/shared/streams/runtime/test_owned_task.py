"""The table of a worker's tasks, and how a task is closed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.owned_task import OwnedTask, WorkerTasks
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.metrics import RestoreMetrics
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.manual_clock import ManualClock


def owned_of(partition: int) -> OwnedTask:
    """A task that is assigned and not restored yet."""
    of = (
        KafkaSettings(),
        StreamsSettings(),
        partition,
        "here",
        ManualClock(),
        1_000,
        RestoreMetrics(CollectorRegistry()),
    )
    return OwnedTask(ChangelogPartition(*of))


def begin(owned: OwnedTask, settings: StreamsSettings | None = None) -> None:
    settings = settings or StreamsSettings()
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    owned.begin(StreamTask(builder.build(), owned.partition, application="app"), settings)


def test_a_partition_is_held_while_the_group_meets() -> None:
    """The partition of a suspended task is still held."""
    tasks = WorkerTasks()
    assert not tasks.holds(5)
    tasks.owned[5] = owned_of(5)
    assert tasks.holds(5)
    tasks.suspended[5] = tasks.owned.pop(5)
    assert tasks.holds(5)
    tasks.suspended.clear()
    assert not tasks.holds(5)


def test_a_task_that_is_restored_takes_no_records() -> None:
    """A task that is being restored is neither running nor ready."""
    tasks = WorkerTasks()
    tasks.owned[0] = owned = owned_of(0)
    assert (tasks.running(), tasks.ready()) == ([], {})
    begin(owned)
    assert (tasks.running(), tasks.ready()) == ([owned], {0: owned.running})
    assert [one["state"] for one in tasks.describe()] == ["running"]
    assert repr(tasks) == "WorkerTasks(owned [0], suspended [])"


@pytest.mark.parametrize(("given", "limit"), [({}, 1_000), ({"buffered_records_per_partition": 4}, 4)])
def test_how_many_records_wait_is_a_setting(given: dict[str, Any], limit: int) -> None:
    """A partition is full with more than `buffered_records_per_partition` records, by default Kafka Streams' 1,000."""
    owned = owned_of(3)
    begin(owned, StreamsSettings(**given))
    assert owned.running is not None
    inputs = owned.running.inputs
    full = []
    for at in range(limit + 1):
        inputs.add(Columns.of([ConsumerRecord("in", 3, at, 0, b"k", b"{}")]))
        full.append(inputs.is_full("in"))
    assert full == [False] * limit + [True]


def test_a_task_that_cannot_be_closed_is_in_the_log() -> None:
    """All tasks are removed, and the log names the one whose closing failed, with the reason."""
    tasks = WorkerTasks()
    tasks.owned |= {3: owned_of(3), 4: owned_of(4)}
    with capture_logs() as lines:
        tasks.closed([None, OSError("no response")])
    assert [(line["event"], line["log_level"], line["partition"], line["reason"]) for line in lines] == [
        ("a task cannot be closed", "error", 4, "no response")
    ]
    assert tasks.all() == []


async def test_what_a_processor_raises_when_it_is_closed_is_in_the_log() -> None:
    """An error while closing a processor is logged with task and node. The other processors and the task are still
    closed."""
    calls: list[str] = []

    class Closing(Processor):
        def __init__(self, message: str) -> None:
            self._message = message

        def close(self) -> None:
            calls.append(self._message)
            if self._message:
                raise ValueError(self._message)

    builder = StreamsBuilder()
    stream = builder.stream("in")
    for name, message in (("first", "disk full"), ("second", ""), ("third", "no such file")):
        stream.process(partial(Closing, message), name=name)
    owned = owned_of(5)
    task = StreamTask(builder.build(), 5, application="app")
    owned.begin(task, StreamsSettings())
    with capture_logs() as lines:
        await owned.close(100)
        await owned.close(100)
    assert calls == ["disk full", "", "no such file"]
    ((line),) = [line for line in lines if line["log_level"] == "error"]
    assert (line["event"], line["partition"]) == ("a task was not closed as it should be", 5)
    assert line["reason"] == (
        "the processors of partition 5 cannot be closed: node 'first': ValueError: disk full; "
        "node 'third': ValueError: no such file"
    )
