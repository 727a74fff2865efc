"""The delivered, running and finished records of one partition: the state on which the scheduler decides.

Unfinished records form a linked list in offset order. Each one knows the range of finished records after it. So the
committable offset and its metadata are read from the list, however many records are finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.shared.clients.parallel_consumer.commit_metadata import Ranges, encode_finished, encoded_bytes_max
from penstock.shared.common.records import OFFSET_METADATA_MAX_BYTES, Columns, ConsumerRecord, OffsetAndMetadata

SPAN_ALWAYS_FITS = 24_000
"""This many offsets fit as a bitmap in any pattern. `may_start` estimates the size only for more offsets."""


@dataclass(slots=True, eq=False, repr=False)
class Work:
    """One delivered record: failed `attempts`, whether it must run `alone`, and a `memo` for the code that runs it."""

    columns: Columns
    index: int
    offset: int
    attempts: int = 0
    alone: bool = False
    memo: object = None
    due_ms: int | None = None
    lane: Lane = field(init=False)
    before: Work | None = None
    after: Work | None = None
    # These are the first and the last offset of the finished records before the next unfinished one.
    run: tuple[int, int] | None = None

    @property
    def record(self) -> ConsumerRecord:
        return self.columns.record(self.index)

    def __repr__(self) -> str:
        return f"Work({self.columns.topic_partition}@{self.offset}, {self.attempts} attempts)"


@dataclass(slots=True, eq=False)
class Lane:
    """A queue of records that are handled in offset order, by one execution at a time, such as those of one key."""

    key: object
    queue: deque[Work] = field(default_factory=deque)
    running: int = 0


class PartitionProgress:
    """Lanes and progress of one partition: a linked list of its unfinished records. Each has the range of finished
    records after it."""

    def __init__(self, committed: OffsetAndMetadata | None, finished: Ranges) -> None:
        self.committed = committed
        self.known = deque(finished)
        self.position = committed.offset if committed else None
        self.highest = finished[-1][1] if finished else -1
        self.leader_epoch = committed.leader_epoch if committed else -1
        self.is_new = committed is None
        self.running = 0
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        """Start with an empty list of unfinished records."""
        self.head: Work | None = None
        self.tail: Work | None = None
        self.lanes: dict[object, Lane] = {}
        self.ready: list[tuple[int, Lane]] = []
        self.unfinished = 0
        self.runs = 0
        self.full = False
        self.buffering = False
        self.draining = False

    def rewind(self) -> None:
        """Forget the progress and all unfinished records, because delivery continues from a lower offset (a truncated
        log, or a seek).

        A lane with a running record is kept: until that record is settled, no other record of the lane is started.
        """
        lanes = {k: lane for k, lane in self.lanes.items() if lane.running}
        self.begin()
        for lane in lanes.values():
            lane.queue.clear()
        self.lanes = lanes
        self.epoch += 1
        self.known.clear()
        self.highest = -1
        self.leader_epoch = -1

    def truncate(self, offset: int) -> int | None:
        """Forget all unfinished records if the log was truncated at `offset`, and some of them are before it.

        Those before `offset` are still in the log. Returns the offset of the first one: deliver again from there. The
        records before `offset` that are finished are then skipped. Returns None if there is nothing to deliver again.
        """
        if self.position is None or offset >= self.position or self.head is None or self.head.offset >= offset:
            return None
        first = self.head.offset
        finished = [(begin, min(end, offset - 1)) for begin, end in self._finished_offset_ranges() if begin < offset]
        self.rewind()
        self.known.extend(finished)
        self.highest = finished[-1][1] if finished else -1
        self.position = first
        return first

    def deliver(self, work: Work) -> bool:
        """Append a record, unless the metadata of the commit marks it as finished. Returns whether it was appended. A
        record at a lower offset than expected first calls `rewind`."""
        offset = work.offset
        if self.position is not None and offset < self.position:
            self.rewind()
        self.position = offset + 1
        while self.known and self.known[0][1] < offset:
            self.known.popleft()
        if self.known and self.known[0][0] <= offset:
            if self.tail is not None:
                self.runs += self.tail.run is None
                self.tail.run = (self.tail.run[0] if self.tail.run else offset, offset)
            return False
        work.before = self.tail
        self.tail = work
        if work.before is None:
            self.head = work
        else:
            work.before.after = work
        self.unfinished += 1
        return True

    def pass_over(self, position: int) -> bool:
        """Note that no record below this offset will be delivered: a reset found the offset, or only markers are before
        it.

        Returns True, once, if the partition had no committed offset. Does nothing while the partition is draining.
        """
        if self.draining:
            return False
        if self.head is None:
            self.position = max(position, self.position or 0)
        was_new = self.is_new
        self.is_new = False
        return was_new

    def finish(self, work: Work) -> None:
        """Remove a record from the list of unfinished records, and add its offset to the finished ones."""
        before = work.before
        after = work.after
        if before is None:
            self.head = after
            self.runs -= work.run is not None
        else:
            self.runs += 1 - (work.run is not None) - (before.run is not None)
            before.run = (before.run[0] if before.run else work.offset, work.run[1] if work.run else work.offset)
            before.after = after
        if after is None:
            self.tail = before
        else:
            after.before = before
        work.before = None
        work.after = None
        self.unfinished -= 1

    def may_start(self, work: Work) -> bool:
        """Return whether the commit metadata would still fit after this record and all running ones have finished."""
        base = self.head.offset if self.head else work.offset
        span = max(self.highest, work.offset) - base + 1
        if span <= SPAN_ALWAYS_FITS or work is self.head:
            return True
        return encoded_bytes_max(self.runs + len(self.known) + self.running + 1, span) <= OFFSET_METADATA_MAX_BYTES

    def committable(self) -> OffsetAndMetadata | None:
        """Return the offset to commit, with the finished offsets after it as metadata; None without a position."""
        if self.position is None:
            return None
        offset = self.head.offset if self.head else self.position
        return OffsetAndMetadata(
            offset, encode_finished(offset, list(self._finished_offset_ranges())), self.leader_epoch
        )

    def _finished_offset_ranges(self) -> Iterator[tuple[int, int]]:
        work = self.head
        while work is not None:
            if work.run:
                yield work.run
            work = work.after
        assert self.position is not None
        yield from ((max(first, self.position), last) for first, last in self.known if last >= self.position)
