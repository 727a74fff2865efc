"""The work runner, with a worker whose connector stops when the test allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.connect.group.connect_protocol import ConnectorsAndTasks
from penstock.shared.connect.herder.work_runner import WorkRunner
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from tests.shared.connect.harness import StatusRecorder

TASK = ConnectorTaskId("x", 0)


class SlowToStop:
    """A worker with one connector, which stops once `may_stop` is set."""

    def __init__(self) -> None:
        self.running = {"x"}
        self.starts = 0
        self.may_stop = asyncio.Event()

    def connector_names(self) -> frozenset[str]:
        return frozenset(self.running)

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        return frozenset()

    async def stop_connector(self, name: str) -> None:
        if name in self.running:
            self.running.discard(name)
            await self.may_stop.wait()

    async def stop_connectors(self, names: Iterable[str]) -> None:
        for name in names:
            await self.stop_connector(name)

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None: ...

    async def start_connector(self, name: str, *_: object) -> State:
        self.running.add(name)
        self.starts += 1
        return State.RUNNING


def runner(worker: SlowToStop) -> tuple[WorkRunner, list[str]]:
    snapshot = ConfigSnapshot(configs={"x": {}}, target_states={"x": TargetState.STARTED})
    started: list[str] = []
    made = WorkRunner(
        cast(Any, worker), cast(Any, None), lambda: snapshot,
        on_started=started.append, on_reconfiguration=started.append,
    )  # fmt: skip
    return made, started


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_connector_given_up_during_its_restart_does_not_start() -> None:
    """A connector that is given up during its restart stops before the call ends, and does not start again."""
    worker = SlowToStop()
    work, started = runner(worker)
    work.beside(work.restart_connector("x"))
    await turns()
    giving_up = asyncio.ensure_future(work.stop(ConnectorsAndTasks({"x"}, ())))
    await turns()
    assert not giving_up.done()
    worker.may_stop.set()
    await giving_up
    await turns()
    assert (worker.running, worker.starts, started) == (set(), 0, [])


async def test_a_reassigned_connector_starts_after_the_old_one_has_stopped() -> None:
    """A connector that is given up and assigned again during its restart starts once, after the old one has stopped."""
    worker = SlowToStop()
    work, started = runner(worker)
    work.beside(work.restart_connector("x"))
    await turns()
    giving_up = asyncio.ensure_future(work.stop(ConnectorsAndTasks({"x"}, ())))
    await turns()
    await work.start(ConnectorsAndTasks({"x"}, ()))
    await turns()
    assert worker.starts == 0
    worker.may_stop.set()
    await giving_up
    await work.until_started("x")
    assert (worker.running, worker.starts, started) == ({"x"}, 1, ["x"])


async def test_a_restart_stops_and_starts() -> None:
    """A restart stops and starts the connector, and calls `on_started`."""
    worker = SlowToStop()
    worker.may_stop.set()
    work, started = runner(worker)
    await work.restart_connector("x")
    assert (worker.starts, started) == (1, ["x"])


@pytest.mark.parametrize("error", [KafkaTimeout("late"), ExceptionGroup("several", [KafkaTimeout("late")]), KeyError()])
async def test_a_task_that_cannot_be_prepared_is_failed(error: Exception) -> None:
    """Any error before a task's start is the task's: its status is FAILED with the trace, and it does not start."""
    snapshot = ConfigSnapshot(configs={"x": {}}, task_configs={TASK: {}}, task_counts={"x": 1})
    listener = StatusRecorder()

    async def before_task(task: ConnectorTaskId) -> bool:
        raise error

    work = WorkRunner(
        cast(Any, SlowToStop()), cast(Any, listener), lambda: snapshot,
        on_started=print, on_reconfiguration=print, before_task=before_task,
    )  # fmt: skip
    await work.start_task(TASK)
    await turns()
    assert listener.of(TASK) == ["failure"]
    assert type(error).__name__ in listener.traces[0]
    assert work.running().tasks == frozenset()
