"""CloudEvents 1.0 over HTTP to Kafka records, by the HTTP and Kafka bindings of CloudEvents.

Sans-IO. A structured event (and each of a batch) is stored as it came, under the header `content-type`; a binary one
is stored as its data, with its attributes as `ce_` headers. The topic's pointers and JSON Schema speak of the data.
Where the topic names no key, `partitionkey` is it, and `time` is the event time.

>>> event = binary_event([("ce-specversion", "1.0"), ("ce-id", "7"), ("ce-source", "/s"), ("ce-type", "t"),
...                       ("ce-subject", "a%20b"), ("content-type", "application/json")])
>>> event.headers[-1], event.headers[1], event.attributes
(('ce_type', b't'), ('ce_id', b'7'), Attributes(key=None, time=None))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from api.event import EventRefused, RecordError, explain_malformed
from api.ndjson import Attributes, EventParser, Parsed
from shared.common.records import Headers, ProducerRecord

STRUCTURED_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
HTTP_PREFIX, KAFKA_PREFIX = "ce-", "ce_"
SPEC_VERSION = "ce-specversion"
REQUIRED = ("specversion", "id", "source", "type")
INVALID_CLOUDEVENT = "INVALID_CLOUDEVENT"
STRUCTURED_HEADERS: Headers = (("content-type", b"application/cloudevents+json; charset=UTF-8"),)
ATTRIBUTES_MAX = 100
"""Headers of one binary event that are kept; more are refused."""


class BinaryEvent(NamedTuple):
    """The record's headers and what else the attributes say."""

    headers: Headers
    attributes: Attributes
    is_json: bool


def is_binary(headers: Mapping[str, str]) -> bool:
    """Whether a request carries an event in binary mode."""
    return SPEC_VERSION in headers


def binary_event(headers: Iterable[tuple[str, str]]) -> BinaryEvent:
    """The attributes of a binary event; EventRefused where one that is required is missing or wrong."""
    found: dict[str, str] = {}
    content_type = ""
    for name, value in headers:
        if name == "content-type":
            content_type = value
        elif name.startswith(HTTP_PREFIX):
            found[name.removeprefix(HTTP_PREFIX)] = _attribute(name, value)
    if len(found) > ATTRIBUTES_MAX:
        raise EventRefused(INVALID_CLOUDEVENT, f"more than {ATTRIBUTES_MAX} attributes")
    _check(found)
    own = tuple((KAFKA_PREFIX + name, value.encode()) for name, value in sorted(found.items()))
    kept: Headers = (("content-type", content_type.encode("latin-1")), *own) if content_type else own
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type in ("", "application/json") or media_type.endswith("+json")
    return BinaryEvent(kept, _beside(found), is_json)


class CloudEventParser:
    """Events of one request to records of one topic."""

    def __init__(self, parser: EventParser, *, reads_data: bool) -> None:
        """`reads_data` is false where the topic's settings ask nothing of the data: then it may be anything."""
        self._parser, self._reads_data = parser, reads_data
        self._opaque = EventParser(parser.topic, parser.settings, parser.reader._replace(event=_opaque))

    def binary(self, event: BinaryEvent, data: bytes, now_ms: int) -> Parsed:
        """The one event of a request in binary mode."""
        if event.is_json and (data or self._reads_data):
            return self._parser.parse([data], 0, now_ms, event.headers, event.attributes)
        if self._reads_data:
            parsed = Parsed()
            message = "the topic's settings need data in JSON"
            parsed.errors.append(RecordError(0, 400, INVALID_CLOUDEVENT, message))
            return parsed
        return self._opaque.parse([data], 0, now_ms, event.headers, event.attributes)

    def structured(self, values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
        """Events as JSON objects, at the positions `first`, `first + 1`, ..."""
        whole = Parsed()
        for position, value in enumerate(values, first):
            if value is None:
                whole.errors += self._parser.parse([None], position, now_ms).errors
                continue
            try:
                attributes, data = _structured(value)
            except EventRefused as e:
                whole.errors.append(RecordError(position, 400, e.error_code, str(e), e.column))
                continue
            parser = self._parser if self._reads_data else self._opaque
            parsed = parser.parse([data or b"null"], position, now_ms, STRUCTURED_HEADERS, attributes)
            whole.errors += parsed.errors
            whole.positions += parsed.positions
            whole.records += [_with_value(record, value) for record in parsed.records]
        return whole


def _attribute(name: str, value: str) -> str:
    """A header's value, percent-decoded; each character stands for one byte that came."""
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise EventRefused(INVALID_CLOUDEVENT, f"the header {name} is not UTF-8") from None


def _opaque(value: bytes, latest_ms: int) -> tuple[None, None]:
    return None, None


def _with_value(record: ProducerRecord, value: bytes) -> ProducerRecord:
    return ProducerRecord(record.topic, value, record.key, record.headers, None, record.timestamp)


def _structured(value: bytes) -> tuple[Attributes, bytes | None]:
    """The attributes and the bytes of the data."""
    try:
        event = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise EventRefused(INVALID_CLOUDEVENT, "a CloudEvent is a JSON object") from None
    except (ValueError, RecursionError) as e:
        raise explain_malformed(value, e) from None
    named = {name: raw for name, raw in event.items() if name not in ("data", "data_base64")}
    if len(named) > ATTRIBUTES_MAX:
        raise EventRefused(INVALID_CLOUDEVENT, f"more than {ATTRIBUTES_MAX} attributes")
    try:
        attributes = {name: msgspec.json.decode(bytes(raw)) for name, raw in named.items()}
    except (ValueError, RecursionError) as e:
        raise explain_malformed(value, e) from None
    _check(attributes)
    data = event.get("data")
    return _beside(attributes), None if data is None else bytes(data)


def _check(attributes: Mapping[str, Any]) -> None:
    for name in REQUIRED:
        value = attributes.get(name)
        if not isinstance(value, str) or not value:
            raise EventRefused(INVALID_CLOUDEVENT, f"the attribute {name} is required, as a text that is not empty")
    if attributes["specversion"] != "1.0":
        raise EventRefused(INVALID_CLOUDEVENT, f"specversion {attributes['specversion'][:20]!r} is not 1.0")
    for name in ("time", "partitionkey", "subject"):
        if name in attributes and not isinstance(attributes[name], str):
            raise EventRefused(INVALID_CLOUDEVENT, f"the attribute {name} must be a text")


def _beside(attributes: Mapping[str, Any]) -> Attributes:
    key = attributes.get("partitionkey")
    return Attributes(None if key is None else key.encode(), attributes.get("time"))
