"""A batch: records of one partition that are sent, acknowledged, retried and given up together.

The batch has the future. A record has only its index, and its metadata is made when it is requested.

    OPEN ──full, linger, flush──▶ OUT ◀──retry──▶ QUEUED
                                   │└── too large, or some records invalid ──▶ SPLIT (its parts are QUEUED)
                                   └── acknowledged, or a final error ──▶ DONE
    OPEN, QUEUED ──expired, failed──▶ DONE

A record can be cancelled while its batch is OPEN: no request has contained the batch yet. The compiled builder cannot
remove a record, so the batch marks it as removed. Before the batch is sent, it is encoded again without the marked
records.

`fate_unknown` is set once an attempt may have put the batch into the log although it was not acknowledged. If such a
batch is given up, its sequence numbers are not used again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextvars import Context
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.shared.clients.protocol.record_batches import (
    Compression,
    SealedBatch,
    new_batch_builder,
    read_batch_records,
    seal_batch,
    write_producer_state,
)
from penstock.shared.common.errors import PenstockError, SendCancelled
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import NO_TIMESTAMP, Int64Array, OnDelivery, RecordMetadata, TopicPartition

log = get_logger(__name__)

SEQUENCES = 2**31
"""Sequence numbers wrap to 0 after 2^31 - 1."""
UNLIMITED = 2**31 - 1
"""The batch size of a builder that takes every record."""


class BatchState(Enum):
    """The states of a batch."""

    OPEN = auto()
    OUT = auto()
    QUEUED = auto()
    SPLIT = auto()
    DONE = auto()


class ProducerState(NamedTuple):
    """The identity of an idempotent batch: producer id, epoch, and the sequence number of its first record."""

    producer_id: int = -1
    epoch: int = -1
    base_sequence: int = -1


NO_STATE = ProducerState()


class RecordCallback(NamedTuple):
    """The callback of one record of a batch, with the fields of its metadata. `record_index` is its index in the
    batch."""

    record_index: int
    timestamp: int
    key_size: int
    value_size: int
    on_delivery: OnDelivery

    def call(self, metadata: RecordMetadata | None, error: PenstockError | None) -> None:
        """Call `on_delivery` for this record of a `ProducerBatch`. An exception from it is only logged."""
        try:
            self.on_delivery(metadata, error)
        except Exception:
            log.exception("on_delivery failed")


class ProducerBatch:
    """Records of one partition on their way to the broker.

    `append(index, timestamp, key, value, headers)` is the builder's own method. It returns None if the record does not
    fit. The first record always fits, except in a batch for columns, which takes no single records. The caller
    increments `count`.
    """

    __slots__ = (
        "_builder",
        "_data",
        "_size",
        "append",
        "attempts",
        "base_offset",
        "callbacks",
        "check_waiter",
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
        "on_cancelled",
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
        """`builder` is a ColumnBatchBuilder if the records come in columns; by default it is aiokafka's."""
        self.tp = tp
        self.takes_columns = builder is not None
        self.created_ms = now_ms
        self.compression = compression
        self.transactional = transactional
        self.state = BatchState.OPEN
        self.count = 0
        self.memory = 0
        self.order = (0, 0)
        """Its order in its partition: the number of the batch, then the first record of a part that a split made."""
        self.nodes: tuple[int, ...] = ()
        """The nodes that it was sent to."""
        self.held_up_by = ""
        """The reason why it could not be sent when it expired in its queue; empty if unknown."""
        self.callbacks: list[RecordCallback] = []
        self.done_callbacks: dict[int, list[tuple[Callable[[Any], object], Context]]] = {}
        """Done callbacks of deliveries used as futures, by record index; `callbacks` has one entry for each."""
        self.on_cancelled: Callable[[SendCancelled], None] | None = None
        """Called once after records were cancelled, not for each record."""
        self.check_waiter: Callable[[], None] | None = None
        """Raises IllegalState for a waiter in another event loop than the producer's, where no result would wake it."""
        self.removed: list[int] = []
        self.parts: list[tuple[int, ProducerBatch]] = []
        self.producer_state = NO_STATE
        self.attempts = 0
        self.splits = 0
        """Attempts that ended in a split; they do not count as retries."""
        self.retry_at_ms = 0
        self.sent_ms = 0
        self.fate_unknown = False
        self.base_offset = -1
        self.log_append_time = NO_TIMESTAMP
        self.error: PenstockError | None = None
        self.last_error: PenstockError | None = None
        self.future: asyncio.Future[None] | None = None
        self.run: object = None
        """The current run of a bulk's appends, if it has filled this batch (`DeliveryLocations`)."""
        self._builder: Any = new_batch_builder(batch_size, transactional) if builder is None else builder
        self._data: SealedBatch | None = None
        self._size = 0
        self.append: Any = self._builder.append

    def __repr__(self) -> str:
        return f"<ProducerBatch {self.tp}, {self.count} records, {self.state.name}, attempt {self.attempts}>"

    @property
    def sequenced(self) -> bool:
        """Whether the batch has a sequence number. A retry keeps the number, unless `forget_state` has cleared it."""
        return self.producer_state.producer_id >= 0

    def size(self) -> int:
        """Return the size in bytes: uncompressed until `data` is called, then as it is sent."""
        return int(self._builder.size()) if self._builder is not None else self._size

    def extend(self, columns: Any, rows: Int64Array, first: int) -> int:
        """Append records of the columns (EncodableColumns), as many as fit.

        `rows` has the records' indices in the columns. Only `rows[first:]` are appended. Returns the position in `rows`
        of the first record that was not appended, or the length of `rows`. A batch built from single records takes no
        columns.
        """
        if not self.takes_columns:
            return first
        stop: int = self._builder.extend(columns, rows, first, len(rows))
        self.count += stop - first
        return stop

    def remove(self, *indices: int) -> int:
        """Cancel records if the batch is open, and call their callbacks. Returns the number of records newly cancelled.

        If there are any, the caller then calls `cancelled_records` once, for all batches together.
        """
        if self.state is not BatchState.OPEN:
            return 0
        new = [index for index in indices if not self._is_removed(index)]
        for index in new:
            insort(self.removed, index)
        if self.callbacks:
            gone = set(new)
            callbacks = self.callbacks
            self.callbacks = [c for c in callbacks if c.record_index not in gone]
            for callback in callbacks:
                if callback.record_index in gone:
                    callback.call(None, self.cancelled_error())
        return len(new)

    def _is_removed(self, index: int) -> bool:
        at = bisect_left(self.removed, index)
        return at < len(self.removed) and self.removed[at] == index

    def cancelled_records(self) -> None:
        """Call `on_cancelled`, since records were removed."""
        if self.on_cancelled is not None:
            self.on_cancelled(self.cancelled_error())

    def cancelled_error(self) -> SendCancelled:
        """Return the error of a cancelled record."""
        return SendCancelled(f"{self.tp}: the record was cancelled before it was sent")

    def without_removed(self) -> int:
        """Encode the batch again without the cancelled records. Returns the number of records left."""
        if not self.removed:
            return self.count
        records = read_batch_records(seal_batch(self._builder, NO_STATE))
        # Without a size limit: every record that is left has fitted before.
        self._builder = new_batch_builder(UNLIMITED, self.transactional)
        gone = set(self.removed)
        for index, record in enumerate(r for i, r in enumerate(records) if i not in gone):
            self._builder.append(index, *record)
        self.callbacks = [c._replace(record_index=self.position(c.record_index)) for c in self.callbacks]
        self.count -= len(gone)
        return self.count

    def position(self, index: int) -> int:
        """Return the position, among the sent records, of the record that was appended as `index`."""
        return index - bisect_left(self.removed, index) if self.removed else index

    def locate(self, index: int) -> tuple[ProducerBatch, int]:
        """Return the batch that now contains a record, after any splits, and the record's index in that batch.

        The index is -1 if the record was cancelled.
        """
        batch = self
        while True:
            # Only a batch that was open can have cancelled records, so this changes the index at most once.
            if batch.removed:
                if batch._is_removed(index):
                    return batch, -1
                index = batch.position(index)
            if batch.state is not BatchState.SPLIT:
                return batch, index
            start, batch = next(part for part in reversed(batch.parts) if part[0] <= index)
            index -= start

    def forget_state(self) -> None:
        """Clear the producer state: no attempt reached the log, so the next one may use another producer state."""
        self.producer_state = NO_STATE
        self.fate_unknown = False

    def data(self, state: ProducerState) -> SealedBatch:
        """Return the bytes to send under a producer state; a new state overwrites the old one."""
        if self._data is None:
            self._data = seal_batch(self._builder, state, self.compression)
            self._size = len(self._data)
            self._builder = None
            self.append = None
        # After a gap the batch gets new numbers (KIP-360). The records stay compressed: only the header changes.
        elif state != self.producer_state:
            write_producer_state(self._data, state)
        self.producer_state = state
        return self._data

    def split(self, cuts: Sequence[int] = ()) -> list[ProducerBatch]:
        """Return batches with this batch's records. Each of `cuts` is the index of a part's first record, ascending and
        without the 0. By default there are two parts, cut near half of the bytes.

        The parts have this batch's age, and share its callbacks and memory.
        """
        assert self._data is not None, "only a batch that was sent is split"
        assert self.count > 1, "one record cannot be split"
        records = read_batch_records(self._data)
        # 1. Cut where half of the bytes are reached, with at least one record on each side. A part that is too large
        #    again is split again.
        if not cuts:
            sizes = [len(key or b"") + len(value or b"") + 1 for _, key, value, _ in records]
            total = sum(sizes)
            so_far = 0
            cut = 0
            while cut < self.count - 1 and (cut == 0 or so_far + sizes[cut] <= total // 2):
                so_far += sizes[cut]
                cut += 1
            cuts = [cut]
        # 2. Make the parts.
        for start, end in pairwise([0, *cuts, self.count]):
            part = ProducerBatch(self.tp, UNLIMITED, self.compression, self.transactional, self.created_ms)
            for index, record in enumerate(records[start:end]):
                part.append(index, *record)
            part.count = end - start
            # The parts share the numbers of the whole, since later batches may have the numbers after it already
            # (Java: `ProducerBatch.split`).
            if self.sequenced:
                producer_id, epoch, base = self.producer_state
                part.data(ProducerState(producer_id, epoch, (base + start) % SEQUENCES))
            part.callbacks = [
                c._replace(record_index=c.record_index - start) for c in self.callbacks if start <= c.record_index < end
            ]
            part.attempts = self.attempts
            part.splits = self.splits + 1
            part.nodes = self.nodes
            part.check_waiter = self.check_waiter
            part.order = (self.order[0], self.order[1] + start)
            part.state = BatchState.QUEUED
            self.parts.append((start, part))
        # 3. Hand over the memory, so that it is released once, and wake up the waiters: they go on to the parts.
        parts = [part for _, part in self.parts]
        for part in parts[1:]:
            part.memory = self.memory // len(parts)
        parts[0].memory = self.memory - sum(part.memory for part in parts[1:])
        self.memory = 0
        self.callbacks = []
        self.state = BatchState.SPLIT
        self._resolve_future()
        return parts

    def complete(self, base_offset: int, log_append_time: int) -> None:
        """Complete the batch. `base_offset` is the offset of its first record, or -1 if the broker did not return
        it."""
        self._mark_done()
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        self._resolve_future()

    def fail(self, error: PenstockError) -> None:
        """End the batch with an error."""
        self._mark_done()
        self.error = error
        self._resolve_future()

    def _mark_done(self) -> None:
        assert self.state not in (BatchState.DONE, BatchState.SPLIT), f"{self!r} ended twice"
        self.state = BatchState.DONE

    def _resolve_future(self) -> None:
        self._builder = None
        self._data = None
        self.append = None
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> None:
        """Wait until the batch is done or split. Cancelling a waiter does not affect the batch."""
        if self.state is BatchState.DONE or self.state is BatchState.SPLIT:
            return
        if self.check_waiter is not None:
            self.check_waiter()
        # Made on demand: most records are sent without anybody waiting for their batch.
        if self.future is None:
            self.future = asyncio.get_running_loop().create_future()
        # All records of the batch share the future: cancelling one waiter must not cancel it for the others.
        await asyncio.shield(self.future)

    async def wait_all(self) -> None:
        """Wait until the batch, or each of its parts, is done."""
        await self.wait()
        for _, part in self.parts:
            await part.wait_all()

    def metadata(self, index: int, timestamp: int, key_size: int, value_size: int) -> RecordMetadata:
        """Return the metadata of the record at `index`. Call it only after `complete`, not after `fail`."""
        return RecordMetadata(
            self.tp.topic,
            self.tp.partition,
            -1 if self.base_offset < 0 else self.base_offset + index,
            timestamp if self.log_append_time == NO_TIMESTAMP else self.log_append_time,
            key_size,
            value_size,
        )
