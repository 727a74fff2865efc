"""How a consumer commits: on request, and by each poll as `commit_strategy` says.

What the user commits is told to the positions like what is committed by itself, so that nothing which comes by itself
goes below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.shared.clients.consumer.committer import OnCommit
from penstock.shared.clients.consumer.offsets import OffsetLookups
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import CommitFailed, IllegalState, UnknownTopicOrPartition
from penstock.shared.common.offset_checks import checked_offsets
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition


class Committing(OffsetLookups):
    """The part of `Consumer` that commits."""

    _next_commit_ms = 0

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, timeout_ms: float | None = None
    ) -> None:
        """Commit `offsets` (each the next to read), by default everything handed out, and wait.

        Pending asynchronous commits go first or with it, also where there is nothing else to commit. Raises
        CommitFailed (IllegalGeneration, UnknownMember) where this member did not commit an offset that the call
        covers: one of `offsets`, or one handed out since the last commit, also of a partition that was revoked or lost
        meanwhile, which is reported once. All others are committed. Raises FencedInstanceId, KafkaTimeout after
        `timeout_ms` (default `commit_timeout_ms`), IllegalState without a group, ValueError and TypeError for an
        invalid offset.
        """
        positions = self._membership.positions
        wanted, lost = self._covered(offsets)
        # From here on: a rebalance that comes while this waits must not commit what lies before it.
        positions.registered(wanted)
        try:
            await self._committer.commit(wanted, self._settings.commit_timeout_ms if timeout_ms is None else timeout_ms)
        except CommitFailed:
            positions.reported({tp: at.offset for tp, at in wanted.items()} | lost)
            raise
        positions.recovered({tp: at.offset for tp, at in wanted.items()})
        if lost:
            positions.reported(lost)
            raise self._membership.not_committed(lost)

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, callback: OnCommit | None = None
    ) -> None:
        """Commit `offsets`, by default everything handed out, beside the caller.

        Passing failures are retried while no newer offset covers them. `callback(offsets, error)` is called once on the
        event loop: None when these offsets or newer ones are committed, CommitFailed where `commit` would raise it.
        """
        positions = self._membership.positions
        wanted, lost = self._covered(offsets)
        positions.registered(wanted)
        if callback is None:
            self._committer.commit_async(wanted)
            return

        def answered(offsets: Mapping[TopicPartition, OffsetAndMetadata], error: Exception | None) -> None:
            at = {tp: each.offset for tp, each in offsets.items()}
            if error is None:
                positions.recovered(at)
            elif isinstance(error, CommitFailed):
                positions.reported(at)
            callback(offsets, error)

        if lost:
            self._committer.commit_async(wanted)
            both = {**{tp: OffsetAndMetadata(offset) for tp, offset in lost.items()}, **wanted}
            asyncio.get_running_loop().call_soon(answered, both, self._membership.not_committed(lost))
        elif wanted:
            self._committer.commit_async(wanted, answered)
        else:
            asyncio.get_running_loop().call_soon(callback, wanted, None)

    async def _commit_as_configured(self) -> None:
        strategy, positions = self._settings.commit_strategy, self._membership.positions
        if strategy == "none":
            return
        owned = self._fetching.owned
        offsets = {tp: at for tp, at in positions.uncommitted().items() if tp in owned}
        if not offsets:
            return
        if strategy == "sync":
            try:
                await self._committer.commit(offsets, self._settings.commit_timeout_ms)
            except UnknownTopicOrPartition:  # given up: said once, the other partitions are committed
                positions.registered(offsets)
                raise
            except CommitFailed:
                positions.reported({tp: at.offset for tp, at in offsets.items()})
                raise
        elif strategy == "auto" and SYSTEM_CLOCK.monotonic_ms() < self._next_commit_ms and not positions.has_drifting:
            return
        else:
            self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
            self._committer.commit_async(offsets)
        positions.registered(offsets)

    def _covered(
        self, given: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, int]]:
        """What a commit of `given` covers: the offsets to be sent, and those that this member cannot commit any more.

        A member commits only what the group has assigned to it: another one may be further with the rest.
        """
        self._check_open()
        if self._settings.group_id is None:
            raise IllegalState("commit needs a group_id")
        positions = self._membership.positions
        wanted = positions.polled() if given is None else checked_offsets(given)
        self._fetching.leave_if_overdue()
        if not self._fetching.is_managed:
            return wanted, {}
        owned = self._fetching.owned
        mine = {tp: at for tp, at in wanted.items() if tp in owned}
        if given is not None:
            return mine, {tp: at.offset for tp, at in wanted.items() if tp not in owned}
        gone = wanted.keys() - owned
        lost = positions.handed_out(gone, self._committer.committed(gone))
        return mine, lost | positions.forfeited({tp: at.offset for tp, at in mine.items()})
