"""The rebalance listener, and its calls (Java: `ConsumerRebalanceListener`, `ConsumerRebalanceListenerInvoker`).

As in the Java consumer, the listener is called only inside `poll`, `close`, and the wait of an `async for` for its next
record. By then all records that were handed out count as processed (`ConsumedPositions`). Only a `close` after an
iteration or an exception leaves out the last ones. The invoker also commits around a revocation, unless
`commit_strategy` is `none`, and forgets the positions of partitions that are gone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Mapping

from penstock.shared.clients.consumer.commit_request_manager import CommitRequestManager
from penstock.shared.clients.consumer.consumer_coordinator import ConsumerCoordinator
from penstock.shared.clients.consumer.fetcher import Fetcher
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscription_state import ConsumedPositions
from penstock.shared.clients.group.member_identity import describe_member
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import CommitFailed, IllegalState, KafkaTimeout, PenstockError, UnknownMember
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)

NOT_OWNED = "this member does not own the partitions any more"


class RebalanceListener:
    """Base class whose methods do nothing; override those you need.

    The methods are called only inside `poll`, `close`, and the wait of an `async for` for its next record. Heartbeats
    continue meanwhile. Each method has `listener_timeout_ms`, but not more than `max_poll_interval_ms`. In a `close`
    with `timeout_ms`, that is the only limit. If a method raises or runs out of time, the call that it ran in raises
    the exception or KafkaTimeout.

    A method cannot poll, iterate or close. Its `commit()` covers what was handed out of partitions that the member
    still owns. In a `close`, it leaves out the records that may be unprocessed (`Consumer.close`).

    Source of the semantics: Java's ConsumerRebalanceListener.
    """

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Called after a rebalance with the partitions that are newly owned. A seek is possible here.

        An eager member revoked everything before, so these are all its partitions. For a cooperative member they are
        the new ones, possibly none.
        """

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Called with partitions that the member owns until this method returns. Finish their records and commit.

        In a close, these are all its partitions. In a rebalance, an eager member gives up all its partitions before it
        joins again. A cooperative member gives up those that its new assignment lacks. Before it joins, it gives up
        those of topics that it no longer subscribes to.
        """

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Called with partitions that are lost and may be owned by another member: a commit would be rejected."""


def check_listener(listener: object) -> None:
    """Raise TypeError unless `listener` is None, or a RebalanceListener whose methods are async."""
    if listener is None:
        return
    if not isinstance(listener, RebalanceListener):
        got = f"the class {listener.__name__}" if isinstance(listener, type) else f"a {type(listener).__name__}"
        raise TypeError(f"listener must be an instance of a subclass of RebalanceListener, got {got}")
    for method in (listener.on_partitions_assigned, listener.on_partitions_revoked, listener.on_partitions_lost):
        if not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise TypeError(f"listener: {method!r} must be an `async def` without `yield`")


class RebalanceListenerInvoker:
    """Calls the listener of one consumer."""

    def __init__(
        self,
        coordinator: ConsumerCoordinator,
        fetcher: Fetcher,
        commits: CommitRequestManager,
        positions: ConsumedPositions,
        settings: ConsumerSettings,
        metrics: ConsumerMetrics,
    ) -> None:
        self._coordinator = coordinator
        self._fetcher = fetcher
        self._commits = commits
        self._positions = positions
        self._settings = settings
        self._metrics = metrics
        self.listener: RebalanceListener | None = None
        self._errors: deque[BaseException] = deque()
        self._why_gone = NOT_OWNED
        self._calling: asyncio.Task[object] | None = None

    def raise_pending(self) -> None:
        """Raise the oldest error of a listener that was not raised yet.

        If there is none, raise CommitFailed for records whose partition was lost before they were committed. With the
        `commit_strategy` `none` it is not raised.
        """
        if self._errors:
            raise self._errors.popleft()
        if self._settings.commit_strategy != "none" and (lost := self._positions.take_forfeited()):
            raise self.not_committed(lost)

    def is_called(self, task: asyncio.Task[object] | None) -> bool:
        """Whether this task is inside a call of the listener."""
        return task is not None and task is self._calling

    def not_committed(self, offsets: Mapping[TopicPartition, int]) -> CommitFailed:
        """Return the error for offsets that this member may not commit."""
        if self._coordinator.member.identity[0] == NO_GENERATION:
            return UnknownMember(f"{self._describe_member()}: not assigned anything by the group yet")
        reason = self._coordinator.gone_because or self._why_gone
        named = ", ".join(f"{tp} offset {offset}" for tp, offset in sorted(offsets.items()))
        return CommitFailed(f"{self._describe_member()}: not committed: {named}: {reason}")

    async def on_revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Handle partitions that are revoked or lost: call the listener, and forget the partitions' state."""
        self._why_gone = (lost and self._coordinator.gone_because) or NOT_OWNED
        # 1. Lost: another member may own the partitions already. Drop their state first, so that no commit in
        #    `on_partitions_lost` includes them.
        if lost:
            self._let_go(partitions, lost=True)
        try:
            await self._give_back(partitions, lost=lost, limit_ms=self._listener_limit_ms)
        # 2. Revoked: drop their state after the last commit, also if a close cancels the call, since it does not
        #    repeat it.
        finally:
            if not lost:
                self._let_go(partitions, lost=False)

    async def on_assigned(self, partitions: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        """Handle an assignment; `added` are the partitions that were not owned before."""
        log.info(
            "assigned",
            group_id=self._settings.group_id,
            generation=self._coordinator.member.generation,
            member_id=self._coordinator.member.member_id,
            partitions=sorted(map(str, partitions)),
        )
        try:
            if self.listener is not None:
                call = self.listener.on_partitions_assigned(added)
                await self._call_listener(call, "on_partitions_assigned", self._listener_limit_ms)
        finally:
            self._metrics.rebalanced(self._coordinator.rebalance_ms)

    async def leave(self, timeout_ms: float | None) -> None:
        """Commit and revoke for the last time, before LeaveGroup.

        `timeout_ms` limits all of it. If it is None, the limit of a call of the listener does.
        """
        if self._settings.group_id is None:
            return
        limit_ms = self._listener_limit_ms if timeout_ms is None else timeout_ms
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        # A close counts as a poll, but a member that is overdue has lost its partitions.
        self._coordinator.polled(SYSTEM_CLOCK.monotonic_ms())
        # The group may reject commits during a rebalance, so take part in no further one before the last commit.
        await self._coordinator.stop_joining(limit_ms)
        partitions = self._fetcher.assignment
        lost = self._coordinator.is_managed and self._coordinator.member.generation == NO_GENERATION
        left_ms = max(0.0, limit_ms - (SYSTEM_CLOCK.monotonic_ms() - started_ms))
        if lost:
            self._commits.retain(())
        await self._give_back(partitions, lost=lost, limit_ms=left_ms)
        if self._errors:
            raise self._errors.popleft()

    @property
    def _listener_limit_ms(self) -> float:
        return float(min(self._settings.listener_timeout_ms, self._settings.max_poll_interval_ms))

    def _let_go(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Drop the state of partitions that another member may commit from now on.

        If the partitions are `lost` or `commit_strategy` is `none`, positions that were handed out and not committed
        are kept until an error reports them.
        """
        kept = self._fetcher.assignment - partitions
        # Under any other strategy a revocation has just committed what was processed. Nothing is left to report.
        if lost or self._settings.commit_strategy == "none":
            self._positions.forfeit(partitions, self._commits.committed(partitions))
        self._positions.retain(kept)
        self._commits.retain(kept)

    async def _give_back(self, partitions: frozenset[TopicPartition], *, lost: bool, limit_ms: float) -> None:
        """Call the listener and commit, within one limit."""
        listener = self.listener
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        # A member that was removed cannot commit: the group rejects its generation.
        if lost:
            if listener is not None and partitions:
                await self._call_listener(listener.on_partitions_lost(partitions), "on_partitions_lost", limit_ms)
            return
        # 1. Start the commit of the processed records. A commit of the listener is registered later, so it wins.
        if self._settings.commit_strategy != "none" and (offsets := self._positions.uncommitted()):
            self._commits.commit_async(offsets)
            self._positions.registered(offsets)
        # 2. Call the listener, which may commit.
        if listener is not None and partitions and self._coordinator.is_managed:
            await self._call_listener(listener.on_partitions_revoked(partitions), "on_partitions_revoked", limit_ms)
        # 3. Wait for both. The next owner starts from the committed offsets as soon as this returns.
        if self._settings.group_id is not None:
            left_ms = max(0.0, limit_ms - (SYSTEM_CLOCK.monotonic_ms() - started_ms))
            await self._commits.drain(min(left_ms, self._settings.commit_timeout_ms))

    async def _call_listener(self, call: Awaitable[None], name: str, limit_ms: float) -> None:
        deadline = asyncio.timeout(limit_ms / 1000)
        task = asyncio.current_task()
        self._calling = task
        try:
            async with deadline:
                await call
        except TimeoutError as e:
            if deadline.expired():
                self._note_listener_error(
                    KafkaTimeout(f"{self._describe_member()}: {name}: not done within {limit_ms:.0f} ms"), name
                )
            # The listener's own timeout, not this one.
            else:
                self._note_listener_error(e, name)
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                self._note_listener_error(
                    KafkaTimeout(f"{self._describe_member()}: {name}: not done when the consumer was closed"), name
                )
                raise
            # A task or future that the listener awaits was cancelled. Raised, this would end the membership silently.
            self._note_listener_error(
                IllegalState(f"{self._describe_member()}: {name} raised CancelledError without a cancellation"),
                name,
            )
        except Exception as e:
            self._note_listener_error(e, name)
        finally:
            self._calling = None

    def _describe_member(self) -> str:
        return describe_member(self._coordinator.member.config.client_id, self._coordinator.member.owner_metadata)

    def _note_listener_error(self, error: Exception, name: str) -> None:
        kind = "known" if isinstance(error, PenstockError) else type(error).__name__
        log.error(
            "rebalance listener failed",
            method=name,
            kind=kind,
            reason=str(error),
            client_id=self._coordinator.member.config.client_id,
            group_id=self._settings.group_id,
            generation=self._coordinator.member.generation,
        )
        self._errors.append(error)
