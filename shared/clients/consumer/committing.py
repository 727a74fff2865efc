"""How a consumer commits: on request, and by each poll as `commit_strategy` says.

What the user commits is told to the positions like what is committed by itself, so that nothing which comes by itself
goes below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shared.clients.consumer.committer import OnCommit
from shared.clients.consumer.offsets import OffsetLookups
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import CommitFailed, IllegalState, RebalanceInProgress, UnknownTopicOrPartition
from shared.common.offset_checks import checked_offsets
from shared.common.records import OffsetAndMetadata, TopicPartition


class Committing(OffsetLookups):
    """The part of `Consumer` that commits."""

    _next_commit_ms = 0

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, timeout_ms: float | None = None
    ) -> None:
        """Commit `offsets` (each the next to read), by default everything polled, and wait.

        Pending asynchronous commits go first or with it, also where there is nothing else to commit. Raises
        IllegalGeneration, UnknownMember, RebalanceInProgress, FencedInstanceId, KafkaTimeout after `timeout_ms`
        (default `commit_timeout_ms`), IllegalState without a group, ValueError and TypeError for what is no offset.
        """
        wanted = self._offsets(offsets)
        await self._check_in_time(True)
        # From here on: a rebalance that comes while this waits must not commit what lies before it.
        self._membership.positions.registered(wanted)
        await self._committer.commit(wanted, self._settings.commit_timeout_ms if timeout_ms is None else timeout_ms)

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, callback: OnCommit | None = None
    ) -> None:
        """Commit `offsets`, by default everything polled, beside the caller.

        Passing failures are retried while no newer offset covers them. `callback(offsets, error)` is called once on the
        event loop: None when these offsets or newer ones are committed.
        """
        wanted = self._offsets(offsets)
        if wanted:
            self._membership.positions.registered(wanted)
            self._committer.commit_async(wanted, callback)
        elif callback is not None:
            asyncio.get_running_loop().call_soon(callback, wanted, None)

    async def _commit_as_configured(self) -> None:
        strategy, positions = self._settings.commit_strategy, self._membership.positions
        offsets = positions.uncommitted()
        if strategy == "none" or not offsets:
            return
        if strategy == "sync":
            standing = self._membership.standing
            try:
                await self._committer.commit(offsets, self._settings.commit_timeout_ms)
            except UnknownTopicOrPartition:  # given up: said once, the other partitions are committed
                positions.registered(offsets)
                raise
            except (RebalanceInProgress, CommitFailed) as e:
                if not self._membership.will_go_on(e, standing):
                    raise
                return  # it goes on under the new generation, or with the partition's next owner
        elif strategy == "auto" and SYSTEM_CLOCK.monotonic_ms() < self._next_commit_ms and not positions.has_drifting:
            return
        else:
            self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
            self._committer.commit_async(offsets)
        positions.registered(offsets)

    def _offsets(
        self, given: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        self._check_open()
        if self._settings.group_id is None:
            raise IllegalState("commit needs a group_id")
        if given is None:
            return self._membership.positions.polled()
        return checked_offsets(given)

    async def _check_in_time(self, has_offsets: bool) -> None:
        if await self._fetching.leave_if_overdue():
            self._membership.begin_anew()
            if has_offsets:
                raise CommitFailed(f"{self._who()}: not committed: {self._fetching.gone_because}")
