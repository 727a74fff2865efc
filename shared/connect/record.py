"""The records that Connect processes: decoded keys and values, each with or without a schema.

>>> record = SinkRecord("clicks", 0, None, "ann", None, {"n": 1}, timestamp=1_000, kafka_offset=7)
>>> record.with_value(None, {"n": 2}).value, record.kafka_partition, record.kafka_offset
({'n': 2}, 0, 7)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.schema import Schema

Partition = Mapping[str, Any]
"""Names one part of a source (a file, a table). Its values are JSON values."""
Offset = Mapping[str, Any]
"""The position up to which a part of a source was read. Its values are JSON values."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """One header. A record may have several headers with the same name."""

    name: str
    value: Any
    schema: Schema | None = None


class ConnectRecord(msgspec.Struct, frozen=True, gc=False):
    """The base of source and sink records. `timestamp` is ms since the epoch or None. If the `kafka_partition` of a
    source record is None, the producer chooses the partition."""

    topic: str
    kafka_partition: int | None
    key_schema: Schema | None
    key: Any
    value_schema: Schema | None
    value: Any
    timestamp: int | None = None
    headers: tuple[Header, ...] = ()

    def with_key(self, schema: Schema | None, key: Any) -> Self:
        """Return a copy of the record with another key and key schema."""
        return msgspec.structs.replace(self, key_schema=schema, key=key)

    def with_value(self, schema: Schema | None, value: Any) -> Self:
        """Return a copy of the record with another value and value schema."""
        return msgspec.structs.replace(self, value_schema=schema, value=value)

    def with_topic(self, topic: str) -> Self:
        """Return a copy of the record with another topic."""
        return msgspec.structs.replace(self, topic=topic)

    def replaced(self, **fields: Any) -> Self:
        """Return a copy of the record with these attributes replaced."""
        return msgspec.structs.replace(self, **fields)


class SinkRecord(ConnectRecord, frozen=True, kw_only=True, gc=False):
    """A record read from Kafka, as a sink task receives it.

    `original_topic`, `original_partition` and `kafka_offset` are its coordinates in Kafka, even if a transform has
    changed the topic. `pre_commit` refers to offsets by these coordinates.
    """

    kafka_offset: int
    original_topic: str = ""
    original_partition: int = -1

    @property
    def original_tp(self) -> TopicPartition:
        """Return the topic and partition that the record was read from."""
        if self.original_topic:
            return TopicPartition(self.original_topic, self.original_partition)
        return TopicPartition(self.topic, -1 if self.kafka_partition is None else self.kafka_partition)

    @property
    def coordinates(self) -> str:
        """Return the record's coordinates in Kafka as text: `topic-partition@offset`."""
        return f"{self.original_tp}@{self.kafka_offset}"


class SourceRecord(ConnectRecord, frozen=True, kw_only=True, gc=False):
    """A record for Kafka, with its source partition and the source offset that is reached after it."""

    source_partition: Partition
    source_offset: Offset
