"""The I/O of `WorkerMember`: executes each of its steps and reports the outcome.

The herder calls `ensure_active`, which executes steps until the worker is an active member. On the way it calls the
herder's callbacks. Heartbeats are sent in parallel, also while the herder starts and stops work. Another asyncio task
checks whether the group has removed the worker. If so, the worker's work is stopped at once, even if the herder is
busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.group.group_requests import GroupRequests
from penstock.shared.clients.group.member import Join, Sync, Wait
from penstock.shared.common.clock import Clock
from penstock.shared.common.log import get_logger
from penstock.shared.connect.group.connect_protocol import PROTOCOL_TYPE, ConnectorsAndTasks, ExtendedAssignment
from penstock.shared.connect.group.worker_member import CompleteRebalance, GiveUpWork, Lead, Stable, Step, WorkerMember

log = get_logger(__name__)

LEAD_READ_MS = 3_000
"""How long the leader reads the configs to reach a member's offset before it reports that it cannot assign."""


class WorkerRebalanceListener(Protocol):
    """The callbacks of the worker's coordinator in a rebalance. The herder implements them."""

    async def on_revoked(self, work: ConnectorsAndTasks, *, lost: bool) -> None:
        """Stop this work. When this returns, other workers may run the work; if it is `lost`, they may run it
        already."""

    def on_assigned(self, assignment: ExtendedAssignment, generation: int) -> None:
        """Take all work that this worker is to run, in `assignment.work`."""

    async def read_configs(self, offset: int, timeout_ms: int) -> tuple[ConnectorsAndTasks, int]:
        """Read the configs up to `offset`. Called when this worker leads the rebalance.

        Returns all configured work, and the offset up to which the configs were read. After `timeout_ms` that offset
        may be lower than `offset`.
        """


class WorkerCoordinator:
    """One worker's membership in its group, over an open connection."""

    def __init__(
        self,
        connection: Connection,
        member: WorkerMember,
        rebalances: WorkerRebalanceListener,
        clock: Clock,
        *,
        rebalance_timeout_ms: int,
        on_rejoin: Callable[[], None],
    ) -> None:
        self.member = member
        self._rebalances = rebalances
        self._clock = clock
        self._on_rejoin = on_rejoin
        self._requests = GroupRequests(
            connection,
            member,
            clock,
            protocol_type=PROTOCOL_TYPE,
            rebalance_timeout_ms=rebalance_timeout_ms,
            on_heartbeat=self._after_heartbeat,
        )
        self._beside: list[asyncio.Task[None]] = []
        self._losing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WorkerCoordinator {self.member}>"

    async def ensure_active(self) -> None:
        """Return when the worker is an active member of the group. Retriable errors are retried. Any other error, such
        as AuthorizationFailed, is raised."""
        if not self._beside:
            self._beside = [
                asyncio.create_task(self._requests.heartbeats(), name="worker heartbeats"),
                asyncio.create_task(self._watch_membership(), name="worker's membership"),
            ]
        while self.member.needs_to_join:
            step = self.member.next_step(self._clock.monotonic_ms())
            await self._requests.execute(step, self._execute_step(step))

    async def step_out(self) -> None:
        """Stop all work and leave the group. `ensure_active` joins again."""
        held = self.member.held
        await self._rebalances.on_revoked(held, lost=False)
        self.member.on_given_up(held)
        await self._requests.leave(self.member.leave())

    async def close(self) -> None:
        """Leave the group. The caller must have stopped the worker's work before."""
        beside = [*self._beside, *([self._losing] if self._losing else [])]
        self._beside = []
        for task in beside:
            task.cancel()
        if beside:
            await asyncio.wait(beside)
        await self._requests.leave(self.member.leave())

    async def _execute_step(self, step: Step) -> None:
        match step:
            case Wait(ms):
                await asyncio.sleep((ms or 0) / 1000)
            # Shielded: `_check_membership` may have begun the same stop, and a cancelled step must not end it.
            case GiveUpWork(lost=True):
                await asyncio.shield(self._begin_stop_of_lost_work())
            case GiveUpWork(work):
                await self._rebalances.on_revoked(work, lost=False)
                self.member.on_given_up(work)
            case Join():
                self.member.on_join(await self._requests.join(step), self._clock.monotonic_ms())
            case Lead(offset):
                configured, read = await self._rebalances.read_configs(offset, LEAD_READ_MS)
                self.member.on_led(configured, read, self._clock.monotonic_ms())
            case Sync():
                self.member.on_sync(await self._requests.sync(step), self._clock.monotonic_ms())
            case CompleteRebalance(assignment, generation):
                self.member.on_completed(assignment)
                self._rebalances.on_assigned(assignment, generation)
            case Stable():
                pass

    def _after_heartbeat(self, _all_is_well: bool) -> None:
        if self.member.needs_to_join:
            self._on_rejoin()
        self._check_membership()

    # --- lost work ---

    async def _watch_membership(self) -> None:
        while True:
            await asyncio.sleep(self.member.config.heartbeat_interval_ms / 1000)
            self._check_membership()

    def _check_membership(self) -> None:
        if self.member.has_lost_work(self._clock.monotonic_ms()):
            self._begin_stop_of_lost_work()

    def _begin_stop_of_lost_work(self) -> asyncio.Task[None]:
        """Start to stop all held work, since other workers may run it. Calls in the meantime return the same
        asyncio task."""
        if self._losing is None or self._losing.done():
            self._losing = asyncio.create_task(self._stop_lost_work(), name="work that is lost")
            self._losing.add_done_callback(self._lost_work_stopped)
        return self._losing

    async def _stop_lost_work(self) -> None:
        held = self.member.held
        await self._rebalances.on_revoked(held, lost=True)
        self.member.on_given_up(held, lost=True)
        self._on_rejoin()

    def _lost_work_stopped(self, losing: asyncio.Task[None]) -> None:
        if not losing.cancelled() and (error := losing.exception()) is not None:
            log.warning("lost work could not be stopped", **self._requests.fields(), reason=str(error))
