"""Decides which delivered records may be handled now, and which offsets may be committed.

The records of a partition are queued in lanes. There is one lane for each key (`ordering="key"`), one for the whole
partition (`partition`), or one for each record (`unordered`, and records without a key under `key`). The records of a
lane are handled in offset order, by one execution at a time. A record that waits for its retry blocks only its own
lane. The ready lane with the lowest offset is served first, so that few records finish out of order. Partitions are
served in turn.

The committable offset is that of the first unfinished record. If all are finished, it is the position, which `deliver`
and `pass_over` advance. Finished records above the committable offset are stored in the commit's metadata, so that they
are skipped after a restart. A record is started only if the metadata would still fit after all records in flight have
finished. If no record can be started for this reason, the partition is `paused` until one can.

>>> from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition
>>> tp = TopicPartition("clicks", 0)
>>> scheduler = KeyScheduler()
>>> scheduler.assign(tp, None)
>>> delivered = ((7, b"ann"), (8, b"ann"), (12, b"bob"))
>>> scheduler.deliver(Columns.of([ConsumerRecord("clicks", 0, offset, 0, key, b"") for offset, key in delivered]))
0
>>> ann, bob = scheduler.take(now_ms=0), scheduler.take(now_ms=0)
>>> scheduler.take(now_ms=0) is None                          # offset 8 waits for 7: the same key
True
>>> scheduler.settle(bob, finished=bob.works)
True
>>> scheduler.committable()[tp].offset                        # 12 is finished, beyond the gap
7
>>> decode_finished(scheduler.committable()[tp])
((12, 12),)
>>> scheduler
KeyScheduler(key, executing 1/64, clicks-0: at 7, 2 unfinished, 0 ready, 1 running, 1 runs beyond)
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.shared.clients.parallel_consumer.commit_metadata import decode_finished
from penstock.shared.clients.parallel_consumer.partition_progress import Lane, PartitionProgress, Work
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

Ordering = Literal["key", "partition", "unordered"]
PauseReason = Literal["buffer", "metadata"]

BUFFERED_RECORDS_MAX = 2_000
"""The number of unfinished records of one partition at which fetching stops. It resumes below half."""


@dataclass(slots=True, eq=False)
class Execution:
    """Records of one partition passed to one call of the handler, in offset order."""

    topic_partition: TopicPartition
    works: tuple[Work, ...]
    owner: PartitionProgress = field(repr=False)
    epoch: int = field(repr=False)


# Not a NamedTuple, which makes a retry about 12 % slower.
_WaitingLane = tuple[int, int, TopicPartition, PartitionProgress, Lane]
"""A lane whose first record waits for its retry: `due_ms`, a unique number, the partition, its progress, and the lane.

The number orders lanes that are due at the same time.
"""


class KeyScheduler:
    """Schedules the records of all partitions of one consumer. It is not thread-safe; every method returns at once."""

    def __init__(
        self,
        ordering: Ordering = "key",
        max_concurrency: int = 64,
        batch_records_max: int = 1,
        buffered_records_max: int = BUFFERED_RECORDS_MAX,
    ) -> None:
        self.ordering = ordering
        self.max_concurrency = max_concurrency
        self.batch_records_max = batch_records_max
        self.buffered_records_max = buffered_records_max
        self._partitions: dict[TopicPartition, PartitionProgress] = {}
        self._turn: deque[TopicPartition] = deque()
        self._executions: set[Execution] = set()
        self._waiting: list[_WaitingLane] = []
        self._sequence = 0

    def assign(self, partition: TopicPartition, committed: OffsetAndMetadata | None) -> None:
        """Add a partition with its committed offset.

        Raises DataError if the commit's metadata is damaged. Then assign the partition with the offset alone.
        """
        if partition in self._partitions:
            raise IllegalState(f"{partition} is assigned already")
        self._partitions[partition] = PartitionProgress(committed, decode_finished(committed) if committed else ())
        self._turn.append(partition)

    def deliver(self, columns: Columns) -> int:
        """Queue records, except those that are known to be finished: by the commit's metadata, or, after `truncate`
        returned an offset, since before that. Returns the number of the finished ones.

        If a record has a lower offset than expected, the partition's finished and unfinished records are forgotten.

        Records of a partition that is being revoked are ignored, since its next owner reads them. Raises IllegalState
        for a partition that is not assigned.
        """
        partition = columns.topic_partition
        if (state := self._partitions.get(partition)) is None:
            raise IllegalState(f"records of {partition}, which is not assigned")
        # A revoked partition: its next owner reads them from the committed offset.
        if state.draining:
            return 0
        finished = 0
        for index, (offset, key) in enumerate(zip(columns.offsets.tolist(), columns.keys, strict=True)):
            work = Work(columns, index, offset)
            if state.deliver(work):
                self._enqueue_record(state, work, key)
            else:
                finished += 1
        state.leader_epoch = max(state.leader_epoch, columns.leader_epoch)
        return finished

    def truncate(self, partition: TopicPartition, offset: int) -> int | None:
        """Note that the next records of a partition begin at `offset`. Call it before `deliver`.

        If this is below the position, the log was truncated there. If the partition has unfinished records before
        `offset`, forgets all unfinished ones, and returns the offset from which the records must be delivered instead.
        """
        state = self._partitions[partition]
        return None if state.draining else state.truncate(offset)

    def pass_over(self, partition: TopicPartition, position: int) -> bool:
        """Note that no record below this offset will be delivered. If no record is unfinished, the offset becomes
        committable.

        Returns True, once, if the partition had no committed offset. Then the offset should be committed now. Does
        nothing while the partition is being revoked.
        """
        return self._partitions[partition].pass_over(position)

    def _enqueue_record(self, state: PartitionProgress, work: Work, key: bytes | None) -> None:
        alone = self.ordering == "unordered" or (self.ordering == "key" and key is None)
        lane_key: object = work.offset if alone else key if self.ordering == "key" else None
        lane = state.lanes.get(lane_key) or state.lanes.setdefault(lane_key, Lane(lane_key))
        work.lane = lane
        lane.queue.append(work)
        # A lane is ready only once: by its first record, while none of its records runs.
        if len(lane.queue) == 1 and not lane.running:
            heapq.heappush(state.ready, (work.offset, lane))

    def take(self, now_ms: int) -> Execution | None:
        """Return the next records for the handler.

        Returns None if no record may be handled now, or if `max_concurrency` executions are in progress.
        """
        while self._waiting and self._waiting[0][0] <= now_ms:
            _due_ms, _number, partition, state, lane = heapq.heappop(self._waiting)
            # The partition may have been lost or rewound while the record waited. Its lane is then another object, or
            # gone.
            if self._partitions.get(partition) is state and state.lanes.get(lane.key) is lane and lane.queue:
                heapq.heappush(state.ready, (lane.queue[0].offset, lane))
        if len(self._executions) >= self.max_concurrency:
            return None
        for _ in range(len(self._turn)):
            partition = self._turn[0]
            self._turn.rotate(-1)
            state = self._partitions[partition]
            works = self._take_works_of_partition(state) if state.ready and not state.draining else ()
            if works:
                self._executions.add(execution := Execution(partition, works, state, state.epoch))
                return execution
        return None

    def _take_works_of_partition(self, state: PartitionProgress) -> tuple[Work, ...]:
        works: list[Work] = []
        # A batch may continue in the lanes that it has begun, in their order: no other call runs their records.
        next_in_lane: list[tuple[int, Lane]] = []
        while len(works) < self.batch_records_max and (state.ready or next_in_lane):
            from_ready = not next_in_lane or (bool(state.ready) and state.ready[0] < next_in_lane[0])
            heap = state.ready if from_ready else next_in_lane
            lane = heap[0][1]
            work = lane.queue[0]
            # A record that must run alone is not put into a batch.
            if works and (work.alone or works[0].alone):
                break
            # Starting this record could make the commit's metadata too long. If nothing else can start, pause the
            # partition until its first record is finished.
            if not state.may_start(work):
                state.full = not works
                break
            heapq.heappop(heap)
            lane.queue.popleft()
            lane.running += 1
            state.full = False
            state.running = state.running + 1
            state.highest = max(state.highest, work.offset)
            works.append(work)
            if lane.queue and self.batch_records_max > 1:
                heapq.heappush(next_in_lane, (lane.queue[0].offset, lane))
        return tuple(works)

    def settle(
        self, execution: Execution, finished: Iterable[Work] = (), retry: Iterable[Work] = (), due_ms: int = 0
    ) -> bool:
        """End an execution. Its `finished` records are done, and its `retry` records are handled again at `due_ms`.

        If the partition was lost or rewound since the execution began, the results are ignored, and False is returned.
        """
        self._executions.remove(execution)
        state = execution.owner
        works = execution.works
        state.running -= len(works)
        # Also after a rewind: a lane with a running record stays locked until here, so that no two records of a key run
        # at once.
        for work in works:
            work.lane.running -= 1
        owned = self.holds(execution)
        if owned:
            done = list(finished)
            # In descending order, because each is put before the others: the lane stays in offset order.
            again = sorted(retry, key=lambda work: work.offset, reverse=True)
            assert len(done) + len(again) == len(works) == 1 or {*done, *again} == {*works}
            for work in done:
                state.finish(work)
            for work in again:
                work.due_ms = due_ms
                work.lane.queue.appendleft(work)
        for lane in [works[0].lane] if len(works) == 1 else {id(work.lane): work.lane for work in works}.values():
            if not lane.running:
                self._continue_lane(execution.topic_partition, state, lane)
        return owned

    def holds(self, execution: Execution) -> bool:
        """Whether the partition has been owned, and not rewound, since the execution began."""
        owner = execution.owner
        return self._partitions.get(execution.topic_partition) is owner and execution.epoch == owner.epoch

    def _continue_lane(self, partition: TopicPartition, state: PartitionProgress, lane: Lane) -> None:
        if not lane.queue:
            state.lanes.pop(lane.key, None)
        elif (due_ms := lane.queue[0].due_ms) is None:
            heapq.heappush(state.ready, (lane.queue[0].offset, lane))
        else:
            self._sequence += 1
            heapq.heappush(self._waiting, (due_ms, self._sequence, partition, state, lane))

    def next_due_ms(self) -> int | None:
        """Return the time in ms at which the next retry is due. Returns None if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def paused(self) -> dict[TopicPartition, PauseReason]:
        """Return the partitions of which no more records are wanted, with the reason."""
        reasons: dict[TopicPartition, PauseReason] = {}
        for partition, state in self._partitions.items():
            # Fetching resumes at half, so that a partition does not stop and start with each record.
            limit = self.buffered_records_max // 2 if state.buffering else self.buffered_records_max
            state.buffering = state.unfinished >= max(limit, 1)
            if state.full or state.buffering:
                reasons[partition] = "metadata" if state.full else "buffer"
        return reasons

    def is_wanted(self, partition: TopicPartition) -> bool:
        """Whether the reason to pause a partition is gone."""
        state = self._partitions.get(partition)
        return state is None or not (state.full or state.unfinished >= max(self.buffered_records_max // 2, 1))

    def committable(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets to commit that differ from the committed ones, by owned partition."""
        wanted = self._partitions if partitions is None else [p for p in partitions if p in self._partitions]
        offsets = {p: self._partitions[p].committable() for p in wanted}
        return {p: o for p, o in offsets.items() if o is not None and o != self._partitions[p].committed}

    def committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Note a successful commit; partitions that are no longer owned are ignored."""
        for partition, offset in offsets.items():
            if partition in self._partitions:
                self._partitions[partition].committed = offset

    def revoke(self, partitions: Iterable[TopicPartition]) -> list[Execution]:
        """Start no more records of these partitions. Returns the executions in flight.

        When these are settled, commit and call `lost`.
        """
        going = [p for p in partitions if p in self._partitions]
        for partition in going:
            self._partitions[partition].draining = True
        return self._executions_of(going)

    def lost(self, partitions: Iterable[TopicPartition]) -> list[Execution]:
        """Remove these partitions. Returns the executions in flight, whose results will be ignored."""
        gone = [p for p in partitions if p in self._partitions]
        in_flight = self._executions_of(gone)
        for partition in gone:
            del self._partitions[partition]
            self._turn.remove(partition)
        return in_flight

    def _executions_of(self, partitions: Iterable[TopicPartition]) -> list[Execution]:
        states = {p: self._partitions[p] for p in partitions}
        return [e for e in self._executions if e.owner is states.get(e.topic_partition)]

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self._partitions)

    @property
    def in_flight(self) -> int:
        """The number of executions that are not settled."""
        return len(self._executions)

    def unfinished(self, partition: TopicPartition) -> int:
        """Return how many records of the partition are queued or being handled."""
        return self._partitions[partition].unfinished

    def __repr__(self) -> str:
        parts = [f"{self.ordering}, executing {len(self._executions)}/{self.max_concurrency}"]
        for partition, state in self._partitions.items():
            at = state.head.offset if state.head else state.position
            reason = ", metadata full" if state.full else ", draining" if state.draining else ""
            parts.append(
                f"{partition}: at {at}, {state.unfinished} unfinished, {len(state.ready)} ready, "
                f"{state.running} running, {state.runs} runs beyond{reason}"
            )
        return f"KeyScheduler({', '.join(parts)})"
