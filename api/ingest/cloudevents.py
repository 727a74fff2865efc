"""CloudEvents 1.0 over HTTP to Kafka records, by the HTTP and Kafka bindings of CloudEvents.

Sans-IO. An event arrives in one of three content modes: structured (a JSON object with attributes and data), batched
(an array of such objects), or binary (attributes as `ce-` headers, the body as data). How it is stored depends only on
the topic:

1. `cloudevents = "data"`: the Kafka binding's binary form. The record's value is the data, and the attributes are `ce_`
   headers; `datacontenttype` is the header `content-type`. An event without data is rejected: a record without a value
   would delete its key from a compacted topic.
2. `cloudevents = "envelope"`: the structured form. The value is the JSON object, unchanged if the event arrived
   as one.

The topic's JSON pointers and JSON Schema apply to the event's data, in every content mode. Without pointers, the
attribute `partitionkey` is the key and the attribute `time` is the event time.

>>> event = cloudevent_from_json(b'{"specversion":"1.0","id":"7","source":"/s","type":"t","count":3,"data":{"a": 1}}')
>>> event.data, event.kafka_headers[0], event.kafka_headers[1]
(b'{"a": 1}', ('content-type', b'application/json'), ('ce_count', b'3'))
"""

from __future__ import annotations

import base64
import binascii
import encodings
import encodings.aliases
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from penstock.api.http.json_response import JSON_TYPE
from penstock.api.http.status_codes import BAD_REQUEST
from penstock.api.ingest.event import (
    JSON_SPACE,
    Attributes,
    EventParser,
    EventRejected,
    Parsed,
    RecordError,
    explain_malformed,
)
from penstock.api.settings import CloudEventsForm
from penstock.shared.common.json_decoding import NOT_UTF8, InvalidJson, JsonTypeMismatch, decode_json
from penstock.shared.common.records import Headers, ProducerRecord

MEDIA_TYPE_PREFIX = "application/cloudevents"
"""The start of the media type of structured events and batches, in every event format."""
STRUCTURED_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
HTTP_PREFIX = "ce-"
KAFKA_PREFIX = "ce_"
SPEC_VERSION = "ce-specversion"
REQUIRED = ("specversion", "id", "source", "type")
TEXTS = frozenset((*REQUIRED, "datacontenttype", "dataschema", "subject", "time", "partitionkey"))
"""Attributes that must be strings."""
INVALID_CLOUDEVENT = "INVALID_CLOUDEVENT"
STRUCTURED_HEADERS: Headers = (("content-type", b"application/cloudevents+json; charset=UTF-8"),)
ATTRIBUTES_MAX = 100
"""The most attributes of one event."""

SHOWN_MAX = 60
"""The most characters of a value in an error message."""

_CHARSET = re.compile(r';\s*charset="?([\w.:-]+)', re.IGNORECASE)


class CloudEvent(NamedTuple):
    """One event of any content mode: its attributes as text, without `datacontenttype`, and its data."""

    attributes: Mapping[str, str]
    content_type: str
    """`datacontenttype`. Without it: JSON for JSON data and in binary mode, else empty."""
    data: bytes | None
    is_json: bool
    """Whether the data is declared to be JSON."""

    @property
    def kafka_headers(self) -> Headers:
        """The headers of the Kafka binding's binary form."""
        own = tuple((KAFKA_PREFIX + name, value.encode()) for name, value in sorted(self.attributes.items()))
        return (("content-type", self.content_type.encode()), *own) if self.content_type else own

    @property
    def key_and_time(self) -> Attributes:
        """The key and the event time in the attributes."""
        key = self.attributes.get("partitionkey")
        return Attributes(None if key is None else key.encode(), self.attributes.get("time"))

    def envelope(self) -> bytes:
        """Return the event as a JSON object; data that is not JSON is in base64."""
        members: dict[str, Any] = dict(self.attributes)
        if self.content_type:
            members["datacontenttype"] = self.content_type
        if self.data is not None and self.is_json:
            members["data"] = msgspec.Raw(self.data)
        elif self.data is not None:
            members["data_base64"] = base64.b64encode(self.data).decode()
        return msgspec.json.encode(members)


def is_binary_cloudevent(media_type: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request is an event in binary mode. `media_type` is its Content-Type without parameters.

    A structured event or a batch may have `ce-specversion` too (HTTP binding, section 3.2.3).
    """
    return SPEC_VERSION in headers and not media_type.startswith(MEDIA_TYPE_PREFIX)


def cloudevent_from_headers(headers: Iterable[tuple[str, str]]) -> CloudEvent:
    """Return an event in binary mode, without its data.

    Raises EventRejected if the headers are not those of a CloudEvent.
    """
    attributes: dict[str, str] = {}
    content_type = ""
    for name, value in headers:
        if name == "content-type":
            content_type = value.encode("latin-1").decode(errors="replace")
        elif name.startswith(HTTP_PREFIX):
            attributes[name.removeprefix(HTTP_PREFIX)] = _decode_header(name, value)
    if reserved := attributes.keys() & {"data", "data_base64", "datacontenttype"}:
        message = f"the header {HTTP_PREFIX}{min(reserved)} is not an attribute: the body is the data, and the header"
        raise EventRejected(INVALID_CLOUDEVENT, f"{message} Content-Type is its datacontenttype")
    content_type = content_type or JSON_TYPE
    return CloudEvent(_check_cloudevent_attributes(attributes), content_type, None, _is_json_media_type(content_type))


def cloudevent_from_json(value: bytes) -> CloudEvent:
    """Return an event in structured mode. Raises EventRejected if the value is not a CloudEvent."""
    try:
        # msgspec does not check that a Raw value is UTF-8.
        value.decode()
        members = decode_json(value, dict[str, msgspec.Raw])
    except UnicodeDecodeError:
        raise explain_malformed(value, InvalidJson(NOT_UTF8)) from None
    except JsonTypeMismatch:
        raise EventRejected(INVALID_CLOUDEVENT, "a CloudEvent is a JSON object") from None
    except InvalidJson as e:
        raise explain_malformed(value, e) from None
    data = members.pop("data", None)
    data_base64 = members.pop("data_base64", None)
    if len(members) > ATTRIBUTES_MAX:
        raise EventRejected(INVALID_CLOUDEVENT, f"more than {ATTRIBUTES_MAX} attributes")
    try:
        decoded = {name: decode_json(raw) for name, raw in members.items()}
        encoded = None if data_base64 is None else decode_json(data_base64)
    except InvalidJson as e:
        raise explain_malformed(value, e) from None
    texts = {name: _attribute_as_text(name, attribute) for name, attribute in decoded.items() if attribute is not None}
    content_type = texts.pop("datacontenttype", "")
    attributes = _check_cloudevent_attributes(texts)
    if encoded is not None:
        if data is not None:
            raise EventRejected(INVALID_CLOUDEVENT, "an event has data or data_base64, not both")
        return CloudEvent(attributes, content_type, _decode_base64_data(encoded), _is_json_media_type(content_type))
    if data is None:
        return CloudEvent(attributes, content_type, None, is_json=False)
    if content_type and not _is_json_media_type(content_type):
        return CloudEvent(
            attributes, content_type, _cloudevent_data_from_text(bytes(data), content_type), is_json=False
        )
    # An event without datacontenttype has JSON data, which the other forms must declare (JSON format, section 3.1.2).
    return CloudEvent(attributes, content_type or JSON_TYPE, bytes(data), is_json=True)


class CloudEventParser:
    """Converts events of one request to records of one topic."""

    def __init__(self, parser: EventParser, form: CloudEventsForm, *, reads_data: bool) -> None:
        """`reads_data` is whether the topic's pointers or JSON Schema read the data.

        If not, data that is not declared to be JSON may be any bytes.
        """
        self._parser = parser
        self._form = form
        self._reads_data = reads_data
        self._opaque = copy(parser)
        self._opaque.reader = parser.reader._replace(event=_read_opaque_cloudevent_data)

    def binary(self, head: CloudEvent, body: bytes, now_ms: int) -> Parsed:
        """Parse the event of a request in binary mode. An empty body is no data."""
        return self._parse_cloudevent(head._replace(data=body or None), 0, now_ms, None)

    def structured(self, values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
        """Parse events as JSON objects, at the positions `first`, `first + 1`, ..."""
        batch = Parsed()
        for position, value in enumerate(values, first):
            if value is None:
                parsed = self._parser.parse([None], position, now_ms)
            else:
                try:
                    parsed = self._parse_cloudevent(cloudevent_from_json(value), position, now_ms, value)
                except EventRejected as e:
                    parsed = Parsed()
                    parsed.errors.append(RecordError(position, BAD_REQUEST, e.error_code, str(e), e.column))
            batch.errors += parsed.errors
            batch.positions += parsed.positions
            batch.records += parsed.records
        return batch

    def _parse_cloudevent(self, event: CloudEvent, position: int, now_ms: int, envelope: bytes | None) -> Parsed:
        """Parse one event; `envelope` is the JSON object as which it arrived, None in binary mode."""
        data = event.data
        stores_envelope = self._form == "envelope"
        if data is None and not stores_envelope:
            message = (
                'the event has no data, and the topic stores an event as its data; cloudevents = "envelope" in the'
                " topic's settings stores events with their envelope"
            )
            return _rejected_cloudevent(position, message)
        if data is not None and self._reads_data and event.content_type and not event.is_json:
            message = f"the topic's settings need data in JSON, got {event.content_type[:SHOWN_MAX]!r}"
            return _rejected_cloudevent(position, message)
        # An event that arrived as an envelope is valid JSON and is stored unchanged.
        is_parsed = self._reads_data or (event.is_json and not (stores_envelope and envelope is not None))
        if data is not None and is_parsed and not data.strip(JSON_SPACE):
            return _rejected_cloudevent(position, "the data must be JSON, and is empty")
        parser = self._parser if is_parsed else self._opaque
        headers = STRUCTURED_HEADERS if stores_envelope else event.kafka_headers
        # Opaque data may be blank, and a parser skips blank values. So the record gets its value below.
        value = data if is_parsed and data is not None else b"null"
        parsed = parser.parse([value], position, now_ms, headers, event.key_and_time)
        if stores_envelope:
            data = event.envelope() if envelope is None and parsed.records else envelope
        parsed.records = [_replace_record_value(record, data) for record in parsed.records]
        return parsed


def _rejected_cloudevent(position: int, message: str) -> Parsed:
    parsed = Parsed()
    parsed.errors.append(RecordError(position, BAD_REQUEST, INVALID_CLOUDEVENT, message))
    return parsed


def _read_opaque_cloudevent_data(value: bytes, latest_ms: int, /, **_: bool) -> tuple[None, None]:
    """A `ReadEvent` for a CloudEvent's opaque data. It accepts any value, and reads no key and no time from it."""
    return None, None


def _replace_record_value(record: ProducerRecord, value: bytes | None) -> ProducerRecord:
    return ProducerRecord(record.topic, value, record.key, record.headers, None, record.timestamp)


def _decode_header(name: str, value: str) -> str:
    """Return a header's value, unquoted and percent-decoded. Each character of `value` stands for one received byte.

    Raises EventRejected if the result is not UTF-8.
    """
    # Senders of older versions quote a value with spaces (HTTP binding, section 3.1.3.2).
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise EventRejected(INVALID_CLOUDEVENT, f"the header {name} is not UTF-8") from None


def _attribute_as_text(name: str, value: Any) -> str:
    """Return an attribute's canonical text. In JSON, CloudEvents has strings, integers and booleans."""
    if type(value) is str:
        return value
    if name not in TEXTS and type(value) in (bool, int):
        return str(value).lower()
    expected = "a text" if name in TEXTS else "a text, an integer or a boolean"
    raise EventRejected(INVALID_CLOUDEVENT, f"the attribute {name[:SHOWN_MAX]} must be {expected}")


def _check_cloudevent_attributes(attributes: dict[str, str]) -> dict[str, str]:
    """Return the attributes.

    Raises EventRejected if a required one is missing or empty, `specversion` is not 1.0, or there are too many.
    """
    if len(attributes) > ATTRIBUTES_MAX:
        raise EventRejected(INVALID_CLOUDEVENT, f"more than {ATTRIBUTES_MAX} attributes")
    for name in REQUIRED:
        if not attributes.get(name):
            raise EventRejected(INVALID_CLOUDEVENT, f"the attribute {name} is required, as a text that is not empty")
    if attributes["specversion"] != "1.0":
        raise EventRejected(INVALID_CLOUDEVENT, f"specversion {attributes['specversion'][:20]!r} is not 1.0")
    return attributes


def _is_json_media_type(content_type: str) -> bool:
    """Return whether a media type declares JSON.

    >>> [_is_json_media_type(one) for one in ("application/json; charset=utf-8", "application/vnd.a+JSON", "")]
    [True, True, False]
    """
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type.endswith(("/json", "+json"))


def _decode_base64_data(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise EventRejected(INVALID_CLOUDEVENT, "data_base64 must be a text in base64") from None


@cache
def _encodings() -> frozenset[str]:
    """Return the normalized names of Python's encodings, which takes some milliseconds once.

    Others are not looked up: Python would keep each unknown name forever.
    """
    modules = pkgutil.iter_modules(encodings.__path__)
    return frozenset(encodings.aliases.aliases) | {module.name for module in modules}


def _cloudevent_data_from_text(data: bytes, content_type: str) -> bytes:
    """Return the bytes of data that is not JSON and arrived as a JSON string.

    They are in the media type's charset, or in UTF-8 if it names none. Raises EventRejected if that is impossible.
    """
    charset = _CHARSET.search(content_type)
    encoding = encodings.normalize_encoding(charset[1]).lower() if charset else "utf_8"
    try:
        if charset and encoding not in _encodings():
            raise LookupError(encoding)
        return decode_json(data, str).encode(encoding)
    except (InvalidJson, LookupError, UnicodeError):
        message = f"data must be a text that {content_type[:SHOWN_MAX]!r} can hold; other data goes into data_base64"
        raise EventRejected(INVALID_CLOUDEVENT, message) from None
