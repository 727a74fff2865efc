"""Reads the records of a produce request of REST Proxy v3: a stream of JSON objects, or a batch of entries.

Sans-IO. `RecordStreamSplitter` splits the chunks of a stream into objects. It examines only braces and strings; the
decoding of an object validates it. Between objects there may be whitespace and commas.

As in REST Proxy, an unknown field is an error: a misspelled `value` would store a tombstone.

>>> from penstock.api.ingest.event import topic_reader
>>> from penstock.api.settings import IngestSettings, TopicSettings
>>> read_time = topic_reader(IngestSettings(), TopicSettings()).time
>>> body = b'{"key":{"type":"STRING","data":"ann"},"value":{"type":"JSON","data":{"a": 1}}}'
>>> record = v3_record(body, "t", read_time, 0)
>>> record.record.key, record.record.value, record.key_type
(b'ann', b'{"a": 1}', 'STRING')
>>> values = RecordStreamSplitter(max_bytes=20)
>>> values.feed(b'{"a":"}"}{"b"'), values.feed(b':{}} \\n {"c":1}'), values.close()
([b'{"a":"}"}'], [b'{"b":{}}', b'{"c":1}'], None)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.api.ingest.event import EventRejected, ReadTime
from penstock.api.rest_proxy.embedded_format import (
    INVALID,
    EmbeddedFormat,
    decode_base64,
    decode_embedded,
)
from penstock.api.rest_proxy.record_errors import MalformedRecord
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.records import Headers, ProducerRecord

T = TypeVar("T")


class V3Data(msgspec.Struct, forbid_unknown_fields=True):
    """A key or a value. As in REST Proxy, the fields for schemas must be null in formats without a schema.

    `data` is required, so that a value without it is not stored as a tombstone.
    """

    type: EmbeddedFormat
    data: msgspec.Raw
    subject: None = None
    subject_name_strategy: None = None
    schema_id: None = None
    schema_version: None = None
    schema: None = None


class V3Header(msgspec.Struct, forbid_unknown_fields=True):
    """A header; its value is base64."""

    name: str
    value: str | None = None


class V3Record(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v3 request, or one object of its stream."""

    partition_id: int | None = None
    headers: list[V3Header] | None = None
    key: V3Data | None = None
    value: V3Data | None = None
    timestamp: str | None = None


class V3Entry(V3Record, kw_only=True):
    """One of the `entries` of a batch."""

    id: str


class V3Batch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of records:batch."""

    entries: list[msgspec.Raw]


class Decoded(NamedTuple):
    """A record to send, and the types of its key and value for the delivery report."""

    record: ProducerRecord
    key_type: EmbeddedFormat | None = None
    value_type: EmbeddedFormat | None = None


def v3_record(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    """Return one v3 record. Raises EventRejected if it is invalid, MalformedRecord if its fields are."""
    return _decode_v3_record(_decode_object(body, V3Record), topic, read_time, latest_ms)


def v3_entries(body: bytes, entries_max: int) -> list[bytes]:
    """Return the entries of a v3 batch, each not yet decoded.

    Raises EventRejected if the body is not a batch of 1 to `entries_max` entries.
    """
    entries = _decode_object(body, V3Batch).entries
    if not 0 < len(entries) <= entries_max:
        raise EventRejected(INVALID, f"a batch has 1 to {entries_max} entries, got {len(entries)}")
    return [bytes(entry) for entry in entries]


def v3_entry(body: bytes, topic: str, read_time: ReadTime, latest_ms: int) -> tuple[str, Decoded]:
    """Return the id and the record of an entry of a v3 batch. Raises as `v3_record` does."""
    entry = _decode_object(body, V3Entry)
    return entry.id, _decode_v3_record(entry, topic, read_time, latest_ms)


def id_of_invalid_entry(body: bytes) -> str:
    """Return the `id` of an invalid entry of a v3 batch. Returns "" if no text can be decoded as its `id`."""
    try:
        value = decode_json(body, dict[str, Any]).get("id", "")
    except InvalidJson:
        return ""
    return value if isinstance(value, str) else ""


def _decode_object(body: bytes, kind: type[T]) -> T:
    try:
        return decode_json(body, kind)
    except InvalidJson as e:
        raise MalformedRecord(INVALID, str(e)) from None


def _decode_v3_record(item: V3Record, topic: str, read_time: ReadTime, latest_ms: int) -> Decoded:
    timestamp = None
    if item.timestamp is not None:
        timestamp = read_time("timestamp", item.timestamp, latest_ms)
    key = _decode_key_or_value(item.key, "key")
    value = _decode_key_or_value(item.value, "value")
    record = ProducerRecord(topic, value, key, _decode_headers(item.headers or ()), item.partition_id, timestamp)
    key_type, value_type = (None if data is None else data.type for data in (item.key, item.value))
    return Decoded(record, key_type, value_type)


def _decode_headers(headers: Sequence[V3Header]) -> Headers:
    return tuple((h.name, None if h.value is None else decode_base64(h.value, "headers")) for h in headers)


def _decode_key_or_value(data: V3Data | None, name: str) -> bytes | None:
    """Return the bytes of a key or a value of a v3 record; None for null."""
    return None if data is None else decode_embedded(data.data, data.type, name)


_MARK = re.compile(rb'["{}\\]')
_BETWEEN = re.compile(rb"[\s,]*")


class NotAnObject(ValueError):
    """The body has no object, has data that is not an object, or an object in it has no end or is too long.

    Nothing after the error can be read.
    """


class RecordStreamSplitter:
    """Splits the chunks of a stream of records into JSON objects. An object may have `max_bytes` at most.

    It sets `error` and stops at data between objects that is neither whitespace nor a comma, and at an object that is
    too long. The objects before that are returned, however the stream is divided into chunks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.error: NotAnObject | None = None
        """Why the splitter has stopped."""
        self._rest = bytearray()
        self._scanned = 0
        self._depth = 0
        self._in_string = False

    def __repr__(self) -> str:
        return f"RecordStreamSplitter({len(self._rest)} bytes, depth={self._depth})"

    @property
    def unfinished(self) -> bool:
        """Whether a record's object has begun and is incomplete."""
        return self._depth > 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the objects of records that this chunk of the stream completes; none once there is an `error`."""
        objects: list[bytes] = []
        if self.error is None:
            try:
                self._split(chunk, objects)
            except NotAnObject as e:
                self.error = e
        return objects

    def _split(self, chunk: bytes, objects: list[bytes]) -> None:
        """Append the objects that this chunk completes.

        Raises NotAnObject at the first data that is not an object, or at an object longer than `max_bytes`.
        """
        self._rest += chunk
        start = 0
        while True:
            if not self._depth:
                between = _BETWEEN.match(self._rest, start)
                assert between is not None
                start = between.end()
                self._scanned = start
                if start == len(self._rest):
                    break
                if self._rest[start] != ord("{"):
                    raise NotAnObject(f"expected an object, got {bytes(self._rest[start : start + 20])!r}")
            end = self._scan_object()
            if end is None:
                break
            self._check_size(end - start)
            objects.append(bytes(self._rest[start:end]))
            start = end
        del self._rest[:start]
        self._scanned -= start
        self._check_size(len(self._rest))

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise NotAnObject(f"an object longer than {self._max_bytes} bytes")

    def close(self) -> None:
        """End the stream of records. Raises `self.error` if set, or NotAnObject if the last object is incomplete."""
        if self.error is not None:
            raise self.error
        if self._depth:
            raise NotAnObject("the body ends within an object")

    def _scan_object(self) -> int | None:
        """Return the end of the current record's object in `_rest`; None if it is incomplete."""
        rest = self._rest
        at = self._scanned
        while (mark := _MARK.search(rest, at)) is not None:
            at = mark.end()
            character = rest[mark.start()]
            if character == ord("\\"):
                if at == len(rest):
                    # The escaped character has not arrived yet.
                    self._scanned = mark.start()
                    return None
                at += 1
            elif character == ord('"'):
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if character == ord("{") else -1
                if not self._depth:
                    self._scanned = at
                    return at
        self._scanned = len(rest)
        return None
