"""A batch: records of one partition that are sent, acknowledged, retried and given up together.

The future belongs to the batch. A record keeps only its index, and its own metadata is made when somebody asks.

    OPEN ──append full, linger, flush──▶ OUT ◀──retry──▶ QUEUED ──▶ DONE (an offset, or an error)
                                          └── too large for the broker ──▶ SPLIT (its parts are QUEUED)

A record can be taken back while the batch is open: the compiled builder cannot forget it, so it is marked, and the
batch is encoded again without it when it is sealed.

`fate_unknown` is set once a try may have reached the log without an answer; it decides whether the sequence numbers
of a batch that is given up are still free.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_left, insort
from collections.abc import Callable
from contextvars import Context
from enum import Enum, auto
from typing import Any, NamedTuple

from penstock.shared.clients.connection import (
    Compression,
    SealedBatch,
    batch_records,
    crc32c,
    new_batch_builder,
    seal_batch,
)
from penstock.shared.common.errors import PenstockError, SendCancelled
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import NO_TIMESTAMP, Int64Array, RecordMetadata, TopicPartition

log = get_logger(__name__)

OnDelivery = Callable[[RecordMetadata | None, Exception | None], object]


class BatchState(Enum):
    """Where a batch is in its life."""

    OPEN = auto()
    OUT = auto()
    QUEUED = auto()
    SPLIT = auto()
    DONE = auto()


class ProducerState(NamedTuple):
    """What makes a batch idempotent: producer id, epoch, and the sequence number of its first record."""

    producer_id: int = -1
    epoch: int = -1
    base_sequence: int = -1


NO_STATE = ProducerState()


class Callback(NamedTuple):
    """Who wants to hear of one record's fate, with what its metadata needs; `place` is the record's index."""

    place: int
    timestamp: int
    key_size: int
    value_size: int
    on_delivery: OnDelivery

    def tell(self, metadata: RecordMetadata | None, error: PenstockError | None) -> None:
        """Call it; what it raises is logged and changes nothing."""
        try:
            self.on_delivery(metadata, error)
        except Exception:
            log.exception("on_delivery failed")


class Batch:
    """Records of one partition under way to the broker. `append(index, timestamp, key, value, headers)` is the
    builder's own: it gives None where the record does not fit (the first always does), and `count` is its caller's."""

    __slots__ = (
        "_builder",
        "_data",
        "_size",
        "append",
        "attempts",
        "base_offset",
        "callbacks",
        "compression",
        "count",
        "created_ms",
        "done_callbacks",
        "error",
        "fate_unknown",
        "future",
        "held_up_by",
        "last_error",
        "log_append_time",
        "memory",
        "nodes",
        "on_taken_back",
        "order",
        "parts",
        "producer_state",
        "removed",
        "retry_at_ms",
        "run",
        "sent_ms",
        "splits",
        "state",
        "takes_columns",
        "tp",
        "transactional",
    )

    def __init__(
        self,
        tp: TopicPartition,
        batch_size: int,
        compression: Compression,
        transactional: bool,
        now_ms: int,
        builder: Any = None,
    ) -> None:
        """`builder` is a ColumnBatchBuilder where the records come in columns; by default it is aiokafka's."""
        self.tp = tp
        self.takes_columns = builder is not None
        self.created_ms = now_ms
        self.compression = compression
        self.transactional = transactional
        self.state = BatchState.OPEN
        self.count = 0
        self.memory = 0
        self.order = (0, 0)
        """Its place among its partition's batches: number of the batch, and first record of a part of it."""
        self.nodes: tuple[int, ...] = ()
        """Where it was sent to."""
        self.held_up_by = ""
        """Why it could not be sent when it expired in its queue, if that is known."""
        self.callbacks: list[Callback] = []
        self.done_callbacks: dict[int, list[tuple[Callable[[Any], object], Context]]] = {}
        """Of deliveries that are used as futures, by the record's index; `callbacks` has one entry for each."""
        self.on_taken_back: Callable[[SendCancelled], None] | None = None
        """Who wants to hear that records were taken back, though not of each."""
        self.removed: list[int] = []
        self.parts: list[tuple[int, Batch]] = []
        self.producer_state = NO_STATE
        self.attempts = 0
        self.splits = 0
        """Tries that ended in a split, which count for nothing."""
        self.retry_at_ms = 0
        self.sent_ms = 0
        self.fate_unknown = False
        self.base_offset = -1
        self.log_append_time = NO_TIMESTAMP
        self.error: PenstockError | None = None
        self.last_error: PenstockError | None = None
        self.future: asyncio.Future[None] | None = None
        self.run: object = None
        """The run of a bulk's appends that is going on, if it has filled this batch (places.py)."""
        self._builder: Any = new_batch_builder(batch_size, transactional) if builder is None else builder
        self._data: SealedBatch | None = None
        self._size = 0
        self.append: Any = self._builder.append

    def __repr__(self) -> str:
        return f"<Batch {self.tp}, {self.count} records, {self.state.name}, attempt {self.attempts}>"

    @property
    def sequenced(self) -> bool:
        """Whether it has a sequence number, which a retry keeps."""
        return self.producer_state.producer_id >= 0

    def size(self) -> int:
        """Bytes, before compression while the batch is open; of one that is done, as they were sent."""
        return int(self._builder.size()) if self._builder is not None else self._size

    def extend(self, columns: Any, rows: Int64Array, first: int) -> int:
        """Take the records `rows[first:]` of the columns (EncodableColumns), as many as fit; gives where it stopped.

        A batch of single records takes none.
        """
        if not self.takes_columns:
            return first
        stop: int = self._builder.extend(columns, rows, first, len(rows))
        self.count += stop - first
        return stop

    def remove(self, index: int) -> bool:
        """Take a record back; False where the batch is no longer open, or the record is gone already.

        Whoever does that says so with `taken_back` once it is through.
        """
        if self.state is not BatchState.OPEN or index in self.removed:
            return False
        insort(self.removed, index)
        gone = [c for c in self.callbacks if c.place == index]
        self.callbacks = [c for c in self.callbacks if c.place != index]
        for callback in gone:
            callback.tell(None, self.cancelled_error())
        return True

    def taken_back(self) -> None:
        """Records were removed: tell who wants to hear of it."""
        if self.on_taken_back is not None:
            self.on_taken_back(self.cancelled_error())

    def cancelled_error(self) -> SendCancelled:
        """What a record that was taken back ended in."""
        return SendCancelled(f"{self.tp}: the record was taken back before it was sent")

    def without_removed(self) -> int:
        """Encode the batch again without the records that were taken back; gives how many are left."""
        if not self.removed:
            return self.count
        records = batch_records(seal_batch(self._builder, NO_STATE))
        self._builder = new_batch_builder(2**31 - 1, self.transactional)
        gone = set(self.removed)
        for index, record in enumerate(r for i, r in enumerate(records) if i not in gone):
            self._builder.append(index, *record)
        self.callbacks = [c._replace(place=self.position(c.place)) for c in self.callbacks]
        self.count -= len(gone)
        return self.count

    def position(self, index: int) -> int:
        """Where the record that was appended as `index` is among those that were sent."""
        return index - bisect_left(self.removed, index) if self.removed else index

    def forget_state(self) -> None:
        """It is certain that no try reached the log: the next one may be under another producer state."""
        self.producer_state = NO_STATE
        self.fate_unknown = False

    def data(self, state: ProducerState) -> SealedBatch:
        """The bytes to send under a producer state; a new state is written over the old one."""
        if self._data is None:
            self._data = seal_batch(self._builder, state, self.compression)
            self._size = len(self._data)
            self._builder = self.append = None
        elif state != self.producer_state:
            restamp(self._data, state)
        self.producer_state = state
        return self._data

    def split(self) -> list[Batch]:
        """Two batches with half of the bytes each, with this one's sequence numbers, age, callbacks and memory."""
        assert self._data is not None, "only a batch that was sent can turn out too large"
        assert self.count > 1, "one record cannot be split"
        records = batch_records(self._data)
        sizes = [len(key or b"") + len(value or b"") + 1 for _, key, value, _ in records]
        total, so_far, cut = sum(sizes), 0, 0
        while cut < self.count - 1 and (cut == 0 or so_far + sizes[cut] <= total // 2):
            so_far += sizes[cut]
            cut += 1
        for start, end in ((0, cut), (cut, self.count)):
            part = Batch(self.tp, 2**31 - 1, self.compression, self.transactional, self.created_ms)
            for index, record in enumerate(records[start:end]):
                part.append(index, *record)
            part.count = end - start
            if self.sequenced:
                producer_id, epoch, base = self.producer_state
                part.data(ProducerState(producer_id, epoch, (base + start) % 2**31))
            part.callbacks = [c._replace(place=c.place - start) for c in self.callbacks if start <= c.place < end]
            part.attempts, part.splits, part.nodes = self.attempts, self.splits + 1, self.nodes
            part.order = (self.order[0], self.order[1] + start)
            part.state = BatchState.QUEUED
            self.parts.append((start, part))
        parts = [part for _, part in self.parts]
        parts[0].memory = self.memory // 2
        parts[1].memory = self.memory - parts[0].memory
        self.memory, self.callbacks, self.state = 0, [], BatchState.SPLIT
        self._tell()
        return parts

    def complete(self, base_offset: int, log_append_time: int) -> None:
        """The broker has it: `base_offset` is its first record's, -1 where unknown."""
        self._finish()
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        self._tell()

    def fail(self, error: PenstockError) -> None:
        """It is given up."""
        self._finish()
        self.error = error
        self._tell()

    def _finish(self) -> None:
        assert self.state not in (BatchState.DONE, BatchState.SPLIT), f"{self!r} ended twice"
        self.state = BatchState.DONE

    def _tell(self) -> None:
        self._builder = self._data = self.append = None
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> None:
        """Until the batch is done or split; cancelling a waiter leaves the batch alone."""
        if self.state is BatchState.DONE or self.state is BatchState.SPLIT:
            return
        if self.future is None:
            self.future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.future)

    async def wait_all(self) -> None:
        """Until the batch, or each of its parts, is done."""
        await self.wait()
        for _, part in self.parts:
            await part.wait_all()

    def metadata(self, index: int, timestamp: int, key_size: int, value_size: int) -> RecordMetadata:
        """Where the record at `index` was stored; the batch must have been completed."""
        return RecordMetadata(
            self.tp.topic,
            self.tp.partition,
            -1 if self.base_offset < 0 else self.base_offset + index,
            timestamp if self.log_append_time == NO_TIMESTAMP else self.log_append_time,
            key_size,
            value_size,
        )


def located(batch: Batch, index: int) -> tuple[Batch, int]:
    """The batch a record is in now, and its position there, through every split; -1 where it was taken back."""
    while True:
        if batch.removed:
            if index in batch.removed:
                return batch, -1
            index = batch.position(index)
        if batch.state is not BatchState.SPLIT:
            return batch, index
        start, batch = next(part for part in reversed(batch.parts) if part[0] <= index)
        index -= start


_CRC_AT, _CRC_FROM, _STATE_AT = 17, 21, 43
_state = struct.Struct(">qhi")
_crc = struct.Struct(">I")


def restamp(data: SealedBatch, state: ProducerState) -> None:
    """Write another producer state into a sealed record batch (magic 2), and its checksum anew."""
    _state.pack_into(data, _STATE_AT, *state)
    _crc.pack_into(data, _CRC_AT, crc32c(memoryview(data)[_CRC_FROM:]))
