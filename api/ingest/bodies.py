"""The events of a request's body in any format, as batches of parsed events in order (an edge).

| Content-Type | events |
|---|---|
| application/x-ndjson (ndjson, jsonl) | one a line, read as it arrives: a body of any length |
| application/json | one object, or the elements of an array, read whole |
| application/cloudevents+json | one CloudEvent |
| application/cloudevents-batch+json | an array of CloudEvents |
| any, with ce-specversion | one CloudEvent in binary mode: the body is its data |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from fastapi import Request

from penstock.api.http.body import BodyReader, BodyStalled, ServiceLeaving, too_long
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.ingest import cloudevents
from penstock.api.ingest.cloudevents import BATCH_TYPE, STRUCTURED_TYPE, CloudEventParser
from penstock.api.ingest.event import EventRejected, TopicReader
from penstock.api.ingest.ndjson import EventParser, NdjsonReader, Parsed, TooManyEvents, array_elements, json_object
from penstock.api.ingest.turns import Turn
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import IllegalState

NDJSON_TYPES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})
JSON_TYPE = "application/json"

Unit = Literal["line", "index"]
ParseBatch = Callable[[Sequence[bytes | None], int, int], Parsed]


class Events(Protocol):
    """The events of one request."""

    unit: Unit
    position: int
    """The position of the first event that `take` has not returned."""

    async def wait(self) -> bool:
        """Wait until `take` has a batch. Returns False at the end.

        Raises Problem if the body is invalid as a whole. Raises BodyStalled, CorruptBody or ServiceLeaving if reading
        ended early but earlier events count.
        """
        ...

    def take(self) -> Parsed:
        """Return the next batch, parsed."""
        ...


class Lines:
    """NDJSON, read as it arrives."""

    unit: Unit = "line"

    def __init__(self, body: BodyReader, parser: EventParser, max_line_bytes: int, clock: Clock) -> None:
        self._body = body
        self._clock = clock
        self._reader: NdjsonReader | None = NdjsonReader(parser, max_line_bytes)
        self._chunk: bytes | None = None
        self.position = 1

    async def wait(self) -> bool:
        reader = self._reader
        if reader is None:
            return False
        if reader.behind:
            await asyncio.sleep(0)
            return True
        self._chunk = await self._body.next()
        if self._chunk is None and not reader.unfinished:
            self._reader = None
        return self._reader is not None

    def take(self) -> Parsed:
        reader, now_ms = self._reader, self._clock.now_ms()
        assert reader is not None, "wait() comes first"
        if reader.behind:
            parsed = reader.more(now_ms)
        elif self._chunk is None:
            self._reader, parsed = None, reader.close(now_ms)
        else:
            parsed = reader.feed(self._chunk, now_ms)
            self._body.seen(ended=reader.ended, unfinished=reader.unfinished)
        self.position = reader.next_line
        return parsed


class Whole:
    """A body that is read to its end before its first event is parsed."""

    unit: Unit = "index"

    def __init__(self, read: Callable[[bytes], Iterator[tuple[int, list[bytes | None]]]], parse: ParseBatch) -> None:
        self._read = read
        self._parse = parse
        self._batches: Iterator[tuple[int, list[bytes | None]]] | None = None
        self._batch: tuple[int, list[bytes | None]] | None = None
        self.position = 0

    def start(self, body: bytes, clock: Clock) -> Whole:
        """Set the body. Raises Problem (400) if it does not match its type."""
        self._clock = clock
        try:
            self._batches = self._read(body)
        except EventRejected as e:
            place = "" if e.column is None else f" at line {e.line}, column {e.column}"
            extra = {} if e.column is None else {"line": e.line, "column": e.column}
            kind = ErrorKind(400, e.error_code, "Not a JSON object or array")
            if isinstance(e, TooManyEvents):
                kind = ErrorKind(413, e.error_code, "Too many events")
            raise Problem(kind, f"{e}{place}", extra) from None
        return self

    async def wait(self) -> bool:
        assert self._batches is not None, "start() comes first"
        if self._batch is not None:
            await asyncio.sleep(0)
        self._batch = next(self._batches, None)
        return self._batch is not None

    def take(self) -> Parsed:
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
) -> Events:
    """Return the events of a request of a type from `check_media_type`. Raises Problem (400, 408, 413, 503)."""
    key, time = _from_headers(request, topic, reader, settings, clock)
    parser = EventParser(topic, settings, reader, key=key, time=time)
    if media_type in NDJSON_TYPES:
        return Lines(body, parser, settings.max_line_bytes, clock)
    own = settings.for_topic(topic)
    reads_data = bool(own.key or own.time or own.json_schema)
    events = CloudEventParser(parser, own.cloudevents, reads_data=reads_data)
    most = settings.max_line_bytes

    def one(whole: bytes) -> Iterator[tuple[int, list[bytes | None]]]:
        return iter([(0, [whole if len(whole) <= most else None])])

    def elements(whole: bytes) -> Iterator[tuple[int, list[bytes | None]]]:
        if media_type == JSON_TYPE and (value := json_object(whole)) is not None:
            return one(value)
        return array_elements(whole, most, settings.max_body_events)

    def plain(values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
        return parser.parse(values, first, now_ms)

    if cloudevents.is_binary(request.headers):
        try:
            head = cloudevents.from_headers(request.headers.items())
        except EventRejected as e:
            raise Problem(ErrorKind(400, e.error_code, "Not a CloudEvent"), str(e)) from None

        def binary(values: Sequence[bytes | None], first: int, now_ms: int) -> Parsed:
            return plain(values, first, now_ms) if values[0] is None else events.binary(head, values[0], now_ms)

        form = Whole(one, binary)
    elif media_type == STRUCTURED_TYPE:
        form = Whole(one, events.structured)
    else:
        form = Whole(elements, events.structured if media_type == BATCH_TYPE else plain)
    return form.start(await whole_body(body, settings.max_body_bytes), clock)


async def whole_body(body: BodyReader, max_body_bytes: int) -> bytes:
    """Return the body, up to `max_body_bytes`.

    Raises Problem: 413 if it is longer, 408 if it stalls, 400 if it cannot be inflated, 503 if the service shuts down.
    """
    if body.declared_bytes > max_body_bytes:
        raise too_long(max_body_bytes)
    try:
        return await body.all(max_body_bytes)
    except (BodyStalled, CorruptBody) as e:
        raise Problem(ErrorKind(stop_status(e), stop_code(stop_status(e)), "Body incomplete"), str(e)) from None
    except ServiceLeaving as e:
        raise Problem.of(IllegalState(str(e))) from None


async def next_turn(body: BodyReader, events: int) -> Turn:
    """Like `BodyReader.turn`, before anything was stored. Raises Problem (503) if the service shuts down."""
    try:
        return await body.turn(events)
    except ServiceLeaving as e:
        raise Problem.of(IllegalState(str(e))) from None


def stop_status(error: Exception) -> int:
    """Return the answer's status if an error ended the reading of the body before its first whole event."""
    return 408 if isinstance(error, BodyStalled) else 400 if isinstance(error, CorruptBody) else 503


def stop_code(status: int) -> str:
    """Return the error code of such an answer.

    >>> stop_code(408), stop_code(400), stop_code(503)
    ('BODY_STALLED', 'CORRUPT_BODY', 'NOTHING_READ')
    """
    return {408: "BODY_STALLED", 400: "CORRUPT_BODY"}.get(status, "NOTHING_READ")


def check_media_type(request: Request) -> str:
    """Return the Content-Type without parameters. Raises Problem (415) for a type that ingest does not read."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    known = NDJSON_TYPES | {JSON_TYPE, STRUCTURED_TYPE, BATCH_TYPE}
    if media_type in known or cloudevents.is_binary(request.headers):
        return media_type
    raise Problem(
        ErrorKind(415, "UNSUPPORTED_MEDIA_TYPE", "Unsupported body"),
        "Content-Type must be application/x-ndjson, application/json or a CloudEvent's (application/cloudevents+json,"
        f" application/cloudevents-batch+json, or any with ce-specversion), got {media_type[:60]!r}",
    )


def _from_headers(
    request: Request, topic: str, reader: TopicReader, settings: IngestSettings, clock: Clock
) -> tuple[bytes | None, str | None]:
    """Return the key and the time that the request's headers set for all of its events."""
    own = settings.for_topic(topic)
    key = request.headers.get(own.key_header) if own.key_header else None
    time = request.headers.get(own.time_header) if own.time_header else None
    if time is not None:
        try:
            value = int(time) if time.isascii() and time.isdigit() else time
            reader.time(f"the header {own.time_header}", value, clock.now_ms() + settings.max_future_ms)
        except EventRejected as e:
            raise Problem(ErrorKind(400, e.error_code, "Wrong event time"), str(e)) from None
    # A header's value is bytes; Starlette decodes each to one character.
    return None if key is None else key.encode("latin-1"), time
