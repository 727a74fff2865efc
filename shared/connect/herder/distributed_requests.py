"""What may be asked of a distributed worker: each request a command of its loop (an edge).

What changes configs is the leader's to do: another worker answers NotHere with the leader's address, and REST asks
there. While the group is about to assign anew, everything that changes something is refused (RebalanceNeeded).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from penstock.shared.clients.admin import Admin
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError, ProducerFenced
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, said_of, trace_of
from penstock.shared.connect.group.connect_protocol import SESSIONED
from penstock.shared.connect.group.worker_group import WorkerGroup
from penstock.shared.connect.herder import views
from penstock.shared.connect.herder.base_herder import BaseHerder, Stores
from penstock.shared.connect.herder.command_queue import REQUEST_TIMEOUT_MS, CommandQueue
from penstock.shared.connect.herder.connector_offsets import Row
from penstock.shared.connect.herder.errors import BadRequest, Forbidden, NotHere, RebalanceNeeded, RequestTimedOut
from penstock.shared.connect.herder.fencing import fence_producers
from penstock.shared.connect.herder.leader_client import LeaderClient, LeaderRefused
from penstock.shared.connect.herder.pending_changes import PendingChanges
from penstock.shared.connect.herder.restart_plan import RestartPlan, plan_restart
from penstock.shared.connect.herder.session_keys import verify
from penstock.shared.connect.herder.settings import DistributedConfig
from penstock.shared.connect.herder.views import Json
from penstock.shared.connect.herder.work_runner import WorkRunner
from penstock.shared.connect.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.storage.config_records import Config, LoggerLevel, RestartRequest
from penstock.shared.connect.worker import Worker

log = get_logger(__name__)

T = TypeVar("T")

REBALANCE_WAIT_MS = 10_000
"""How long a request waits for a rebalance to end before it is refused."""
RETRY_FIRST_MS, RETRY_MAX_MS = 250, 60_000


class DistributedRequests(BaseHerder):
    """The part of the herder that answers requests."""

    group: WorkerGroup

    def __init__(
        self,
        config: DistributedConfig,
        worker: Worker,
        admin: Admin,
        stores: Stores,
        worker_id: str,
        *,
        clock: Clock,
    ) -> None:
        super().__init__(worker, admin, stores, worker_id, clock=clock)
        self._config = config
        self._commands = CommandQueue(clock, self.wake)
        self._pending = PendingChanges()
        self._known: frozenset[str] = frozenset()
        self._leader_client = LeaderClient(
            token=config["rest.auth.token"].value, user=config["rest.auth.users"].value.partition(",")[0]
        )
        self._runner = WorkRunner(
            worker,
            self._reporter,
            self.snapshot,
            on_started=self._reconfigure,
            on_reconfiguration=self._reconfigure,
            before_task=self._before_task if config.exactly_once else None,
        )

    def wake(self) -> None:
        """There is something to do."""

    # --- what may be done now, and by whom ---

    def _check_settled(self) -> None:
        if self.group.needs_to_join:
            raise RebalanceNeeded(
                "Request cannot be completed because a rebalance is expected: the workers are about to divide the work"
            )

    def _check_leader(self) -> None:
        self._check_settled()
        if not self.group.is_leader:
            assignment = self.group.assignment
            raise NotHere("Only the leader can do this.", assignment.leader_url if assignment else None)

    def _owner_url(self, owned: Callable[[str], bool]) -> str | None:
        """On the leader: where the member's REST is of whom `owned` holds."""
        owners, urls = self.group.owners or {}, self.group.urls or {}
        return next((urls.get(member) for member in owners if owned(member)), None)

    async def _in_turn(self, run: Callable[[], Awaitable[T]]) -> T:
        return await self._as_leader(run)

    async def _as_leader(self, run: Callable[[], Awaitable[T]]) -> T:
        async def checked() -> T:
            self._check_leader()
            try:
                return await run()
            except ProducerFenced:
                self.group.rejoin("another worker leads")
                raise RebalanceNeeded("Another worker leads the group now; ask again in a moment") from None

        return await self._ask(checked)

    async def _ask(self, run: Callable[[], Awaitable[T]]) -> T:
        """As a command of the loop; while the group assigns anew it waits, but not for long (RebalanceNeeded)."""
        try:
            return await self._commands.ask(run, REBALANCE_WAIT_MS if self.group.needs_to_join else REQUEST_TIMEOUT_MS)
        except RequestTimedOut:
            self._check_settled()
            raise

    async def is_healthy(self) -> bool:
        """Whether the loop comes to requests."""
        return await self._commands.is_attended()

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
        """As every herder's; also NotHere, RebalanceNeeded."""
        await self._check_config(name, self._kept(name, config))
        self._check_group(name, config)

        async def put() -> tuple[bool, Json]:
            exists = self._check_put(name, replace=replace, instead_of=instead_of)
            await self._stores.configs.put_connector(name, self._kept(name, config), target)
            return not exists, self.connector_info(name)

        return await self._as_leader(put)

    def _check_group(self, name: str, config: Config) -> None:
        group = config.get("consumer.override.group.id", f"connect-{name}")
        if group == self._config["group.id"] and views.kind_of_connector(self.plugins, config) == "sink":
            raise BadRequest(
                f"Consumer group for sink connector named {name} conflicts with Connect worker group {group}"
            )

    async def delete_connector(self, name: str) -> None:
        """Delete a connector; ConnectorNotFound."""

        async def delete() -> None:
            self.connector_config(name)
            await self._stores.configs.remove_connector(name)

        await self._as_leader(delete)

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Have a connector run, pause or stop; ConnectorNotFound. To stop it is the leader's, since its tasks go."""

        async def put() -> None:
            if name not in self.snapshot().configs:
                raise self._unknown(name)
            if target is TargetState.STOPPED:
                await self._stores.configs.put_tasks(name, [])
            await self._stores.configs.put_target_state(name, target)

        await (self._as_leader(put) if target is TargetState.STOPPED else self._ask(put))

    # --- restarts ---

    async def restart_connector(self, name: str) -> None:
        """Restart a connector without its tasks, on the worker that runs it; ConnectorNotFound, NotHere."""

        async def restart() -> asyncio.Task[None]:
            self._check_settled()
            if name not in self.snapshot().configs:
                raise self._unknown(name, ": ")
            if name not in self._runner.running().connectors:
                self._not_here(lambda m: name in (self.group.owners or {})[m].connectors, f"connector {name}")
            return self._runner.beside(self._runner.restart_connector(name))

        await self._restarted(await self._ask(restart))

    async def restart_task(self, task: ConnectorTaskId) -> None:
        """Restart a task, on the worker that runs it; ConnectorNotFound, NotHere."""

        async def restart() -> None:
            self._check_settled()
            snapshot = self.snapshot()
            if task.connector not in snapshot.configs:
                raise self._unknown(task.connector, ": ")
            if task not in snapshot.tasks(task.connector):
                raise ConnectorNotFound(f"Unknown task: {task}")
            held = self.group.assignment.work if self.group.assignment else None
            if held is None or task not in held.tasks:
                self._not_here(lambda m: task in (self.group.owners or {})[m].tasks, f"task {task}")
            await self._runner.restart_tasks([task])

        await self._ask(restart)

    def _not_here(self, owned: Callable[[str], bool], what: str) -> None:
        self._check_leader()
        raise NotHere(f"Cannot restart {what}: it is not assigned to this worker", self._owner_url(owned))

    async def restart(self, request: RestartRequest) -> Json:
        """Have all workers restart what they have of a connector; gives its status with what is being restarted."""

        async def put() -> Json:
            name = request.connector
            if name not in self.snapshot().configs:
                raise self._unknown(name, ": ")
            plan = self._plan(request)
            shown = views.connector_status(self.snapshot(), self._stores.statuses.cache, self.plugins, name, plan)
            # Said before it happens, so that who asks next does not take what was for what is.
            self._reporter.announce_restart(plan.tasks, name if plan.connector else None)
            await self._stores.statuses.flush()
            await self._stores.configs.put_restart(request)
            return shown

        return await self._as_leader(put)

    def _plan(self, request: RestartRequest) -> RestartPlan:
        cache = self._stores.statuses.cache
        status = cache.connector(request.connector)
        if status is None:
            raise ConnectorNotFound(f"Status for connector {request.connector} not found")
        return plan_restart(request, status, cache.tasks(request.connector))

    async def _restart_what_is_here(self, request: RestartRequest) -> None:
        try:
            plan = self._plan(request)
        except ConnectorNotFound:
            return
        here = self._runner.running()
        tasks = [task for task in plan.tasks if task in here.tasks]
        if tasks:
            await self._runner.restart_tasks(tasks, announced=True)
        if plan.connector and request.connector in here.connectors:
            self._runner.beside(self._runner.restart_connector(request.connector, announced=True))

    # --- offsets and loggers ---

    async def alter_offsets(self, name: str, rows: Sequence[Row] | None) -> Json:
        """Set a stopped connector's offsets, or forget all of them (None); BadRequest while it is not stopped."""
        return await self._alter_offsets(name, rows)

    async def _fence_for_offsets(self, name: str) -> None:
        if self._config.exactly_once:
            await self._fence(name)

    async def set_cluster_level(self, logger: str, level: str) -> None:
        """Set a logger's level on every worker."""
        await self._stores.configs.put_logger_level(LoggerLevel(logger, level))

    # --- task configs ---

    def _reconfigure(self, name: str, attempt: int = 0) -> None:
        """Have a running connector divide its work, and keep what it says where that differs."""
        self._runner.beside(self._make_tasks(name, attempt))

    async def _make_tasks(self, name: str, attempt: int) -> None:
        snapshot = self.snapshot()
        config = snapshot.configs.get(name)
        if config is None or self.worker.state(name) is not State.RUNNING:
            return
        try:
            made = await self.worker.connector_task_configs(name, config)
        except ConnectorNotFound:
            return
        except ConnectError as e:
            self._reporter.on_failure(name, self.worker.masking(config)(trace_of(e)))
            return
        except Exception as e:  # of the connector: it may do better next time
            self._again(name, attempt, e)
            return
        try:
            await self._keep_tasks(name, made)
        except LeaderRefused as e:
            log.error("the leader refuses task configs", connector=name, reason=str(e))
        except PenstockError as e:
            self._again(name, attempt, e)

    def _again(self, name: str, attempt: int, error: Exception) -> None:
        delay_ms = min(RETRY_FIRST_MS << min(attempt, 16), RETRY_MAX_MS)
        mask = self.worker.masking(self.snapshot().configs.get(name, {}))
        log.warning("tasks cannot be configured yet", connector=name, again_in_ms=delay_ms, reason=mask(said_of(error)))

        async def again() -> None:
            self._reconfigure(name, attempt + 1)

        self._commands.put(again, delay_ms)

    async def _keep_tasks(self, name: str, made: Sequence[Config]) -> None:
        if not self._differ(name, made):
            return

        async def put() -> str | None:
            self._check_settled()
            if not self.group.is_leader:
                return self.group.assignment.leader_url if self.group.assignment else None
            await self._put_tasks(name, made)
            return None

        url = await self._ask(put)
        if url is not None:
            await self._leader_client.put_tasks(url, name, made, self.snapshot().session_key)

    def _differ(self, name: str, made: Sequence[Config]) -> bool:
        snapshot = self.snapshot()
        if name in snapshot.inconsistent or name not in snapshot.task_counts:
            return True
        return [dict(task) for task in snapshot.all_task_configs(name)] != [dict(task) for task in made]

    async def _put_tasks(self, name: str, made: Sequence[Config]) -> None:
        snapshot = self.snapshot()
        wanted = name in snapshot.configs and snapshot.target_state(name) is not TargetState.STOPPED
        if wanted and self._differ(name, made):
            await self._stores.configs.put_tasks(name, made)

    # --- between workers ---

    def _check_signed(self, body: bytes, headers: Mapping[str, str]) -> None:
        if self.group.version < SESSIONED:
            return
        key = self.snapshot().session_key
        if key is None:
            raise RebalanceNeeded("This worker is still starting up and has not been able to read a session key yet")
        try:
            valid = verify(key, body, headers, self._config["inter.worker.verification.algorithms"])
        except ValueError as e:
            raise BadRequest(f"Internal request missing required signature or malformed: {e}") from None
        if not valid:
            raise Forbidden("Internal request contained invalid signature.")

    async def put_task_configs(
        self, name: str, configs: Sequence[Config], body: bytes, headers: Mapping[str, str]
    ) -> None:
        """From a worker that runs a connector: its tasks. Forbidden, BadRequest where it is not signed."""
        self._check_signed(body, headers)
        await self._as_leader(lambda: self._put_tasks(name, configs))

    async def fence(self, name: str, body: bytes, headers: Mapping[str, str]) -> None:
        """From a worker that is to start a source's tasks: fence the older ones."""
        self._check_signed(body, headers)
        await self._as_leader(lambda: self._fence(name))

    async def _before_task(self, task: ConnectorTaskId) -> bool:
        """Exactly-once sources: whether the task may start, once all tasks of older sets are fenced."""
        snapshot = self.snapshot()
        if views.kind_of_connector(self.plugins, snapshot.configs.get(task.connector)) != "source":
            return True
        if task.connector in snapshot.pending_fencing:
            if self.group.is_leader:
                await self._ask(lambda: self._fence(task.connector))
            elif self.group.assignment is not None:
                await self._leader_client.fence(self.group.assignment.leader_url, task.connector, snapshot.session_key)
            await self._stores.configs.refresh()
        held = self.group.assignment.work if self.group.assignment else None
        return held is not None and task in held.tasks

    async def _fence(self, name: str) -> None:
        """The leader's: end the producers of all tasks of older sets, and note how many there may be from now on."""
        snapshot = self.snapshot()
        config = views.config_of(snapshot, name)
        if views.kind_of_connector(self.plugins, config) != "source":
            raise BadRequest(f"Connector {name} is not a source connector")
        count, before = len(snapshot.tasks(name)), snapshot.task_count_records.get(name, 0)
        if name not in snapshot.pending_fencing and count:
            return
        # One task after one task: the new producer has the old one's transactional id and fences it itself.
        if before > 1 or (before == 1 and count != 1):
            ids = [self._config.source_transactional_id(name, task) for task in range(before)]
            await fence_producers(self.worker.config.kafka, ids)
        if count:
            await self._stores.configs.put_task_count(name, count)
