"""A consumer's side of the group protocol, with I/O (Java: `ConsumerCoordinator`).

`ConsumerMembershipManager` decides the next step. This module executes the step and reports the result. There are two
tasks. One executes the steps: JoinGroup, the leader's assignment, SyncGroup, the calls of the listener. The other sends
the heartbeats, also during a call of the listener, since the call may take longer than a session. The requests are
those of every group member (`penstock.shared.clients.group.group_requests`). Without a group there are no tasks, and a
subscription reads all partitions of its topics.

In a rebalance, a call of the listener begins only while a poll waits for it (`listening`), when no records are
processed. Until then the call is due, and polls return no records. If the poll is cancelled, a call that has begun
continues, and the next poll waits for it. A new assignment is passed to the fetcher before the listener is called.

A member without a poll for `max_poll_interval_ms` leaves the group. A poll in progress counts as a recent one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer.fetch_request_manager import FetchRequestManager
from penstock.shared.clients.consumer.membership_manager import (
    Complete,
    ConsumerMembershipManager,
    Gather,
    Leave,
    Lose,
    Revoke,
    Step,
)
from penstock.shared.clients.consumer.subscription_state import SubscriptionState
from penstock.shared.clients.group.group_requests import GroupRequests
from penstock.shared.clients.group.member import Join, MemberState, Sync, Wait
from penstock.shared.clients.protocol.consumer_protocol import PROTOCOL_TYPE
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import AuthorizationFailed, IllegalState
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, TopicPartition
from penstock.shared.common.repeated_failure import RepeatedFailure

log = get_logger(__name__)

UNKNOWN_TOPIC_REFRESH_MS = 1_000
"""The interval of looks for subscribed topics that do not exist, and of the metadata requests for them."""
JOIN_END_MS = 2_000
"""How long a close waits for a join in progress. The responses take two round trips once all members have joined."""


class RebalanceCallbacks(Protocol):
    """The functions that the coordinator calls and awaits in a rebalance (`RebalanceListenerInvoker`). They must not
    raise."""

    async def on_revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Called by the coordinator with revoked or lost partitions. The member still owns revoked partitions, but not
        lost ones."""

    async def on_assigned(self, assigned: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        """Called by the coordinator with all partitions that the member owns now, and the new ones among them."""


class ConsumerCoordinator:
    """One consumer's subscription, and its part in the group.

    Without a group (`has_group` is False) a subscription reads all partitions of its topics.
    """

    def __init__(
        self,
        connection: Connection,
        member: ConsumerMembershipManager,
        subscription: SubscriptionState,
        fetches: FetchRequestManager,
        clock: Clock,
        *,
        has_group: bool,
    ) -> None:
        self._connection = connection
        self.member = member
        self._subscription = subscription
        self._fetches = fetches
        self._clock = clock
        self._has_group = has_group
        self._rebalances: RebalanceCallbacks | None = None
        self._polls = 0
        self._polled_ms = clock.monotonic_ms()
        self._next_refresh_ms = 0
        # The metadata request of the last look for topics that do not exist.
        self._look: asyncio.Future[bool] | None = None
        self._missing = RepeatedFailure()
        self._requests = GroupRequests(
            connection,
            member,
            clock,
            protocol_type=PROTOCOL_TYPE,
            rebalance_timeout_ms=member.config.max_poll_interval_ms,
            on_heartbeat=self._after_heartbeat,
        )
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
        return f"<ConsumerCoordinator {self.member}>"

    # --- the subscription ---

    def subscribe(self, topics: Sequence[str] | re.Pattern[str], rebalances: RebalanceCallbacks) -> None:
        """Read topics, or all whose whole name matches a pattern; `rebalances` gets the group's assignments."""
        self._subscription.subscribe(topics)
        if isinstance(topics, re.Pattern):
            self._connection.watch_all()
        else:
            for topic in self._subscription.topics:
                self._connection.watch(topic)
        self._look = None
        self._next_refresh_ms = 0
        self._rebalances = rebalances
        # The interval between polls begins now, not when the consumer was made.
        self._polled_ms = self._clock.monotonic_ms()
        self._update_subscription()
        if self._has_group:
            self._start_tasks()
            self.wake()

    def on_metadata(self) -> None:
        """Apply new metadata: other topics may match the pattern, or topics may have other partitions."""
        if self._has_group:
            self.wake()
        else:
            self._update_subscription()

    def look_for_topics(self, now_ms: int) -> None:
        """Request metadata if a subscribed topic does not exist, and log the topics that the request does not find."""
        if now_ms < self._next_refresh_ms:
            return
        self._next_refresh_ms = now_ms + UNKNOWN_TOPIC_REFRESH_MS
        fields = {"client_id": self._connection.client_id}
        missing = sorted(topic for topic in self._subscription.topics if self._connection.partitions(topic) is None)
        if not missing:
            self._look = None
            if (times := self._missing.succeeded(now_ms)) is not None:
                log.info("all subscribed topics exist", **fields, **times)
            return
        is_answered = self._look is not None and self._look.done() and self._look.result()
        if is_answered and (times := self._missing.failed(now_ms)) is not None:
            log.warning("subscribed topics do not exist", **fields, topics=missing, **times)
        # Without this request a topic that is created later would be found only with the next regular refresh.
        self._look = self._connection.refresh_metadata()

    def _update_subscription(self) -> None:
        """Apply the metadata: pass the subscribed topics to the member, or without a group read their partitions."""
        subscription = self._subscription
        subscription.match(self._connection.topics())
        if not subscription.is_by_topic:
            return
        if self._has_group:
            self.member.subscribe(subscription.topics)
            # The leader assigns the topics of all members, also those that it has not subscribed to itself.
            self.member.metadata(self.known_partitions(subscription.topics | self.member.group_topics))
            return
        assigned = self._fetches.fetcher.assignment
        known = {topic: self._connection.partitions(topic) or () for topic in subscription.topics}
        every = frozenset(TopicPartition(topic, p) for topic, found in known.items() for p in found)
        # The metadata has no partitions of a topic that may not be read at the moment. Without a group, its positions
        # are nowhere else, and `auto_offset_reset` would skip records, or read them again.
        forbidden = self._connection.unauthorized_topics()
        every |= {tp for tp in assigned if tp.topic in forbidden and subscription.wants(tp.topic)}
        # Partitions that are read already keep their position and buffer.
        if every != assigned:
            self._fetches.assign(sorted(every), every & assigned)

    # --- the polls ---

    @property
    def idle_ms(self) -> float:
        """The ms since the last poll."""
        return 0.0 if self._polls else float(self._clock.monotonic_ms() - self._polled_ms)

    def polled(self, now_ms: int) -> None:
        """Note a poll: the consumer counts as alive for `max_poll_interval_ms` from now.

        If the last poll is older than that already, the consumer first leaves the group.
        """
        # Check before the time is replaced. Otherwise this poll would hide that the interval has passed, and a member
        # that was blocked would go on as an owner.
        if now_ms - self._polled_ms >= self.member.config.max_poll_interval_ms:
            self.leave_if_overdue()
        self._polled_ms = now_ms

    @contextlib.contextmanager
    def polling(self) -> Iterator[None]:
        """Return a block in which the consumer counts as alive."""
        self._polls += 1
        self.member.polled()
        self.wake()
        try:
            yield
        finally:
            self._polls -= 1
            self._polled_ms = self._clock.monotonic_ms()

    # --- the membership ---

    @property
    def is_managed(self) -> bool:
        """Whether the group assigns the partitions."""
        return self._has_group and self._subscription.is_by_topic

    @property
    def committable_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that are read and may be committed: the assigned ones, without those that were lost."""
        # After the group has removed the member, its partitions stay assigned until the listener is called. Another
        # member may own them already, so they must not be committed.
        is_lost = self.is_managed and self.member.generation == NO_GENERATION
        return frozenset() if is_lost else self._fetches.fetcher.assignment

    def group_metadata(self) -> GroupMetadata:
        """Return the member's identity, with the generation that its commits carry. Raises IllegalState without a
        group."""
        if not self._has_group:
            raise IllegalState("no group_id is set")
        return self.member.owner_metadata

    def enforce_rebalance(self) -> None:
        """Join the group again."""
        self.member.rejoin("enforced")
        self.wake()

    def _start_tasks(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._main_loop()), asyncio.create_task(self._requests.heartbeats())]
            self._watch_loop(self._clock.monotonic_ms())

    def wake(self) -> None:
        """Check at once for the next step, since something changed."""
        self._wake.set()

    def check_errors(self) -> None:
        """Raise the error that keeps the member out of the group, AuthorizationFailed for a topic, or
        AuthenticationFailed."""
        if unauthorized := self._connection.unauthorized_topics():
            topics_read = self._subscription.topics | {tp.topic for tp in self._fetches.fetcher.assignment}
            if forbidden := unauthorized & topics_read:
                topics = ", ".join(sorted(forbidden))
                raise AuthorizationFailed(f"client {self._connection.client_id}: may not read {topics}")
        if self._broken is not None:
            raise self._broken
        error = self.member.take_error()
        if error is not None:
            self.wake()
            raise error
        self._connection.check_authentication()

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
        """Whether polls must wait for a call of the listener, due or in progress, before they return records. False
        once the consumer closes or the group membership has broken."""
        # If the group has removed the member, the step that reports the loss may not be decided yet. No record of the
        # lost partitions may be returned in between.
        is_due = self._listener_due or self.member.is_forgotten
        return is_due and not self._stopping and self._broken is None

    async def call_listener(self) -> None:
        """Allow the call of the listener, and wait until it has ended."""
        while self.is_listener_due:
            self._settled.clear()
            with self.listening():
                await self._settled.wait()

    def on_commit_rejected(self, sent_as: tuple[int, str], code: int) -> None:
        """Handle a commit's error that shows the loss of the membership, without waiting for the next heartbeat.

        `sent_as` are the generation and member id of the commit, `code` is the error code.
        """
        self.member.on_heartbeat(sent_as, code, self._clock.monotonic_ms())
        self.wake()

    def leave_if_overdue(self) -> None:
        """Leave the group if the last poll is older than `max_poll_interval_ms`. Does nothing during a call of the
        listener.

        Polls and commits call this. The task that takes the steps checks the same, but it cannot run while the user's
        code blocks the event loop.
        """
        if not self._calling and (step := self.member.leave_if_idle(self.idle_ms)) is not None:
            self._leave_group(step)
            self.wake()

    @property
    def rebalance_ms(self) -> float:
        """The ms since the current rebalance began; 0 if there is none."""
        return 0.0 if self._began_ms is None else float(self._clock.monotonic_ms() - self._began_ms)

    async def stop_joining(self, timeout_ms: float) -> None:
        """Stop the steps of a rebalance: JoinGroup, SyncGroup and the calls of the listener. Heartbeats continue.

        A call of the listener that has begun is cancelled after `timeout_ms`. A member that owns partitions has
        JOIN_END_MS, or a shorter `timeout_ms`, to finish its join. Any other step is cancelled at once.
        """
        self._stopping = True
        self.wake()
        # Only the first task takes steps. The heartbeats go on, or the group could remove the member before the last
        # commit.
        for task in self._tasks[:1]:
            if self._calling:
                await asyncio.wait([task], timeout=timeout_ms / 1000)
            # The last commit follows, and the group may reject commits until SyncGroup is answered. If JoinGroup is not
            # answered by then, the group still waits for other members, and accepts commits of the previous generation.
            elif self._ends_join:
                await asyncio.wait([task], timeout=min(timeout_ms, JOIN_END_MS) / 1000)
            await _cancel_task(task)

    @property
    def _ends_join(self) -> bool:
        return self.member.is_owner and self.member.state in (MemberState.JOINING, MemberState.SYNCING)

    @property
    def is_owner(self) -> bool:
        """Whether the member owns partitions in a valid generation, and `stop_joining` was not called."""
        return self.member.is_owner and not self._stopping

    async def close(self) -> None:
        """Leave the group, unless the member is static: the group keeps its membership until the session times out."""
        if self._watch is not None:
            self._watch.cancel()
        self._began_ms = None
        # All before the first wait, which a limit of the close may cancel.
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._requests.leave(self.member.leave())
        if self._leaving is not None:
            await asyncio.wait([self._leaving])

    async def run_once(self) -> None:
        """Take one step."""
        # Clear before the step is decided: a change during the step then causes another turn.
        self._wake.clear()
        self._update_subscription()
        step = self.member.next_step(self._clock.monotonic_ms(), self.idle_ms)
        await self._requests.execute(step, self._execute_step(step))
        if self.member.error is not None:
            self._fetches.wake_pollers()

    async def _execute_step(self, step: Step) -> None:
        if self._began_ms is None and isinstance(step, Join | Revoke):
            self._began_ms = self._clock.monotonic_ms()
        self._set_listener_due(isinstance(step, Revoke | Lose | Complete))
        if self._listener_due and not self._listening:
            # A poll wakes this wait. An overdue poll needs no timer: the member has left, or failed.
            left_ms = self.member.config.max_poll_interval_ms - self.idle_ms
            await self._wait_for_wake(left_ms if left_ms > 0 else None)
            return
        match step:
            case Wait(ms):
                await self._wait_for_wake(ms)
            case Revoke(partitions) | Lose(partitions):
                # The member keeps the partitions until the listener returns: no other member gets them before its
                # commit.
                await self._call_listener(self._revoke(partitions, lost=isinstance(step, Lose)))
                self.member.on_revoked(partitions)
            case Complete(assigned, added):
                # Before the listener, so that it commits under the new generation.
                self.member.adopt()
                self._requests.follow_up()
                await self._call_listener(self._assign(assigned, added))
                self.member.on_completed()
                self._began_ms = None
                self.gone_because = ""
            case Join():
                self.member.on_join(await self._requests.join(step), self._clock.monotonic_ms())
            case Gather(topics):
                self.member.on_gathered(await self._fetch_partition_counts(topics))
            case Sync():
                self.member.on_sync(await self._requests.sync(step), self._clock.monotonic_ms())
            case Leave():
                self._leave_group(step)

    async def _revoke(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Call the listener for partitions that are taken away. Revoked partitions stay assigned until it returns, lost
        ones do not."""
        assert self._rebalances is not None
        left = self._fetches.fetcher.assignment - partitions
        # 1. Lost: another member may own the partitions already. Stop reading before the listener is called.
        if lost:
            self._fetches.assign(sorted(left), left)
        # 2. Revoked: the member owns the partitions until the listener returns. It may still look up their positions
        #    and commit.
        try:
            await self._rebalances.on_revoked(partitions, lost=lost)
        finally:
            self._fetches.assign(sorted(left), left)

    async def _assign(self, assigned: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        assert self._rebalances is not None
        # Before the listener, so that it can seek and pause the new partitions.
        self._fetches.assign(sorted(assigned), assigned - added)
        await self._rebalances.on_assigned(assigned, added)

    async def _wait_for_wake(self, ms: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if ms is None else ms / 1000):
                await self._wake.wait()

    def _set_listener_due(self, is_due: bool) -> None:
        """Set whether a call of the listener is due, and wake waiting polls: they allow the call, or check again."""
        if is_due or self._listener_due:
            self._fetches.wake_pollers()
        self._listener_due = is_due
        self._settled.set()

    def _leave_group(self, step: Leave) -> None:
        """Send LeaveGroup, unless the member is static: its membership lasts until the session times out.

        No poll waits for the response, but `close` does.
        """
        event = "left the group" if step.member_id else "sent no LeaveGroup, so its membership is kept for a session"
        limit_ms = self.member.config.max_poll_interval_ms
        self.gone_because = f"{event}: no poll within max_poll_interval_ms={limit_ms}"
        log.error(self.gone_because, **self._requests.fields())
        if step.member_id:
            self._leaving = asyncio.create_task(self._requests.leave(step.member_id))

    async def _call_listener(self, call: Any) -> None:
        self._calling = True
        try:
            await call
        finally:
            self._calling = False

    async def _fetch_partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Request new metadata, and return the partition counts of the topics that exist."""
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
            self._broken = IllegalState(f"{self.member.where()}: cancelled from within: {e}")
            self._fetches.wake_pollers()
        except Exception as e:
            log.exception("group membership broke", **self._requests.fields())
            self._broken = e
            self._fetches.wake_pollers()
        finally:
            self._settled.set()

    def _watch_loop(self, due_ms: float) -> None:
        """Log if code that does not await has held up the event loop and the heartbeats for over half a session."""
        config = self.member.config
        now_ms = self._clock.monotonic_ms()
        if (late_ms := now_ms - due_ms) > config.session_timeout_ms / 2:
            self.gone_because = f"the event loop was held up for {late_ms:.0f} ms, in which no heartbeat was sent"
            log.error(self.gone_because, **self._requests.fields())
        wait_ms = config.heartbeat_interval_ms
        self._watch = asyncio.get_running_loop().call_later(wait_ms / 1000, self._watch_loop, now_ms + wait_ms)

    def _after_heartbeat(self, all_is_well: bool) -> None:
        # The response may be for a member that has left meanwhile. Then the reason is kept.
        if all_is_well and self.member.generation != NO_GENERATION:
            self.gone_because = ""
            return
        if self.member.error is not None:
            self._fetches.wake_pollers()
        self.wake()


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
