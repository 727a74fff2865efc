"""Records that were produced, as a consumer gets them."""

from __future__ import annotations

from penstock.shared.common.records import ConsumerRecord, ProducerRecord


def as_consumed(record: ProducerRecord, offset: int = 0) -> ConsumerRecord:
    """The record at this offset of its partition, or of partition 0."""
    timestamp = record.timestamp or 0
    partition = record.partition or 0
    return ConsumerRecord(record.topic, partition, offset, timestamp, record.key, record.value, record.headers)
