"""Which delivered records may be handled now, and what may be committed.

Records of a partition fall into lanes: one lane a key (`ordering="key"`), one in all (`partition`), or one a record
(`unordered`, and records without a key under `key`). A lane runs one record at a time, in offset order; a record that
waits for its retry holds up its own lane and nothing else. Ready lanes are served lowest offset first, so that the gap
stays small, and partitions in turn.

The committable offset is the first unfinished record's: contiguous over the DELIVERED records, since compaction and
transaction markers leave holes in the offsets. What is finished beyond it travels in the commit's metadata, so that a
restart skips it. A record beyond the gap starts only where the metadata would still fit with everything in flight
finished; else its partition is `paused` until the first unfinished record is through.

>>> from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition
>>> tp = TopicPartition("clicks", 0)
>>> scheduler = KeyScheduler()
>>> scheduler.assign(tp, None)
>>> delivered = ((7, b"ann"), (8, b"ann"), (12, b"bob"))
>>> scheduler.deliver(Columns.of([ConsumerRecord("clicks", 0, offset, 0, key, b"") for offset, key in delivered]))
3
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

from penstock.shared.clients.consumer.partition_progress import Lane, PartitionProgress, Work
from penstock.shared.common.commit_metadata import decode_finished
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

Ordering = Literal["key", "partition", "unordered"]
PauseReason = Literal["buffer", "metadata"]

BUFFERED_RECORDS_MAX = 2_000
"""Unfinished records of one partition above which no more of it are fetched; resumed at half."""


@dataclass(slots=True, eq=False)
class Execution:
    """Records of one partition handed to one call of the handler, in offset order."""

    topic_partition: TopicPartition
    works: tuple[Work, ...]
    owner: PartitionProgress = field(repr=False)
    epoch: int = field(repr=False)


class KeyScheduler:
    """See the module. Not thread-safe; every method returns at once."""

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
        self.ignored = 0  # results that came after their partition was lost, or had been rewound
        self.skipped = 0  # delivered records that an earlier owner had finished
        self._partitions: dict[TopicPartition, PartitionProgress] = {}
        self._turn: deque[TopicPartition] = deque()
        self._executions: set[Execution] = set()
        self._waiting: list[tuple[int, int, TopicPartition, PartitionProgress, Lane]] = []
        self._sequence = 0

    def assign(self, partition: TopicPartition, committed: OffsetAndMetadata | None) -> None:
        """Own a partition from its committed position; DataError if its metadata is damaged: assign without it."""
        if partition in self._partitions:
            raise IllegalState(f"{partition} is assigned already")
        self._partitions[partition] = PartitionProgress(committed, decode_finished(committed) if committed else ())
        self._turn.append(partition)

    def deliver(self, columns: Columns) -> int:
        """Take records in; returns how many are to be handled.

        Those of a partition that is being given up are left to its next owner.
        IllegalState for a partition that is not assigned: its records would be missing from the contiguous offset.
        """
        partition = columns.topic_partition
        if (state := self._partitions.get(partition)) is None:
            raise IllegalState(f"records of {partition}, which is not assigned")
        if state.draining:
            return 0
        taken = 0
        for index, (offset, key) in enumerate(zip(columns.offsets.tolist(), columns.keys, strict=True)):
            work = Work(columns, index, offset)
            if state.deliver(work):
                taken += 1
                self._enqueue(state, work, key)
        state.leader_epoch = max(state.leader_epoch, columns.leader_epoch)
        self.skipped += len(columns) - taken
        return taken

    def pass_over(self, partition: TopicPartition, position: int) -> bool:
        """Nothing is to be delivered before this offset: where nothing is unfinished either, it is committable, though
        no record came. True once where nothing of the partition was ever committed: it should be now."""
        return self._partitions[partition].pass_over(position)

    def _enqueue(self, state: PartitionProgress, work: Work, key: bytes | None) -> None:
        alone = self.ordering == "unordered" or (self.ordering == "key" and key is None)
        lane_key: object = work.offset if alone else key if self.ordering == "key" else None
        work.lane = lane = state.lanes.get(lane_key) or state.lanes.setdefault(lane_key, Lane(lane_key))
        lane.queue.append(work)
        if len(lane.queue) == 1 and not lane.running:
            heapq.heappush(state.ready, (work.offset, lane))

    def take(self, now_ms: int) -> Execution | None:
        """The next records to hand to the handler, or None: nothing may run now, or `max_concurrency` do."""
        while self._waiting and self._waiting[0][0] <= now_ms:
            *_, partition, state, lane = heapq.heappop(self._waiting)
            if self._partitions.get(partition) is state and state.lanes.get(lane.key) is lane and lane.queue:
                heapq.heappush(state.ready, (lane.queue[0].offset, lane))
        if len(self._executions) >= self.max_concurrency:
            return None
        for _ in range(len(self._turn)):
            partition = self._turn[0]
            self._turn.rotate(-1)
            state = self._partitions[partition]
            works = self._take_of(state) if state.ready else ()
            if works:
                self._executions.add(execution := Execution(partition, works, state, state.epoch))
                return execution
        return None

    def _take_of(self, state: PartitionProgress) -> tuple[Work, ...]:
        works: list[Work] = []
        next_in_lane: list[tuple[int, Lane]] = []  # a batch may go on in its lanes: the handler sees them in order
        while len(works) < self.batch_records_max and (state.ready or next_in_lane):
            from_ready = not next_in_lane or (bool(state.ready) and state.ready[0] < next_in_lane[0])
            heap = state.ready if from_ready else next_in_lane
            lane = heap[0][1]
            work = lane.queue[0]
            if works and (work.alone or works[0].alone):
                break
            if not state.may_start(work):
                state.full = not works
                break
            heapq.heappop(heap)
            lane.queue.popleft()
            lane.running += 1
            state.full, state.running, state.highest = False, state.running + 1, max(state.highest, work.offset)
            works.append(work)
            if lane.queue and self.batch_records_max > 1:
                heapq.heappush(next_in_lane, (lane.queue[0].offset, lane))
        return tuple(works)

    def settle(
        self, execution: Execution, finished: Iterable[Work] = (), retry: Iterable[Work] = (), due_ms: int = 0
    ) -> bool:
        """End an execution: what is finished, and what is to run again at `due_ms`; False, and counted, if too late."""
        self._executions.remove(execution)
        state, works = execution.owner, execution.works
        state.running -= len(works)
        for work in works:
            work.lane.running -= 1
        owned = self.holds(execution)
        if owned:
            done, again = list(finished), sorted(retry, key=lambda work: work.offset, reverse=True)
            assert len(done) + len(again) == len(works) == 1 or {*done, *again} == {*works}
            for work in done:
                state.finish(work)
            for work in again:
                work.due_ms = due_ms
                work.lane.queue.appendleft(work)
        else:
            self.ignored += len(works)
        for lane in [works[0].lane] if len(works) == 1 else {id(work.lane): work.lane for work in works}.values():
            if not lane.running:
                self._go_on(execution.topic_partition, state, lane)
        return owned

    def holds(self, execution: Execution) -> bool:
        """Whether the partition is still ours as it was when the execution began, and was read on from there."""
        owner = execution.owner
        return self._partitions.get(execution.topic_partition) is owner and execution.epoch == owner.epoch

    def _go_on(self, partition: TopicPartition, state: PartitionProgress, lane: Lane) -> None:
        if not lane.queue:
            state.lanes.pop(lane.key, None)
        elif not state.draining:
            due_ms = lane.queue[0].due_ms
            if due_ms is None:
                heapq.heappush(state.ready, (lane.queue[0].offset, lane))
            else:
                self._sequence += 1
                heapq.heappush(self._waiting, (due_ms, self._sequence, partition, state, lane))

    def next_due_ms(self) -> int | None:
        """When the next retry is due."""
        return self._waiting[0][0] if self._waiting else None

    def paused(self) -> dict[TopicPartition, PauseReason]:
        """Partitions of which no more records are wanted, and why."""
        reasons: dict[TopicPartition, PauseReason] = {}
        for partition, state in self._partitions.items():
            limit = self.buffered_records_max // 2 if state.buffering else self.buffered_records_max
            state.buffering = state.unfinished >= max(limit, 1)
            if state.full or state.buffering:
                reasons[partition] = "metadata" if state.full else "buffer"
        return reasons

    def is_wanted(self, partition: TopicPartition) -> bool:
        """Whether a paused partition is paused for nothing any more."""
        state = self._partitions.get(partition)
        return state is None or not (state.full or state.unfinished >= max(self.buffered_records_max // 2, 1))

    def committable(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What may be committed and differs from what was, by partition; nothing of those that are not ours."""
        wanted = self._partitions if partitions is None else [p for p in partitions if p in self._partitions]
        offsets = {p: self._partitions[p].committable() for p in wanted}
        return {p: o for p, o in offsets.items() if o is not None and o != self._partitions[p].committed}

    def committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """A commit went through; partitions given up meanwhile are passed over."""
        for partition, offset in offsets.items():
            if partition in self._partitions:
                self._partitions[partition].committed = offset

    def revoke(self, partitions: Iterable[TopicPartition]) -> list[Execution]:
        """Start nothing more of these; returns what is in flight. Commit once it is settled, then `lost` lets go."""
        going = {p: self._partitions[p] for p in partitions if p in self._partitions}
        for state in going.values():
            state.draining = True
            state.ready.clear()
        return [e for e in self._executions if e.owner is going.get(e.topic_partition)]

    def lost(self, partitions: Iterable[TopicPartition]) -> list[Execution]:
        """Let go of these; returns what is still in flight, whose results will be ignored and counted."""
        in_flight = self.revoke(gone := [p for p in partitions if p in self._partitions])
        for partition in gone:
            del self._partitions[partition]
            self._turn.remove(partition)
        return in_flight

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self._partitions)

    @property
    def in_flight(self) -> int:
        """Executions that are not settled."""
        return len(self._executions)

    def unfinished(self, partition: TopicPartition) -> int:
        """Delivered records of the partition that are not finished."""
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
