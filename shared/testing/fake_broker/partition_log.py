"""One partition's log: batches in order of offset, and the part of them that a reader may see.

The high watermark is the log's end: a batch is on all replicas as soon as it is appended. The last stable offset is the
first offset of the first open transaction, or the log's end if none is open. `read_committed` reads up to there, and
the response lists the aborted transactions in the returned range.

An idempotent producer numbers its records. The partition appends a batch whose sequence number follows the last one. If
the batch is one of the producer's last five, the partition repeats its earlier response. It rejects any other sequence
number. With a newer epoch the numbers start at zero; an older epoch is fenced. If the partition does not know the
producer, it accepts any number. An example, with batches of ten:

    sequence 0 -> appended;  10 -> appended;  10 again -> the offset of the first 10;  30 ->
    OUT_OF_ORDER_SEQUENCE_NUMBER
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.shared.testing.fake_broker.broker_batches import (
    BrokerBatch,
    assign_offset,
    marker,
    next_sequence,
    records,
    stamp,
)
from penstock.shared.testing.fake_broker.protocol import ErrorCode

BATCHES_REMEMBERED = 5
"""The maximum number of batches that a producer may have in flight."""


class AbortedTransaction(NamedTuple):
    """An aborted transaction: its producer, its first offset, and the offset of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int


class TimedOffset(NamedTuple):
    """An offset found for ListOffsets, and its record's timestamp; either is -1 if there is none."""

    offset: int
    timestamp: int


class EpochEnd(NamedTuple):
    """A leader epoch, and the offset at which it ends: the first of the next epoch, or the end of the log."""

    epoch: int
    end_offset: int


@dataclass
class Fetched:
    """The result of a fetch: an error code, or the bytes of whole batches. If only committed records are read, it also
    has the aborted transactions that overlap the range that was read."""

    code: ErrorCode
    data: bytes = b""
    aborted: tuple[AbortedTransaction, ...] = ()


class PartitionLog:
    """The batches of one partition."""

    def __init__(self) -> None:
        self.batches: list[BrokerBatch] = []
        self._lasts: list[int] = []
        self.start_offset = 0
        self.end_offset = 0
        self.size_bytes = 0
        self.producers = ProducerStates()
        self._open: dict[int, int] = {}
        self._aborted: list[AbortedTransaction] = []

    def __repr__(self) -> str:
        return f"PartitionLog({self.start_offset}..{self.end_offset}, stable to {self.last_stable_offset})"

    @property
    def high_watermark(self) -> int:
        return self.end_offset

    @property
    def last_stable_offset(self) -> int:
        return max(self.start_offset, min(self._open.values(), default=self.end_offset))

    def in_transaction(self, producer_id: int) -> bool:
        """Whether a producer has an open transaction with records in this partition."""
        return producer_id in self._open

    def append(self, batch: BrokerBatch, leader_epoch: int, append_time_ms: int = -1) -> Appended | ErrorCode:
        """Append a batch. Returns its position, or the error code. With LogAppendTime, `append_time_ms` is the time.

        If the batch repeats one of an idempotent producer's last five, the earlier position is returned.
        """
        if batch.producer_id >= 0:
            verdict = self.producers.check(batch)
            if verdict is not ErrorCode.NONE:
                return verdict
        if append_time_ms >= 0:
            stamp(batch, append_time_ms)
        self._append_batch(batch, leader_epoch)
        if batch.producer_id >= 0:
            self.producers.appended(batch)
            if batch.is_transactional:
                self._open.setdefault(batch.producer_id, batch.base_offset)
        return Appended(batch.base_sequence, batch.last_sequence, batch.base_offset, append_time_ms)

    def end_transaction(
        self, producer_id: int, producer_epoch: int, leader_epoch: int, *, committed: bool, now_ms: int
    ) -> None:
        """Write the marker that ends a producer's transaction."""
        batch = self._append_batch(
            marker(producer_id, producer_epoch, committed=committed, now_ms=now_ms), leader_epoch
        )
        first = self._open.pop(producer_id, None)
        if first is not None and not committed:
            self._aborted.append(AbortedTransaction(producer_id, first, batch.base_offset))
        self.producers.fenced(producer_id, producer_epoch)

    def _append_batch(self, batch: BrokerBatch, leader_epoch: int) -> BrokerBatch:
        assign_offset(batch, self.end_offset, leader_epoch)
        self.batches.append(batch)
        self._lasts.append(batch.last_offset)
        self.size_bytes += len(batch.data)
        self.end_offset = batch.last_offset + 1
        return batch

    def fetch(self, offset: int, max_bytes: int, *, committed: bool, at_least_one: bool = True) -> Fetched:
        """Whole batches from `offset` on, up to `max_bytes`; with `at_least_one`, the first batch may be larger."""
        if not self.start_offset <= offset <= self.end_offset:
            return Fetched(ErrorCode.OFFSET_OUT_OF_RANGE)
        end = self.last_stable_offset if committed else self.end_offset
        taken: list[bytes] = []
        size = 0
        upper = offset
        for at in range(bisect_left(self._lasts, offset), len(self.batches)):
            batch = self.batches[at]
            size += len(batch.data)
            if batch.last_offset >= end or (size > max_bytes and (taken or not at_least_one)):
                break
            taken.append(batch.data)
            upper = batch.last_offset + 1
        aborted: tuple[AbortedTransaction, ...] = ()
        if committed:
            aborted = tuple(one for one in self._aborted if one.last_offset >= offset and one.first_offset < upper)
        return Fetched(ErrorCode.NONE, b"".join(taken), aborted)

    def end_of_epoch(self, epoch: int, current: int) -> EpochEnd | None:
        """The largest epoch up to `epoch` that has a batch here or is `current`, and the offset at which it ends.

        If there is none, it is `epoch`, which ends where the first batch begins. Returns None if `epoch` is above
        `current`, the present leader epoch.
        """
        if epoch > current:
            return None
        if epoch == current:
            return EpochEnd(epoch, self.end_offset)
        # Leader epochs never decrease in a log.
        later = bisect_right(self.batches, epoch, key=lambda batch: batch.leader_epoch)
        end = self.batches[later].base_offset if later < len(self.batches) else self.end_offset
        return EpochEnd(self.batches[later - 1].leader_epoch if later else epoch, end)

    def truncate(self, end: int) -> None:
        """Remove each batch whose last offset is `end` or later.

        The state of producers and transactions is rebuilt from the remaining batches. So a removed batch can be
        appended again, and a transaction is open again if its marker was removed and a batch of it remains.
        """
        kept = bisect_left(self._lasts, end)
        self.size_bytes -= sum(len(batch.data) for batch in self.batches[kept:])
        del self.batches[kept:], self._lasts[kept:]
        self.end_offset = self._lasts[-1] + 1 if self._lasts else self.start_offset
        self._aborted = [one for one in self._aborted if one.last_offset < self.end_offset]
        self._open = {producer: first for producer, first in self._open.items() if first < self.start_offset}
        self.producers = ProducerStates()
        for batch in self.batches:
            if batch.is_control:
                self._open.pop(batch.producer_id, None)
                self.producers.fenced(batch.producer_id, batch.producer_epoch)
            elif batch.producer_id >= 0:
                self.producers.appended(batch)
                if batch.is_transactional:
                    self._open.setdefault(batch.producer_id, batch.base_offset)

    def bytes_from(self, offset: int, wanted: int, *, committed: bool) -> int:
        """The number of bytes from `offset` on; the count stops with the batch that reaches `wanted`."""
        end = self.last_stable_offset if committed else self.end_offset
        found = 0
        for at in range(bisect_left(self._lasts, offset), bisect_left(self._lasts, end)):
            if found >= wanted:
                break
            found += len(self.batches[at].data)
        return found

    def readable(self, *, committed: bool) -> list[BrokerBatch]:
        """The batches without control batches; with `committed`, only those that `read_committed` returns."""
        end = self.last_stable_offset if committed else self.end_offset
        aborted = self._aborted if committed else []
        return [
            batch
            for batch in self.batches
            if not batch.is_control
            and batch.last_offset < end
            and not any(
                batch.is_transactional
                and one.producer_id == batch.producer_id
                and one.first_offset <= batch.base_offset <= one.last_offset
                for one in aborted
            )
        ]

    def offset_for_time(self, timestamp: int, *, committed: bool) -> TimedOffset:
        """The first record at or after a time, in log order."""
        end = self.last_stable_offset if committed else self.end_offset
        for batch in self.batches:
            if batch.max_timestamp >= timestamp and not batch.is_control and batch.last_offset >= self.start_offset:
                for record in records(batch, "", 0):
                    if record.timestamp >= timestamp and self.start_offset <= record.offset < end:
                        return TimedOffset(record.offset, record.timestamp)
        return TimedOffset(-1, -1)

    def latest_in_time(self, *, committed: bool) -> TimedOffset:
        """The first record with the highest timestamp."""
        end = self.last_stable_offset if committed else self.end_offset
        found = TimedOffset(-1, -1)
        for batch in self.batches:
            if (
                batch.max_timestamp > found.timestamp
                and not batch.is_control
                and batch.last_offset >= self.start_offset
            ):
                for record in records(batch, "", 0):
                    if record.timestamp > found.timestamp and self.start_offset <= record.offset < end:
                        found = TimedOffset(record.offset, record.timestamp)
        return found

    def delete_records(self, before: int) -> None:
        """Move the log's start to an offset between its start and its end. The state of producers stays."""
        self.start_offset = max(self.start_offset, before)
        gone = bisect_right(self._lasts, self.start_offset - 1)
        self.size_bytes -= sum(len(batch.data) for batch in self.batches[:gone])
        del self.batches[:gone], self._lasts[:gone]
        self._aborted = [one for one in self._aborted if one.last_offset >= self.start_offset]

    def retain(self, max_bytes: int) -> None:
        """Delete the oldest batches while the log is larger than `max_bytes`, but only below the last stable offset."""
        surplus = self.size_bytes - max_bytes
        before = self.start_offset
        for batch in self.batches if surplus > 0 else ():
            if surplus <= 0 or batch.last_offset >= self.last_stable_offset:
                break
            surplus -= len(batch.data)
            before = batch.last_offset + 1
        self.delete_records(before)


@dataclass(frozen=True, slots=True)
class Appended:
    """The position of an appended batch in the log, its append time, and its sequence numbers."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    append_time_ms: int


@dataclass(slots=True)
class BrokerProducerState:
    """One producer: its epoch and its last batches."""

    epoch: int
    batches: deque[Appended] = field(default_factory=lambda: deque(maxlen=BATCHES_REMEMBERED))


class ProducerStates:
    """The producers that one partition knows."""

    def __init__(self) -> None:
        self._known: dict[int, BrokerProducerState] = {}

    def __repr__(self) -> str:
        return f"ProducerStates({self._known})"

    def check(self, batch: BrokerBatch) -> Appended | ErrorCode:
        """NONE if the batch may be appended, the position of an earlier append of it, or the error code."""
        known = self._known.get(batch.producer_id)
        if known is None:
            return ErrorCode.NONE
        if batch.producer_epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if batch.producer_epoch > known.epoch:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER if batch.base_sequence else ErrorCode.NONE
        for one in known.batches:
            if (one.base_sequence, one.last_sequence) == (batch.base_sequence, batch.last_sequence):
                return one
        expected = next_sequence(known.batches[-1].last_sequence) if known.batches else 0
        return ErrorCode.NONE if batch.base_sequence == expected else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def appended(self, batch: BrokerBatch) -> None:
        """Remember a batch that has its offset."""
        known = self._state_of_producer(batch.producer_id, batch.producer_epoch)
        at = batch.base_offset, batch.append_time_ms
        known.batches.append(Appended(batch.base_sequence, batch.last_sequence, *at))

    def fenced(self, producer_id: int, epoch: int) -> None:
        """Remember the epoch of a transaction's marker."""
        self._state_of_producer(producer_id, epoch)

    def _state_of_producer(self, producer_id: int, epoch: int) -> BrokerProducerState:
        known = self._known.get(producer_id)
        if known is None or epoch > known.epoch:
            known = BrokerProducerState(epoch)
            self._known[producer_id] = known
        return known
