"""aiokafka's compiled record-batch builder and checksum."""

from __future__ import annotations

from typing import Any

from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

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


def seal_batch(builder: Any, state: tuple[int, int, int]) -> bytes:
    """The finished batch under a producer id, epoch and base sequence; the builder is used up."""
    builder.set_producer_state(*state)
    return bytes(builder.build())


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


def produce_request(transactional_id: str | None, acks: int, timeout_ms: int, topics: list[Any]) -> Any:
    """Produce: `topics` is `[(topic, [(partition, batch bytes)])]`."""
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)
