"""Parses events: converts the bytes of a JSON value to a record, with its key and its event time.

Sans-IO, except for reading schema files. Decoding validates the value. The stored value is the received bytes.

>>> flights = TopicSettings(key=["/carrier", "/origin"], time="/at")
>>> reader = topic_reader(IngestSettings(), flights)
>>> reader.event(b'{"carrier":"UA","origin":"EWR","at":"2013-01-01T05:15:00-05:00"}', 1_400_000_000_000)
(b'UA-EWR', 1357035300000)
>>> reader.event(b'{"carrier":"UA"}', 1_400_000_000_000)
Traceback (most recent call last):
    ...
penstock.api.ingest.event.EventRejected: key: nothing at /origin
>>> reader.time("/at", 1357035300, 1_400_000_000_000)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
penstock.api.ingest.event.EventRejected: time: /at is 1357035300 (1970-...), before min_event_time=2000-01-01; it...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.api.http.problem import FailedOutcome
from penstock.api.http.status_codes import BAD_REQUEST, CONTENT_TOO_LARGE
from penstock.api.settings import IngestSettings, TopicSettings
from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.extras import needs
from penstock.shared.common.json_decoding import JSON_ERRORS, NOT_UTF8, InvalidJson, decode_schema, invalid_json
from penstock.shared.common.records import Headers, ProducerRecord
from penstock.shared.common.time_text import DIGITS_MAX, EPOCH, TIME_MS_MAX, TIME_MS_MIN, TimeUnit, time_ms, utc_text

ONE_MS = timedelta(milliseconds=1)

MALFORMED_JSON = "MALFORMED_JSON"
INVALID_KEY = "INVALID_KEY"
INVALID_TIMESTAMP = "INVALID_TIMESTAMP"
SCHEMA_VIOLATED = "SCHEMA_VIOLATED"

SHOWN_MAX = 40
"""The most characters of a time in an error message."""

BLANK = b" \t\r"
JSON_SPACE = b" \t\r\n"
SPACE = 0x20


class ReadEvent(Protocol):
    """(value, latest_ms) -> (key, timestamp in ms). The latest event time is `latest_ms`. Raises EventRejected.

    With `has_key` or `has_time`, the record has its own: the value need not have one, and the result is None.
    """

    def __call__(
        self, value: bytes, latest_ms: int, /, *, has_key: bool = False, has_time: bool = False
    ) -> tuple[bytes | None, int | None]: ...


ReadTime = Callable[[str, Any, int], int]
"""(source, value, latest_ms) -> timestamp in ms. `source` describes the value in errors. Raises EventRejected."""

UNITS: dict[TimeUnit, tuple[int, int, str]] = {
    "s": (1_000, 1, "seconds"),
    "ms": (1, 1, "milliseconds"),
    "us": (1, 1_000, "microseconds"),
    "ns": (1, 1_000_000, "nanoseconds"),
}
"""Each unit's factor and divisor to ms, and its name."""

_BYTE = re.compile(r" \(byte (\d+)\)$")
_HALF_PAIR = re.compile(rb"(?<!\\)\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u|\\?\Z)")

Validate = Callable[[Any], str | None]
"""Returns the first error of a value, or None if it is valid."""

MESSAGE_CHARACTERS_MAX = 300


def load_event_schema(path: Path) -> Validate:
    """Return the validator of events by a schema file.

    Raises ConfigError if the file cannot be read or is not a JSON Schema.
    """
    try:
        schema = decode_schema(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"json_schema: {path}: {e.strerror}") from None
    except InvalidJson as e:
        raise ConfigError(f"json_schema: {path}: not JSON: {e}") from None
    return compile_event_schema(schema, str(path))


def compile_event_schema(schema: Any, name: str) -> Validate:
    """Return the validator of events by a JSON Schema.

    Raises ConfigError, with the schema's `name` in its message, if the schema is invalid.

    >>> schema = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}
    >>> validate = compile_event_schema(schema, "it")
    >>> validate({"id": 1})
    >>> validate({"id": "x"})
    '/id: "x" is not of type "integer"'
    """
    with needs(f"json_schema {name}"):
        import jsonschema_rs
    try:
        validator = jsonschema_rs.validator_for(schema)
    except ValueError as e:
        raise ConfigError(f"json_schema: {name}: {e}"[:MESSAGE_CHARACTERS_MAX]) from None

    def validate_event(value: Any) -> str | None:
        if validator.is_valid(value):
            return None
        error = next(iter(validator.iter_errors(value)))
        pointer = "".join(f"/{step}" for step in error.instance_path)
        return f"{pointer or 'the event'}: {error.message}"[:MESSAGE_CHARACTERS_MAX]

    return validate_event


class EventRejected(DataError):
    """The error of an event, or of the body of a request, that cannot be converted to records.

    `line` and `column` are the 1-based position of the error in that event or body. A column counts characters. Both
    are None if the position is unknown.
    """

    def __init__(self, error_code: str, message: str, column: int | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.column = column
        self.line = line


class RecordError(NamedTuple):
    """Why the event at `position` (a 1-based line or a 0-based index) is not known to be stored."""

    position: int
    status: int
    error_code: str
    message: str
    column: int | None = None
    retry_after_s: int | None = None
    outcome: FailedOutcome = "not_stored"


class TopicReader(NamedTuple):
    """Two functions for one topic.

    `event` returns the key and the time of an event's JSON value. `time` converts a time from elsewhere: a header, an
    attribute of a CloudEvent, or the `timestamp` of a record of REST Proxy v3.
    """

    event: ReadEvent
    time: ReadTime


def topic_reader(settings: IngestSettings, own: TopicSettings) -> TopicReader:
    """Return the functions that read events for a topic with the settings `own`.

    Raises ConfigError if the topic's JSON Schema cannot be used.
    """
    read_time = _event_time_reader(own.time_unit, own.min_event_time or settings.min_event_time)
    return TopicReader(_event_reader(own, read_time), read_time)


def _event_reader(own: TopicSettings, read_time: ReadTime) -> ReadEvent:
    decode = msgspec.json.Decoder().decode
    validate = None if own.json_schema is None else load_event_schema(own.json_schema)
    key_parts = [(pointer, _json_pointer_resolver(pointer)) for pointer in own.key]
    time = None if own.time is None else (own.time, _json_pointer_resolver(own.time))

    def read_event(
        value: bytes, latest_ms: int, /, *, has_key: bool = False, has_time: bool = False
    ) -> tuple[bytes | None, int | None]:
        try:
            document = decode(value)
        except JSON_ERRORS as e:
            raise explain_malformed(value, invalid_json(e)) from None
        if validate is not None and (violation := validate(document)) is not None:
            raise EventRejected(SCHEMA_VIOLATED, f"schema: {violation}")
        key = None
        if key_parts and not has_key:
            key = "-".join([_event_key_part(p, resolve(document, "key", p)) for p, resolve in key_parts]).encode()
        if time is None or has_time:
            return key, None
        pointer, resolve_time = time
        return key, read_time(pointer, resolve_time(document, "time", pointer), latest_ms)

    return read_event


Resolve = Callable[[Any, str, str], Any]
"""(document, role, pointer) -> value. `role` is "key" or "time". Raises EventRejected if there is no value."""


def _json_pointer_resolver(pointer: str) -> Resolve:
    """Return the function that finds an event's key or time by a JSON pointer (RFC 6901)."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    error_code = {"key": INVALID_KEY, "time": INVALID_TIMESTAMP}

    def resolve_json_pointer(document: Any, role: str, pointer: str) -> Any:
        value = document
        for step in steps:
            if type(value) is dict and step in value:
                value = value[step]
            elif type(value) is list and _is_array_index(step) and int(step) < len(value):
                value = value[int(step)]
            elif value is document and type(value) not in (dict, list):
                message = f"{role}: {pointer} needs an object, got {_json_type_name(value)}"
                raise EventRejected(error_code[role], message)
            else:
                raise EventRejected(error_code[role], f"{role}: nothing at {pointer}")
        return value

    if len(steps) > 1:
        return resolve_json_pointer
    step = steps[0]

    # The common case, without the loop. `resolve` handles arrays and builds the error.
    def resolve_member(document: Any, role: str, pointer: str) -> Any:
        try:
            return document[step]
        except (KeyError, TypeError):
            return resolve_json_pointer(document, role, pointer)

    return resolve_member


def _is_array_index(step: str) -> bool:
    """Return whether a step of a JSON pointer into an event is an array index.

    An index has no sign, no leading zero, and at most nine digits.
    """
    return step.isascii() and step.isdigit() and len(step) < 10 and (step == "0" or step[0] != "0")


def _event_key_part(pointer: str, value: Any) -> str:
    """Return a string, integer or boolean as one part of the event's key. Raises EventRejected for another value."""
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    message = f"key: {pointer} must be a string, integer or boolean, got {_json_type_name(value)}"
    raise EventRejected(INVALID_KEY, message)


def _event_time_reader(unit: TimeUnit, earliest: str) -> ReadTime:
    """Return a function from a JSON value to the event time in ms; it raises EventRejected."""
    factor, divisor, unit_name = UNITS[unit]
    earliest_ms = time_ms(earliest)

    def read_time(source: str, value: Any, latest_ms: int) -> int:
        if type(value) is int:
            timestamp = value * factor // divisor
        elif type(value) is str:
            timestamp = _event_time_of_iso_text(source, value)
        else:
            expected = f"must be an integer ({unit_name} since the epoch) or an ISO 8601 string"
            raise EventRejected(INVALID_TIMESTAMP, f"time: {source} {expected}, got {_json_type_name(value)}")
        if earliest_ms <= timestamp <= latest_ms:
            return timestamp
        message = f"time: {source} is {str(value)[:SHOWN_MAX]} ({_describe_event_time(timestamp)}), "
        if timestamp < earliest_ms:
            message += f"before min_event_time={earliest}"
        else:
            message += f"further ahead than max_future_ms allows ({_describe_event_time(latest_ms)})"
        if type(value) is int and (likely_unit := _likely_event_time_unit(value, earliest_ms, latest_ms)):
            message += f'; it looks like {UNITS[likely_unit][2]}: set time_unit = "{likely_unit}" for the topic'
        raise EventRejected(INVALID_TIMESTAMP, message)

    return read_time


def number_or_text(text: str) -> int | str:
    """Return an event time in a header or an attribute for `ReadTime`: a number if it is at most DIGITS_MAX digits.

    >>> number_or_text("1357035300000"), number_or_text("2013-01-01T05:15:00Z")
    (1357035300000, '2013-01-01T05:15:00Z')
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else text


def _describe_event_time(ms: int) -> str:
    """Return an event time as an error message shows it."""
    # Python cannot convert integers of thousands of digits to text, so `ms` is bounded.
    text = utc_text(min(max(ms, TIME_MS_MIN), TIME_MS_MAX))
    # `utc_text` returns a number if the time has no date in these years.
    return "outside of the years 1 to 9999" if text.removeprefix("-").isdigit() else f"{text} UTC"


def _likely_event_time_unit(value: int, earliest_ms: int, latest_ms: int) -> TimeUnit | None:
    """Return the unit in which a number is an accepted event time; None if there is none."""
    for unit, (factor, divisor, _) in UNITS.items():
        if earliest_ms <= value * factor // divisor <= latest_ms:
            return unit
    return None


def _event_time_of_iso_text(source: str, text: str) -> int:
    """Return the event time in ms of an ISO 8601 text with a UTC offset, as `datetime.fromisoformat` reads it.

    Raises EventRejected for any other text.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise EventRejected(
            INVALID_TIMESTAMP, f"time: {source} is not an ISO 8601 time: {text[:SHOWN_MAX]!r}"
        ) from None
    if moment.tzinfo is None:
        raise EventRejected(
            INVALID_TIMESTAMP, f"time: {source} has no offset from UTC: {text[:SHOWN_MAX]!r} (write ...Z or ...+00:00)"
        )
    try:
        return (moment - EPOCH) // ONE_MS
    except OverflowError:
        raise EventRejected(INVALID_TIMESTAMP, f"time: {source} is out of range: {text[:SHOWN_MAX]!r}") from None


def _json_type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "an array"
        case str():
            return "a string"
        case bool():
            return "a boolean"
    return "a number"


def explain_malformed(value: bytes, error: InvalidJson) -> EventRejected:
    """Return EventRejected for an event or a body that is not JSON, with the position of the error if it is known."""
    reason = str(error)
    if reason == NOT_UTF8:
        at = _first_non_utf8_byte(value)
    else:
        at, reason = _msgspec_error(reason, value)
    if at is None:
        return EventRejected(MALFORMED_JSON, f"not JSON: {reason}")
    before = value[:at].decode(errors="replace")
    return EventRejected(MALFORMED_JSON, f"not JSON: {reason}", column_after(before), before.count("\n") + 1)


def _msgspec_error(message: str, value: bytes) -> tuple[int | None, str]:
    """Return the byte offset, None if unknown, and the reason of an error of msgspec."""
    if message == "Input data was truncated":
        # msgspec says this also of half a surrogate pair in the last bytes of a complete value.
        if (half := _HALF_PAIR.search(value)) is not None:
            return half.end(), "unexpected end of escaped utf-16 surrogate pair"
        return len(value), "the value ends too early"
    match = _BYTE.search(message)
    at = None if match is None else int(match[1])
    reason = _BYTE.sub("", message).removeprefix("JSON is malformed: ")
    if reason == "trailing characters" and at is not None:
        # msgspec reports the position after the first trailing character.
        at -= 1
    return at, reason


def column_after(before: str) -> int:
    """Return the 1-based column of the character in an event's JSON that follows the text `before`.

    >>> column_after(""), column_after("ab"), column_after("ab\\nc")
    (1, 3, 2)
    """
    return len(before) - before.rfind("\n")


def _first_non_utf8_byte(value: bytes) -> int | None:
    """Return the offset of an event's first byte that is not UTF-8; None if there is none."""
    try:
        value.decode()
    except UnicodeDecodeError as e:
        return e.start
    return None


class Attributes(NamedTuple):
    """The key and the time of an event that are in its attributes, not in its value. `time` is the received text."""

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
    """Converts values to records of one topic.

    `key` and `time`, in ms since the epoch, are the defaults for events without a key or a time.
    """

    def __init__(
        self,
        topic: str,
        settings: IngestSettings,
        reader: TopicReader,
        *,
        key: bytes | None = None,
        time: int | None = None,
    ) -> None:
        self.topic = topic
        self.reader = reader
        self._reads_time = settings.for_topic(topic).time is not None
        self._max_future_ms = settings.max_future_ms
        self._max_line_bytes = settings.max_line_bytes
        self._key = key
        self._time = None if self._reads_time else time

    def parse(
        self,
        values: Sequence[bytes | None],
        first: int,
        now_ms: int,
        headers: Headers = (),
        event: Attributes = NO_ATTRIBUTES,
    ) -> Parsed:
        """Parse events at the positions `first`, `first + 1`, ... Blank values are skipped, but count as a position.

        `headers` are the headers of every record. `event` has the key and the time from a CloudEvent's attributes,
        which take precedence over the request's. If its time is needed and invalid, the only result is an error at
        `first`: a CloudEvent has a single value.
        """
        parsed = Parsed()
        read = self.reader.event
        topic = self.topic
        latest_ms = now_ms + self._max_future_ms
        default_key = self._key if event.key is None else event.key
        default_time = self._time
        if event.time is not None and not self._reads_time:
            try:
                default_time = self.reader.time("its header or attribute", number_or_text(event.time), latest_ms)
            except EventRejected as e:
                parsed.errors.append(RecordError(first, BAD_REQUEST, e.error_code, str(e)))
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

    def _too_long_event_error(self, position: int) -> RecordError:
        return RecordError(
            position, CONTENT_TOO_LARGE, "MESSAGE_TOO_LARGE", f"longer than max_line_bytes={self._max_line_bytes}"
        )
