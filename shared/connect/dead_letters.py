"""Dead letters and log lines of records that failed, as Kafka Connect writes them.

A dead letter is the record as it was read, key, value and headers, with its timestamp; with
`errors.deadletterqueue.context.headers.enable` ten headers follow that say what happened. Values are UTF-8 text.
"""

from __future__ import annotations

import traceback
from typing import Any

from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.connect.error_handling import Failure
from penstock.shared.connect.errors import ConnectError, DataError, RetriableError
from penstock.shared.connect.plugins import class_name
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.states import ConnectorTaskId

PREFIX = "__connect.errors."
TRACE_BYTES_MAX = 32_768
"""A longer trace is cut: a dead letter must stay writable where its record was."""
KAFKA_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (DataError, "org.apache.kafka.connect.errors.DataException"),
    (RetriableError, "org.apache.kafka.connect.errors.RetriableException"),
    (ConnectError, "org.apache.kafka.connect.errors.ConnectException"),
)
"""What our errors are called in dead letters; those of a user's code have their own names."""


def error_name(error: Exception) -> str:
    """An error's class as dead letters name it."""
    kind = type(error)
    if kind.__module__.startswith("penstock."):
        for base, name in KAFKA_ERRORS:
            if isinstance(error, base):
                return name
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dead_letter(
    topic: str, record: ConsumerRecord, failure: Failure, id: ConnectorTaskId, *, headers: bool
) -> ProducerRecord:
    """The record for the dead-letter topic."""
    own: tuple[tuple[str, bytes | None], ...] = ()
    if headers:
        error = failure.error
        name = error_name(error)
        trace = "".join(traceback.format_tb(error.__traceback__))
        said = {
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
        own = tuple((PREFIX + key, _text(value)) for key, value in said.items())
    timestamp = record.timestamp if record.timestamp >= 0 else None
    return ProducerRecord(topic, record.value, record.key, (*record.headers, *own), None, timestamp)


def log_fields(
    record: ConsumerRecord | SourceRecord, failure: Failure, id: ConnectorTaskId, *, messages: bool
) -> dict[str, Any]:
    """What the log says of a failure; with `messages` also which record it was, never what it held."""
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


def _text(value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    return data if len(data) <= TRACE_BYTES_MAX else data[:TRACE_BYTES_MAX].decode(errors="ignore").encode()
