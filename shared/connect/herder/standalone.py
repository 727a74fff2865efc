"""The herder of a standalone worker: configs in memory, offsets in a file, no group.

As in a distributed worker, requests run in one loop. This worker runs all work, and there is no leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from penstock.shared.clients.admin import Admin
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import BadRequest, ConnectError, ConnectorNotFound
from penstock.shared.connect.group.connect_protocol import ConnectorsAndTasks
from penstock.shared.connect.herder import views
from penstock.shared.connect.herder.base_herder import BaseHerder, Stores
from penstock.shared.connect.herder.command_queue import CommandQueue
from penstock.shared.connect.herder.views import Json
from penstock.shared.connect.herder.work_runner import WorkRunner
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.storage.cluster_config_state import ConfigChange
from penstock.shared.connect.storage.config_records import Config, RestartRequest

log = get_logger(__name__)

T = TypeVar("T")

NO_INTERNAL = "A standalone worker takes no requests from other workers."


class StandaloneHerder(BaseHerder):
    """The herder of one standalone worker."""

    def __init__(self, worker: Worker, admin: Admin, stores: Stores, worker_id: str) -> None:
        super().__init__(worker, admin, stores, worker_id)
        self._wakeup = asyncio.Event()
        self._commands = CommandQueue(self._clock, self._wakeup.set)
        self._runner = WorkRunner(
            worker,
            self._reporter,
            self.snapshot,
            on_reconfiguration=self._reconfigure_tasks,
        )

    def __repr__(self) -> str:
        return f"<StandaloneHerder {self._runner!r}, {self._commands!r}>"

    async def startup(self) -> None:
        """Read the offsets."""
        await self._stores.configs.start()
        await self.worker.startup()
        self._started = True

    async def main_loop(self) -> None:
        """Run until cancelled."""
        while True:
            await self._commands.run_due()
            wait_ms = self._commands.wait_ms()
            try:
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()

    async def shutdown(self) -> None:
        """Stop connectors and tasks."""
        self._commands.close()
        await self._runner.close()
        await self.worker.shutdown()

    def on_config_change(self, change: ConfigChange) -> None:
        """Do nothing: all changes come from this worker, which applies each one when it makes it."""

    # --- connectors ---

    async def put_connector(
        self,
        name: str,
        config: Config,
        target: TargetState | None = None,
        *,
        replace: bool,
        instead_of: Config | None = None,
    ) -> tuple[bool, Json]:
        """Create a connector, or replace its config. Returns whether it is new, and its form in REST.

        Returns before the connector has started. Raises the errors of `BaseHerder.put_connector`.
        """
        await self._check_config(self._with_stored_secrets(name, config))

        async def put_connector_config() -> tuple[bool, Json]:
            exists = self._check_config_precondition(name, replace=replace, instead_of=instead_of)
            await self._stores.configs.put_connector(name, self._with_stored_secrets(name, config), target)
            # Beside the loop: a connector's start may take any time, and must not delay other requests.
            if exists:
                self._runner.beside(self._runner.restart_connector(name))
            else:
                self._runner.start_connector(name)
            return not exists, self.connector_info(name)

        return await self._commands.execute(put_connector_config)

    async def started(self, name: str, timeout_ms: int) -> None:
        """Wait until the start of a new connector has ended, at most `timeout_ms`.

        Raises ConnectError if the connector has failed by then. Returns if it is still starting."""
        await self._runner.until_started(name, timeout_ms)
        status = self._stores.statuses.cache.get(name)
        if status is not None and status.state is State.FAILED:
            raise ConnectError(((status.trace or "").strip().splitlines() or ["it failed to start"])[-1])

    async def delete_connector(self, name: str) -> None:
        """Delete a connector. Raises ConnectorNotFound."""

        async def delete_connector_config() -> None:
            self.connector_config(name)
            # Stopped first: a task must not report after its statuses are removed.
            await self._runner.stop(ConnectorsAndTasks({name}, self._running_tasks_of_connector(name)))
            await self._stores.configs.remove_connector(name)
            self._reporter.forget_connector(name)

        await self._commands.execute(delete_connector_config)

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Start, pause or stop a connector. Raises ConnectorNotFound."""

        async def put_target_state() -> None:
            if name not in self.snapshot().configs:
                raise self._unknown_connector(name)
            if target is TargetState.STOPPED:
                await self._put_tasks(name, [])
            await self._stores.configs.put_target_state(name, target)
            self._runner.set_target_state(name)

        await self._commands.execute(put_target_state)

    # --- restarts ---

    async def restart_connector(self, name: str) -> None:
        """Restart a connector without its tasks. Raises ConnectorNotFound, and ConnectError if it fails to start."""

        async def restart_known_connector() -> asyncio.Task[State | None]:
            if name not in self.snapshot().configs:
                raise self._unknown_connector(name, ": ")
            return self._runner.beside(self._runner.restart_connector(name))

        await self._await_connector_restart(name, await self._commands.execute(restart_known_connector))

    async def restart_task(self, task: ConnectorTaskId) -> None:
        """Restart a task. Raises ConnectorNotFound if the connector or the task is unknown, and ConnectError if the
        task cannot be created."""

        async def restart_known_task() -> None:
            if task.connector not in self.snapshot().configs:
                raise self._unknown_connector(task.connector, ": ")
            if task not in self.snapshot().tasks(task.connector):
                raise ConnectorNotFound(f"Unknown task: {task}")
            await self._restart_task(task)

        await self._commands.execute(restart_known_task)

    async def restart(self, request: RestartRequest) -> Json:
        """Restart what the request selects of a connector and its tasks.

        Returns the connector's status, in which the selected ones are RESTARTING. Raises ConnectorNotFound if the
        connector is unknown or has no status yet.
        """

        async def restart_connector_and_tasks() -> Json:
            name = request.connector
            if name not in self.snapshot().configs:
                raise self._unknown_connector(name, ": ")
            plan = self._plan_restart(request)
            shown = views.connector_status(self.snapshot(), self._stores.statuses.cache, self.plugins, name, plan)
            await self._runner.restart_tasks(plan.tasks, announced=True)
            if plan.connector:
                self._runner.beside(self._runner.restart_connector(name, announced=True))
            return shown

        return await self._commands.execute(restart_connector_and_tasks)

    # --- offsets, loggers, requests between workers ---

    async def _fence_for_offsets(self, name: str) -> None:
        """Do nothing: a standalone worker's tasks write without transactions."""

    async def set_cluster_level(self, logger: str, level: str) -> None:
        """Set a logger's level in the whole cluster, which is this worker."""
        self.loggers.set_level(logger, level)

    async def put_task_configs(
        self, name: str, configs: Sequence[Config], body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Raise BadRequest: a standalone worker takes no requests from other workers."""
        raise BadRequest(NO_INTERNAL)

    async def fence(self, name: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Raise BadRequest: a standalone worker takes no requests from other workers."""
        raise BadRequest(NO_INTERNAL)

    # --- task configs ---

    async def _run_as_leader(self, run: Callable[[], Awaitable[T]]) -> T:
        return await self._commands.execute(run)

    def _running_tasks_of_connector(self, name: str) -> list[ConnectorTaskId]:
        return [task for task in self._runner.running().tasks if task.connector == name]

    async def _keep_tasks(self, name: str, made: Sequence[Config]) -> None:
        async def put_tasks_unless_stopped() -> None:
            # A connector that was stopped while its tasks were computed gets none.
            if self.snapshot().target_state(name) is not TargetState.STOPPED:
                await self._put_tasks(name, made)

        await self._commands.execute(put_tasks_unless_stopped)

    async def _put_tasks(self, name: str, made: Sequence[Config]) -> None:
        snapshot = self.snapshot()
        if name not in snapshot.configs:
            return
        await self._stores.configs.put_tasks(name, made)
        # Unlike Kafka Connect's StandaloneHerder, which restarts all tasks: only tasks with new configs are restarted.
        snapshot = self.snapshot()
        gone = set(self._running_tasks_of_connector(name)) - set(snapshot.tasks(name))
        await self._runner.stop(
            ConnectorsAndTasks((), gone | self._runner.outdated(snapshot.tasks(name), whole_sets=False))
        )
        for task in self._stores.statuses.cache.tasks(name).keys() - set(snapshot.tasks(name)):
            self._reporter.forget(task)
        await self._runner.start(ConnectorsAndTasks((), snapshot.tasks(name)))
