"""Converts records as Confluent's REST Proxy writes them in JSON to Kafka records, and back to delivery reports.

Sans-IO. Embedded JSON is stored as the received bytes. BINARY is base64, STRING is UTF-8. null is no key, or a
tombstone.

>>> from penstock.api.ingest.event import topic_reader
>>> from penstock.api.settings import IngestSettings, TopicSettings
>>> read_time = topic_reader(IngestSettings(), TopicSettings()).time
>>> body = b'{"key":{"type":"STRING","data":"ann"},"value":{"type":"JSON","data":{"a": 1}}}'
>>> record = v3_record(body, "t", read_time, 0)
>>> record.record.key, record.record.value, record.key_type
(b'ann', b'{"a": 1}', 'STRING')
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.api.ingest.event import EventRejected, ReadTime
from penstock.shared.common.records import Headers, ProducerRecord

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Embedded = Literal["json", "binary"]
DataType = Literal["BINARY", "JSON", "STRING"]
INVALID = "INVALID_RECORD"


class V2Record(msgspec.Struct):
    """One of the `records` of a v2 request."""

    key: msgspec.Raw = msgspec.Raw(b"null")
    value: msgspec.Raw = msgspec.Raw(b"null")
    partition: int | None = None


class V2Request(msgspec.Struct):
    """The body of a v2 request. Schemas belong to formats that are not supported."""

    records: list[V2Record]


class V3Data(msgspec.Struct):
    """A key or a value."""

    type: DataType
    data: msgspec.Raw = msgspec.Raw(b"null")


class V3Header(msgspec.Struct):
    """A header; its value is base64."""

    name: str
    value: str | None = None


class V3Record(msgspec.Struct):
    """The body of a v3 request, or one object of its stream."""

    partition_id: int | None = None
    headers: list[V3Header] = []
    key: V3Data | None = None
    value: V3Data | None = None
    timestamp: str | None = None


class V3Entry(V3Record, kw_only=True):
    """One of the `entries` of a batch."""

    id: str


class V3Batch(msgspec.Struct):
    """The body of records:batch."""

    entries: list[msgspec.Raw]


class Decoded(NamedTuple):
    """A record to send, and the types that its report repeats."""

    record: ProducerRecord
    key_type: DataType | None = None
    value_type: DataType | None = None


def v2_records(body: bytes, topic: str, embedded: Embedded, partition: int | None) -> list[ProducerRecord | str]:
    """Return the records of a v2 request, each decoded or as its error's text. Raises EventRejected for the body."""
    request = _decode(body, V2Request)
    if not request.records:
        raise EventRejected(INVALID, "records may not be empty")
    read = _raw_json if embedded == "json" else _raw_base64
    records: list[ProducerRecord | str] = []
    for given in request.records:
        try:
            key, value = read(given.key, "key"), read(given.value, "value")
        except EventRejected as e:
            records.append(str(e))
            continue
        chosen = given.partition if partition is None else partition
        records.append(ProducerRecord(topic, value, key, (), chosen))
    return records


def v3_record(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    """Return one v3 record. Raises EventRejected if it is invalid."""
    return _v3(_decode(body, V3Record), topic, read_time, latest_ms)


def v3_entries(body: bytes, entries_max: int) -> list[bytes]:
    """Return the entries of a batch, not yet decoded. Raises EventRejected if the body is not a batch."""
    entries = _decode(body, V3Batch).entries
    if not 0 < len(entries) <= entries_max:
        raise EventRejected(INVALID, f"a batch has 1 to {entries_max} entries, got {len(entries)}")
    return [bytes(entry) for entry in entries]


def v3_entry(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> tuple[str, Decoded]:
    """Return an entry's id and record."""
    entry = _decode(body, V3Entry)
    return entry.id, _v3(entry, topic, read_time, latest_ms)


def entry_id(body: bytes) -> str:
    """Return the id of an entry that is otherwise invalid; empty if it has none."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any]).get("id", "")
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def report(cluster_id: str, decoded: Decoded, partition: int, offset: int, timestamp: int) -> dict[str, Any]:
    """Return the delivery report of a stored record."""
    record = decoded.record
    return {
        "error_code": 200,
        "cluster_id": cluster_id,
        "topic_name": record.topic,
        "partition_id": partition,
        "offset": offset,
        "timestamp": (EPOCH + timedelta(milliseconds=timestamp)).isoformat().replace("+00:00", "Z"),
        "key": _size(decoded.key_type, record.key),
        "value": _size(decoded.value_type, record.value),
    }


def _v3(given: V3Record, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    timestamp = None
    if given.timestamp is not None:
        timestamp = read_time("timestamp", given.timestamp, latest_ms)
    key, value = _data(given.key, "key"), _data(given.value, "value")
    record = ProducerRecord(topic, value, key, _headers(given.headers), given.partition_id, timestamp)
    key_type, value_type = (None if data is None else data.type for data in (given.key, given.value))
    return Decoded(record, key_type, value_type)


def _headers(given: Sequence[V3Header]) -> Headers:
    return tuple((header.name, None if header.value is None else _base64(header.value, "headers")) for header in given)


def _data(given: V3Data | None, name: str) -> bytes | None:
    if given is None:
        return None
    if given.type == "JSON":
        return _raw_json(given.data, name)
    if given.type == "BINARY":
        return _raw_base64(given.data, name)
    text = _decode(bytes(given.data), str | None)
    return None if text is None else text.encode()


def _raw_json(raw: msgspec.Raw, name: str) -> bytes | None:
    data = bytes(raw)
    return None if data == b"null" else data


def _raw_base64(raw: msgspec.Raw, name: str) -> bytes | None:
    text = _decode(bytes(raw), str | None)
    return None if text is None else _base64(text, name)


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EventRejected(INVALID, f"{name} is not base64") from None


def _decode(body: bytes, wanted: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=wanted)
    except (ValueError, RecursionError) as e:
        raise EventRejected(INVALID, str(e) or type(e).__name__) from None


def _size(kind: DataType | None, data: bytes | None) -> dict[str, Any] | None:
    return None if kind is None else {"type": kind, "size": 0 if data is None else len(data)}
