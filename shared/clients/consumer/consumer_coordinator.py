"""A consumer's side of the group protocol, with I/O (Java: `ConsumerCoordinator`).

`GroupState` decides the next step; this module takes it and reports the result. There are two tasks. One takes the
steps: JoinGroup, the leader's assignment, SyncGroup, the calls of the listener. The other sends the heartbeats, also
during the calls of the listener, since a call may take longer than a session. The requests are those of every group
member (`penstock.shared.clients.group.requests`).

The listener is called only while a poll waits for it (`listening`), so never beside the code that processes records.
Until then the step is due, and the poll returns no records. A call that has begun runs to its end, also if the poll
that waits for it is cancelled; the next poll waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer.group_state import Complete, Gather, GroupState, Leave, Lose, Revoke, Step
from penstock.shared.clients.group.member_states import MemberState
from penstock.shared.clients.group.requests import GroupRequests
from penstock.shared.clients.group.steps import Join, Sync, Wait
from penstock.shared.clients.protocol.consumer_protocol import PROTOCOL_TYPE
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import IllegalState, PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)

JOIN_END_MS = 2_000
"""How long a close waits for a join in progress. The answers take two round trips once all members have joined."""


class Rebalances(Protocol):
    """Receives the rebalances, and is awaited. It must not raise."""

    async def on_revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """These partitions are revoked. Unless they are lost, the member owns them until this returns."""

    async def on_assigned(self, assigned: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        """All partitions that the member owns now, and the new ones among them."""


class ConsumerCoordinator:
    """One member's part in its group, over an open connection."""

    def __init__(
        self,
        connection: Connection,
        state: GroupState,
        rebalances: Rebalances,
        clock: Clock,
        *,
        idle_ms: Callable[[], float],
        on_news: Callable[[], None],
        before_step: Callable[[], None],
    ) -> None:
        self._connection = connection
        self.state = state
        self._rebalances = rebalances
        self._clock = clock
        self._requests = GroupRequests(
            connection,
            state,
            clock,
            protocol_type=PROTOCOL_TYPE,
            rebalance_timeout_ms=state.config.max_poll_interval_ms,
            on_heartbeat=self._after_heartbeat,
        )
        self._idle_ms = idle_ms
        self._on_news = on_news
        self._before_step = before_step
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._calling = False
        self._stopping = False
        self._listener_due = False
        self._listening = 0
        self._settled = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self._began_ms: int | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.gone_because = ""
        """Why the membership was lost, if this process caused it; cleared when there is a new one."""

    def __repr__(self) -> str:
        return f"<ConsumerCoordinator {self.state}>"

    def start(self) -> None:
        """Take part in the group, as soon as there are topics."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._main_loop()), asyncio.create_task(self._requests.heartbeats())]
            self._watch_loop(self._clock.monotonic_ms())

    def wake(self) -> None:
        """Check at once for the next step, since something changed."""
        self._wake.set()

    def check_errors(self) -> None:
        """Raise the error that keeps the member out of the group, if there is one."""
        if self._broken is not None:
            raise self._broken
        error = self.state.take_error()
        if error is not None:
            self.wake()
            raise error

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Return a block in which the listener may be called: the caller processes no records."""
        self._listening += 1
        if self._listener_due:
            self.wake()
        try:
            yield
        finally:
            self._listening -= 1

    @property
    def is_listener_due(self) -> bool:
        """Whether a call of the listener is due or in progress. Then no records may be returned before it has ended."""
        # If the group has removed the member, the step that reports the loss may not be decided yet. No record of the
        # lost partitions may be returned in between.
        is_due = self._listener_due or self.state.is_forgotten
        return is_due and not self._stopping and self._broken is None

    async def call_listener(self) -> None:
        """Allow the call of the listener, and wait until it has ended."""
        while self.is_listener_due:
            self._settled.clear()
            with self.listening():
                await self._settled.wait()

    def on_commit_rejected(self, sent_as: tuple[int, str], code: int) -> None:
        """Handle a commit's error that shows the loss of the membership, without waiting for the next heartbeat."""
        self.state.on_heartbeat(sent_as, code, self._clock.monotonic_ms())
        self.wake()

    def leave_if_overdue(self) -> None:
        """Leave the group if the last poll is older than `max_poll_interval_ms`.

        Blocking code keeps the event loop from noticing it.
        """
        if not self._calling and (step := self.state.leave_if_idle(self._idle_ms())) is not None:
            self._leave_group(step)
            self.wake()

    @property
    def rebalance_ms(self) -> float:
        """Return the ms since the current rebalance began."""
        return 0.0 if self._began_ms is None else float(self._clock.monotonic_ms() - self._began_ms)

    async def stop_joining(self, timeout_ms: float) -> None:
        """Take no further step. A call of the listener in progress has `timeout_ms` to end.

        It also waits for a cooperative member's join in progress, for at most JOIN_END_MS: the group may reject commits
        until the sync is answered, and the last commit is still to come. If the group has not answered the join by
        then, it still waits for other members, and accepts commits of the previous generation.
        """
        self._stopping = True
        self.wake()
        # Only the first task takes steps. The heartbeats go on, or the group could remove the member before the last
        # commit.
        for task in self._tasks[:1]:
            if self._calling:
                await asyncio.wait([task], timeout=timeout_ms / 1000)
            elif self._ends_join:
                await asyncio.wait([task], timeout=min(timeout_ms, JOIN_END_MS) / 1000)
            await _cancel_task(task)

    @property
    def _ends_join(self) -> bool:
        return self.state.is_owner and self.state.state in (MemberState.JOINING, MemberState.SYNCING)

    @property
    def is_owner(self) -> bool:
        """Whether the member owns partitions and takes part in the group's rebalances."""
        return self.state.is_owner and not self._stopping

    async def close(self) -> None:
        """Leave the group, unless the member is static: the group keeps its membership until the session times out."""
        if self._watch is not None:
            self._watch.cancel()
        for task in self._tasks:
            await _cancel_task(task)
        await self._requests.leave(self.state.leave())
        if self._leaving is not None:
            await asyncio.wait([self._leaving])

    async def run_once(self) -> None:
        """Take one step."""
        # Clear before the step is decided: a change during the step then causes another turn.
        self._wake.clear()
        self._before_step()
        step = self.state.next_step(self._clock.monotonic_ms(), self._idle_ms())
        try:
            await self._execute_step(step)
        except PenstockError as e:
            self._requests.failed(step, e)
            self.state.on_failure(e, self._clock.monotonic_ms())
        else:
            self._requests.succeeded(step)
        self._send_follow_up_requests()

    async def _execute_step(self, step: Step) -> None:
        if self._began_ms is None and isinstance(step, Join | Revoke):
            self._began_ms = self._clock.monotonic_ms()
        self._set_listener_due(isinstance(step, Revoke | Lose | Complete))
        if self._listener_due and not self._listening:
            # A poll wakes this wait. An overdue poll needs no timer: the member has left, or failed.
            left_ms = self.state.config.max_poll_interval_ms - self._idle_ms()
            await self._wait_for_wake(left_ms if left_ms > 0 else None)
            return
        match step:
            case Wait(ms):
                await self._wait_for_wake(ms)
            case Revoke(partitions) | Lose(partitions):
                # The state keeps the partitions until the listener returns: no other member gets them before its
                # commit.
                await self._call_listener(self._rebalances.on_revoked(partitions, lost=isinstance(step, Lose)))
                self.state.on_revoked(partitions)
            case Complete(assigned, added):
                # Before the listener, so that it commits under the new generation.
                self.state.adopt()
                self._requests.follow_up()
                await self._call_listener(self._rebalances.on_assigned(assigned, added))
                self.state.on_completed()
                self._began_ms, self.gone_because = None, ""
            case Join():
                self.state.on_join(await self._requests.join(step), self._clock.monotonic_ms())
            case Gather(topics):
                self.state.on_gathered(await self._fetch_partition_counts(topics))
            case Sync():
                self.state.on_sync(await self._requests.sync(step), self._clock.monotonic_ms())
            case Leave():
                self._leave_group(step)

    async def _wait_for_wake(self, ms: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if ms is None else ms / 1000):
                await self._wake.wait()

    def _set_listener_due(self, is_due: bool) -> None:
        """Set the event and wake waiting polls: to allow the call if one is due, else to check again."""
        if is_due or self._listener_due:
            self._on_news()
        self._listener_due = is_due
        self._settled.set()

    def _leave_group(self, step: Leave) -> None:
        """Send LeaveGroup in parallel to the steps: no poll waits for its answer, and a following close sends it."""
        event = "left the group" if step.member_id else "sent no LeaveGroup, so its membership is kept for a session"
        limit_ms = self.state.config.max_poll_interval_ms
        self.gone_because = f"{event}: no poll within max_poll_interval_ms={limit_ms}"
        log.error(self.gone_because, **self._requests.fields())
        # A static member sends none: the group keeps its membership until the session times out.
        if step.member_id:
            self._leaving = asyncio.create_task(self._requests.leave(step.member_id))

    async def _call_listener(self, call: Any) -> None:
        self._calling = True
        try:
            await call
        finally:
            self._calling = False

    async def _fetch_partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the partition counts of the topics that exist, from fresh metadata."""
        # The leader also assigns topics that it does not read itself, so their metadata may be unknown.
        for topic in topics:
            self._connection.watch(topic)
        await self._connection.refresh_metadata()
        return self.known_partitions(topics)

    def known_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the partition counts of these topics, without the unknown ones."""
        return {topic: len(known) for topic in topics if (known := self._connection.partitions(topic)) is not None}

    async def _main_loop(self) -> None:
        try:
            while not self._stopping or self._ends_join:
                await self.run_once()
        # Without a request to cancel this task, something that it awaited was cancelled. Raised, it would end the
        # task without an error, and polls would wait for a rebalance that never ends.
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.error("group membership broke", **self._requests.fields(), reason="cancelled from within")
            self._broken = IllegalState(f"{self.state.where()}: cancelled from within: {e}")
            self._on_news()
        except Exception as e:
            log.exception("group membership broke", **self._requests.fields())
            self._broken = e
            self._on_news()
        finally:
            self._settled.set()

    def _watch_loop(self, due_ms: float) -> None:
        """Log code that does not await, since it delays heartbeats too, before the group removes the member."""
        config = self.state.config
        now_ms = self._clock.monotonic_ms()
        if (late_ms := now_ms - due_ms) > config.session_timeout_ms / 2:
            self.gone_because = f"the event loop was held up for {late_ms:.0f} ms, in which no heartbeat was sent"
            log.error(self.gone_because, **self._requests.fields())
        wait_ms = config.heartbeat_interval_ms
        self._watch = asyncio.get_running_loop().call_later(wait_ms / 1000, self._watch_loop, now_ms + wait_ms)

    def _after_heartbeat(self, all_is_well: bool) -> None:
        # The answer may be for a member that has left meanwhile. Then the reason is kept.
        if all_is_well and self.state.generation != NO_GENERATION:
            self.gone_because = ""
            return
        if self.state.error is not None:
            self._on_news()
        self.wake()

    def _send_follow_up_requests(self) -> None:
        self._requests.follow_up()
        if self.state.error is not None:
            self._on_news()


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
