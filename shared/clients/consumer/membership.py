"""What a rebalance does to a consumer, and which positions may be committed at any moment.

Positions go through three hands: what the current poll returned (`_returned`: the user may be working on it), what
polls before it returned (`_processed`), and what of that was handed to the committer (`_registered`). A revocation runs
beside the user's code, so it commits `_processed` and no more. In an `async for` each record is returned by itself; the
rest of its batch is `unread`, and nobody's position has passed it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping

from shared.clients.connection import NO_EPOCH
from shared.clients.consumer.committer import Committer
from shared.clients.consumer.fetching import Fetching
from shared.clients.consumer.listener import RebalanceListener
from shared.clients.consumer.metrics import ConsumerMetrics
from shared.clients.consumer.settings import ConsumerSettings
from shared.clients.consumer.unread import Unread
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import (
    CommitFailed,
    FencedInstanceId,
    IllegalGeneration,
    IllegalState,
    KafkaTimeout,
    PenstockError,
    RebalanceInProgress,
    UnknownMember,
)
from shared.common.log import get_logger
from shared.common.records import OffsetAndMetadata, TopicPartition

log = get_logger(__name__)

NO_GENERATION = -1


class Membership:
    """The listener's calls around a rebalance, and the positions."""

    def __init__(
        self, fetching: Fetching, committer: Committer, settings: ConsumerSettings, metrics: ConsumerMetrics
    ) -> None:
        self._fetching = fetching
        self._committer = committer
        self._settings = settings
        self._metrics = metrics
        self.listener: RebalanceListener | None = None
        self.rebalancing = False
        self.identity = (NO_GENERATION, "")
        self._owned: frozenset[TopicPartition] = frozenset()
        self._losses = 0
        self._errors: deque[BaseException] = deque()
        self._settled = asyncio.Event()
        self._returned: dict[TopicPartition, int] = {}
        self._processed: dict[TopicPartition, int] = {}
        self._registered: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self.unread = Unread()
        self.is_one_by_one = False
        """Whether what was returned last is one record, of an iteration."""

    def returned(
        self,
        positions: Mapping[TopicPartition, int],
        epochs: Mapping[TopicPartition, int] = {},
        *,
        one_by_one: bool = False,
    ) -> None:
        """A poll or an iteration returned records up to these positions, the last of them of these leader epochs."""
        self._returned.update(positions)
        self._epochs.update(epochs)
        self.is_one_by_one = one_by_one

    def processed(self) -> None:
        """The next poll or record asked for (or close) says that what was returned so far is done."""
        self._processed.update(self._returned)
        self._returned.clear()

    def uncommitted(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The processed positions that were not handed to the committer yet."""
        return self._with_epochs({tp: p for tp, p in self._processed.items() if self._registered.get(tp) != p})

    def registered(self, offsets: Iterable[TopicPartition]) -> None:
        """The committer has them."""
        self._registered.update({tp: self._processed[tp] for tp in offsets if tp in self._processed})

    def polled(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The positions after everything that was returned, for a commit that the user asks for."""
        return self._with_epochs({**self._processed, **self._returned})

    def _with_epochs(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndMetadata]:
        return {tp: OffsetAndMetadata(p, "", self._epochs.get(tp, NO_EPOCH)) for tp, p in positions.items()}

    def sought(self, tp: TopicPartition, offset: int) -> None:
        """The user's own position: what was read before says nothing any more."""
        self.unread.drop([tp])
        self._returned.pop(tp, None)
        self._epochs.pop(tp, None)
        self._processed[tp] = offset

    def forget_except(self, partitions: Iterable[TopicPartition]) -> None:
        """Only these are read now."""
        kept = set(partitions)
        self.unread.keep(kept)
        for positions in (self._returned, self._processed, self._registered, self._epochs):
            for tp in [tp for tp in positions if tp not in kept]:
                del positions[tp]

    def raise_pending(self) -> None:
        """Raise what a listener raised since the last poll."""
        if self._errors:
            raise self._errors.popleft()

    async def wait(self, timeout_ms: float) -> None:
        """Until there may be something to return."""
        if self.rebalancing:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._settled.wait()
            except TimeoutError:
                return
        else:
            await self._fetching.wait_for_data(timeout_ms)

    def begin_anew(self) -> None:
        """The place in the group was just given up: poll gives nothing before there is a new one, nor is anything of
        before committed."""
        self.forget_except(())
        self._committer.keep(())
        self.rebalancing = True
        self._settled.clear()

    @property
    def losses(self) -> int:
        """How often partitions were lost so far."""
        return self._losses

    def will_go_on(self, error: PenstockError, losses: int) -> bool:
        """Whether a commit failed for an ordinary rebalance alone: `losses` are those before it was tried.

        Then nothing is lost by it. Of partitions that are kept it is made under the new generation; others have been
        given back, and their next owner goes on from what was committed.
        """
        if isinstance(error, RebalanceInProgress):
            return True
        if self._losses != losses or isinstance(error, UnknownMember | FencedInstanceId):
            return False
        if isinstance(error, IllegalGeneration):
            return self._fetching.is_joining or self._fetching.generation > self.identity[0]
        return isinstance(error, CommitFailed)  # taken away, and not lost

    async def on_revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Partitions are given back, or were lost already: all of them before an eager member joins anew."""
        self._begin()
        self._losses += lost
        if not lost:
            await self._give_back(partitions, lost=False, limit_ms=self._settings.rebalance_timeout_ms)
        if lost or self._fetching.is_cooperative:
            # From here on another may commit them, so that nothing may be left which would go out later.
            kept = self._fetching.assignment() - partitions
            self.forget_except(kept)
            self._committer.keep(kept)
        if lost:
            await self._give_back(partitions, lost=True, limit_ms=self._settings.rebalance_timeout_ms)
        if self._fetching.is_cooperative and self._fetching.generation != NO_GENERATION:
            self._end()

    async def on_assigned(self, partitions: frozenset[TopicPartition], added: frozenset[TopicPartition]) -> None:
        """After the group has assigned; `added` are those that were not ours before."""
        self._begin()
        self._metrics.no_lag(self._owned - partitions)
        self._owned = partitions
        self._committer.keep(partitions)
        # What is new is read from its committed offset, so positions of an earlier generation say nothing any more.
        self.forget_except(partitions - added)
        log.info(
            "assigned",
            group_id=self._settings.group_id,
            generation=self._fetching.generation,
            member_id=self._fetching.member_id,
            partitions=sorted(map(str, partitions)),
        )
        try:
            if self.listener is not None:
                await self._call(
                    self.listener.on_partitions_assigned(added),
                    "on_partitions_assigned",
                    self._settings.rebalance_timeout_ms,
                )
        finally:
            self._metrics.rebalanced(self._fetching.rebalance_ms)
            self._end()

    async def leave(self, timeout_ms: float | None) -> None:
        """The last commit and revocation, before the group is left; `timeout_ms` bounds all of it."""
        if self._settings.group_id is None:
            return
        self.rebalancing = True
        limit_ms = float(self._settings.rebalance_timeout_ms) if timeout_ms is None else timeout_ms
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        await self._fetching.stop_joining(limit_ms)
        partitions = self._fetching.assignment()
        lost = bool(self._fetching.topics()) and self._fetching.generation == NO_GENERATION
        left_ms = max(0.0, limit_ms - (SYSTEM_CLOCK.monotonic_ms() - started_ms))
        await self._give_back(partitions, lost=lost, limit_ms=left_ms)
        self.raise_pending()

    def _begin(self) -> None:
        """Poll gives nothing from here on."""
        if self._fetching.generation != NO_GENERATION:
            # The identity of work done from here on. Work of the generation before keeps the old one, whatever the
            # group has agreed on in the background, and so does work that was lost: its commits must be refused.
            self.identity = (self._fetching.generation, self._fetching.member_id)
        self.rebalancing = True
        self._settled.clear()

    def _end(self) -> None:
        self.rebalancing = False
        self._settled.set()

    async def _give_back(self, partitions: frozenset[TopicPartition], *, lost: bool, limit_ms: float) -> None:
        """Listener and commit, within one limit."""
        listener, started_ms = self.listener, SYSTEM_CLOCK.monotonic_ms()
        if lost:
            self._committer.keep(())
            if listener is not None and partitions:
                await self._call(listener.on_partitions_lost(partitions), "on_partitions_lost", limit_ms)
            return
        if self._settings.commit_strategy != "none" and (offsets := self.uncommitted()):
            self._committer.commit_async(offsets)
            self.registered(offsets)
        if listener is not None and partitions and self._fetching.topics():
            await self._call(listener.on_partitions_revoked(partitions), "on_partitions_revoked", limit_ms)
        if self._settings.group_id is not None:
            left_ms = max(0.0, limit_ms - (SYSTEM_CLOCK.monotonic_ms() - started_ms))
            await self._committer.drain(min(left_ms, self._settings.commit_timeout_ms))

    async def _call(self, call: Awaitable[None], name: str, limit_ms: float) -> None:
        deadline, task = asyncio.timeout(limit_ms / 1000), asyncio.current_task()
        try:
            async with deadline:
                await call
        except TimeoutError as e:
            if deadline.expired():
                self._note(KafkaTimeout(f"{self._who()}: {name}: not done within {limit_ms:.0f} ms"), name)
            else:
                self._note(e, name)
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            # Of something that the listener awaits; were it passed on, it would end the membership without a word.
            self._note(IllegalState(f"{self._who()}: {name} let a cancellation through that was not asked for"), name)
        except Exception as e:
            self._note(e, name)

    def _who(self) -> str:
        return (
            f"client {self._fetching.client_id}, group {self._settings.group_id}, "
            f"generation {self._fetching.generation}"
        )

    def _note(self, error: Exception, name: str) -> None:
        kind = "known" if isinstance(error, PenstockError) else type(error).__name__
        log.error(
            "rebalance listener failed",
            method=name,
            kind=kind,
            reason=str(error),
            client_id=self._fetching.client_id,
            group_id=self._settings.group_id,
            generation=self._fetching.generation,
        )
        self._errors.append(error)
