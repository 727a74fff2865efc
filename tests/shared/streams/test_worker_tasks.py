"""The table of a worker's tasks, and which of them are paused."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from shared.common.errors import IllegalState
from shared.common.settings import KafkaSettings
from shared.streams.changelog import ChangelogPartition
from shared.streams.dsl import StreamsBuilder
from shared.streams.owned_task import OwnedTask
from shared.streams.settings import StreamsSettings
from shared.streams.stream_task import StreamTask
from shared.streams.task_metrics import RestoreMetrics
from shared.streams.worker_tasks import WorkerTasks
from shared.testing.manual_clock import ManualClock


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


def begin(tasks: WorkerTasks, owned: OwnedTask) -> None:
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    owned.begin(StreamTask(builder.build(), owned.partition, application="app"), StreamsSettings())
    tasks.begun(owned)


def test_a_paused_partition_stays_so_whichever_task_runs_it() -> None:
    """A task that was restored after a crash or a rebalance is paused where the one before was, until it is resumed."""
    tasks = WorkerTasks()
    tasks.owned[3] = first = owned_of(3)
    begin(tasks, first)
    tasks.pause(3, paused=True)
    assert first.inputs is not None
    assert first.inputs.is_paused
    tasks.clear()
    tasks.owned |= {3: owned_of(3), 4: owned_of(4)}
    for owned in tasks.all():
        begin(tasks, owned)
    assert [one["state"] for one in tasks.describe()] == ["paused", "running"]
    tasks.pause(3, paused=False)
    assert [one["state"] for one in tasks.describe()] == ["running", "running"]


def test_a_task_may_be_paused_while_it_is_restored() -> None:
    """It begins paused; it is not among those that run before."""
    tasks = WorkerTasks()
    tasks.owned[0] = owned = owned_of(0)
    tasks.pause(0, paused=True)
    assert (tasks.running(), tasks.ready()) == ([], {})
    begin(tasks, owned)
    assert (tasks.running(), tasks.ready()) == ([owned], {0: owned})
    assert [one["state"] for one in tasks.describe()] == ["paused"]
    assert repr(tasks) == "WorkerTasks(owned [0], suspended [], paused {0})"


def test_only_what_runs_here_can_be_paused() -> None:
    """Another's partition is refused; one that was paused here can be resumed when it is elsewhere."""
    tasks = WorkerTasks()
    with pytest.raises(IllegalState, match="partition 7 does not run here"):
        tasks.pause(7, paused=True)
    with pytest.raises(IllegalState, match="partition 7 does not run here"):
        tasks.pause(7, paused=False)
    tasks.owned[7] = owned_of(7)
    tasks.pause(7, paused=True)
    tasks.clear()
    tasks.pause(7, paused=False)
    with pytest.raises(IllegalState):
        tasks.pause(7, paused=False)
