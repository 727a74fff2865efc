"""Starts and stops a worker's connectors and tasks to match its assignment.

The start of a connector may take any time, so it runs outside the herder's loop. `on_reconfiguration` is called when a
connector is started or resumed, or requests new task configs. Tasks start at once, or after `before_task`, and
initialize in the background. A call to stop returns when the work is stopped, or abandoned after the worker's graceful
timeout. Work that is revoked during its restart is not started again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import trace_of
from penstock.shared.connect.group.connect_protocol import ConnectorsAndTasks
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot

log = get_logger(__name__)


class WorkRunner:
    """Starts and stops connectors and tasks of one worker as the configs require."""

    def __init__(
        self,
        worker: Worker,
        listener: StatusListener,
        snapshot: Callable[[], ConfigSnapshot],
        *,
        on_reconfiguration: Callable[[str], None],
        before_task: Callable[[ConnectorTaskId], Awaitable[bool]] | None = None,
    ) -> None:
        self._worker = worker
        self._listener = listener
        self._snapshot = snapshot
        self._on_reconfiguration = on_reconfiguration
        self._before_task = before_task
        self._beside: set[asyncio.Task[Any]] = set()
        self._preparing: dict[ConnectorTaskId, asyncio.Task[None]] = {}
        self._specs: dict[ConnectorTaskId, TaskSpec] = {}
        self._starting: dict[str, asyncio.Task[Any]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._given_up: Counter[str | ConnectorTaskId] = Counter()
        self.startups: Counter[tuple[str, bool]] = Counter()
        """The number of starts by kind (`connector` or `task`) and success."""

    def __repr__(self) -> str:
        return f"<WorkRunner of {self._worker!r}>"

    def running(self) -> ConnectorsAndTasks:
        """Return all work on this worker, including failed work, but not connectors that could not be created."""
        return ConnectorsAndTasks(self._worker.connector_names(), {*self._worker.task_ids(), *self._preparing})

    def outdated(self, tasks: Iterable[ConnectorTaskId], *, whole_sets: bool) -> set[ConnectorTaskId]:
        """Return those of `tasks` that run here with old configs, or that cannot be made. Another tasks.max alone does
        not make a config old.

        With `whole_sets`, return all of `tasks` that run here, whatever their configs: the producers of a connector's
        tasks are fenced together.
        """
        snapshot = self._snapshot()
        here = self.running().tasks
        return {task for task in set(tasks) & here if whole_sets or self._is_outdated_task(task, snapshot)}

    def _is_outdated_task(self, task: ConnectorTaskId, snapshot: ConfigSnapshot) -> bool:
        spec = self._specs.get(task)
        return (
            spec is None
            # The cause may lie outside its config: tasks.max, or a secret that the config refers to.
            or not self._worker.is_constructed(task)
            or spec.task_config != snapshot.task_configs.get(task)
            or _without_tasks_max(spec.connector_config)
            != _without_tasks_max(snapshot.applied_configs.get(task.connector, {}))
        )

    def beside(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as an asyncio task, so that the herder does not wait for it. Its errors are logged."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._log_failed_work)
        return task

    def _log_failed_work(self, task: asyncio.Task[Any]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work beside the herder failed", exc_info=error)

    async def start(self, work: ConnectorsAndTasks) -> None:
        """Start the configured part of the work that does not run yet."""
        snapshot = self._snapshot()
        here = self.running()
        for name in sorted(work.connectors - here.connectors):
            if name in snapshot.configs:
                self.start_connector(name)
        for task in sorted(work.tasks - here.tasks):
            if task in snapshot.tasks(task.connector):
                await self.start_task(task)

    async def stop(self, work: ConnectorsAndTasks) -> None:
        """Stop the given work. Tasks are stopped first, since a connector may serve its tasks. Work that is in a
        restart is not started again."""
        self._given_up.update([*work.connectors, *work.tasks])
        await self._stop_work(work)

    async def _stop_work(self, work: ConnectorsAndTasks) -> None:
        # A cancellation, as at the shutdown, does not end the stop: `close` waits for it.
        stopping = asyncio.create_task(self._stop_tasks_and_connectors(work))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        await asyncio.shield(stopping)

    async def _stop_tasks_and_connectors(self, work: ConnectorsAndTasks) -> None:
        preparing = work.tasks & self._preparing.keys()
        for task in preparing:
            self._preparing.pop(task).cancel()
        for task in work.tasks:
            self._specs.pop(task, None)
        await self._worker.stop_tasks(work.tasks & {*self._worker.task_ids(), *preparing})
        for name in work.connectors & self._starting.keys():
            self._starting.pop(name).cancel()
        ending = [self._ending[name] for name in work.connectors & self._ending.keys()]
        await self._worker.stop_connectors(work.connectors & self._worker.connector_names())
        if ending:
            await asyncio.wait(ending)

    async def close(self) -> None:
        """Stop everything, and wait for all stops, also those of restarts and those whose caller was cancelled."""
        ending = tuple(self._ending.values())
        # A restart whose stop ends during the wait must not start its connector.
        for task in self._beside:
            task.cancel()
        await self.stop(self.running())
        if stopping := {*ending, *self._stopping}:
            await asyncio.wait(stopping)
        # Also what a connector requested before it stopped.
        beside = tuple(self._beside)
        for task in beside:
            task.cancel()
        if beside:
            await asyncio.wait(beside)

    def start_connector(self, name: str) -> None:
        """Begin to start a connector as configured, in its target state. Does not wait for the start."""
        starting = self.beside(self._start_connector(name))
        self._starting[name] = starting
        starting.add_done_callback(lambda done: self._starting.get(name) is done and self._starting.pop(name))

    async def until_started(self, name: str, timeout_ms: int) -> None:
        """Wait for the start that `start_connector` began, at most `timeout_ms`."""
        if name in self._starting:
            await asyncio.wait([self._starting[name]], timeout=timeout_ms / 1000)

    async def _start_connector(self, name: str) -> State | None:
        if name in self._ending:
            await asyncio.wait([self._ending[name]])
        snapshot = self._snapshot()
        if name in self._worker.connector_names() or name not in snapshot.configs:
            return None
        state = await self._worker.start_connector(
            name, snapshot.configs[name], snapshot.target_state(name), self._listener, self._on_reconfiguration
        )
        self.startups["connector", state is not State.FAILED] += 1
        if state is State.RUNNING:
            self._on_reconfiguration(name)
        return state

    async def restart_connector(self, name: str, *, announced: bool = False) -> State | None:
        """Stop a connector and start it, unless it is revoked while it stops. If `announced`, RESTARTING is reported
        before the start. Returns the state after the start, or None if the connector was not started.

        Call it outside the herder's loop, since a start may take long.
        """
        before = self._given_up[name]
        # An earlier restart may still be stopping the connector.
        while name in self._ending:
            await asyncio.wait([self._ending[name]])
        ending = asyncio.create_task(self._worker.stop_connector(name))
        self._ending[name] = ending
        try:
            await asyncio.shield(ending)
        finally:
            if self._ending.get(name) is ending:
                del self._ending[name]
        # A rebalance has revoked the connector while it stopped: it must not start again here.
        if self._given_up[name] != before:
            return None
        if announced:
            self._listener.on_event(name, Event.RESTART)
        return await self._start_connector(name)

    async def start_task(self, task: ConnectorTaskId) -> bool:
        """Start a task with its current config. Returns False if it cannot be created.

        If `before_task` is set, this method returns True, and `before_task` runs in the background. The task starts
        only if `before_task` returns True. If it raises an error, the task is FAILED, and is restarted after a backoff
        if `task.restart.enable` is set.
        """
        if self._before_task is None:
            return await self._start_task(task)
        if task not in self._preparing:
            preparing = asyncio.create_task(self._prepare_task(task))
            self._preparing[task] = preparing
            self._beside.add(preparing)
            preparing.add_done_callback(self._log_failed_work)
        return True

    async def _prepare_task(self, task: ConnectorTaskId) -> None:
        assert self._before_task is not None
        may = False
        try:
            while True:
                try:
                    may = await self._before_task(task)
                    break
                except Exception as e:
                    # The fencing failed. Without it, an older task might still write.
                    self._listener.on_event(task, Event.FAILURE, trace_of(e))
                # As after any other failure of the task.
                wait_ms = self._worker.restart_wait_ms(task)
                if wait_ms is None:
                    break
                log.warning("task will be restarted", task=str(task), in_ms=wait_ms)
                await asyncio.sleep(wait_ms / 1000)
                self._listener.on_event(task, Event.RESTART)
        finally:
            # A restart may have replaced this preparation by another.
            if self._preparing.get(task) is asyncio.current_task():
                del self._preparing[task]
        if may:
            await self._start_task(task)

    async def _start_task(self, task: ConnectorTaskId) -> bool:
        snapshot = self._snapshot()
        if task not in snapshot.tasks(task.connector) or task in self._worker.task_ids():
            return True
        spec = TaskSpec(
            task,
            # The connector's config that the tasks were made from. A newer one comes with newer task configs.
            snapshot.applied_configs.get(task.connector, snapshot.configs[task.connector]),
            snapshot.task_configs[task],
            len(snapshot.tasks(task.connector)),
        )
        started = await self._worker.start_task(spec, snapshot.target_state(task.connector), self._listener)
        self._specs[task] = spec
        self.startups["task", started] += 1
        return started

    async def restart_tasks(self, tasks: Iterable[ConnectorTaskId], *, announced: bool = False) -> bool:
        """Stop and start tasks. If `announced`, RESTARTING is reported in between. Returns False if `start_task` does
        so for one of them."""
        started = True
        before = {task: self._given_up[task] for task in sorted(tasks)}
        await self._stop_work(ConnectorsAndTasks((), before))
        for task, given_up in before.items():
            if self._given_up[task] != given_up:
                continue
            if announced:
                self._listener.on_event(task, Event.RESTART)
            started &= await self.start_task(task)
        return started

    def set_target_state(self, name: str) -> None:
        """Begin to bring a connector and its tasks, as far as they run here, to the connector's target state."""
        target = self._snapshot().target_state(name)
        self.beside(self._set_target_state(name, target))

    async def _set_target_state(self, name: str, target: Any) -> None:
        await self._worker.set_target_state(name, target)
        # Also if it was RUNNING before: a connector that is resumed while it still stops has lost its tasks.
        if self._worker.state(name) is State.RUNNING:
            self._on_reconfiguration(name)


def _without_tasks_max(config: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a config whose change makes a running task outdated: all but tasks.max."""
    return {name: value for name, value in config.items() if name != "tasks.max"}
