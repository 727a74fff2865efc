"""Dead letters and log lines of records that failed, as Kafka Connect writes them.

A dead letter is the record as it was read: key, value, headers and timestamp. If
`errors.deadletterqueue.context.headers.enable` is set, ten headers follow that describe the failure. Their values are
UTF-8 text.

`RawRecords` keeps the records of a sink task as they were read until their offsets are committed.
"""

from __future__ import annotations

import traceback
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.connect.errors import ConnectError, DataError, RetriableError
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime.error_handling import Failure
from penstock.shared.connect.runtime.plugins import class_name
from penstock.shared.connect.runtime.states import ConnectorTaskId

PREFIX = "__connect.errors."
CACHED_BYTES_MAX = 64 << 20
"""Bytes of keys and values kept beside the batch in delivery. The oldest records are dropped first. The dead letter of
a dropped record is converted from its `SinkRecord`."""
TRACE_BYTES_MAX = 32_768
"""A longer trace is cut: a dead letter must stay writable where its record was."""
KAFKA_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (DataError, "org.apache.kafka.connect.errors.DataException"),
    (RetriableError, "org.apache.kafka.connect.errors.RetriableException"),
    (ConnectError, "org.apache.kafka.connect.errors.ConnectException"),
)
"""The names of our errors in dead letters. Errors of a user's code keep their own names."""


def error_name(error: Exception) -> str:
    """Return the class that a dead letter's header names: Kafka's where there is one, else Python's with its module.

    >>> error_name(KeyError("k"))
    'KeyError'
    """
    kind = type(error)
    if kind.__module__.startswith("penstock."):
        for base, name in KAFKA_ERRORS:
            if isinstance(error, base):
                return name
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dead_letter(
    topic: str, record: ConsumerRecord, failure: Failure, id: ConnectorTaskId, *, headers: bool
) -> ProducerRecord:
    """Return the record for the dead-letter topic."""
    own: tuple[tuple[str, bytes | None], ...] = ()
    if headers:
        error = failure.error
        name = error_name(error)
        trace = "".join(traceback.format_tb(error.__traceback__))
        headers_by_name = {
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "connector.name": id.connector,
            "task.id": str(id.task),
            "stage": failure.stage.name,
            "class.name": class_name(failure.executing_class),
            "exception.class.name": name,
            "exception.message": str(error),
            "exception.stacktrace": f"{name}: {error}\n{trace}",
        }
        own = tuple((PREFIX + key, _encode_header_text(value)) for key, value in headers_by_name.items())
    timestamp = record.timestamp if record.timestamp >= 0 else None
    return ProducerRecord(topic, record.value, record.key, (*record.headers, *own), None, timestamp)


def log_fields(
    record: ConsumerRecord | SourceRecord, failure: Failure, id: ConnectorTaskId, *, messages: bool
) -> dict[str, Any]:
    """Return the log fields of a failure. With `messages`, they identify the record, but never show its content."""
    fields: dict[str, Any] = {
        "task": str(id),
        "stage": failure.stage.name,
        "class_name": class_name(failure.executing_class),
        "error": f"{type(failure.error).__name__}: {failure.error}",
        "attempt": failure.attempt,
    }
    if messages:
        partition = record.partition if isinstance(record, ConsumerRecord) else record.kafka_partition
        fields |= {"topic": record.topic, "partition": partition, "timestamp": record.timestamp}
        if isinstance(record, ConsumerRecord):
            fields["offset"] = record.offset
        else:
            fields |= {"source_partition": dict(record.source_partition), "source_offset": dict(record.source_offset)}
    return fields


def _encode_header_text(value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    return data if len(data) <= TRACE_BYTES_MAX else data[:TRACE_BYTES_MAX].decode(errors="ignore").encode()


@dataclass(frozen=True)
class _CachedBatch:
    columns: Columns
    poll: int
    bytes: int

    @property
    def last(self) -> int:
        return self.columns.offsets.item(-1)


class RawRecords:
    """The records that one sink task has read and not yet committed, in columns, up to a limit of bytes.

    A sink may report an errant record as late as `flush`, and its `SinkRecord` may have gone through transforms. The
    dead letter is made of the record as it was read.
    """

    def __init__(self, bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._polls = 0
        self._cached: dict[TopicPartition, deque[_CachedBatch]] = {}

    def __repr__(self) -> str:
        return f"<RawRecords of {len(self._cached)} partitions, {self._bytes} bytes>"

    def add(self, polled: Mapping[TopicPartition, Columns]) -> None:
        """Adds the records of one poll, which are delivered next. Drops earlier ones if there are too many."""
        self._polls += 1
        for tp, columns in polled.items():
            own = self._cached.setdefault(tp, deque())
            first = columns.offsets.item(0)
            # After a rewind the same offsets are read again.
            while own and own[-1].last >= first:
                self._bytes -= own.pop().bytes
            size = sum(map(len, filter(None, columns.keys))) + sum(map(len, filter(None, columns.values)))
            own.append(_CachedBatch(columns, self._polls, size))
            self._bytes += size
        while self._bytes > self._bytes_max:
            oldest = min((own for own in self._cached.values() if own), key=lambda own: own[0].poll)
            # The batch in delivery is kept beyond the limit: its records are the likeliest to be reported.
            if oldest[0].poll == self._polls:
                return
            self._bytes -= oldest.popleft().bytes

    def find(self, topic: str, partition: int, offset: int) -> ConsumerRecord | None:
        """Return a record as it was read, or None if it is not kept."""
        own = self._cached.get(TopicPartition(topic, partition), deque())
        at = bisect_left(own, offset, key=lambda cached: cached.last)
        if at == len(own):
            return None
        columns = own[at].columns
        index = int(columns.offsets.searchsorted(offset))
        return columns.record(index) if columns.offsets.item(index) == offset else None

    def committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Drops the records before the group's committed offsets: they are not reported any more."""
        for tp, at in offsets.items():
            own = self._cached.get(tp, deque())
            while own and own[0].last < at.offset:
                self._bytes -= own.popleft().bytes

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drops the records of revoked partitions."""
        for tp in partitions:
            self._bytes -= sum(cached.bytes for cached in self._cached.pop(tp, ()))
