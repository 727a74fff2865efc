"""The herder of a standalone worker: configs in memory, offsets in a file, no group.

As in a distributed worker, requests run in one loop. This worker runs all work, and there is no leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import BadRequest, ConnectError
from penstock.shared.connect.group.connect_protocol import ConnectorsAndTasks
from penstock.shared.connect.herder.base_herder import BaseHerder
from penstock.shared.connect.herder.restart_plan import RestartPlan
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.storage.cluster_config_state import ConfigChange
from penstock.shared.connect.storage.config_records import Config, RestartRequest

log = get_logger(__name__)

T = TypeVar("T")

NO_INTERNAL = "A standalone worker takes no requests from other workers."


class StandaloneHerder(BaseHerder):
    """The herder of one standalone worker."""

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

    async def _store_connector(self, name: str, config: Config, target: TargetState | None) -> None:
        exists = name in self.snapshot().configs
        await self._stores.configs.put_connector(name, config, target)
        # Beside the loop: a connector's start may take any time, and must not delay other requests.
        if exists:
            self._runner.beside(self._runner.restart_connector(name))
        else:
            self._runner.start_connector(name)

    async def _remove_connector(self, name: str) -> None:
        # Stopped first: a task must not report after its statuses are removed.
        await self._runner.stop(ConnectorsAndTasks({name}, self._running_tasks_of_connector(name)))
        await self._stores.configs.remove_connector(name)
        self._reporter.forget_connector(name)

    async def started(self, name: str, timeout_ms: int) -> None:
        """Wait until the start of a new connector has ended, at most `timeout_ms`.

        Raises ConnectError if the connector has failed by then. Returns if it is still starting."""
        await self._runner.until_started(name, timeout_ms)
        status = self._stores.statuses.cache.get(name)
        if status is not None and status.state is State.FAILED:
            raise ConnectError(((status.trace or "").strip().splitlines() or ["it failed to start"])[-1])

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Start, pause or stop a connector. Raises ConnectorNotFound."""

        async def put_target_state() -> None:
            self._require_connector(name)
            if target is TargetState.STOPPED:
                await self._put_tasks(name, [])
            await self._stores.configs.put_target_state(name, target)
            self._runner.set_target_state(name)

        await self._commands.execute(put_target_state)

    async def _begin_restart(self, request: RestartRequest, plan: RestartPlan) -> None:
        await self._runner.restart_tasks(plan.tasks, announced=True)
        if plan.connector:
            self._runner.beside(self._runner.restart_connector(request.connector, announced=True))

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
