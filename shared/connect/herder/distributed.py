"""One worker of a group: it takes part in rebalances, runs what it is assigned, follows the configs (an edge).

Everything that changes something runs in one loop, one thing after another: `run_once` takes the worker's place in the
group, then what the configs say is new, then one request after another of those that wait. What takes long (a
connector's start, a leader's answer) runs beside it and comes back as a command.

`startup`, `main_loop`, `shutdown` are the worker's life. The requests themselves are in `distributed_requests`.
"""

from __future__ import annotations

import asyncio
import contextlib

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.group.member_states import GroupConfig
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import KafkaTimeout, PenstockError, ProducerFenced, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.group.assignor import IncrementalAssignor
from penstock.shared.connect.group.connect_protocol import PROTOCOL_NAMES, Assignment, Work
from penstock.shared.connect.group.worker_coordinator import WorkerCoordinator
from penstock.shared.connect.group.worker_group import WorkerGroup
from penstock.shared.connect.herder.base_herder import Stores
from penstock.shared.connect.herder.distributed_requests import DistributedRequests
from penstock.shared.connect.herder.session_keys import expires_in_ms, new_key
from penstock.shared.connect.herder.settings import DistributedConfig
from penstock.shared.connect.storage.config_state import ConfigChange, ConfigSnapshot
from penstock.shared.connect.worker import Worker

log = get_logger(__name__)

RETRY_MS = 1_000
IDLE_MS = 10_000
"""How long the loop waits at most for something to do."""


class DistributedHerder(DistributedRequests):
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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(config, worker, admin, stores, worker_id, clock=clock)
        self.url = url
        self._wakeup = asyncio.Event()
        group = WorkerGroup(
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
            group,
            self,
            clock,
            rebalance_timeout_ms=config["rebalance.timeout.ms"],
            on_rejoin=self.wake,
        )
        self.group = group
        self._resolved = False
        self._rejoin_at_ms: int | None = None
        self._started = False
        self.rebalances = 0
        self._rebalance_ms: tuple[int | None, float, float] = (None, 0.0, 0.0)
        """When the last rebalance ended, how long all of them took, and the longest."""

    def __repr__(self) -> str:
        return f"<DistributedHerder {self.group}, {self._commands!r}>"

    @property
    def is_ready(self) -> bool:
        return self._started

    def rebalance_metrics(self) -> dict[str, float]:
        ended_ms, total_ms, max_ms = self._rebalance_ms
        since = 0.0 if ended_ms is None else float(self._clock.monotonic_ms() - ended_ms)
        return {
            "epoch": float(self.generation),
            "completed_rebalances_total": float(self.rebalances),
            "rebalancing": float(self.group.needs_to_join or not self._resolved),
            "rebalance_avg_time_ms": total_ms / self.rebalances if self.rebalances else 0.0,
            "rebalance_max_time_ms": max_ms,
            "time_since_last_rebalance_ms": since,
        }

    def rebalance_texts(self) -> dict[str, str]:
        assignment = self.group.assignment
        if assignment is None:
            return {}
        return {"leader_name": assignment.leader_url, "connect_protocol": PROTOCOL_NAMES[self.group.version]}

    # --- its life ---

    async def startup(self) -> None:
        """Read the three topics; ConfigError where one is not what it must be."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stores.configs.start())
            tasks.create_task(self._stores.statuses.start())
            tasks.create_task(self.worker.startup())
        self.group.config_offset = self.snapshot().offset

    async def main_loop(self) -> None:
        """Work until cancelled; what is passing, such as a Kafka that does not answer, is tried again."""
        while True:
            try:
                await self.run_once()
            except RetriableError as e:
                log.warning("a turn of the herder failed, trying again", error=type(e).__name__, reason=str(e))
                await asyncio.sleep(RETRY_MS / 1000)
            except ProducerFenced as e:  # of a leader's write: nothing is lost but the lead
                log.warning("another worker leads", reason=str(e))
                self.group.rejoin("another worker leads")

    async def shutdown(self) -> None:
        """Stop what runs, leave the group, close the stores."""
        self._commands.close()
        await self._runner.close()
        await self._stores.statuses.flush()
        await self._coordinator.close()
        await self.worker.shutdown()
        await self._stores.statuses.stop()
        await self._stores.configs.stop()
        await self._leader_client.close()

    async def run_once(self) -> None:
        """One turn: the group, the configs, the requests; then wait for something to do."""
        self.group.config_offset = self.snapshot().offset
        await self._take_place()
        if not await self._rebalance_completed():
            return
        self._started = True
        await self._keep_session_key()
        now_ms = self._clock.monotonic_ms()
        if self._rejoin_at_ms is not None and now_ms >= self._rejoin_at_ms:
            self._rejoin_at_ms = None
            self.group.rejoin("work of a worker that is gone has waited long enough")
        await self._follow_configs()
        if self.group.needs_to_join or not self._resolved:
            return
        # Also while a change wants a rebalance: what waits together is written together, and assigned together.
        await self._commands.run_due(until=lambda: self.group.needs_to_join)
        if not self.group.needs_to_join and not self._pending:
            await self._wait()

    async def _take_place(self) -> None:
        if not self.group.needs_to_join:
            return
        began_ms = self._clock.monotonic_ms()
        await self._coordinator.ensure_active()
        ended_ms = self._clock.monotonic_ms()
        took_ms = ended_ms - began_ms
        self._rebalance_ms = (ended_ms, self._rebalance_ms[1] + took_ms, max(self._rebalance_ms[2], took_ms))

    def wake(self) -> None:
        """There is something to do."""
        self._wakeup.set()

    async def _wait(self) -> None:
        now_ms, waits = self._clock.monotonic_ms(), [IDLE_MS]
        if (wait_ms := self._commands.wait_ms()) is not None:
            waits.append(wait_ms)
        if self._rejoin_at_ms is not None:
            waits.append(max(0, self._rejoin_at_ms - now_ms))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(waits) / 1000):
                await self._wakeup.wait()
        self._wakeup.clear()

    # --- the group ---

    async def on_revoked(self, work: Work, *, lost: bool) -> None:
        log.info("work is given up", work=repr(work), lost=lost)
        await self._runner.stop(work)
        await self._stores.statuses.flush()

    def on_assigned(self, assignment: Assignment, generation: int) -> None:
        log.info("assigned", generation=generation, leader=assignment.leader_url, work=repr(assignment.work))
        self.generation, self._resolved = generation, False
        self._pending.assigned(assignment.config_offset)
        self.rebalances += 1
        self._rejoin_at_ms = self._clock.monotonic_ms() + assignment.delay_ms if assignment.delay_ms > 0 else None

    async def read_configs(self, offset: int, timeout_ms: int) -> tuple[Work, int]:
        if self.snapshot().offset < offset:
            with contextlib.suppress(KafkaTimeout):
                await self._stores.configs.refresh(timeout_ms)
        snapshot = self.snapshot()
        return configured(snapshot), snapshot.offset

    async def _rebalance_completed(self) -> bool:
        """Begin what is assigned, once per assignment; False where the group must be joined again first."""
        assignment = self.group.assignment
        if self._resolved or assignment is None:
            return True
        if self.snapshot().offset < assignment.config_offset or assignment.failed:
            try:
                await self._stores.configs.refresh(self._config["worker.sync.timeout.ms"])
            except KafkaTimeout as e:
                log.warning("left the group: the configs cannot be read as far as it has them", reason=str(e))
                await self._coordinator.step_out()
                await asyncio.sleep(self._config["worker.unsync.backoff.ms"] / 1000)
                return False
        self.group.config_offset = self.snapshot().offset
        if assignment.failed:
            self.group.rejoin("read the configs")
            return False
        await self._lead_or_follow()
        await self._runner.stop(self._runner.running() - assignment.work)
        if self.group.held != assignment.work or self.group.is_given_up(self._clock.monotonic_ms()):
            return False  # lost meanwhile: others run it
        await self._runner.start(assignment.work)
        self._resolved = True
        return True

    async def _lead_or_follow(self) -> None:
        if self.group.is_leader:
            if not self._stores.configs.is_claimed:
                await self._stores.configs.claim()
            await self._forget_what_is_gone()
        else:
            await self._stores.configs.release()

    async def _forget_what_is_gone(self) -> None:
        """The leader's: statuses of connectors and tasks that are configured no longer."""
        await self._stores.statuses.refresh()
        snapshot, cache = self.snapshot(), self._stores.statuses.cache
        for name in cache.connectors():
            if name not in snapshot.configs:
                self._reporter.forget_connector(name)
        for name in cache.connectors_with_tasks():
            for status in cache.tasks(name):
                if status.task not in snapshot.tasks(name) and name not in snapshot.inconsistent:
                    self._reporter.on_deletion(status.task)

    # --- the configs ---

    def on_config_change(self, change: ConfigChange) -> None:
        """The config store's listener."""
        self._pending.add(change, self.snapshot().offset, self._known)
        self._known = frozenset(self.snapshot().configs)
        self.wake()

    async def _follow_configs(self) -> None:
        reason = self._pending.take_rejoin()
        changes = self._pending.take()
        for level in changes.loggers:
            with contextlib.suppress(PenstockError):
                self.loggers.set_level(level.logger, level.level)
        here = self._runner.running()
        # Stopped before the group assigns anew, so that none of an old set runs beside the new one.
        outdated = self._runner.outdated(changes.tasks, whole_sets=self._config.exactly_once)
        if outdated:
            await self._runner.stop(Work((), outdated))
            self._resolved = False
        for name in changes.connectors & here.connectors:
            self._runner.beside(self._runner.restart_connector(name))
        for name in changes.targets:
            await self._runner.set_target_state(name)
        for request in changes.restarts.values():
            await self._restart_what_is_here(request)
        if reason is not None:
            self.group.rejoin(reason)

    async def _keep_session_key(self) -> None:
        """The leader's: a key where there is none, and a new one in time."""
        if not self.group.is_leader:
            return
        ttl_ms, now_ms = self._config["inter.worker.key.ttl.ms"], self._clock.now_ms()
        if expires_in_ms(self.snapshot().session_key, ttl_ms, now_ms) <= 0:
            await self._stores.configs.put_session_key(
                new_key(self._config["inter.worker.key.generation.algorithm"], now_ms)
            )


def configured(snapshot: ConfigSnapshot) -> Work:
    """All that is to run somewhere."""
    return Work(snapshot.configs, (task for name in snapshot.configs for task in snapshot.tasks(name)))
