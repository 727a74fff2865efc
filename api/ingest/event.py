"""One event: the bytes of a JSON value become a record's key and event time.

Sans-IO. Decoding validates the value. The stored value is the received bytes.

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

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.api.settings import IngestSettings, TopicSettings
from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.extras import needs
from penstock.shared.common.points_in_time import TimeUnit, time_ms, utc_text

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ONE_MS = timedelta(milliseconds=1)

MALFORMED_JSON = "MALFORMED_JSON"
INVALID_KEY = "INVALID_KEY"
INVALID_TIMESTAMP = "INVALID_TIMESTAMP"
SCHEMA_VIOLATED = "SCHEMA_VIOLATED"

SHOWN_MAX = 40
"""Characters of a time that an error message repeats."""

Read = Callable[[bytes, int], tuple[bytes | None, int | None]]
"""(value, latest_ms) -> (key, timestamp in ms); the event time may be `latest_ms` at most. Raises EventRejected."""

ReadTime = Callable[[str, Any, int], int]
"""(source, value, latest_ms) -> timestamp in ms; `source` names where the value was found. Raises EventRejected."""

UNITS: dict[TimeUnit, tuple[int, int, str]] = {
    "s": (1_000, 1, "seconds"),
    "ms": (1, 1, "milliseconds"),
    "us": (1, 1_000, "microseconds"),
    "ns": (1, 1_000_000, "nanoseconds"),
}
"""Each unit's factor and divisor to ms, and its name."""

_BYTE = re.compile(r" \(byte (\d+)\)$")

Validate = Callable[[Any], str | None]
"""Returns the error of a value, or None if it is valid."""

MESSAGE_CHARACTERS_MAX = 300


def load_schema(path: Path) -> Validate:
    """Return the validator of a schema file. Raises ConfigError if it cannot be read or is no JSON Schema."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"json_schema: {path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"json_schema: {path}: not JSON: {e}") from None
    return compile_schema(schema, str(path))


def compile_schema(schema: Any, name: str) -> Validate:
    """Return the validator of a schema. Errors call it `name`.

    >>> schema = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}
    >>> validate = compile_schema(schema, "it")
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

    def validate(value: Any) -> str | None:
        if validator.is_valid(value):
            return None
        error = next(iter(validator.iter_errors(value)))
        place = "".join(f"/{step}" for step in error.instance_path)
        return f"{place or 'the event'}: {error.message}"[:MESSAGE_CHARACTERS_MAX]

    return validate


class EventRejected(DataError):
    """An event that cannot become a record.

    If the position within the value is known, `line` and `column` are 1-based, the column in characters.
    """

    def __init__(self, error_code: str, message: str, column: int | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.column = column
        self.line = line


class RecordError(NamedTuple):
    """Why the event at `position` (a 1-based line or a 0-based index) was not stored."""

    position: int
    status: int
    error_code: str
    message: str
    column: int | None = None
    retry_after_s: int | None = None
    outcome: Literal["not_stored", "unknown"] = "not_stored"


class TopicReader(NamedTuple):
    """Reads the events of one topic, and times that are given beside events."""

    event: Read
    time: ReadTime


def topic_reader(settings: IngestSettings, own: TopicSettings) -> TopicReader:
    """Return the reader of a topic with the settings `own`. Raises ConfigError if its JSON Schema cannot be used."""
    read_time = _time_reader(own.time_unit, own.min_event_time or settings.min_event_time)
    return TopicReader(_event_reader(own, read_time), read_time)


def _event_reader(settings: TopicSettings, read_time: ReadTime) -> Read:
    decode = msgspec.json.Decoder().decode
    validate = None if settings.json_schema is None else load_schema(settings.json_schema)
    parts = [(pointer, _follow(pointer)) for pointer in settings.key]
    time = None if settings.time is None else (settings.time, _follow(settings.time))

    def read(value: bytes, latest_ms: int) -> tuple[bytes | None, int | None]:
        try:
            document = decode(value)
        except (ValueError, RecursionError) as e:
            raise explain_malformed(value, e) from None
        if validate is not None and (wrong := validate(document)) is not None:
            raise EventRejected(SCHEMA_VIOLATED, f"schema: {wrong}")
        key = "-".join([_key_part(p, get(document, "key", p)) for p, get in parts]).encode() if parts else None
        if time is None:
            return key, None
        pointer, get = time
        return key, read_time(pointer, get(document, "time", pointer), latest_ms)

    return read


Get = Callable[[Any, str, str], Any]


def _follow(pointer: str) -> Get:
    """Return a function for the value at a JSON pointer (RFC 6901). EventRejected names a pointer without value."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    code = {"key": INVALID_KEY, "time": INVALID_TIMESTAMP}

    def deep(document: Any, role: str, pointer: str) -> Any:
        value = document
        for step in steps:
            if type(value) is dict and step in value:
                value = value[step]
            elif type(value) is list and _is_index(step) and int(step) < len(value):
                value = value[int(step)]
            elif value is document and type(value) not in (dict, list):
                raise EventRejected(code[role], f"{role}: {pointer} needs an object, got {_json_type(value)}")
            else:
                raise EventRejected(code[role], f"{role}: nothing at {pointer}")
        return value

    if len(steps) > 1:
        return deep
    step = steps[0]

    def shallow(document: Any, role: str, pointer: str) -> Any:
        try:
            return document[step]
        except (KeyError, TypeError):
            return deep(document, role, pointer)

    return shallow


def _is_index(step: str) -> bool:
    """Return whether a step is an array index: no sign, no leading zero, and at most nine digits."""
    return step.isascii() and step.isdigit() and len(step) < 10 and (step == "0" or step[0] != "0")


def _key_part(pointer: str, value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    raise EventRejected(INVALID_KEY, f"key: {pointer} must be a string, integer or boolean, got {_json_type(value)}")


def _time_reader(unit: TimeUnit, earliest: str) -> ReadTime:
    factor, divisor, unit_name = UNITS[unit]
    earliest_ms = time_ms(earliest)

    def read_time(source: str, value: Any, latest_ms: int) -> int:
        if type(value) is int:
            timestamp = value * factor // divisor
        elif type(value) is str:
            timestamp = _iso_to_ms(source, value)
        else:
            wanted = f"must be an integer ({unit_name} since the epoch) or an ISO 8601 string"
            raise EventRejected(INVALID_TIMESTAMP, f"time: {source} {wanted}, got {_json_type(value)}")
        if earliest_ms <= timestamp <= latest_ms:
            return timestamp
        said = f"time: {source} is {str(value)[:SHOWN_MAX]} ({_moment(timestamp)}), "
        if timestamp < earliest_ms:
            said += f"before min_event_time={earliest}"
        else:
            said += f"further ahead than max_future_ms allows ({_moment(latest_ms)})"
        if type(value) is int and (other := _unit_that_fits(value, earliest_ms, latest_ms)):
            said += f'; it looks like {UNITS[other][2]}: set time_unit = "{other}" for the topic'
        raise EventRejected(INVALID_TIMESTAMP, said)

    return read_time


def _moment(ms: int) -> str:
    text = utc_text(ms)
    return "outside of the years 1 to 9999" if text.removeprefix("-").isdigit() else f"{text} UTC"


def _unit_that_fits(value: int, earliest_ms: int, latest_ms: int) -> TimeUnit | None:
    fitting = (unit for unit, (factor, by, _) in UNITS.items() if earliest_ms <= value * factor // by <= latest_ms)
    return next(fitting, None)


def _iso_to_ms(pointer: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise EventRejected(
            INVALID_TIMESTAMP, f"time: {pointer} is not an ISO 8601 time: {text[:SHOWN_MAX]!r}"
        ) from None
    if moment.tzinfo is None:
        raise EventRejected(
            INVALID_TIMESTAMP, f"time: {pointer} has no offset from UTC: {text[:SHOWN_MAX]!r} (write ...Z or ...+00:00)"
        )
    try:
        return (moment - EPOCH) // ONE_MS
    except OverflowError:
        raise EventRejected(INVALID_TIMESTAMP, f"time: {pointer} is out of range: {text[:SHOWN_MAX]!r}") from None


def _json_type(value: Any) -> str:
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


def explain_malformed(value: bytes, error: Exception) -> EventRejected:
    """Return the error for bytes that are not JSON, with the position of the first wrong character."""
    if isinstance(error, UnicodeDecodeError):
        at, what = _first_non_utf8(value), "not UTF-8"
    elif isinstance(error, RecursionError):
        at, what = None, "nested too deeply"
    else:
        text = str(error)
        found = _BYTE.search(text)
        at = int(found[1]) if found else len(value) if text == "Input data was truncated" else None
        what = _BYTE.sub("", text).removeprefix("JSON is malformed: ")
        if what == "trailing characters" and at is not None:
            at -= 1  # msgspec reports the position after the first trailing character
        if what == "Input data was truncated":
            what = "the value ends too early"
    if at is None:
        return EventRejected(MALFORMED_JSON, f"not JSON: {what}")
    before = value[:at].decode(errors="replace")
    line, column = before.count("\n") + 1, at_column(before)
    return EventRejected(MALFORMED_JSON, f"not JSON: {what}", column, line)


def at_column(before: str) -> int:
    """Return the 1-based column of the text after `before`.

    >>> at_column(""), at_column("ab"), at_column("ab\\nc")
    (1, 3, 2)
    """
    return len(before) - before.rfind("\n")


def _first_non_utf8(value: bytes) -> int | None:
    try:
        value.decode()
    except UnicodeDecodeError as e:
        return e.start
    return None
