"""The edge under `GroupState`: asks it what is to be done, does it, and tells it what became of it.

Two tasks. One takes step after step: JoinGroup, the leader's assignment, SyncGroup, the listener's calls. The other
sends the heartbeats, during the listener's calls as well, since these may take longer than a session. JoinGroup and
SyncGroup are answered when all members are there; they have a connection of their own, so that heartbeats, commits and
fetches do not queue behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shared.clients.connection import Connection, name_of, wire_groups
from shared.clients.consumer.group_protocol import PROTOCOL_TYPE
from shared.clients.consumer.group_state import GroupState
from shared.clients.consumer.group_steps import (
    Complete,
    Gather,
    Join,
    JoinAnswer,
    Leave,
    Lose,
    Revoke,
    Step,
    Sync,
    SyncAnswer,
    Wait,
)
from shared.common.clock import Clock
from shared.common.errors import PenstockError, RetriableError
from shared.common.log import get_logger
from shared.common.records import TopicPartition

log = get_logger(__name__)

ANSWER_GRACE_MS = 5_000
"""How much longer than `rebalance_timeout_ms` the coordinator may take to answer a join, as with the Java consumer."""


class Rebalances(Protocol):
    """Who is told of a rebalance, and awaited. Nothing may be raised."""

    async def on_revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """These go; where they are not lost they are still ours until this returns."""

    async def on_assigned(self, assigned: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        """All that is ours now, and what of it is new."""


class GroupCoordinator:
    """One member's place in its group, over an open connection."""

    def __init__(
        self,
        connection: Connection,
        state: GroupState,
        rebalances: Rebalances,
        clock: Clock,
        *,
        rebalance_timeout_ms: int,
        idle_ms: Callable[[], float],
        on_failed: Callable[[], None],
        before_step: Callable[[], None],
    ) -> None:
        self._connection, self.state, self._rebalances, self._clock = connection, state, rebalances, clock
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._idle_ms, self._on_failed, self._before_step = idle_ms, on_failed, before_step
        self._group_id = state.config.group_id
        self._wake, self._beats = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._calling = self._stopping = False
        self._broken: BaseException | None = None
        self._began_ms: int | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.gone_because = ""
        """Why the place in the group was lost, where that is this process's own doing; until there is a new one."""

    def __repr__(self) -> str:
        return f"<GroupCoordinator {self.state}>"

    def start(self) -> None:
        """Take part in the group, as soon as there are topics."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._main_loop()), asyncio.create_task(self._heartbeats())]
            self._watch_loop(self._clock.monotonic_ms())

    def wake(self) -> None:
        """Something changed: look at once at what is to be done."""
        self._wake.set()

    def check_errors(self) -> None:
        """Raise what keeps the member out of the group."""
        if self._broken is not None:
            raise self._broken
        error = self.state.take_error()
        if error is not None:
            self.wake()
            raise error

    @property
    def rebalance_ms(self) -> float:
        """How long the rebalance has taken that goes on now."""
        return 0.0 if self._began_ms is None else float(self._clock.monotonic_ms() - self._began_ms)

    async def stop_joining(self, timeout_ms: float) -> None:
        """Take no further step; a listener's call that is under way has so long to end."""
        self._stopping = True
        self.wake()
        for task in self._tasks[:1]:
            if self._calling:
                await asyncio.wait([task], timeout=timeout_ms / 1000)
            await _cancel(task)

    async def close(self) -> None:
        """Leave the group, unless the member is static: its place is kept until its session is over."""
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            await _cancel(task)
        if member_id := self.state.leave():
            await self._leave(member_id)

    async def run_once(self) -> None:
        """One step."""
        self._wake.clear()
        self._before_step()
        step = self.state.next_step(self._clock.monotonic_ms(), self._idle_ms())
        try:
            await self._do(step)
        except PenstockError as e:
            log.warning("group request failed", **self._fields(), step=type(step).__name__, reason=str(e))
            self.state.on_failure(e, self._clock.monotonic_ms())
        self._follow_up()

    async def _do(self, step: Step) -> None:
        if self._began_ms is None and isinstance(step, Join | Revoke):
            self._began_ms = self._clock.monotonic_ms()
        match step:
            case Wait(ms):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if ms is None else ms / 1000):
                        await self._wake.wait()
            case Revoke(partitions) | Lose(partitions):
                await self._call(self._rebalances.on_revoked(partitions, lost=isinstance(step, Lose)))
                self.state.on_revoked(partitions)
            case Complete(assigned, added):
                self.state.adopt()
                self._beats.set()
                await self._call(self._rebalances.on_assigned(assigned, added))
                self.state.on_completed()
                self._began_ms, self.gone_because = None, ""
            case Join():
                await self._join(step)
            case Gather(topics):
                self.state.on_gathered(await self._partitions(topics))
            case Sync():
                await self._sync(step)
            case Leave(member_id):
                self.gone_because = (
                    f"left the group: no poll within max_poll_interval_ms={self.state.config.max_poll_interval_ms}"
                )
                log.error(self.gone_because, **self._fields())
                await self._leave(member_id)

    async def _call(self, call: Any) -> None:
        self._calling = True
        try:
            await call
        finally:
            self._calling = False

    async def _join(self, join: Join) -> None:
        config = self.state.config
        log.info("joining the group", **self._fields(), reason=join.reason)
        response = await self._ask(
            wire_groups.JOIN_GROUP(
                config.group_id,
                config.session_timeout_ms,
                self._rebalance_timeout_ms,
                join.member_id,
                config.instance_id,
                PROTOCOL_TYPE,
                [(join.protocol, join.subscription)],
            ),
            "JoinGroup",
            waits_ms=self._rebalance_timeout_ms + ANSWER_GRACE_MS,
        )
        members = tuple((name, instance, bytes(data)) for name, instance, data in response.members)
        answer = JoinAnswer(
            response.error_code,
            response.generation_id,
            response.protocol_name or "",
            response.leader or "",
            response.member_id or "",
            members,
        )
        self.state.on_join(answer, self._clock.monotonic_ms())

    async def _partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions the topics have that exist, from fresh metadata."""
        for topic in topics:
            self._connection.watch(topic)
        await self._connection.refresh_metadata()
        return self.known_partitions(topics)

    def known_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions these topics have, without those that are not known."""
        return {topic: len(known) for topic in topics if (known := self._connection.partitions(topic)) is not None}

    async def _sync(self, sync: Sync) -> None:
        response = await self._ask(
            wire_groups.SYNC_GROUP(
                self._group_id,
                sync.generation,
                sync.member_id,
                self.state.config.instance_id,
                list(sync.assignments.items()),
            ),
            "SyncGroup",
            waits_ms=self._rebalance_timeout_ms + ANSWER_GRACE_MS,
        )
        self.state.on_sync(
            SyncAnswer(response.error_code, bytes(response.assignment or b"")), self._clock.monotonic_ms()
        )

    async def _leave(self, member_id: str) -> None:
        """Best effort: a group that is not told finds out when the session is over."""
        request = wire_groups.LEAVE_GROUP(self._group_id, [(member_id, None)])
        try:
            response = await self._ask(request, "LeaveGroup")
        except PenstockError as e:
            log.info("the group was not told of the leave", **self._fields(), left_as=member_id, reason=str(e))
            return
        for code in (response.error_code, *(code for *_, code in response.members)):
            if code:
                log.info("LeaveGroup refused", **self._fields(), left_as=member_id, reason=name_of(code))

    async def _main_loop(self) -> None:
        try:
            while not self._stopping:
                await self.run_once()
        except Exception as e:
            log.exception("group membership broke", **self._fields())
            self._broken = e
            self._on_failed()

    async def _heartbeats(self) -> None:
        while True:
            wait_ms = self.state.heartbeat_wait_ms(self._clock.monotonic_ms())
            if wait_ms == 0:
                await self._heartbeat()
                continue
            self._beats.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._beats.wait()

    def _watch_loop(self, due_ms: float) -> None:
        """Code that does not await holds up heartbeats as well: say so before the group does."""
        config, now_ms = self.state.config, self._clock.monotonic_ms()
        if (late_ms := now_ms - due_ms) > config.session_timeout_ms / 2:
            self.gone_because = f"the event loop was held up for {late_ms:.0f} ms, in which no heartbeat was sent"
            log.error(self.gone_because, **self._fields())
        wait_ms = config.heartbeat_interval_ms
        self._watch = asyncio.get_running_loop().call_later(wait_ms / 1000, self._watch_loop, now_ms + wait_ms)

    async def _heartbeat(self) -> None:
        config, sent_as = self.state.config, self.state.on_heartbeat_sent(self._clock.monotonic_ms())
        request = wire_groups.HEARTBEAT(config.group_id, *sent_as, config.instance_id)
        try:
            async with asyncio.timeout(config.session_timeout_ms / 1000):
                code = (await self._ask(request, "Heartbeat")).error_code
        except (TimeoutError, RetriableError) as e:
            log.warning("heartbeat without answer", **self._fields(), reason=str(e) or "session timeout")
            self.state.on_heartbeat_lost(self._clock.monotonic_ms())
        except PenstockError as e:
            self.state.fail(e)
        else:
            if code:
                log.info("heartbeat", **self._fields(), answer=name_of(code))
            self.state.on_heartbeat(sent_as, code, self._clock.monotonic_ms())
            if not code:
                self.gone_because = ""
                return
        self._follow_up()
        self.wake()

    async def _ask(self, request: Any, api: str, waits_ms: float | None = None) -> Any:
        where = f"{api} of {self.state.where()}"
        return await self._connection.ask_coordinator("group", self._group_id, request, where, waits_ms=waits_ms)

    def _follow_up(self) -> None:
        self._beats.set()
        if self.state.forget_coordinator:
            self.state.forget_coordinator = False
            self._connection.forget_coordinator("group", self._group_id)
        if self.state.error is not None:
            self._on_failed()

    def _fields(self) -> dict[str, object]:
        config = self.state.config
        return {
            "client_id": config.client_id,
            "group_id": config.group_id,
            "generation": self.state.generation,
            "member_id": self.state.member_id,
            "group_instance_id": config.instance_id,
        }


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
