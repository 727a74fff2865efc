"""The edge under `WorkerGroup`: asks it what is to be done, does it, and tells it what became of it.

The herder drives it: `ensure_active` takes step after step until the worker has its place, and calls the herder back on
the way. Heartbeats are sent beside, also while the herder starts and stops what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from shared.clients.connection import Connection, name_of, wire_groups
from shared.common.clock import Clock
from shared.common.errors import PenstockError, RetriableError
from shared.common.log import get_logger
from shared.connect.group.connect_protocol import PROTOCOL_TYPE, Assignment, Work
from shared.connect.group.worker_group import (
    Complete,
    GiveUp,
    Join,
    JoinAnswer,
    Lead,
    Stable,
    Step,
    Sync,
    Wait,
    WorkerGroup,
)

log = get_logger(__name__)

ANSWER_GRACE_MS = 5_000
"""How much longer than the rebalance timeout the coordinator may take to answer a join."""
LEAD_READ_MS = 3_000
"""How long the leader reads on to where a member is already, before it says that it cannot assign."""


class Rebalances(Protocol):
    """Who is told of a rebalance, and awaited: the herder."""

    async def on_revoked(self, work: Work, *, lost: bool) -> None:
        """Stop this work: others may have it when this returns, or have it already where it is lost."""

    def on_assigned(self, assignment: Assignment, generation: int) -> None:
        """All that this worker is to run now, in `assignment.work`."""

    async def read_configs(self, offset: int, timeout_ms: int) -> tuple[Work, int]:
        """All that is configured, read up to `offset` if that can be done in time, and how far it was read."""


class WorkerCoordinator:
    """One worker's place in its group, over an open connection."""

    def __init__(
        self,
        connection: Connection,
        group: WorkerGroup,
        rebalances: Rebalances,
        clock: Clock,
        *,
        rebalance_timeout_ms: int,
        on_rejoin: Callable[[], None],
    ) -> None:
        self._connection, self.group, self._rebalances, self._clock = connection, group, rebalances, clock
        self._rebalance_timeout_ms, self._on_rejoin = rebalance_timeout_ms, on_rejoin
        self._group_id = group.config.group_id
        self._beats = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WorkerCoordinator {self.group}>"

    async def ensure_active(self) -> None:
        """Return when the worker has its place in the group; raises what keeps it out for good."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._heartbeats(), name="worker heartbeats")
        while self.group.needs_to_join:
            await self.run_once()

    async def run_once(self) -> None:
        """One step."""
        step = self.group.next_step(self._clock.monotonic_ms())
        try:
            await self._do(step)
        except PenstockError as e:
            log.warning("group request failed", **self._fields(), step=type(step).__name__, reason=str(e))
            self.group.on_failure(e, self._clock.monotonic_ms())
        self._follow_up()

    async def step_out(self) -> None:
        """Give up everything and leave the group; `ensure_active` comes back to it."""
        held = self.group.held
        await self._rebalances.on_revoked(held, lost=False)
        self.group.on_given_up(held)
        if member_id := self.group.leave():
            await self._leave(member_id)

    async def close(self) -> None:
        """Leave the group; what the worker ran must be stopped by then."""
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait([beating])
        if member_id := self.group.leave():
            await self._leave(member_id)

    async def _do(self, step: Step) -> None:
        match step:
            case Wait(ms):
                await asyncio.sleep(ms / 1000)
            case GiveUp(work, lost):
                await self._rebalances.on_revoked(work, lost=lost)
                self.group.on_given_up(work)
            case Join():
                await self._join(step)
            case Lead(offset):
                configured, read = await self._rebalances.read_configs(offset, LEAD_READ_MS)
                self.group.on_led(configured, read, self._clock.monotonic_ms())
            case Sync():
                await self._sync(step)
            case Complete(assignment, generation):
                self.group.on_completed(assignment)
                self._rebalances.on_assigned(assignment, generation)
            case Stable():
                pass

    async def _join(self, join: Join) -> None:
        config = self.group.config
        log.info("joining the group", **self._fields(), reason=join.reason)
        response = await self._ask(
            wire_groups.JOIN_GROUP(
                config.group_id,
                config.session_timeout_ms,
                self._rebalance_timeout_ms,
                join.member_id,
                None,
                PROTOCOL_TYPE,
                list(join.protocols),
            ),
            "JoinGroup",
            waits_ms=self._rebalance_timeout_ms + ANSWER_GRACE_MS,
        )
        answer = JoinAnswer(
            response.error_code,
            response.generation_id,
            response.protocol_name or "",
            response.leader or "",
            response.member_id or "",
            tuple((member, bytes(data)) for member, _, data in response.members),
        )
        self.group.on_join(answer, self._clock.monotonic_ms())

    async def _sync(self, sync: Sync) -> None:
        response = await self._ask(
            wire_groups.SYNC_GROUP(self._group_id, sync.generation, sync.member_id, None, list(sync.assignments)),
            "SyncGroup",
            waits_ms=self._rebalance_timeout_ms + ANSWER_GRACE_MS,
        )
        self.group.on_sync(response.error_code, bytes(response.assignment or b""), self._clock.monotonic_ms())

    async def _leave(self, member_id: str) -> None:
        """Best effort: a group that is not told finds out when the session is over."""
        try:
            response = await self._ask(wire_groups.LEAVE_GROUP(self._group_id, [(member_id, None)]), "LeaveGroup")
        except PenstockError as e:
            log.info("the group was not told of the leave", **self._fields(), left_as=member_id, reason=str(e))
            return
        for code in (response.error_code, *(code for *_, code in response.members)):
            if code:
                log.info("LeaveGroup refused", **self._fields(), left_as=member_id, reason=name_of(code))

    async def _heartbeats(self) -> None:
        while True:
            wait_ms = self.group.heartbeat_wait_ms(self._clock.monotonic_ms())
            if wait_ms == 0:
                await self._heartbeat()
                continue
            self._beats.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._beats.wait()

    async def _heartbeat(self) -> None:
        config, sent_as = self.group.config, self.group.on_heartbeat_sent(self._clock.monotonic_ms())
        try:
            async with asyncio.timeout(config.session_timeout_ms / 1000):
                answer = await self._ask(wire_groups.HEARTBEAT(config.group_id, *sent_as, None), "Heartbeat")
        except (TimeoutError, RetriableError) as e:
            log.warning("heartbeat without answer", **self._fields(), reason=str(e) or "session timeout")
            self.group.on_heartbeat_lost(self._clock.monotonic_ms())
        except PenstockError as e:
            self.group.fail(e)
        else:
            if answer.error_code:
                log.info("heartbeat", **self._fields(), answer=name_of(answer.error_code))
            self.group.on_heartbeat(sent_as, answer.error_code, self._clock.monotonic_ms())
        self._follow_up()
        if self.group.needs_to_join:
            self._on_rejoin()

    async def _ask(self, request: Any, api: str, waits_ms: float | None = None) -> Any:
        where = f"{api} of {self.group.where()}"
        return await self._connection.ask_coordinator("group", self._group_id, request, where, waits_ms=waits_ms)

    def _follow_up(self) -> None:
        self._beats.set()
        if self.group.forget_coordinator:
            self.group.forget_coordinator = False
            self._connection.forget_coordinator("group", self._group_id)

    def _fields(self) -> dict[str, object]:
        return {"group_id": self._group_id, "generation": self.group.generation, "member_id": self.group.member_id}
