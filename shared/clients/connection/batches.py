"""aiokafka's compiled record-batch builder and checksum."""

from __future__ import annotations

from typing import Any, cast

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from shared.clients.connection.produce import Produce, Topics

MAGIC = 2
COMPRESSION = {
    "none": DefaultRecordBatch.CODEC_NONE,
    "gzip": DefaultRecordBatch.CODEC_GZIP,
    "snappy": DefaultRecordBatch.CODEC_SNAPPY,
    "lz4": DefaultRecordBatch.CODEC_LZ4,
    "zstd": DefaultRecordBatch.CODEC_ZSTD,
}


def new_batch_builder(batch_size: int, compression: int, transactional: bool) -> Any:
    """A builder that takes records until `batch_size` bytes are full."""
    return DefaultRecordBatchBuilder(MAGIC, compression, int(transactional), -1, -1, -1, batch_size)


def seal_batch(builder: Any, state: tuple[int, int, int]) -> bytearray:
    """The finished batch under a producer id, epoch and base sequence; the builder is used up."""
    builder.set_producer_state(*state)
    sealed: bytearray = builder.build()
    return sealed


def read_batches(data: bytes) -> list[Any]:
    """The record batches in a piece of a log."""
    records, found = MemoryRecords(data), []
    while records.has_next():
        found.append(records.next_batch())
    return found


def record_size(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> int:
    """An upper bound of a record's bytes in a batch of its own, headers of record and batch included."""
    size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)
    return size


def crc32c(data: bytes) -> int:
    """The checksum of record batches."""
    return int(calc_crc32c(data))


def produce_request(transactional_id: str | None, acks: int, timeout_ms: int, topics: Topics) -> Any:
    """Produce; the response is a `ProduceResponse`."""
    return Produce(transactional_id, acks, timeout_ms, cast(Any, topics))


BatchRecord = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Timestamp (ms), key, value, headers."""


def batch_records(data: bytes | bytearray) -> list[BatchRecord]:
    """The records of one sealed batch."""
    return [(r.timestamp, r.key, r.value, list(r.headers)) for r in read_batches(bytes(data))[0]]
