"""A batch: records of one partition that are sent, acknowledged, retried and given up together.

The future belongs to the batch. A record keeps only its index, and its own metadata is made when somebody asks.

    OPEN ──append full, linger, flush──▶ DRAINED ◀──retry──▶ QUEUED ──▶ DONE (an offset, or an error)

`fate_unknown` is set once a try may have reached the log without an answer; it decides whether the sequence numbers
of a batch that is given up are still free.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from shared.clients.connection import crc32c, new_batch_builder, seal_batch
from shared.common.errors import PenstockError
from shared.common.records import NO_TIMESTAMP, RecordMetadata, TopicPartition

OnDelivery = Callable[[RecordMetadata | None, Exception | None], object]


class BatchState(Enum):
    """Where a batch is in its life."""

    OPEN = auto()
    DRAINED = auto()
    QUEUED = auto()
    DONE = auto()


class ProducerState(NamedTuple):
    """What makes a batch idempotent: producer id, epoch, and the sequence number of its first record."""

    producer_id: int = -1
    epoch: int = -1
    base_sequence: int = -1


class Batch:
    """Records of one partition under way to the broker."""

    __slots__ = (
        "_builder",
        "_data",
        "attempts",
        "base_offset",
        "callbacks",
        "count",
        "created_ms",
        "error",
        "fate_unknown",
        "future",
        "last_error",
        "log_append_time",
        "memory",
        "producer_state",
        "retry_at_ms",
        "rows",
        "state",
        "tp",
    )

    def __init__(self, tp: TopicPartition, batch_size: int, compression: int, transactional: bool, now_ms: int) -> None:
        self.tp = tp
        self.created_ms = now_ms
        self.state = BatchState.OPEN
        self.count = 0
        self.memory = 0
        self.rows: list[tuple[int, int, int]] = []
        self.callbacks: list[tuple[int, OnDelivery]] = []
        self.producer_state = ProducerState()
        self.attempts = 0
        self.retry_at_ms = 0
        self.fate_unknown = False
        self.base_offset = -1
        self.log_append_time = NO_TIMESTAMP
        self.error: PenstockError | None = None
        self.last_error: PenstockError | None = None
        self.future: asyncio.Future[None] | None = None
        self._builder: Any = new_batch_builder(batch_size, compression, transactional)
        self._data: bytes | None = None

    def __repr__(self) -> str:
        return f"<Batch {self.tp}, {self.count} records, {self.state.name}, attempt {self.attempts}>"

    def append(self, key: bytes | None, value: bytes | None, headers: Any, timestamp: int) -> bool:
        """Add a record; False where the batch is full (the first record always fits)."""
        if self._builder.append(self.count, timestamp, key, value, headers) is None:
            return False
        self.count += 1
        self.rows.append((timestamp, -1 if key is None else len(key), -1 if value is None else len(value)))
        return True

    def size(self) -> int:
        """Bytes, before compression while the batch is open."""
        return int(self._builder.size()) if self._data is None else len(self._data)

    def data(self, state: ProducerState) -> bytes:
        """The bytes to send under a producer state; a new state is written over the old one."""
        if self._data is None:
            self._data = seal_batch(self._builder, state)
            self._builder = None
        elif state != self.producer_state:
            self._data = restamp(self._data, state)
        self.producer_state = state
        return self._data

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
        assert self.state is not BatchState.DONE, f"{self!r} ended twice"
        self.state = BatchState.DONE

    def _tell(self) -> None:
        self._builder = self._data = None
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> None:
        """Until the batch is done; cancelling a waiter leaves the batch alone."""
        if self.state is BatchState.DONE:
            return
        if self.future is None:
            self.future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.future)

    def metadata(self, index: int) -> RecordMetadata:
        """Where the record at `index` was stored; the batch must have been completed."""
        timestamp, key_size, value_size = self.rows[index]
        return RecordMetadata(
            self.tp.topic,
            self.tp.partition,
            -1 if self.base_offset < 0 else self.base_offset + index,
            timestamp if self.log_append_time == NO_TIMESTAMP else self.log_append_time,
            key_size,
            value_size,
        )


_CRC_AT, _CRC_FROM, _STATE_AT = 17, 21, 43
_state = struct.Struct(">qhi")
_crc = struct.Struct(">I")


def restamp(data: bytes, state: ProducerState) -> bytes:
    """A sealed record batch (magic 2) under another producer state, its checksum computed anew."""
    changed = bytearray(data)
    _state.pack_into(changed, _STATE_AT, *state)
    _crc.pack_into(changed, _CRC_AT, crc32c(bytes(changed[_CRC_FROM:])))
    return bytes(changed)
