"""The key and the time of an event, from its bytes or from headers, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.ingest.event import EventRejected, column_after, explain_malformed, load_event_schema, topic_reader
from penstock.api.settings import IngestSettings, TopicSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.time_text import TimeUnit
from penstock.shared.testing.manual_clock import ManualClock
from tests.api.ingest.service import NDJSON, URL, Service

EARLIEST = 946_684_800_000
"""2000-01-01, the default earliest event time."""
LATEST = 2_000_000_000_000
CLOUDEVENT = {
    "Content-Type": "application/json",
    "ce-specversion": "1.0",
    "ce-id": "1",
    "ce-source": "/s",
    "ce-type": "t",
}


def read(value: bytes, key: list[str] | None = None, time: str | None = None) -> tuple[bytes | None, int | None]:
    own = TopicSettings(key=tuple(key or ()), time=time)
    return topic_reader(IngestSettings(), own).event(value, LATEST)


def time_of(value: bytes, unit: TimeUnit = "ms", **settings: Any) -> int:
    """The event time of a JSON value."""
    own = TopicSettings(time="/t", time_unit=unit, **settings)
    timestamp = topic_reader(IngestSettings(), own).event(b'{"t":%s}' % value, LATEST)[1]
    assert timestamp is not None
    return timestamp


def time_error(value: bytes, unit: TimeUnit = "ms", **settings: Any) -> str:
    """The error message for an invalid event time."""
    with pytest.raises(EventRejected) as e:
        time_of(value, unit, **settings)
    assert e.value.error_code == "INVALID_TIMESTAMP"
    return str(e.value)


def rejection(value: bytes, key: list[str] | None = None, time: str | None = None) -> EventRejected:
    with pytest.raises(EventRejected) as e:
        read(value, key, time)
    return e.value


def test_without_settings_any_json_value_is_an_event() -> None:
    """A topic without key and time accepts every JSON value, without key and timestamp."""
    for value in (b"1", b"null", b'"x"', b"[1,2]", b'{"a":1}'):
        assert read(value) == (None, None)


def test_key_parts_are_joined_in_the_order_of_their_pointers() -> None:
    """Strings, integers and booleans become text, joined by a dash."""
    value = b'{"carrier":"UA","flight":{"number":12},"legs":["EWR",true]}'
    assert read(value, ["/legs/0", "/carrier", "/flight/number", "/legs/1"])[0] == b"EWR-UA-12-true"


def test_pointers_are_unescaped() -> None:
    """~1 is a slash and ~0 a tilde, as in RFC 6901, and an empty step is the empty name."""
    assert read(b'{"a/b":{"m~n":"x","":"y"}}', ["/a~1b/m~0n", "/a~1b/"])[0] == b"x-y"


@pytest.mark.parametrize("pointer", ["/b", "/a/b", "/list/2", "/list/01", "/list/-1", "/list/x"])
def test_a_missing_key_names_its_pointer(pointer: str) -> None:
    """A key pointer without a target is an error that names it."""
    error = rejection(b'{"a":1,"list":[1,2]}', [pointer])
    assert error.error_code == "INVALID_KEY"
    assert pointer in str(error)


@pytest.mark.parametrize("value", [b"null", b"1.5", b"{}", b"[]"])
def test_a_key_must_be_a_plain_scalar(value: bytes) -> None:
    """Null, fractions, objects and arrays are not valid keys."""
    assert "/k must" in str(rejection(b'{"k":%s}' % value, ["/k"]))


def test_a_key_needs_an_object() -> None:
    """If a key is configured, a value that is no object is an error that names its type."""
    assert str(rejection(b"17", ["/k"])) == "key: /k needs an object, got a number"
    assert str(rejection(b'"k"', ["/k"])) == "key: /k needs an object, got a string"


@given(st.integers(EARLIEST, LATEST))
def test_a_time_in_ms_is_taken_as_it_is(timestamp: int) -> None:
    """An integer is the event time in ms."""
    assert read(b'{"t":%d}' % timestamp, time="/t")[1] == timestamp


@given(
    st.datetimes(datetime(2000, 1, 3), datetime(2033, 1, 1)),
    st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
def test_an_iso_time_is_its_moment_in_ms(moment: datetime, zone: timezone) -> None:
    """ISO 8601 times with an offset are converted to ms, rounded down, from every zone."""
    aware = moment.replace(tzinfo=UTC).astimezone(zone)
    expected = (moment - datetime(1970, 1, 1)) // timedelta(milliseconds=1)
    assert read(b'{"t":"%s"}' % aware.isoformat().encode(), time="/t")[1] == expected


def test_utc_may_be_written_as_z() -> None:
    """`Z` is accepted as an offset."""
    assert read(b'{"t":"2000-01-01T00:00:01.5Z"}', time="/t")[1] == EARLIEST + 1_500


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_number_is_in_the_topics_unit(unit: TimeUnit) -> None:
    """A number is converted from the topic's unit to ms, rounded down; text has no unit."""
    number = {"s": b"1717408800", "ms": b"1717408800999", "us": b"1717408800999999", "ns": b"1717408800999999999"}
    assert time_of(number[unit], unit) == (1_717_408_800_000 if unit == "s" else 1_717_408_800_999)
    assert time_of(b'"2024-06-03T10:00:00Z"', unit) == 1_717_408_800_000


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"1717408800", "s"),
        (b"1717408800000", "ms"),
        (b"1717408800000000", "us"),
        (b"1717408800000000000", "ns"),
    ],
)
def test_a_number_in_another_unit_is_an_error_with_the_likely_unit(
    unit: TimeUnit, value: bytes, named: TimeUnit
) -> None:
    """A number in another unit than the topic's is rejected, and the error names the likely unit and the setting."""
    if named == unit:
        assert time_of(value, unit) == 1_717_408_800_000
        return
    message = time_error(value, unit)
    assert f'time_unit = "{named}"' in message
    assert value.decode() in message


def test_the_error_for_seconds_is_complete() -> None:
    """The error names the value, its time, the violated setting, and the setting that accepts it."""
    message = time_error(b"1717408800")
    for part in ("/t", "1717408800", "1970-01-20T21:03:28.800", "min_event_time=2000-01-01", 'time_unit = "s"'):
        assert part in message


def test_values_without_a_likely_unit_are_rejected() -> None:
    """Values that are too early in every unit, and old dates, are rejected without a likely unit."""
    for value in (b"0", b"5", b"-1717408800", b'"1999-12-31T23:59:59.999Z"'):
        message = time_error(value)
        assert "before min_event_time=2000-01-01" in message
        assert "looks like" not in message
    assert time_of(b'"2000-01-01T00:00:00Z"') == EARLIEST


def test_the_earliest_event_time_is_a_setting_of_the_ingest_and_of_a_topic() -> None:
    """`min_event_time` can be set for the ingest service and for a topic, as text or date, and not before 1970."""
    assert time_of(b"0", min_event_time="1970-01-01") == 0
    assert time_of(b'"1985-06-01T00:00:00Z"', min_event_time=date(1985, 6, 1)) == 486_432_000_000
    later = topic_reader(IngestSettings(min_event_time="2020-01-01T00:00:00+01:00"), TopicSettings(time="/t"))
    assert later.event(b'{"t":1577833200000}', LATEST) == (None, 1_577_833_200_000)
    with pytest.raises(EventRejected):
        later.event(b'{"t":1577833199999}', LATEST)
    for wrong in ("1969-12-31", "soon"):
        with pytest.raises(ConfigError, match="min_event_time"):
            IngestSettings(min_event_time=wrong)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'"2013-01-01T05:00:00"', "no offset"),
        (b'"2013-01-01"', "no offset"),
        (b'"yesterday"', "not an ISO 8601 time"),
        (b'"1357035300000"', "not an ISO 8601 time"),
        (b'"1969-12-31T23:59:59Z"', "before min_event_time"),
        (b"-1", "before min_event_time"),
        (b"1.5", "got a number"),
        (b"true", "got a boolean"),
        (b"null", "got null"),
        (b"{}", "got an object"),
        (b"2000000000001", "max_future_ms"),
        (b"99999999999999999999999999", "max_future_ms"),
        (b'"0001-01-01T00:00:00+23:59"', "before min_event_time"),
    ],
)
def test_an_invalid_time_is_rejected_with_its_reason(value: bytes, reason: str) -> None:
    """Invalid, negative, fractional, naive and far-future times are rejected with the reason and the pointer."""
    error = rejection(b'{"t":%s}' % value, time="/t")
    assert error.error_code == "INVALID_TIMESTAMP"
    assert "/t" in str(error)
    assert reason in str(error)


def test_a_missing_time_names_its_pointer() -> None:
    """An event without its time is rejected, and the error names the pointer."""
    assert str(rejection(b"{}", time="/at")) == "time: nothing at /at"


@pytest.mark.parametrize(
    ("value", "column", "what"),
    [
        (b'{"a":NaN}', 6, "invalid character"),
        (b'{"a":Infinity}', 6, "invalid character"),
        (b'{"a":1', 7, "the value ends too early"),
        (rb'{"a":"hi \ud83d', 16, "the value ends too early"),
        (rb'{"a":"hi \ud83d\ude', 20, "the value ends too early"),
        (rb'{"a":"hi \\ud83d"', 18, "the value ends too early"),
        (rb'{"a":"hi \ud83d"}', 16, "unexpected end of escaped utf-16 surrogate pair"),
        (rb'{"a":"hi \ud83d","b":1234}', 16, "unexpected end of escaped utf-16 surrogate pair"),
        (b'{"a":1} x', 9, "trailing characters"),
        ('{"é":"é" x}'.encode(), 10, "expected ',' or '}'"),
        (b'{"a":"\xff"}', 7, "not UTF-8"),
        (b'{"a":"ab\xe2\x28"}', 9, "not UTF-8"),
        (b'\xef\xbb\xbf{"a":1}', 1, "invalid character"),
        (b"[" * 100_000, None, "nested too deeply"),
        (b'{"a":1e999}', None, "Number out of range"),
    ],
)
def test_malformed_json_is_located(value: bytes, column: int | None, what: str) -> None:
    """Malformed JSON is an error with the problem and the 1-based column in characters."""
    error = rejection(value)
    assert error.error_code == "MALFORMED_JSON"
    assert what in str(error)
    assert error.column == column


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_rejected(value: bytes) -> None:
    """Any bytes are either accepted, as a JSON decoder does, or rejected as malformed."""
    try:
        msgspec.json.decode(value)
    except ValueError:
        column = rejection(value).column
        assert column is None or 1 <= column <= len(value) + 1
    else:
        assert read(value) == (None, None)


def test_errors_in_values_of_several_lines_have_line_and_column() -> None:
    """In a value of several lines the error has the line, and the column within it."""
    with pytest.raises(ValueError) as e:
        msgspec.json.decode(b'[\n  {"a": 1,,}\n]')
    error = explain_malformed(b'[\n  {"a": 1,,}\n]', e.value)
    assert (error.line, error.column) == (2, 11)
    assert column_after("") == 1


def test_a_time_outside_of_the_calendar_is_described() -> None:
    """A time beyond the year 9999 is described as outside of the calendar, with the likely unit."""
    settings = IngestSettings()
    read_time = topic_reader(settings, settings.default_topic).time
    with pytest.raises(EventRejected, match=r"/at.*1795460162760000000") as e:
        read_time("/at", 1_795_460_162_760_000_000, 1_795_460_162_760)
    assert 'time_unit = "ns"' in str(e.value)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_of_thousands_of_digits_is_rejected(unit: TimeUnit) -> None:
    """A number that Python cannot convert to text is an invalid time, like any other that is out of range."""
    assert "further ahead" in time_error(b"9" * 4_299, unit)
    assert "before min_event_time" in time_error(b"-" + b"9" * 4_299, unit)


async def test_a_time_header_of_thousands_of_digits_is_rejected(producer: Any) -> None:
    """The request is a 400; a CloudEvent with such a time is an error of its own."""
    service = Service(producer, topics={"t": {"time_header": "X-Time"}})
    for header in ({"X-Time": "9" * 5_000}, CLOUDEVENT | {"ce-time": "9" * 5_000}):
        response = await service.post(b"1\n", NDJSON | header)
        assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")
    assert producer.batches == []


async def test_key_and_time_come_from_the_topics_settings(producer: Any) -> None:
    """Records have the key and time that the topic's pointers address; a missing one is an error with the pointer."""
    service = Service(producer, topics={"t": {"key": ["/c", "/o"], "time": "/at"}})
    at = 1_717_408_800_000
    response = await service.post(b'{"c":"UA","o":"EWR","at":%d}\n{"c":"UA","at":%d}\n' % (at, at))
    assert response.status_code == 207
    (record,) = [record for log in producer.logs["t"] for record in log]
    assert (record.key, record.timestamp) == (b"UA-EWR", at)
    assert response.json()["errors"][0]["message"] == "key: nothing at /o"


async def test_an_event_too_far_ahead_is_rejected_alone(producer: Any) -> None:
    """An event too far in the future is rejected alone, since the broker would reject its whole batch."""
    service = Service(producer, topics={"t": {"time": "/t"}})
    response = await service.post(b'{"t":1717408800000}\n{"t":99999999999999}\n')
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    assert "max_future_ms" in response.json()["errors"][0]["message"]


async def test_seconds_taken_for_ms_are_rejected_alone(producer: Any) -> None:
    """Seconds in a topic of ms are rejected with the likely unit; a topic with `time_unit = "s"` accepts them."""
    body = b'{"t":1717408800}\n{"t":0}\n{"t":"1970-01-20T21:03:28Z"}\n{"t":"2024-06-03T10:00:00Z"}\n'
    response = await Service(producer, topics={"t": {"time": "/t"}}).post(body)
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    errors = response.json()["errors"]
    assert [(e["line"], e["error_code"], e["outcome"]) for e in errors] == [
        (line, "INVALID_TIMESTAMP", "not_stored") for line in (1, 2, 3)
    ]
    assert ["looks like seconds" in e["message"] for e in errors] == [True, False, False]
    assert all("min_event_time=2000-01-01" in e["message"] for e in errors)
    seconds = Service(producer, topics={"t": {"time": "/t", "time_unit": "s"}})
    assert (await seconds.post(b'{"t":1717408801}\n')).status_code == 200
    stored = sorted(r.timestamp or 0 for log in producer.logs["t"] for r in log)
    assert stored == [1_717_408_800_000, 1_717_408_801_000]


async def test_key_and_time_come_from_headers_where_the_event_has_none(producer: Any) -> None:
    """The topic's settings name the headers. A key or time in the event takes precedence."""
    service = Service(producer, topics={"t": {"key_header": "X-Key", "time_header": "X-Time"}})
    response = await service.post(b"1\n2\n", NDJSON | {"X-Key": "ann", "X-Time": "2024-06-03T10:00:00Z"})
    assert response.status_code == 200
    assert {(r.key, r.timestamp) for log in producer.logs["t"] for r in log} == {(b"ann", 1_717_408_800_000)}


class AdjustableClock(ManualClock):
    """A manual clock that can be set back."""

    def set_back(self, ms: int) -> None:
        self._now -= ms


async def test_a_time_header_that_was_accepted_is_the_time_of_every_event(producer: Any) -> None:
    """The time is checked once, when the request begins. The events are stored also if the clock is then set back."""
    clock = AdjustableClock(EARLIEST)
    settings = IngestSettings()
    service = Service(producer, clock=clock, topics={"t": {"time_header": "X-Time"}})
    latest_ms = EARLIEST + settings.max_future_ms

    async def body() -> AsyncIterator[bytes]:
        yield b"1\n2\n3\n"
        clock.set_back(1)
        yield b"4\n5\n6\n"

    response = await service.post(body(), NDJSON | {"X-Time": str(latest_ms)})
    assert (response.status_code, response.json()["stored"]) == (200, 6)
    assert {r.timestamp for log in producer.logs["t"] for r in log} == {latest_ms}


async def test_a_time_header_has_the_topics_unit_and_earliest_time(producer: Any) -> None:
    """Seconds are accepted only for a topic in seconds. Otherwise the response names the likely unit."""
    service = Service(
        producer, topics={"t": {"time_header": "X-Time"}, "u": {"time_header": "X-Time", "time_unit": "s"}}
    )
    producer.logs["u"] = [[], []]
    seconds = NDJSON | {"X-Time": "1717408800"}
    response = await service.post(b"1\n", seconds)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")
    assert "the header X-Time" in response.json()["detail"]
    assert "looks like seconds" in response.json()["detail"]
    assert (await service.client.post("/v1/topics/u/events", content=b"1\n", headers=seconds)).status_code == 200
    assert [r.timestamp for log in producer.logs["u"] for r in log] == [1_717_408_800_000]


async def test_a_key_from_a_header_is_the_bytes_that_were_sent(producer: Any) -> None:
    """A key that is not ASCII is stored as UTF-8, like an event's own key."""
    service = Service(producer, topics={"t": {"key_header": "X-Key"}})
    request = service.client.build_request("POST", URL, content=b"1\n", headers=NDJSON)
    request.headers = httpx.Headers([*request.headers.raw, (b"x-key", "Zoë".encode())])
    assert (await service.client.send(request)).status_code == 200
    assert [r.key for log in producer.logs["t"] for r in log] == ["Zoë".encode()]


async def test_an_invalid_time_header_rejects_the_request(producer: Any) -> None:
    """A time header that is no time or too far ahead is a 400."""
    service = Service(producer, topics={"t": {"time_header": "X-Time"}})
    for text in ("soon", str(2**62)):
        response = await service.post(b"1\n", NDJSON | {"X-Time": text})
        assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")
    assert producer.batches == []


def test_an_error_has_the_pointer_to_the_invalid_value(tmp_path: Path) -> None:
    """A validation error has the pointer to the invalid value and the expected type."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"properties": {"a": {"items": {"type": "string"}}}}))
    validate = load_event_schema(path)
    assert validate({"a": ["x"]}) is None
    assert validate({"a": ["x", 2]}) == '/a/1: 2 is not of type "string"'


@pytest.mark.parametrize("text", ["{", '{"type": 7}', "[" * 100_000])
def test_an_invalid_schema_is_rejected_at_start_up(tmp_path: Path, text: str) -> None:
    """An invalid or missing schema file is a ConfigError that names the setting and the file."""
    path = tmp_path / "s.json"
    path.write_text(text)
    for name in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=r"json_schema: .*json"):
            load_event_schema(name)


async def test_a_schema_rejects_single_events(producer: Any, tmp_path: Path) -> None:
    """An event that violates the topic's JSON Schema is rejected, and the others are stored."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"required": ["id"]}))
    response = await Service(producer, topics={"t": {"json_schema": str(path)}}).post(b'{"id":1}\n{}\n')
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    assert response.json()["errors"][0]["error_code"] == "SCHEMA_VIOLATED"
