"""The events of a request's body in any format, as batches of parsed events in order.

| Content-Type | events |
|---|---|
| application/x-ndjson (ndjson, jsonl) | one a line, parsed as it arrives: a body of any length |
| application/json | one object, or the elements of an array; buffered |
| application/cloudevents+json | one CloudEvent; buffered |
| application/cloudevents-batch+json | an array of CloudEvents; buffered |
| any but NDJSON and application/cloudevents…, with ce-specversion | one CloudEvent with the body as data; buffered |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal, Protocol

import msgspec
from fastapi import Request

from penstock.api.http.body import BodyReader, read_body, too_many_events
from penstock.api.http.json_response import JSON_TYPE
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import BAD_REQUEST, UNSUPPORTED_MEDIA_TYPE
from penstock.api.ingest import cloudevents
from penstock.api.ingest.cloudevents import BATCH_TYPE, STRUCTURED_TYPE, CloudEventParser
from penstock.api.ingest.event import (
    JSON_SPACE,
    EventParser,
    EventRejected,
    Parsed,
    TopicReader,
    explain_malformed,
    number_or_text,
)
from penstock.api.ingest.ndjson import LineSplitter
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.json_decoding import InvalidJson, JsonTypeMismatch, decode_json

NDJSON_TYPES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})
LINES_MAX = 4_000
"""The most lines that are parsed at once. Between such batches other requests proceed, and errors are counted."""
ELEMENTS_MAX = 1_000
"""The most elements of an array that are parsed at once, for the same reasons."""

_OBJECT = re.compile(rb"[ \t\r\n]*\{")

Unit = Literal["line", "index"]
ParseBatch = Callable[[Sequence[bytes | None], int, int], Parsed]
"""(values, position of the first, now_ms) -> parsed events. None is a value over `max_line_bytes`."""
Batch = tuple[int, list[bytes | None]]
"""The position of the first value, and the values."""


class RequestEvents(Protocol):
    """The events of one request."""

    unit: Unit
    position: int
    """The position of the first event that `parse_batch` has not returned."""

    async def wait(self) -> bool:
        """Wait until `parse_batch` has a batch. Returns False at the end.

        Raises BodyStalled, CorruptBody or ServiceShuttingDown if reading ended early. The response then has the
        outcomes of the events before. Raises ClientDisconnected if nobody waits for a response any more.
        """
        ...

    def parse_batch(self) -> Parsed:
        """Return the next batch, parsed."""
        ...


class NdjsonLines:
    """The events of an NDJSON body, parsed as they arrive."""

    unit: Unit = "line"

    def __init__(self, body: BodyReader, parser: EventParser, max_line_bytes: int, clock: Clock) -> None:
        self._body = body
        self._parser = parser
        self._clock = clock
        self._splitter = LineSplitter(max_line_bytes)
        self._lines: list[bytes | None] = []
        """Lines that are not parsed yet."""
        self._has_ended = False
        self.position = 1

    async def wait(self) -> bool:
        if self._lines:
            await asyncio.sleep(0)
        elif not self._has_ended:
            chunk = await self._body.next()
            if chunk is None:
                self._has_ended = True
                self._lines = self._splitter.close()
            else:
                self._lines = self._splitter.feed(chunk)
                self._body.chunk_split(ended=len(self._lines), unfinished=self._splitter.unfinished)
        return bool(self._lines) or not self._has_ended

    def parse_batch(self) -> Parsed:
        lines = self._lines[:LINES_MAX]
        self._lines = self._lines[LINES_MAX:]
        parsed = self._parser.parse(lines, self.position, self._clock.now_ms())
        self.position += len(lines)
        return parsed


class BufferedBody:
    """The events of a body that is read to its end before its first event is parsed."""

    unit: Unit = "index"

    def __init__(
        self, split: Callable[[bytes], Iterator[Batch]], parse: ParseBatch, content: bytes, clock: Clock
    ) -> None:
        """Split the content into events.

        Raises Problem: 400 if the content is not the expected JSON object or array, 413 for too many events. A single
        CloudEvent is checked later.
        """
        self._parse = parse
        self._clock = clock
        self._batch: Batch | None = None
        self.position = 0
        try:
            self._batches = split(content)
        except EventRejected as e:
            coordinates = "" if e.column is None else f" at line {e.line}, column {e.column}"
            extra = {} if e.column is None else {"line": e.line, "column": e.column}
            kind = ErrorKind(BAD_REQUEST, e.error_code, "Not a JSON object or array")
            raise Problem(kind, f"{e}{coordinates}", extra) from None

    async def wait(self) -> bool:
        if self._batch is not None:
            await asyncio.sleep(0)
        self._batch = next(self._batches, None)
        return self._batch is not None

    def parse_batch(self) -> Parsed:
        assert self._batch is not None, "wait() comes first"
        first, values = self._batch
        self.position = first + len(values)
        return self._parse(values, first, self._clock.now_ms())


async def open_events(
    request: Request,
    media_type: str,
    body: BodyReader,
    topic: str,
    reader: TopicReader,
    settings: IngestSettings,
    clock: Clock,
) -> RequestEvents:
    """Return the events of a request. `media_type` is the result of `check_media_type`.

    Raises Problem (400) for invalid headers. For a buffered body, raises also what `read_body` and `BufferedBody`
    raise.
    """
    key, time = _key_and_time_of_headers(request, topic, reader, settings, clock)
    parser = EventParser(topic, settings, reader, key=key, time=time)
    if media_type in NDJSON_TYPES:
        return NdjsonLines(body, parser, settings.max_line_bytes, clock)
    own = settings.for_topic(topic)
    reads_data = bool(own.key or own.time or own.json_schema)
    events = CloudEventParser(parser, own.cloudevents, reads_data=reads_data)
    max_bytes = settings.max_line_bytes

    def single_event(content: bytes) -> Iterator[Batch]:
        return iter([(0, [content if len(content) <= max_bytes else None])])

    def json_elements(content: bytes) -> Iterator[Batch]:
        if media_type == JSON_TYPE and (value := json_object_body(content)) is not None:
            return single_event(value)
        return array_elements(content, max_bytes, settings.max_body_events)

    def parse_plain_events(values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
        return parser.parse(values, first, now_ms)

    split = single_event
    parse: ParseBatch = events.structured
    if cloudevents.is_binary_cloudevent(media_type, request.headers):
        try:
            head = cloudevents.cloudevent_from_headers(request.headers.items())
        except EventRejected as e:
            raise Problem(ErrorKind(BAD_REQUEST, e.error_code, "Not a CloudEvent"), str(e)) from None

        def parse_binary_cloudevent(values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
            return (
                parse_plain_events(values, first, now_ms)
                if values[0] is None
                else events.binary(head, values[0], now_ms)
            )

        parse = parse_binary_cloudevent
    elif media_type == BATCH_TYPE:
        split = json_elements
    elif media_type == JSON_TYPE:
        split = json_elements
        parse = parse_plain_events
    return BufferedBody(split, parse, await read_body(body, settings.max_body_bytes), clock)


def check_media_type(request: Request) -> str:
    """Return the Content-Type without parameters.

    Raises Problem (415) for a type that ingest does not read, except for a CloudEvent in binary mode.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    known = NDJSON_TYPES | {JSON_TYPE, STRUCTURED_TYPE, BATCH_TYPE}
    if media_type in known or cloudevents.is_binary_cloudevent(media_type, request.headers):
        return media_type
    raise Problem(
        ErrorKind(UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE", "Unsupported body"),
        "Content-Type must be application/x-ndjson, application/json or a CloudEvent's (application/cloudevents+json,"
        f" application/cloudevents-batch+json, or any other with ce-specversion), got {media_type[:60]!r}",
    )


def _key_and_time_of_headers(
    request: Request, topic: str, reader: TopicReader, settings: IngestSettings, clock: Clock
) -> tuple[bytes | None, int | None]:
    """Return the default key and time, in ms since the epoch, that the headers of a request set for its events."""
    own = settings.for_topic(topic)
    key = request.headers.get(own.key_header) if own.key_header else None
    text = request.headers.get(own.time_header) if own.time_header else None
    time: int | None = None
    if text is not None:
        try:
            latest_ms = clock.now_ms() + settings.max_future_ms
            time = reader.time(f"the header {own.time_header}", number_or_text(text), latest_ms)
        except EventRejected as e:
            raise Problem(ErrorKind(BAD_REQUEST, e.error_code, "Wrong event time"), str(e)) from None
    # A header's value is bytes; Starlette decodes each to one character.
    return None if key is None else key.encode("latin-1"), time


def array_elements(body: bytes, max_element_bytes: int, max_elements: int) -> Iterator[Batch]:
    """Iterate over the events of a JSON array: (0-based index of the first event, up to ELEMENTS_MAX events).

    An event is bytes, or None if it has more than `max_element_bytes`. The call itself raises EventRejected if `body`
    is no valid JSON array, and Problem (413) if it has more than `max_elements` events. It does not check that the
    events are UTF-8.
    """
    try:
        elements = decode_json(body, list[msgspec.Raw])
    except JsonTypeMismatch:
        message = "the body must be a JSON object, which is one event, or an array of events"
        raise EventRejected("NOT_AN_OBJECT_OR_ARRAY", message) from None
    except InvalidJson as e:
        raise explain_malformed(body, e) from None
    if len(elements) > max_elements:
        raise too_many_events(max_elements)
    return _batches_of_elements(iter(elements), max_element_bytes)


def json_object_body(body: bytes) -> bytes | None:
    """Return the body of a request that is a JSON object, without surrounding space.

    Returns None if the first character after spaces is not `{`. If it is, raises EventRejected for a body that is not
    JSON.

    >>> json_object_body(b' {"a": 1}\\n'), json_object_body(b"[1]")
    (b'{"a": 1}', None)
    """
    if _OBJECT.match(body) is None:
        return None
    try:
        decode_json(body)
    except InvalidJson as e:
        raise explain_malformed(body, e) from None
    return body.strip(JSON_SPACE)


def _batches_of_elements(elements: Iterator[msgspec.Raw], max_element_bytes: int) -> Iterator[Batch]:
    first = 0
    while values := [bytes(element) for element in islice(elements, ELEMENTS_MAX)]:
        yield first, [value if len(value) <= max_element_bytes else None for value in values]
        first += len(values)
