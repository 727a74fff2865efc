"""The state of a sink task, and its decisions: when to commit, redeliver, pause and seek.

The offsets after a batch are *pending* while the batch is delivered, *current* when `put` has returned, and *committed*
when the commit has succeeded. Only offsets that the task's `pre_commit` returns are committed, and never beyond the
current ones. Each commit has a sequence number. A response to any but the newest commit is ignored.

>>> state = SinkTaskState(offset_flush_interval_ms=60_000, offset_flush_timeout_ms=5_000, now_ms=0)
>>> tp = TopicPartition("t", 0)
>>> state.opened({tp: 0})
frozenset()
>>> state.received({tp: 3})
>>> state.delivered()
frozenset()
>>> state.commit_is_due(59_999), state.commit_is_due(60_000)
(False, True)
>>> state.begin_commit(60_000)
(1, {TopicPartition(topic='t', partition=0): OffsetAndMetadata(offset=3, metadata='')})
>>> state.committable({tp: OffsetAndMetadata(2)})  # the task has flushed two of three
{TopicPartition(topic='t', partition=0): OffsetAndMetadata(offset=2, metadata='')}
>>> state.commit_completed(1, None, {tp: OffsetAndMetadata(2)}, 60_010)
10
>>> state.committing, state.last_committed[tp].offset
(False, 2)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.task import Offsets

log = get_logger(__name__)

Partitions = frozenset[TopicPartition]
REDELIVERY_MS = 3_000
"""The maximum poll timeout while a batch waits for redelivery, if the task sets no timeout."""
COMMIT_BACKOFF_MAX_MS = 10_000
"""The maximum backoff before the next commit, after commits that timed out. The interval applies if it is longer."""


class SinkTaskState:
    """One sink task's state. Times are ms of a monotonic clock."""

    def __init__(self, offset_flush_interval_ms: int, offset_flush_timeout_ms: int, now_ms: int) -> None:
        self._interval_ms = offset_flush_interval_ms
        self._timeout_ms = offset_flush_timeout_ms
        self._next_commit_ms = now_ms + offset_flush_interval_ms
        self.batch: list[SinkRecord] = []
        # Each partition maps to the number of the reset that set its position last.
        self.assigned: dict[TopicPartition, int] = {}
        self.resets = 0
        """The number of resets of positions so far: by assignments, failed flushes and rewinds."""
        self.pending: dict[TopicPartition, OffsetAndMetadata] = {}
        self.current: dict[TopicPartition, OffsetAndMetadata] = {}
        self.last_committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.never_committed: set[TopicPartition] = set()
        """Partitions whose offset in `last_committed` is the initial position and was never committed by this task."""
        self.committing = False
        self.commit_seqno = 0
        self.commit_failures = 0
        self._commit_started_ms = 0
        self.paused_for_redelivery = False
        # Requests of the task through its context.
        self.commit_requested = False
        self.retry_timeout_ms: int | None = None
        self.paused_by_task: set[TopicPartition] = set()
        self.rewinds: dict[TopicPartition, int] = {}

    def __repr__(self) -> str:
        doing = ["redelivering"] * self.paused_for_redelivery + ["committing"] * self.committing
        return f"<SinkTaskState {len(self.assigned)} partitions, {len(self.batch)} records {' '.join(doing)}>"

    # Commits

    def commit_is_due(self, now_ms: int) -> bool:
        """Return whether a commit is due: none is in progress, and one is requested or its time has come."""
        return not self.committing and (self.commit_requested or now_ms >= self._next_commit_ms)

    def commit_expired(self, now_ms: int) -> bool:
        """Return whether the commit in progress has timed out. It then counts as failed, and another commit may begin.

        A late response to the newest commit is still applied.
        """
        if not self.committing or now_ms < self._commit_started_ms + self._timeout_ms:
            return False
        # Unlike Kafka Connect, which commits again after the interval: each timeout in a row adds a longer delay, so
        # that a broker that does not answer does not get more and more requests.
        backoff = ExponentialBackoff(self._interval_ms, COMMIT_BACKOFF_MAX_MS)
        self._next_commit_ms = max(self._next_commit_ms, now_ms + int(backoff.wait_ms(self.commit_failures)))
        self.commit_failures += 1
        self.committing = False
        return True

    def begin_commit(
        self, now_ms: int, partitions: Collection[TopicPartition] | None = None
    ) -> tuple[int, dict[TopicPartition, OffsetAndMetadata]] | None:
        """Begin a commit. Returns its sequence number, and the current offsets of `partitions` (default: all).

        Returns None if there are no such offsets.
        """
        self.commit_requested = False
        # A rebalance commits some partitions only. The others keep their schedule.
        if partitions is None:
            self._next_commit_ms = now_ms + self._interval_ms
        wanted = {tp: self.current[tp] for tp in self.current if partitions is None or tp in partitions}
        if not wanted:
            return None
        self.committing = True
        self.commit_seqno += 1
        self._commit_started_ms = now_ms
        return self.commit_seqno, wanted

    def committable(self, provided: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets to commit out of `provided`, the result of `pre_commit`."""
        found = {}
        for tp, offset in provided.items():
            # Three cases are ignored, the first two with a warning, as in WorkerSinkTask.commitOffsets:
            # 1. The partition is not assigned: the offset would overwrite the owner's.
            # 2. The offset is beyond the delivered records: those between would be lost.
            # 3. The offset is committed already, or is a rewind after a commit. A partition's initial position does not
            #    count as committed, so that the group gets an offset of every partition, even without records.
            if tp not in self.current:
                log.warning("offset of a partition that is not assigned is not committed", partition=str(tp))
            elif offset.offset > self.current[tp].offset:
                log.warning("offset that was not delivered is not committed", partition=str(tp), offset=offset.offset)
            elif self.last_committed.get(tp) != offset or tp in self.never_committed:
                found[tp] = offset
        return found

    def commit_completed(self, seqno: int, error: Exception | None, offsets: Offsets | None, now_ms: int) -> int | None:
        """Apply the response to a commit. Returns the duration of the commit in ms.

        If a newer commit has begun since, it ignores the response and returns None.
        """
        # A late response to an earlier commit. Its offsets may be behind those of the newest one.
        if seqno != self.commit_seqno:
            return None
        if error is not None:
            self.commit_failures += 1
        else:
            # The broker answers again, which ends the backoff of `commit_expired`.
            if self.commit_failures:
                self._next_commit_ms = min(self._next_commit_ms, now_ms + self._interval_ms)
            self.commit_failures = 0
            # Without the partitions that were revoked since the commit began.
            self.last_committed.update({tp: offset for tp, offset in (offsets or {}).items() if tp in self.current})
            self.never_committed -= set(offsets or ())
        self.committing = False
        return now_ms - self._commit_started_ms

    def pre_commit_failed(self) -> dict[TopicPartition, int]:
        """Called if the task could not flush. Resets the state to the last commit, and returns the offsets to seek
        to."""
        self.current = dict(self.last_committed)
        self.pending.clear()
        self.batch.clear()
        self._reset(self.last_committed)
        return {tp: offset.offset for tp, offset in self.last_committed.items()}

    def next_commit_in_ms(self, now_ms: int) -> int:
        """Return the ms until the next scheduled commit, or 0 if it is due or a commit is requested."""
        return 0 if self.commit_requested else max(0, self._next_commit_ms - now_ms)

    # Polls

    def poll_timeout_ms(self, now_ms: int) -> int:
        """Return the poll timeout in ms: until the next commit is due, or the current one times out.

        If the task has set a timeout, the result is at most that. If it has set none and a batch waits for redelivery,
        the result is at most `REDELIVERY_MS`.
        """
        response_in_ms = max(0, self._commit_started_ms + self._timeout_ms - now_ms)
        timeout_ms = response_in_ms if self.committing else self.next_commit_in_ms(now_ms)
        if self.retry_timeout_ms is not None and self.retry_timeout_ms > 0:
            timeout_ms = min(timeout_ms, self.retry_timeout_ms)
        elif self.paused_for_redelivery:
            timeout_ms = min(timeout_ms, REDELIVERY_MS)
        # As in WorkerSinkTask.poll, the task's timeout applies to one poll.
        self.retry_timeout_ms = None
        return timeout_ms

    def take_rewinds(self) -> dict[TopicPartition, int]:
        """Return the offsets from which the task has requested to continue, of assigned partitions.

        From now on they count as committed and current.
        """
        rewinds = {tp: offset for tp, offset in self.rewinds.items() if tp in self.assigned}
        self.rewinds.clear()
        for tp, offset in rewinds.items():
            self.last_committed[tp] = OffsetAndMetadata(offset)
            self.current[tp] = self.last_committed[tp]
            self.pending.pop(tp, None)
        # The batch that waits for redelivery, or is still converted, loses records that are now read again or skipped.
        if rewinds:
            self._reset(rewinds)
            self.batch = [record for record in self.batch if record.original_tp not in rewinds]
        return rewinds

    def received(self, ends: Mapping[TopicPartition, int]) -> None:
        """Make the offset after each partition's last polled record pending, dropped records included."""
        if self.batch and ends:
            raise IllegalState("records were polled while a batch is being redelivered")
        self.pending.update({tp: OffsetAndMetadata(offset) for tp, offset in ends.items()})

    def lag_max(self) -> int:
        """Return the largest distance of a partition's pending offset from its current one, or 0."""
        behind = (end.offset - self.current[tp].offset for tp, end in self.pending.items() if tp in self.current)
        return max(behind, default=0)

    def delivered(self) -> Partitions:
        """Called when `put` has returned. After a redelivery, returns the partitions to resume, without those that
        the task paused."""
        self.current.update({tp: offset for tp, offset in self.pending.items() if tp in self.assigned})
        self.pending.clear()
        self.batch.clear()
        if not self.paused_for_redelivery:
            return frozenset()
        self.paused_for_redelivery = False
        return self.resumable()

    def delivery_failed(self) -> Partitions:
        """Called when `put` has raised RetriableError. Returns the partitions to pause, which are all. The batch is
        kept."""
        self.paused_for_redelivery = True
        return frozenset(self.assigned)

    def resumable(self) -> Partitions:
        """Return the partitions that the task has not paused."""
        return frozenset(self.assigned) - self.paused_by_task

    # Rebalances

    def is_still_ours(self, tp: TopicPartition, since: int) -> bool:
        """Return whether a partition is assigned, and its position was not reset since `resets` was `since`."""
        return tp in self.assigned and self.assigned[tp] <= since

    def _reset(self, partitions: Iterable[TopicPartition]) -> None:
        # Records that were polled before, and are still converted, are not delivered: the task continues at the new
        # position.
        self.resets += 1
        self.assigned.update(dict.fromkeys(partitions, self.resets))

    def opened(self, positions: Mapping[TopicPartition, int]) -> Partitions:
        """Add partitions at these positions. Returns the partitions to pause: all assigned ones while a batch waits for
        redelivery, else those that the task has paused."""
        self._reset(positions)
        for tp, position in positions.items():
            self.last_committed[tp] = OffsetAndMetadata(position)
            self.current[tp] = self.last_committed[tp]
        self.never_committed.update(positions)
        self.paused_by_task &= set(self.assigned)
        # Also if all partitions of the waiting batch were revoked: an empty batch is delivered next, and `delivered`
        # resumes the partitions.
        return frozenset(self.assigned) if self.paused_for_redelivery else frozenset(self.paused_by_task)

    def closed(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions. Their new owner reads the uncommitted records again."""
        gone = set(partitions)
        for offsets in (self.assigned, self.current, self.last_committed, self.pending, self.rewinds):
            for tp in gone:
                offsets.pop(tp, None)
        self.never_committed -= gone
        self.batch = [record for record in self.batch if record.original_tp not in gone]
