"""What a rebalance does to a consumer: who is told, what is committed before, and what is forgotten.

A revocation runs beside the user's code, so it commits what polls before the current one returned, and no more
(`positions.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from shared.clients.consumer.committer import Committer
from shared.clients.consumer.fetching import Fetching
from shared.clients.consumer.listener import RebalanceListener
from shared.clients.consumer.metrics import ConsumerMetrics
from shared.clients.consumer.positions import Positions
from shared.clients.consumer.settings import ConsumerSettings
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
from shared.common.records import TopicPartition

log = get_logger(__name__)

NO_GENERATION = -1


class Membership:
    """The listener's calls around a rebalance, and the positions that go with the partitions."""

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
        self.positions = Positions()

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
        self.positions.forget_except(())
        self._committer.keep(())
        self.rebalancing = True
        self._settled.clear()

    @property
    def standing(self) -> tuple[int, int]:
        """How often partitions were lost so far, and the generation whose work is done now."""
        return self._losses, self.identity[0]

    def will_go_on(self, error: PenstockError, standing: tuple[int, int]) -> bool:
        """Whether a commit failed for an ordinary rebalance alone: `standing` is of before it was tried.

        Then nothing is lost by it. Of partitions that are kept it is made under the new generation; others have been
        given back, and their next owner goes on from what was committed.
        """
        losses, generation = standing
        if isinstance(error, RebalanceInProgress):
            return True
        if self._losses != losses or isinstance(error, UnknownMember | FencedInstanceId):
            return False
        if isinstance(error, IllegalGeneration):
            return self._fetching.is_joining or self._fetching.generation > generation
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
            self.positions.forget_except(kept)
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
        self.positions.forget_except(partitions - added)
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
        if self._settings.commit_strategy != "none" and (offsets := self.positions.uncommitted()):
            self._committer.commit_async(offsets)
            self.positions.registered(offsets)
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
