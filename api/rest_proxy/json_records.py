"""Converts records in the JSON formats of Confluent's REST Proxy to Kafka records, and outcomes to delivery reports.

Sans-IO. Embedded JSON is stored as the received bytes. BINARY is base64, STRING is UTF-8. A null key is no key, and a
null value is a tombstone.

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

from penstock.api.http.status_codes import OK
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
    """The body of a v2 request. Its fields for schemas are ignored, since formats with schemas are not supported."""

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
    """A record to send, and the types of its key and value for the delivery report."""

    record: ProducerRecord
    key_type: DataType | None = None
    value_type: DataType | None = None


def v2_records(body: bytes, topic: str, embedded: Embedded, partition: int | None) -> list[ProducerRecord | str]:
    """Return the records of a v2 request; a record that cannot be decoded is the text of its error.

    `partition` overrides the partition of the records. Raises EventRejected if the body is invalid.
    """
    request = _decode_json(body, V2Request)
    if not request.records:
        raise EventRejected(INVALID, "records may not be empty")
    read = _raw_json if embedded == "json" else _raw_base64
    records: list[ProducerRecord | str] = []
    for item in request.records:
        try:
            key = read(item.key, "key")
            value = read(item.value, "value")
        except EventRejected as e:
            records.append(str(e))
            continue
        records.append(ProducerRecord(topic, value, key, (), item.partition if partition is None else partition))
    return records


def v3_record(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    """Return one v3 record. Raises EventRejected if it is invalid."""
    return _decode_v3_record(_decode_json(body, V3Record), topic, read_time, latest_ms)


def v3_entries(body: bytes, entries_max: int) -> list[bytes]:
    """Return the entries of a batch, not yet decoded. Raises EventRejected if the body is not a batch."""
    entries = _decode_json(body, V3Batch).entries
    if not 0 < len(entries) <= entries_max:
        raise EventRejected(INVALID, f"a batch has 1 to {entries_max} entries, got {len(entries)}")
    return [bytes(entry) for entry in entries]


def v3_entry(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> tuple[str, Decoded]:
    """Return an entry's id and record. Raises EventRejected if it is invalid."""
    entry = _decode_json(body, V3Entry)
    return entry.id, _decode_v3_record(entry, topic, read_time, latest_ms)


def entry_id(body: bytes) -> str:
    """Return the id of an entry that is otherwise invalid; empty if it has none."""
    try:
        value = msgspec.json.decode(body, type=dict[str, Any]).get("id", "")
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def report(cluster_id: str, decoded: Decoded, partition: int, offset: int, timestamp: int) -> dict[str, Any]:
    """Return the delivery report of a stored record; `timestamp` is in ms since the epoch."""
    record = decoded.record
    return {
        "error_code": OK,
        "cluster_id": cluster_id,
        "topic_name": record.topic,
        "partition_id": partition,
        "offset": offset,
        "timestamp": (EPOCH + timedelta(milliseconds=timestamp)).isoformat().replace("+00:00", "Z"),
        "key": _size_of_data(decoded.key_type, record.key),
        "value": _size_of_data(decoded.value_type, record.value),
    }


def _decode_v3_record(item: V3Record, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    timestamp = None
    if item.timestamp is not None:
        timestamp = read_time("timestamp", item.timestamp, latest_ms)
    key = _decode_v3_data(item.key, "key")
    value = _decode_v3_data(item.value, "value")
    record = ProducerRecord(topic, value, key, _decode_headers(item.headers), item.partition_id, timestamp)
    key_type, value_type = (None if data is None else data.type for data in (item.key, item.value))
    return Decoded(record, key_type, value_type)


def _decode_headers(headers: Sequence[V3Header]) -> Headers:
    return tuple((h.name, None if h.value is None else _decode_base64(h.value, "headers")) for h in headers)


def _decode_v3_data(item: V3Data | None, name: str) -> bytes | None:
    """Return the bytes of a key or a value; None for null."""
    if item is None:
        return None
    if item.type == "JSON":
        return _raw_json(item.data, name)
    if item.type == "BINARY":
        return _raw_base64(item.data, name)
    text = _decode_json(bytes(item.data), str | None)
    return None if text is None else text.encode()


def _raw_json(raw: msgspec.Raw, name: str) -> bytes | None:
    data = bytes(raw)
    return None if data == b"null" else data


def _raw_base64(raw: msgspec.Raw, name: str) -> bytes | None:
    text = _decode_json(bytes(raw), str | None)
    return None if text is None else _decode_base64(text, name)


def _decode_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EventRejected(INVALID, f"{name} is not base64") from None


def _decode_json(body: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=type_)
    except (ValueError, RecursionError) as e:
        raise EventRejected(INVALID, str(e) or type(e).__name__) from None


def _size_of_data(data_type: DataType | None, data: bytes | None) -> dict[str, Any] | None:
    """Return the type and the size of a key or a value, for a delivery report."""
    return None if data_type is None else {"type": data_type, "size": 0 if data is None else len(data)}
