"""Record batches (format 2) as a broker sees them: a header, and records that the broker need not decode.

When a broker appends a batch, it sets the batch's offset and leader epoch. Both are before the bytes that the checksum
covers, so the broker need not change the rest. With LogAppendTime it also sets the timestamp and computes the checksum
again. Records are decoded only to look up an offset by time, to check timestamps and the keys of compacted topics, and
to return written records to a test.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.shared.clients.protocol.record_batches import crc32c, read_batches
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.testing.fake_broker.protocol import ErrorCode

# base offset, length, leader epoch, magic, crc | attributes, last offset delta, base and max timestamp, producer id,
# producer epoch, base sequence, record count
HEADER = struct.Struct(">qiibIhiqqqhii")
PREFIX = struct.Struct(">qii")
STAMP = struct.Struct(">hiqq")
CRC = struct.Struct(">I")
LENGTH_AT = 12
"""The length field counts the bytes after itself."""
CRC_AT = 17
CRC_COVERS_FROM = 21
MAGIC = 2
SEQUENCE_MAX = 2**31 - 1

TIMESTAMP_TYPE_MASK = 0x08
TRANSACTIONAL_MASK = 0x10
CONTROL_MASK = 0x20
NO_PRODUCER_ID = -1


@dataclass(slots=True)
class BrokerBatch:
    """One batch of a log. `data` are its bytes; `assign_offset` writes its offset and leader epoch into them."""

    data: bytes
    base_offset: int
    last_offset: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def leader_epoch(self) -> int:
        """The leader epoch under which it was appended."""
        return int(PREFIX.unpack_from(self.data)[2])

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_MASK)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_MASK)

    @property
    def append_time_ms(self) -> int:
        """The time of all its records under LogAppendTime, otherwise -1."""
        return self.max_timestamp if self.attributes & TIMESTAMP_TYPE_MASK else -1

    @property
    def last_sequence(self) -> int:
        return next_sequence(self.base_sequence, self.count - 1)


def next_sequence(sequence: int, step: int = 1) -> int:
    """The sequence number of the record `step` records later in the broker's batches; it wraps around to zero.

    >>> next_sequence(2**31 - 1)
    0
    """
    return (sequence + step) & SEQUENCE_MAX


class InvalidBatch(ValueError):
    """Bytes that a broker does not append, with the error code of the response.

    `records` has the error messages of single records, by their index in the batch.
    """

    def __init__(self, code: ErrorCode, why: str, records: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(why)
        self.code = code
        self.records = records


def parse(data: bytes | None) -> BrokerBatch:
    """Parse the bytes of a produce request for one partition. Raises InvalidBatch if they are not one valid batch."""
    if not data or len(data) < HEADER.size:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, "no record batch")
    (_, length, _, magic, crc, attributes, last_delta, first_at, max_at, producer_id, epoch, sequence, count) = (
        HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, f"record batches have the format {MAGIC}, not {magic}")
    if length + LENGTH_AT > len(data):
        raise InvalidBatch(
            ErrorCode.INVALID_RECORD, f"the batch has {len(data) - LENGTH_AT} bytes, its header says {length}"
        )
    if length + LENGTH_AT < HEADER.size:
        raise InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"the length {length} is less than that of a header")
    if length + LENGTH_AT < len(data):
        raise InvalidBatch(ErrorCode.INVALID_RECORD, "more than one batch for a partition")
    if crc32c(memoryview(data)[CRC_COVERS_FROM:]) != crc:
        raise InvalidBatch(ErrorCode.CORRUPT_MESSAGE, "the checksum is wrong")
    if count <= 0 or last_delta != count - 1:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, f"{count} records, the last with the offset delta {last_delta}")
    if attributes & CONTROL_MASK:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, "clients may not write control records")
    if producer_id != NO_PRODUCER_ID and sequence < 0:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, f"the sequence {sequence}, with a producer id")
    return BrokerBatch(
        data=data,
        base_offset=0,
        last_offset=last_delta,
        attributes=attributes,
        base_timestamp=first_at,
        max_timestamp=max_at,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        count=count,
    )


def assign_offset(batch: BrokerBatch, offset: int, leader_epoch: int) -> BrokerBatch:
    """Set the batch's offsets and leader epoch, also in its bytes. Returns the same batch."""
    head = PREFIX.pack(offset, len(batch.data) - LENGTH_AT, leader_epoch)
    batch.data = head + batch.data[PREFIX.size :]
    batch.base_offset = offset
    batch.last_offset = offset + batch.count - 1
    return batch


def stamp(batch: BrokerBatch, now_ms: int) -> BrokerBatch:
    """Set the time of all records of the batch to `now_ms`, as for LogAppendTime. Returns the same batch."""
    batch.attributes |= TIMESTAMP_TYPE_MASK
    batch.max_timestamp = now_ms
    covered = STAMP.pack(batch.attributes, batch.count - 1, batch.base_timestamp, now_ms)
    covered += batch.data[CRC_COVERS_FROM + STAMP.size :]
    batch.data = batch.data[:CRC_AT] + CRC.pack(crc32c(covered)) + covered
    return batch


def marker(producer_id: int, producer_epoch: int, *, committed: bool, now_ms: int) -> BrokerBatch:
    """The control batch that ends a producer's transaction in a partition."""
    key = struct.pack(">hh", 0, int(committed))
    value = struct.pack(">hi", 0, 0)
    body = bytes((0, 0, 0, len(key) << 1)) + key + bytes((len(value) << 1,)) + value + b"\0"
    record = bytes((len(body) << 1,)) + body
    attributes = TRANSACTIONAL_MASK | CONTROL_MASK
    rest = struct.pack(">hiqqqhii", attributes, 0, now_ms, now_ms, producer_id, producer_epoch, -1, 1) + record
    data = PREFIX.pack(0, 9 + len(rest), 0) + struct.pack(">bI", MAGIC, crc32c(rest)) + rest
    return BrokerBatch(
        data=data,
        base_offset=0,
        last_offset=0,
        attributes=attributes,
        base_timestamp=now_ms,
        max_timestamp=now_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=-1,
        count=1,
    )


def records(batch: BrokerBatch, topic: str, partition: int) -> Iterator[ConsumerRecord]:
    """The records of a batch."""
    for unpacked in read_batches(batch.data):
        for record in unpacked:
            yield ConsumerRecord(
                topic, partition, record.offset, record.timestamp, record.key, record.value, tuple(record.headers)
            )
