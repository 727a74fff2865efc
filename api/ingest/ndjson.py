"""Converts a request's body to records: NDJSON line by line as it arrives, or a complete JSON body.

Sans-IO. Records and errors do not depend on how the body is divided into chunks. At most one unfinished line is
buffered, and nothing of a line that is too long.

>>> lines = LineSplitter(max_line_bytes=8)
>>> lines.feed(b'{"a":1}\\r\\n{"a"')
[b'{"a":1}']
>>> lines.feed(b':2}\\n{"a":"too long"}\\n')
[b'{"a":2}', None]
>>> lines.close()
[]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from penstock.api.http.status_codes import BAD_REQUEST, CONTENT_TOO_LARGE
from penstock.api.ingest.event import EventRejected, RecordError, TopicReader, explain_malformed, topic_reader
from penstock.api.settings import IngestSettings
from penstock.shared.common.records import Headers, ProducerRecord

BLANK = b" \t\r"
JSON_SPACE = b" \t\r\n"
SPACE = 0x20
LINES_MAX = 4_000
"""The most lines that are parsed at once. Between such batches other requests proceed, and errors are counted."""

_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class LineSplitter:
    """Splits chunks into lines without their line ends (LF or CR LF); None stands for a line over `max_line_bytes`."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._skipping = False

    def __repr__(self) -> str:
        return f"LineSplitter(rest={len(self._rest)} bytes, skipping={self._skipping})"

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun and is incomplete."""
        return bool(self._rest) or self._skipping

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Return the lines that this chunk completes."""
        head, newline, tail = chunk.partition(b"\n")
        if not newline:
            self._append_to_line(chunk)
            return []
        self._append_to_line(head)
        lines: list[bytes | None] = [self._end_line()]
        *complete, last = tail.split(b"\n")
        lines += [self._line_within_limit(line) for line in complete]
        self._append_to_line(last)
        return lines

    def close(self) -> list[bytes | None]:
        """Return the last line if the body does not end with a line end."""
        return [self._end_line()] if self._rest or self._skipping else []

    def _append_to_line(self, part: bytes) -> None:
        """Add bytes to the unfinished line, or skip them if it is too long."""
        if self._skipping:
            return
        self._rest += part
        if len(self._rest) > self._max_line_bytes + 1:  # + 1: its last byte may be a CR
            self._skipping = True
            self._rest.clear()

    def _end_line(self) -> bytes | None:
        """Return the unfinished line, which has ended; None if it is too long."""
        if self._skipping:
            self._skipping = False
            return None
        line = bytes(self._rest)
        self._rest.clear()
        return self._line_within_limit(line)

    def _line_within_limit(self, line: bytes) -> bytes | None:
        if line.endswith(b"\r"):
            line = line[:-1]
        return line if len(line) <= self._max_line_bytes else None


class Attributes(NamedTuple):
    """The key and the time (ms, or ISO 8601) of an event that are not in its value."""

    key: bytes | None = None
    time: str | None = None


NO_ATTRIBUTES = Attributes()


class Parsed:
    """A batch of consecutive events: records to send, each with its position, and the errors of the others."""

    __slots__ = ("errors", "positions", "records")

    def __init__(self) -> None:
        self.records: list[ProducerRecord] = []
        self.positions: list[int] = []
        self.errors: list[RecordError] = []

    def __repr__(self) -> str:
        return f"Parsed({len(self.records)} records, errors={self.errors})"


class EventParser:
    """Converts values to records of one topic. `key` and `time` are the request's, for events that lack them."""

    def __init__(
        self,
        topic: str,
        settings: IngestSettings,
        reader: TopicReader | None = None,
        *,
        key: bytes | None = None,
        time: str | None = None,
    ) -> None:
        self.topic = topic
        self.settings = settings
        self.reader = topic_reader(settings, settings.for_topic(topic)) if reader is None else reader
        self._max_future_ms = settings.max_future_ms
        self._max_line_bytes = settings.max_line_bytes
        self._key = key
        self._time = time

    def parse(
        self,
        values: Sequence[bytes | None],
        first: int,
        now_ms: int,
        headers: Headers = (),
        event: Attributes = NO_ATTRIBUTES,
    ) -> Parsed:
        """Parse events at the positions `first`, `first + 1`, ... Blank values are skipped but have a position.

        `headers` and `event` (such as a CloudEvent's attributes) apply to all of them.
        """
        parsed = Parsed()
        read = self.reader.event
        topic = self.topic
        latest_ms = now_ms + self._max_future_ms
        default_key = self._key if event.key is None else event.key
        default_time = self._default_time(event, latest_ms, parsed, first)
        if parsed.errors:
            return parsed
        add_record = parsed.records.append
        add_position = parsed.positions.append
        for position, value in enumerate(values, first):
            if value is None:
                parsed.errors.append(self._too_long_event_error(position))
                continue
            # Checked before reading: a compressed body of a few KB may hold millions of blank lines.
            if not value or (value[0] <= SPACE and not value.strip(BLANK)):
                continue
            try:
                key, timestamp = read(value, latest_ms)
            except EventRejected as e:
                parsed.errors.append(RecordError(position, BAD_REQUEST, e.error_code, str(e), e.column))
                continue
            if key is None:
                key = default_key
            if timestamp is None:
                timestamp = default_time
            add_record(ProducerRecord(topic, value, key, headers, None, timestamp))
            add_position(position)
        return parsed

    def _default_time(self, event: Attributes, latest_ms: int, parsed: Parsed, first: int) -> int | None:
        """Return the time of events that lack one. Adds an error at `first` if it is invalid."""
        text = self._time if event.time is None else event.time
        if text is None:
            return None
        try:
            value = int(text) if text.isascii() and text.isdigit() else text
            return self.reader.time("its header or attribute", value, latest_ms)
        except EventRejected as e:
            parsed.errors.append(RecordError(first, BAD_REQUEST, e.error_code, str(e)))
            return None

    def _too_long_event_error(self, position: int) -> RecordError:
        return RecordError(
            position, CONTENT_TOO_LARGE, "MESSAGE_TOO_LARGE", f"longer than max_line_bytes={self._max_line_bytes}"
        )


class NdjsonReader:
    """Parses the body of one NDJSON request: chunks in, records and errors out, `lines_max` lines at a time."""

    def __init__(self, parser: EventParser, max_line_bytes: int, lines_max: int = LINES_MAX) -> None:
        self._parser = parser
        self._lines = LineSplitter(max_line_bytes)
        self._lines_max = lines_max
        self._pending: list[bytes | None] = []
        self.ended = 0
        """Lines that the last chunk completed."""
        self.next_line = 1
        """The number of the next line."""

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun and is incomplete."""
        return self._lines.unfinished

    @property
    def has_pending_lines(self) -> bool:
        """Whether received lines are not parsed yet. Then call `parse_pending` before the next `feed`."""
        return bool(self._pending)

    def feed(self, chunk: bytes, now_ms: int) -> Parsed:
        """Parse the lines that the chunk completes, `lines_max` of them at most; `parse_pending` parses the rest.

        Positions are line numbers from 1.
        """
        assert not self._pending, "parse_pending() comes first"
        lines = self._lines.feed(chunk)
        self.ended = len(lines)
        return self._parse_lines(self._take_first_lines(lines), now_ms)

    def parse_pending(self, now_ms: int) -> Parsed:
        """Parse the next lines of the last chunk."""
        return self._parse_lines(self._take_first_lines(self._pending), now_ms)

    def close(self, now_ms: int) -> Parsed:
        """Parse the last line if it has no line end."""
        assert not self._pending, "parse_pending() comes first"
        return self._parse_lines(self._lines.close(), now_ms)

    def _take_first_lines(self, lines: list[bytes | None]) -> list[bytes | None]:
        """Return the first `lines_max` lines. The others are pending."""
        self._pending = lines[self._lines_max :]
        return lines[: self._lines_max] if self._pending else lines

    def _parse_lines(self, lines: list[bytes | None], now_ms: int) -> Parsed:
        parsed = self._parser.parse(lines, self.next_line, now_ms)
        self.next_line += len(lines)
        return parsed


class TooManyEvents(EventRejected):
    """A buffered body has more events than `max_body_events`."""

    def __init__(self, max_body_events: int) -> None:
        message = f"the body has more than max_body_events={max_body_events} events; NDJSON has no such limit"
        super().__init__("TOO_MANY_EVENTS", message)


def array_elements(
    body: bytes, max_element_bytes: int, max_elements: int, batch: int = 1_000
) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield the elements of a JSON array as bytes, in batches: (0-based index of the first, at most `batch` elements).

    Raises EventRejected before the first element if the body is not an array, or has too many elements.
    """
    try:
        elements = _decode_elements(body)
    except msgspec.ValidationError:
        message = "the body must be a JSON object, which is one event, or an array of events"
        raise EventRejected("NOT_AN_OBJECT_OR_ARRAY", message) from None
    except (ValueError, RecursionError) as e:
        raise explain_malformed(body, e) from None
    if len(elements) > max_elements:
        raise TooManyEvents(max_elements)
    return _batches_of_elements(iter(elements), max_element_bytes, batch)


def json_object(body: bytes) -> bytes | None:
    """Return the JSON object that is the body, without surrounding space; None if the body is not an object.

    Raises EventRejected if it is not JSON.

    >>> json_object(b' {"a": 1}\\n'), json_object(b"[1]")
    (b'{"a": 1}', None)
    """
    if _OBJECT.match(body) is None:
        return None
    try:
        msgspec.json.decode(body)
    except (ValueError, RecursionError) as e:
        raise explain_malformed(body, e) from None
    return body.strip(JSON_SPACE)


def _batches_of_elements(
    elements: Iterator[msgspec.Raw], max_element_bytes: int, batch: int
) -> Iterator[tuple[int, list[bytes | None]]]:
    first = 0
    while values := [bytes(element) for element in islice(elements, batch)]:
        yield first, [value if len(value) <= max_element_bytes else None for value in values]
        first += len(values)
