"""Late records on their way to the late topic: the source record as it was, and headers that say how late it came.

What a punctuation or a commit forwards comes of no source record. Where that is late, it goes there itself, as JSON,
and without the headers that name a source record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from penstock.shared.clients.connection import record_size
from penstock.shared.clients.consumer.dead_letters import DeadLetter
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ConsumerRecord, Headers, ProducerRecord
from penstock.shared.streams.processor import Record
from penstock.shared.streams.topology import ProcessorNode
from penstock.shared.streams.windowed_aggregate import WindowKey, WindowResult

if TYPE_CHECKING:
    from penstock.shared.streams.stream_task import StreamTask

TOPIC = "penstock.late.topic"
PARTITION = "penstock.late.partition"
OFFSET = "penstock.late.offset"
LATENESS_MS = "penstock.late.lateness_ms"
CLOSE_TIME_MS = "penstock.late.close_time_ms"
STREAM_TIME_MS = "penstock.late.stream_time_ms"
STORE = "penstock.late.store"
APPLICATION = "penstock.late.application"
CHANGELOG_ID = "penstock.late.changelog_id"
HEADERS = (TOPIC, PARTITION, OFFSET, LATENESS_MS, CLOSE_TIME_MS, STREAM_TIME_MS, STORE, APPLICATION)
"""What every late record of a source record has; CHANGELOG_ID is not there in those of earlier releases."""
STAGE_LATE = "late"
"""What a late record has in the place of a dead letter's stage."""


def late_record(
    record: ConsumerRecord,
    late_topic: str,
    close_time_ms: int,
    stream_time_ms: int,
    store: str,
    application: str,
    changelog_id: str | None = None,
) -> ProducerRecord:
    """The record for the late topic; header values are text in UTF-8, numbers in decimal.

    `lateness_ms` is how far the record's time lies behind the close time: 1 or more. `store` is the store whose window
    it came too late for: another store of the same source may have taken it, as may another `application`.
    `changelog_id` is the id of the application's changelog topic. A reset makes another: it tells this life of the
    application from earlier ones, which may have taken the record. None where it has no changelog.
    """
    place = ((TOPIC, record.topic.encode()), (PARTITION, b"%d" % record.partition), (OFFSET, b"%d" % record.offset))
    headers = place + _lateness(record.timestamp, close_time_ms, stream_time_ms, store, application, changelog_id)
    return ProducerRecord(late_topic, record.value, record.key, record.headers + headers, None, record.timestamp)


def parse_late_record(record: ConsumerRecord) -> DeadLetter:
    """A record of a late topic as the source record that it was, and why it is there; to be read like a dead letter.

    DataError for one that comes of no source record, or that nobody here wrote.
    """
    found = {name: value for name, value in record.headers if name in HEADERS}
    where = place_of(record)
    missing = [name for name in HEADERS if name not in found]
    if missing:
        raise DataError(f"{where} is no source's late record: without {', '.join(missing)}")
    text = {name: (value or b"").decode(errors="replace") for name, value in found.items()}
    numbers = {name: text[name] for name in (PARTITION, OFFSET, LATENESS_MS)}
    for name, value in numbers.items():
        if not (value.isascii() and value.isdigit()):
            raise DataError(f"{where} is no late record: {name} is {value!r}, not a number")
    own = {*HEADERS, CHANGELOG_ID}
    original: Headers = tuple(header for header in record.headers if header[0] not in own)
    partition, offset = int(text[PARTITION]), int(text[OFFSET])
    source = replace(record, topic=text[TOPIC], partition=partition, offset=offset, headers=original)
    said = f"{text[LATENESS_MS]} ms too late for {text[STORE]}"
    return DeadLetter(source, STAGE_LATE, "", said, 1, text[APPLICATION])


def forwarded_late_record(
    record: Record,
    late_topic: str,
    close_time_ms: int,
    stream_time_ms: int,
    store: str,
    application: str,
    changelog_id: str | None,
    record_bytes_max: int,
) -> ProducerRecord:
    """What was forwarded by itself, for the late topic: key and value as JSON, text and bytes as they are.

    What JSON does not have is shown by its `repr`; a value that makes the record too large is left out. So nothing
    that is late can end the task.
    """
    lateness = _lateness(record.timestamp, close_time_ms, stream_time_ms, store, application, changelog_id)
    headers = record.headers + lateness
    key = as_bytes(record.key.key if isinstance(record.key, WindowKey) else record.key)
    value = record.value.to_json() if isinstance(record.value, WindowResult) else as_bytes(record.value)
    if record_size(key, value, list(headers)) > record_bytes_max:
        value = None
    return ProducerRecord(late_topic, value, key, headers, None, record.timestamp)


def send_late(task: StreamTask, forwarded: Record, node: str, close_time_ms: int, operator_time_ms: int) -> None:
    """Count what came too late for a node's windows and send it to its source's late topic.

    That is the source record in hand; where there is none, in a punctuation or a commit, what was `forwarded`.
    """
    below = task.topology.nodes[node]
    store = next(iter(below.stores), node) if isinstance(below, ProcessorNode) else node
    said = (close_time_ms, operator_time_ms, store, task.application, task.changelog_id)
    record, source = task.source_record(), task.source_node(node)
    if record is not None:
        task.outputs.add(late_record(record, source.late, *said))
        task.late_records += 1
        task.metrics.refused_at["late"] = place_of(record)
        return
    task.outputs.add(forwarded_late_record(forwarded, source.late, *said, task.record_bytes_max))
    task.metrics.late(source.topic, 1)
    task.metrics.refused_at["late"] = f"store {store!r}, of no source record"


def _lateness(
    timestamp_ms: int, close_time_ms: int, stream_time_ms: int, store: str, application: str, changelog_id: str | None
) -> Headers:
    told = (
        (LATENESS_MS, b"%d" % (close_time_ms - timestamp_ms)),
        (CLOSE_TIME_MS, b"%d" % close_time_ms),
        (STREAM_TIME_MS, b"%d" % stream_time_ms),
        (STORE, store.encode()),
        (APPLICATION, application.encode()),
    )
    return told if changelog_id is None else (*told, (CHANGELOG_ID, changelog_id.encode()))


def as_bytes(value: Any) -> bytes | None:
    """Text and bytes as they are, anything else as JSON, what JSON does not have by its `repr`; never raises."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(value).encode(errors="backslashreplace")


def place_of(record: ConsumerRecord) -> str:
    """Where a record stands, in words."""
    return f"{record.topic}-{record.partition}@{record.offset}"
