"""One worker of a distributed cluster: takes part in rebalances, runs its assigned work, and applies new configs.

The herder runs one loop, one step after another. `run_once` first joins the group if needed, then applies new configs,
then runs the REST requests in the command queue. Slow work runs outside the loop, such as the start of a connector or a
request to the leader.

Only the leader writes configs, except that any worker may write a logger's level, or pause or resume a connector. If
another change of a connector is requested of another worker, that worker raises NotHere with the leader's address, and
the REST layer forwards the request there. A change of a connector waits for the end of a rebalance, and is rejected
(RebalanceNeeded) if that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.group.member import GroupConfig
from penstock.shared.common.errors import FatalError, KafkaTimeout, PenstockError, ProducerFenced, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import BadRequest, ConnectorNotFound, summary_of
from penstock.shared.connect.group.assignor import IncrementalAssignor
from penstock.shared.connect.group.connect_protocol import (
    NOTHING,
    PROTOCOL_NAMES,
    SESSIONED,
    ConnectorsAndTasks,
    ExtendedAssignment,
)
from penstock.shared.connect.group.worker_coordinator import WorkerCoordinator
from penstock.shared.connect.group.worker_member import WorkerMember
from penstock.shared.connect.herder import views
from penstock.shared.connect.herder.base_herder import BaseHerder, Stores
from penstock.shared.connect.herder.command_queue import REQUEST_TIMEOUT_MS, request_timeout
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.herder.errors import Forbidden, NotHere, RebalanceNeeded, RequestTimedOut
from penstock.shared.connect.herder.leader_client import LeaderClient
from penstock.shared.connect.herder.restart_plan import RestartPlan, merge_restart_requests
from penstock.shared.connect.herder.session_keys import expires_in_ms, new_key, verify
from penstock.shared.connect.runtime.client_settings import GROUP_ID_OVERRIDE, kafka_settings, sink_group_id
from penstock.shared.connect.runtime.exactly_once_source_task import fence_producers, transactional_id
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.runtime.status_listener import Id
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.storage.cluster_config_state import (
    ConfigChange,
    ConfigSnapshot,
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)
from penstock.shared.connect.storage.config_records import Config, LoggerLevel, RestartRequest, SessionKey

log = get_logger(__name__)

T = TypeVar("T")

RETRY_MS = 1_000
IDLE_MS = 10_000
"""The maximum time that the loop waits for work."""
REBALANCE_WAIT_MS = 10_000
"""How long a request that arrives during a rebalance waits before it is rejected."""


class DistributedHerder(BaseHerder):
    """The herder of one worker of a group."""

    def __init__(
        self,
        config: DistributedConfig,
        worker: Worker,
        admin: Admin,
        connection: Connection,
        stores: Stores,
        *,
        url: str,
        worker_id: str,
    ) -> None:
        fencing = self._fence_before_source_task if config.exactly_once else None
        super().__init__(worker, admin, stores, worker_id, before_task=fencing)
        self.url = url
        self._config = config
        self._pending = ConfigChanges()
        self._leader_client = LeaderClient(
            token=config["rest.auth.token"].value,
            user=next(iter(config.rest_users), ""),
            signature_algorithm=config["inter.worker.signature.algorithm"],
        )
        self._fencing_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By connector."""
        self.member = WorkerMember(
            GroupConfig(
                config["group.id"],
                connection.client_id,
                session_timeout_ms=config["session.timeout.ms"],
                heartbeat_interval_ms=config["heartbeat.interval.ms"],
            ),
            url,
            config.offered_versions,
            IncrementalAssignor(config["scheduled.rebalance.max.delay.ms"]),
        )
        self._coordinator = WorkerCoordinator(
            connection,
            self.member,
            self,
            self._clock,
            rebalance_timeout_ms=config["rebalance.timeout.ms"],
            on_rejoin=self.wake,
        )
        self._resolved = False
        """Whether the work of the current assignment was started."""
        self._unread_since_ms: int | None = None
        """When this worker first had an assignment whose configs it has not read yet."""
        self._must_read_to_join = False
        """Whether this worker has left the group because it could not read the configs."""
        self._rejoin_at_ms: int | None = None
        self.rebalances = 0
        self._rebalance_ended_ms: int | None = None
        self._rebalance_total_ms = 0.0
        self._rebalance_max_ms = 0.0

    def __repr__(self) -> str:
        return f"<DistributedHerder {self.member}, {self._commands!r}>"

    def rebalance_metrics(self) -> dict[str, float]:
        ended_ms = self._rebalance_ended_ms
        since = 0.0 if ended_ms is None else float(self._clock.monotonic_ms() - ended_ms)
        return {
            "epoch": float(self.generation),
            "completed_rebalances_total": float(self.rebalances),
            "rebalancing": float(self.member.needs_to_join or not self._resolved),
            "rebalance_avg_time_ms": self._rebalance_total_ms / self.rebalances if self.rebalances else 0.0,
            "rebalance_max_time_ms": self._rebalance_max_ms,
            "time_since_last_rebalance_ms": since,
        }

    def rebalance_texts(self) -> dict[str, str]:
        assignment = self.member.assignment
        if assignment is None:
            return {}
        return {"leader_name": assignment.leader_url, "connect_protocol": PROTOCOL_NAMES[self.member.version]}

    # --- lifecycle ---

    async def startup(self) -> None:
        """Read the three internal topics. Raises an ExceptionGroup, with ConfigError if one is misconfigured."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stores.configs.start())
            tasks.create_task(self._stores.statuses.start())
            tasks.create_task(self.worker.startup())
        self.member.config_offset = self.snapshot().offset

    async def main_loop(self) -> None:
        """Run until cancelled. Continues after retriable errors, for example if Kafka does not answer, and after
        ProducerFenced. Raises any other error."""
        while True:
            try:
                await self.run_once()
            except RetriableError as e:
                log.warning("a turn of the herder failed and is retried", error=type(e).__name__, reason=str(e))
                await asyncio.sleep(RETRY_MS / 1000)
            # Another worker has claimed the config topic and leads. This worker keeps its work.
            except ProducerFenced as e:
                log.warning("another worker leads", reason=str(e))
                self.member.rejoin("another worker leads")

    async def shutdown(self) -> None:
        """Stop connectors and tasks, leave the group, close the stores."""
        self._commands.close()
        await self._runner.close()
        await self._stores.statuses.flush()
        await self._coordinator.close()
        await self.worker.shutdown()
        await self._stores.statuses.stop()
        await self._stores.configs.stop()
        await self._leader_client.close()

    async def run_once(self) -> None:
        """Run one turn of the loop (Kafka Connect: `DistributedHerder.tick`), then wait until there is work.

        Does not wait if the group must be joined, if work is still to be started, or if new configs have arrived.
        """
        # 1. Join the group if a rebalance is due, and start the assigned work.
        self.member.config_offset = self.snapshot().offset
        await self._join_group()
        if not await self._rebalance_completed():
            return
        self._started = True
        # 2. On the leader, replace an expired session key.
        await self._keep_session_key()
        # 3. Request a rebalance at the end of the delay that the leader has set.
        now_ms = self._clock.monotonic_ms()
        if self._rejoin_at_ms is not None and now_ms >= self._rejoin_at_ms:
            self._rejoin_at_ms = None
            self.member.rejoin("the scheduled rebalance delay is over")
        # 4. Apply new configs. If they require a rebalance, the next turn joins it.
        await self._follow_configs()
        if self.member.needs_to_join or not self._resolved:
            return
        # 5. Run the requests in the command queue. Also if a change requires a rebalance: the changes that wait are
        #    then written and assigned together.
        await self._commands.run_due(until=lambda: self.member.needs_to_join)
        if not self.member.needs_to_join and not self._pending:
            await self._wait_for_work()

    async def _join_group(self) -> None:
        if not self.member.needs_to_join:
            return
        if self._must_read_to_join:
            await self._stores.configs.refresh(self._config["worker.sync.timeout.ms"])
            self._must_read_to_join = False
            self.member.config_offset = self.snapshot().offset
        began_ms = self._clock.monotonic_ms()
        await self._coordinator.ensure_active()
        ended_ms = self._clock.monotonic_ms()
        took_ms = ended_ms - began_ms
        self._rebalance_ended_ms = ended_ms
        self._rebalance_total_ms += took_ms
        self._rebalance_max_ms = max(self._rebalance_max_ms, took_ms)

    def wake(self) -> None:
        """Wake the loop because there is work."""
        self._wakeup.set()

    async def _wait_for_work(self) -> None:
        now_ms = self._clock.monotonic_ms()
        waits = [IDLE_MS]
        if (wait_ms := self._commands.wait_ms()) is not None:
            waits.append(wait_ms)
        if self._rejoin_at_ms is not None:
            waits.append(max(0, self._rejoin_at_ms - now_ms))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(waits) / 1000):
                await self._wakeup.wait()
        self._wakeup.clear()

    # --- the group ---

    async def on_revoked(self, work: ConnectorsAndTasks, *, lost: bool) -> None:
        log.info("work is revoked", work=repr(work), lost=lost)
        await self._runner.stop(work)
        # The UNASSIGNED statuses must precede the next owner's RUNNING.
        await self._stores.statuses.flush()

    def on_assigned(self, assignment: ExtendedAssignment, generation: int) -> None:
        log.info("assigned", generation=generation, leader=assignment.leader_url, work=repr(assignment.work))
        self.generation = generation
        self._resolved = False
        self.rebalances += 1
        self._rejoin_at_ms = self._clock.monotonic_ms() + assignment.delay_ms if assignment.delay_ms > 0 else None

    async def read_configs(self, offset: int, timeout_ms: int) -> tuple[ConnectorsAndTasks, int]:
        if self.snapshot().offset < offset:
            with contextlib.suppress(KafkaTimeout):
                await self._stores.configs.refresh(timeout_ms)
        snapshot = self.snapshot()
        return configured_work(snapshot), snapshot.offset

    async def _rebalance_completed(self) -> bool:
        """Start the assigned work if it was not started yet. Returns False if the worker must first join the group
        again. Raises KafkaTimeout if the configs cannot be read in time."""
        assignment = self.member.assignment
        if self._resolved or assignment is None:
            return True
        # 1. Read the configs up to the assignment's offset. If that takes too long, KafkaTimeout is raised and the turn
        #    is retried. Meanwhile the work that runs goes on. After the rebalance timeout the worker leaves the group
        #    until it has read the configs, so that others get its work.
        if self.snapshot().offset < assignment.config_offset:
            try:
                await self._stores.configs.refresh(self._config["worker.sync.timeout.ms"])
            except KafkaTimeout:
                now_ms = self._clock.monotonic_ms()
                if self._unread_since_ms is None:
                    self._unread_since_ms = now_ms
                if now_ms - self._unread_since_ms < self._config["rebalance.timeout.ms"]:
                    raise
                log.warning("left the group: the config topic could not be read in time")
                await self._coordinator.step_out()
                self._unread_since_ms = None
                self._must_read_to_join = True
                return False
        self._unread_since_ms = None
        self.member.config_offset = self.snapshot().offset
        # 2. Claim the config topic before any write of a leader.
        await self._lead_or_follow()
        # 3. Stop before starting. If the group has removed this worker meanwhile, others run the work.
        await self._runner.stop(self._runner.running() - assignment.work)
        if self.member.held != assignment.work or self.member.is_given_up(self._clock.monotonic_ms()):
            # Without a rejoin, the loop would repeat this turn at once. A follower's turn may wait for nothing, so the
            # loop would block the event loop.
            self.member.rejoin("other workers may run the assigned work")
            return False
        await self._runner.start(assignment.work)
        self._resolved = True
        return True

    async def _lead_or_follow(self) -> None:
        if self.member.is_leader:
            # As claimWritePrivileges in Kafka Connect (KIP-618): fences a former leader's writes.
            if not self._stores.configs.is_claimed:
                await self._stores.configs.claim()
            await self._forget_deleted_connectors()
        else:
            await self._stores.configs.release()

    async def _forget_deleted_connectors(self) -> None:
        """On the leader: removes the statuses of connectors and tasks that are no longer configured."""
        await self._stores.statuses.refresh()
        snapshot = self.snapshot()
        cache = self._stores.statuses.cache
        for name in cache.connectors():
            if name not in snapshot.configs:
                self._reporter.forget_connector(name)
            # The tasks of an inconsistent connector are unknown for now, and not removed.
            elif name not in snapshot.inconsistent:
                for task in cache.tasks(name).keys() - set(snapshot.tasks(name)):
                    self._reporter.forget(task)

    # --- the configs ---

    def on_config_change(self, change: ConfigChange) -> None:
        """Take a change from the config store."""
        self._pending.add(change, self.snapshot().offset)
        self.wake()

    async def _follow_configs(self) -> None:
        changes = self._pending
        self._pending = ConfigChanges()
        # Without a rebalance: logger levels, changed configs, target states and restarts concern the current owners.
        for level in changes.loggers:
            with contextlib.suppress(PenstockError):
                self.loggers.set_level(level.logger, level.level)
        # Before the next assignment, two kinds of work stop:
        # 1. Tasks with old configs, so that none runs beside the new set.
        # 2. Removed connectors and their tasks. If a connector was created again meanwhile, the next assignment may
        #    leave it here, and it must start with its new config.
        outdated = self._runner.outdated(changes.tasks, whole_sets=self._config.exactly_once)
        here = self._runner.running()
        removed_tasks = {task for task in here.tasks if task.connector in changes.removed}
        ending = ConnectorsAndTasks(here.connectors & changes.removed, outdated | removed_tasks)
        if ending:
            await self._runner.stop(ending)
            self._resolved = False
        for name in changes.connectors & self._work_to_run().connectors:
            self._runner.beside(self._runner.restart_connector(name))
        for name in changes.targets:
            self._runner.set_target_state(name)
        for request in changes.restarts.values():
            await self._restart_assigned(request)
        if changes.rejoin is not None:
            reason, offset = changes.rejoin
            # A worker that is behind the leader reads a change after the assignment that includes it.
            if (assigned := self.member.assignment) is None or offset > assigned.config_offset:
                self.member.rejoin(reason)

    def _work_to_run(self) -> ConnectorsAndTasks:
        """Return the work assigned to this worker, also work that could not be created here. Empty if other workers may
        run it."""
        return NOTHING if self.member.is_given_up(self._clock.monotonic_ms()) else self.member.held

    async def _keep_session_key(self) -> None:
        """On the leader: creates the session key if there is none, and replaces it when it has expired.

        Raises RetriableError if it could not be written, and FatalError if no retry can write it.
        """
        if not self.member.is_leader:
            return
        ttl_ms = self._config["inter.worker.key.ttl.ms"]
        now_ms = self._clock.now_ms()
        if expires_in_ms(self.snapshot().session_key, ttl_ms, now_ms) > 0:
            return
        try:
            await self._stores.configs.put_session_key(
                new_key(self._config["inter.worker.key.generation.algorithm"], now_ms)
            )
        except FatalError:
            raise
        except PenstockError as e:
            raise RetriableError(f"the session key could not be written: {summary_of(e)}") from e
        finally:
            self._rejoin_without_claim()

    # --- the worker that may act now ---

    def _require_no_pending_rebalance(self) -> None:
        if self.member.needs_to_join:
            raise RebalanceNeeded(
                "Request cannot be completed because a rebalance is expected: connectors and tasks are being reassigned"
            )

    def _require_group_leader(self) -> None:
        self._require_no_pending_rebalance()
        if not self.member.is_leader:
            assignment = self.member.assignment
            raise NotHere("Only the leader can do this.", assignment.leader_url if assignment else None)

    async def _run_as_leader(self, run: Callable[[], Awaitable[T]]) -> T:
        async def run_if_leader() -> T:
            # in the loop, since a rebalance may have changed the leader while the request waited
            self._require_group_leader()
            return await run()

        return await self._execute_command(run_if_leader)

    async def _execute_command(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a command in the loop and return its result. The timeout, which includes the command's own run, is
        REBALANCE_WAIT_MS if a rebalance is pending at the call, else REQUEST_TIMEOUT_MS.

        After the timeout, raises RebalanceNeeded if a rebalance is pending, else RequestTimedOut. Also raises
        RebalanceNeeded if another worker has claimed the config topic.
        """

        async def run_and_keep_claim() -> T:
            try:
                return await run()
            except ProducerFenced:
                raise RebalanceNeeded("Another worker leads the group now: retry the request") from None
            finally:
                self._rejoin_without_claim()

        try:
            return await self._commands.execute(
                run_and_keep_claim, REBALANCE_WAIT_MS if self.member.needs_to_join else REQUEST_TIMEOUT_MS
            )
        except RequestTimedOut:
            self._require_no_pending_rebalance()
            raise

    def _rejoin_without_claim(self) -> None:
        """On the leader, join again if a failed write has ended the claim of the config topic.

        If this worker then still leads, it claims the topic again.
        """
        if self.member.is_leader and not self._stores.configs.is_claimed:
            self.member.rejoin("the claim of the config topic has ended")

    # --- connectors ---

    async def _check_config(self, name: str, config: Config) -> None:
        await super()._check_config(name, config)
        if views.kind_of_connector(self.plugins, config) != "sink":
            return
        group = sink_group_id(name, self._resolved_part(config, GROUP_ID_OVERRIDE))
        if group == self._config["group.id"]:
            raise BadRequest(
                f"Consumer group for sink connector named {name} conflicts with Connect worker group {group}"
            )

    async def _store_connector(self, name: str, config: Config, target: TargetState | None) -> None:
        if target is None and config == self.snapshot().configs.get(name):
            # As in Kafka Connect, only the connector restarts. After a new record, its tasks would be committed again
            # and, under exactly-once, all restart.
            await self._stores.configs.put_restart(RestartRequest(name, only_failed=False, include_tasks=False))
        else:
            await self._stores.configs.put_connector(name, config, target)

    async def _remove_connector(self, name: str) -> None:
        await self._stores.configs.remove_connector(name)

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Start, pause or stop a connector. Raises ConnectorNotFound.

        Only the leader can stop a connector, because that also removes its task configs.
        """

        async def put_target_state() -> None:
            self._require_connector(name)
            # The tasks first, as in Kafka Connect (stopConnector): if the second write fails, a running connector
            # without tasks is better than a stopped one with tasks.
            if target is TargetState.STOPPED:
                await self._stores.configs.put_tasks(name, [])
            await self._stores.configs.put_target_state(name, target)

        await (
            self._run_as_leader(put_target_state)
            if target is TargetState.STOPPED
            else self._execute_command(put_target_state)
        )

    # --- restarts ---

    def _require_here(self, id: Id) -> None:
        self._require_no_pending_rebalance()
        super()._require_here(id)
        if id in self._work_to_run():
            return
        # Only the leader has all assignments. On another worker this call raises NotHere with the leader's URL.
        self._require_group_leader()
        owner = next((member for member, work in (self.member.owners or {}).items() if id in work), "")
        what = "task" if isinstance(id, ConnectorTaskId) else "connector"
        raise NotHere(
            f"Cannot restart {what} {id}: it is not assigned to this worker", (self.member.urls or {}).get(owner)
        )

    async def _begin_restart(self, request: RestartRequest, plan: RestartPlan) -> None:
        # Announced before it happens, so that a later request does not get the old status.
        self._reporter.announce_restart(plan.tasks, request.connector if plan.connector else None)
        await self._stores.statuses.flush()
        await self._stores.configs.put_restart(request)

    async def _restart_assigned(self, request: RestartRequest) -> None:
        try:
            plan = self._plan_restart(request)
        except ConnectorNotFound:
            return
        here = self._work_to_run()
        tasks = [task for task in plan.tasks if task in here.tasks]
        if tasks:
            await self._runner.restart_tasks(tasks, announced=True)
        if plan.connector and request.connector in here.connectors:
            self._runner.beside(self._runner.restart_connector(request.connector, announced=True))

    # --- offsets and loggers ---

    async def _fence_for_offsets(self, name: str) -> None:
        if self._config.exactly_once:
            await self._fence_producers(name, 0)

    async def set_cluster_level(self, logger: str, level: str) -> None:
        """Set a logger's level on every worker."""
        await self._stores.configs.put_logger_level(LoggerLevel(logger, level))

    # --- task configs ---

    async def _keep_tasks(self, name: str, made: Sequence[Config]) -> None:
        # Configs that are unchanged, and committed after the connector's config, are not written: new ones need a
        # rebalance and, under exactly-once, a restart of all tasks.
        if not self._task_configs_differ(name, made):
            return

        async def put_task_configs() -> str | None:
            self._require_no_pending_rebalance()
            if not self.member.is_leader:
                return self.member.assignment.leader_url if self.member.assignment else None
            await self._put_tasks(name, made)
            return None

        url = await self._execute_command(put_task_configs)
        if url is not None:
            await self._leader_client.put_tasks(url, name, made, self.snapshot().session_key)

    def _task_configs_differ(self, name: str, made: Sequence[Config]) -> bool:
        snapshot = self.snapshot()
        # Written in any case:
        # 1. Incomplete or missing configs: that repairs them.
        # 2. Configs that were committed before the connector's config (KAFKA-9228): the tasks get the connector's
        #    config, with its converters, from the commit.
        if not snapshot.is_committed(name):
            return True
        return [dict(task) for task in snapshot.all_task_configs(name)] != [dict(task) for task in made]

    async def _put_tasks(self, name: str, made: Sequence[Config]) -> None:
        # The connector may have been deleted or stopped since its worker computed the configs.
        snapshot = self.snapshot()
        wanted = name in snapshot.configs and snapshot.target_state(name) is not TargetState.STOPPED
        if wanted and self._task_configs_differ(name, made):
            await self._stores.configs.put_tasks(name, made)

    # --- between workers ---

    def _verify_request_signature(self, body: bytes, headers: Mapping[str, str]) -> None:
        # Signatures came with the protocol `sessioned` (KIP-507). Older workers send none.
        if self.member.version < SESSIONED:
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
        """Store the task configs of a connector that another worker runs.

        Under the protocol `sessioned`, raises BadRequest if the signature is missing or malformed, and Forbidden if it
        is wrong. The other protocols have no signatures.
        """
        self._verify_request_signature(body, headers)
        await self._run_as_leader(lambda: self._put_tasks(name, configs))

    async def fence(self, name: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Fence older tasks of a source, for another worker that is to start new ones."""
        self._verify_request_signature(body, headers)
        await self._fence_older_tasks(name)

    async def _fence_before_source_task(self, task: ConnectorTaskId) -> bool:
        """Fence a source's older tasks, if needed, and return whether the new task may start."""
        if views.kind_of_connector(self.plugins, self.snapshot().configs.get(task.connector)) != "source":
            return True

        def must_be_fenced() -> bool:
            snapshot = self.snapshot()
            return task.connector in snapshot.pending_fencing and task in snapshot.tasks(task.connector)

        attempt = 0
        # Another set of tasks may be stored while this one's predecessors are fenced.
        while must_be_fenced():
            reason = "another set of tasks was stored, which the leader may not know yet"
            try:
                await self._request_fencing(task.connector)
                await self._stores.configs.refresh()
                if not must_be_fenced():
                    break
            # Retried, as with task configs: temporary errors of Kafka, and any error of a request to the leader. Other
            # errors fail the task.
            except (RetriableError, NotHere, RebalanceNeeded, RequestTimedOut) as e:
                reason = summary_of(e)
            attempt += 1
            delay_ms = round(self._retry_backoff.wait_ms(attempt))
            log.warning("older tasks cannot be fenced yet", task=str(task), again_in_ms=delay_ms, reason=reason)
            await asyncio.sleep(delay_ms / 1000)
        # A rebalance while the fencing ran may have moved the task.
        return task in self._work_to_run().tasks

    async def _request_fencing(self, name: str) -> None:
        if self.member.is_leader:
            await self._fence_older_tasks(name)
        elif self.member.assignment is not None:
            url = self.member.assignment.leader_url
            await self._leader_client.fence(url, name, self.snapshot().session_key)

    async def _fence_older_tasks(self, name: str) -> None:
        """On the leader: fence the producers of a source's older tasks, if it has tasks that wait for this. Then store
        the number of these tasks, unless they changed meanwhile.

        Kafka's response may take long, so the herder's loop does not wait for it.
        """

        async def waiting_tasks() -> tuple[ConnectorTaskId, ...]:
            snapshot = self.snapshot()
            if views.kind_of_connector(self.plugins, views.config_of(snapshot, name)) != "source":
                raise BadRequest(f"Connector {name} is not a source connector")
            # Zombie fencing (KIP-618). None waits if the older tasks were fenced already, for another of these tasks.
            return snapshot.tasks(name) if name in snapshot.pending_fencing else ()

        async def put_task_count() -> None:
            snapshot = self.snapshot()
            if name in snapshot.pending_fencing and snapshot.tasks(name) == tasks:
                await self._stores.configs.put_task_count(name, len(tasks))

        # One fencing at a time for each connector. Otherwise a second one could still run when the first one's tasks
        # start, and fence them.
        lock = self._fencing_locks.setdefault(name, asyncio.Lock())
        reason = "Older tasks were not fenced in time: Kafka or the leader is slow, or an earlier fencing still runs"
        async with request_timeout(reason), lock:
            if not (tasks := await self._run_as_leader(waiting_tasks)):
                return
            await self._fence_producers(name, len(tasks))
            await self._run_as_leader(put_task_count)

    async def _fence_producers(self, name: str, count: int) -> None:
        """Fence the producers of a source's older tasks, before `count` tasks replace them."""
        before = self.snapshot().task_count_records.get(name, 0)
        # If one task replaces one task, the new producer has the old one's transactional id and fences it itself.
        if before > 1 or (before == 1 and count != 1):
            ids = [transactional_id(self._config["group.id"], ConnectorTaskId(name, task)) for task in range(before)]
            # With the clients' settings of the fenced tasks: the worker may not have the permissions for their ids.
            overrides = self._resolved_part(views.config_of(self.snapshot(), name), "producer.override.")
            client_id = f"connector-worker-producer-{name}"
            props = self.worker.config.connector_client_props("producer", client_id, overrides)
            await fence_producers(kafka_settings(props), ids)


def configured_work(snapshot: ConfigSnapshot) -> ConnectorsAndTasks:
    """Return the work that the herder assigns when it leads: all connectors and tasks of the configs."""
    return ConnectorsAndTasks(snapshot.configs, (task for name in snapshot.configs for task in snapshot.tasks(name)))


@dataclass(slots=True)
class ConfigChanges:
    """Changes in the config topic that the herder has not handled yet, and handles together.

    They are connectors whose config changed, removed connectors, tasks of connectors whose tasks changed, connectors
    whose target state changed, requested restarts, and logger levels.

    >>> changes = ConfigChanges()
    >>> changes.add(ConnectorChanged("orders", is_new=False), 7)
    >>> changes.add(ConnectorChanged("new", is_new=True), 8)
    >>> changes.rejoin, changes.connectors
    (('connector new is new', 8), {'orders'})
    """

    connectors: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    tasks: set[ConnectorTaskId] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    restarts: dict[str, RestartRequest] = field(default_factory=dict)
    loggers: list[LoggerLevel] = field(default_factory=list)
    rejoin: tuple[str, int] | None = None
    """The reason for a rebalance, which is due unless the assignment is based on the configs up to this offset."""

    def __bool__(self) -> bool:
        return self != ConfigChanges()

    def add(self, change: ConfigChange, offset: int) -> None:
        """Add a change, which the configs up to `offset` contain."""
        match change:
            # As in Kafka Connect: a changed config restarts the connector where it runs. A new or removed connector, or
            # a new set of tasks, must be assigned.
            case ConnectorChanged(connector, is_new=False):
                self.connectors.add(connector)
            case ConnectorChanged(connector):
                self.rejoin = f"connector {connector} is new", offset
            case ConnectorRemoved(connector):
                self.removed.add(connector)
                self.rejoin = f"connector {connector} was removed", offset
                # Earlier changes of a removed connector must not restart it.
                for held in (self.connectors, self.targets):
                    held.discard(connector)
            case TasksChanged(connector, tasks):
                self.tasks |= set(tasks)
                self.rejoin = f"the tasks of {connector} changed", offset
            case TargetStateChanged(connector):
                self.targets.add(connector)
            case RestartRequest(connector):
                self.restarts[connector] = merge_restart_requests(self.restarts.get(connector), change)
            case LoggerLevel():
                self.loggers.append(change)
            case SessionKey():
                # Readers find the session key in the snapshot.
                pass
