"""Dates and times: Java's date patterns, as in Java, and TimestampConverter's conversions between all formats."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.schema import BOOLEAN, INT64, Field, Schema, date_schema, timestamp_schema
from penstock.shared.connect.transforms.java_dates import DatePattern
from penstock.shared.connect.transforms.timestamps import TimestampConverterValue
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.connect.transforms.transforming import applied, configured

NOW_MS = round(dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC).timestamp() * 1000)
FEBRUARY_9 = dt.datetime(2024, 2, 9, 15, 4, 5, 67_000, tzinfo=dt.UTC)

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)
FORMAT = {"format": "yyyy-MM-dd HH:mm:ss.SSS"}
LOCAL = AT.astimezone(dt.timezone(dt.timedelta(hours=-5))) + dt.timedelta(microseconds=999)
"""The same time with another zone, in which it is still the day before, and with a part of a ms."""


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("yyyyMMdd", "20240209"),
        ("d MMM yy", "9 Feb 24"),
        ("EEEE, d MMMM yyyy", "Friday, 9 February 2024"),
        ("hh:mm a", "03:04 PM"),
        ("HH:mm:ss.SSS Z", "15:04:05.067 +0000"),
        ("'it''s' HH 'o''clock'", "it's 15 o'clock"),
        ("''''HH'''a'''", "''15'a'"),
        ("D", "40"),
        ("yyyy-MM-dd'T'HH:mm:ssXXX", "2024-02-09T15:04:05Z"),
    ],
)
def test_times_are_written_as_java_writes_them(pattern: str, text: str) -> None:
    """Times are formatted as in Java, in UTC and English."""
    assert DatePattern(pattern).format(FEBRUARY_9) == text


@pytest.mark.parametrize(
    ("pattern", "text", "iso"),
    [
        ("yyyy-MM-dd HH:mm", "2024-02-30 10:00", "2024-03-01T10:00:00+00:00"),  # lenient
        ("dd/MM/yy hh a", "09/02/24 12 am", "2024-02-09T00:00:00+00:00"),
        ("yyyy-MM-dd HH:mm a", "2024-02-09 05:30 PM", "2024-02-09T05:30:00+00:00"),
        ("yyyy-MM-dd kk:mm a", "2024-02-09 24:30 PM", "2024-02-09T00:30:00+00:00"),
        ("yyyy-MM-dd HH:hh", "2024-02-09 05:03", "2024-02-09T05:00:00+00:00"),
        ("yyyy-MM-dd hh:HH", "2024-02-09 05:03", "2024-02-09T03:00:00+00:00"),
        ("yyyy-MM-dd HH:hh a", "2024-02-09 05:03 PM", "2024-02-09T15:00:00+00:00"),
        ("yyyy-MM-dd KK:HH a", "2024-02-09 05:03 PM", "2024-02-09T17:00:00+00:00"),
        ("yyyy-MM-dd a hh:HH", "2024-02-09 PM 05:03", "2024-02-09T03:00:00+00:00"),
        ("yyyy-MM-dd a hh HH KK", "2024-02-09 PM 05 03 06", "2024-02-09T18:00:00+00:00"),
        ("yyyy-MM-dd hh a HH a", "2024-02-09 05 PM 03 AM", "2024-02-09T05:00:00+00:00"),
        ("yyyy-MM-dd hh:mm a", "2024-02-09 13:00 PM", "2024-02-10T01:00:00+00:00"),
        ("yyyy-MM-dd KK:mm a", "2024-02-09 12:00 AM", "2024-02-09T12:00:00+00:00"),
        ("yyyy-MM-dd kk:mm", "2024-02-09 25:00", "2024-02-10T01:00:00+00:00"),
        ("yyyy-MM-dd a", "2024-02-09 PM", "2024-02-09T12:00:00+00:00"),
        ("yyyy-MM-dd'T'HH:mm:ssXXX", "2024-02-09T15:04:05-01:30", "2024-02-09T16:34:05+00:00"),
        ("yyyyMMddHHmmssSSS", "20240209150405067", "2024-02-09T15:04:05.067000+00:00"),
        ("d MMM yyyy", "9 feb 2024 and more", "2024-02-09T00:00:00+00:00"),
        ("yyyy-DDD HH", "2024-060 10", "2024-02-29T10:00:00+00:00"),
        ("yyyyDDD", "2023366", "2024-01-01T00:00:00+00:00"),
        ("yyyy-DDD MM", "2024-060 05", "2024-02-29T00:00:00+00:00"),
        ("DDD yyyy-MM-dd", "060 2024-05-07", "2024-05-07T00:00:00+00:00"),  # the last day counts
        ("yyyy-MM-dd DDD", "2024-05-07 060", "2024-02-29T00:00:00+00:00"),
        ("yyyy-DDD dd", "2024-060 07", "2024-01-07T00:00:00+00:00"),
        ("MMM d HH:mm:ss yyyy", "Feb  1 10:00:00 2024", "2024-02-01T10:00:00+00:00"),
        ("EEE MMM dd HH:mm z yyyy", "Thu Feb  1 10:00 \tUTC 2024", "2024-02-01T10:00:00+00:00"),
        ("yyyy-MM-dd", " 2024-02-01", "2024-02-01T00:00:00+00:00"),
        ("dMMMyyyy", "15Jan2024", "2024-01-15T00:00:00+00:00"),
        ("ddMMMMyyyy", "1February2024", "2024-02-01T00:00:00+00:00"),
        ("yyyy-MM-dd HH z", "2024-02-09 12 GMT-08:00", "2024-02-09T20:00:00+00:00"),
        ("yyyy-MM-dd HH Z", "2024-02-09 12 GMT+1:30", "2024-02-09T10:30:00+00:00"),
        ("yyyy-MM-dd HH z", "2024-02-09 12 GMT and more", "2024-02-09T12:00:00+00:00"),
    ],
)
def test_times_are_read_as_java_reads_them(pattern: str, text: str, iso: str) -> None:
    """Times are parsed leniently as in Java, ignoring text after the pattern."""
    assert DatePattern(pattern).parse(text, NOW_MS).isoformat() == iso


@pytest.mark.parametrize(
    ("pattern", "text", "iso"),
    [
        ("yy-MM-dd", "26-11-28", "2026-11-28"),
        ("yy-MM-dd", "45-12-31", "2045-12-31"),
        ("yy-MM-dd", "46-11-28", "2046-11-28"),  # the century begins at 1946-11-28, 12:00
        ("yy-MM-dd", "46-11-29", "1946-11-29"),
        ("yy-MM-dd", "49-01-01", "1949-01-01"),
        ("yy-MM-dd", "99-01-01", "1999-01-01"),
        ("y-MM-dd", "24-01-01", "2024-01-01"),
        ("yyyy-MM-dd", "0024-01-01", "0024-01-01"),
        ("yy-MM-dd", "1824-01-01", "1824-01-01"),
    ],
)
def test_two_digit_years_are_near_the_present(pattern: str, text: str, iso: str) -> None:
    """A year of two digits is in the 100 years that begin 80 years before the present."""
    assert DatePattern(pattern).parse(text, NOW_MS).date().isoformat() == iso


def test_text_that_does_not_match_is_an_error() -> None:
    """Text that does not match is a DataError with the pattern, and an invalid pattern is a ConfigError."""
    with pytest.raises(DataError, match=r"\(x\).*\(yyyy\)"):
        DatePattern("yyyy").parse("x", NOW_MS)
    for zone in ("GMT+0100", "CET"):
        with pytest.raises(DataError, match=re.escape(zone)):
            DatePattern("HH:mm z").parse(f"12:00 {zone}", NOW_MS)
    for pattern in ("b", "'open", "'a''", "XXXX"):
        with pytest.raises(ConfigError):
            DatePattern(pattern)


@given(st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)))
def test_times_round_trip(at: dt.datetime) -> None:
    """A formatted time is parsed back to the ms."""
    pattern = DatePattern("yyyy-MM-dd'T'HH:mm:ss.SSSX")
    assert pattern.parse(pattern.format(at), NOW_MS) == at.replace(microsecond=at.microsecond // 1000 * 1000)


@pytest.mark.parametrize("value", [AT, LOCAL, 1704164645678, "2024-01-02 03:04:05.678"])
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("Timestamp", AT),
        ("unix", 1704164645678),
        ("string", "2024-01-02 03:04:05.678"),
        ("Date", AT.date()),
        ("Time", AT.time()),
    ],
)
def test_conversions_between_formats(value: Any, target: str, expected: Any) -> None:
    """Each format is converted to each other one."""
    assert applied(TimestampConverterValue, value, target_type=target, **FORMAT).value == expected


@pytest.mark.parametrize(("precision", "unix"), [("seconds", 1704164645), ("microseconds", 1704164645678000)])
def test_unix_numbers_have_a_precision(precision: str, unix: int) -> None:
    """The unix precision applies to reading and writing; precision below a ms is lost."""
    more = {"unix_precision": precision}
    assert applied(TimestampConverterValue, AT, target_type="unix", **more).value == unix
    read = applied(TimestampConverterValue, unix, target_type="Timestamp", **more).value
    assert read == (AT.replace(microsecond=0) if precision == "seconds" else AT)


def test_unix_numbers_before_1970_are_rounded_towards_zero() -> None:
    """A part of the unit is cut off, as in Java: also before 1970 the number moves towards zero."""
    at = dt.datetime(1969, 12, 31, 23, 59, 58, 500_000, dt.UTC)
    assert applied(TimestampConverterValue, at, target_type="unix", unix_precision="seconds").value == -1
    read = applied(TimestampConverterValue, -1500, target_type="Timestamp", unix_precision="microseconds").value
    assert read == dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, dt.UTC)


def test_one_field_is_converted() -> None:
    """One field and its schema are converted, and the others are unchanged."""
    assert applied(TimestampConverterValue, {"t": 0, "x": 1}, field="t", target_type="Date").value == {
        "t": dt.date(1970, 1, 1),
        "x": 1,
    }
    schema = Schema.struct("S", Field("t", timestamp_schema(optional=True)), Field("x", INT64))
    found = applied(TimestampConverterValue, {"t": AT, "x": 1}, schema, field="t", target_type="Date")
    assert found.value_schema == Schema.struct("S", Field("t", date_schema(optional=True)), Field("x", INT64))
    assert (
        applied(TimestampConverterValue, {"t": None, "x": 1}, schema, field="t", target_type="Date").value["t"] is None
    )


def test_a_struct_without_the_field_is_unchanged() -> None:
    """A struct without the field is passed on unchanged."""
    schema = Schema.struct("S", Field("x", INT64))
    found = applied(TimestampConverterValue, {"x": 1}, schema, field="t", target_type="Date")
    assert (found.value_schema, found.value) == (schema, {"x": 1})


def test_invalid_times_and_formats_are_errors() -> None:
    """Other types and unparsable text are DataErrors, and invalid formats are ConfigErrors."""
    for value, settings in ((1.5, FORMAT), ("soon", FORMAT), ("2024", {})):
        with pytest.raises(DataError):
            applied(TimestampConverterValue, value, target_type="unix", **settings)
    with pytest.raises(DataError, match="known timestamp type"):
        applied(TimestampConverterValue, True, BOOLEAN, target_type="unix")
    with pytest.raises(ConfigError, match="requires format"):
        configured(TimestampConverterValue, target_type="string")
    with pytest.raises(ConfigError, match="not a date pattern"):
        configured(TimestampConverterValue, target_type="string", format="QQ")


def test_two_digit_years_are_near_the_transforms_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """The century of a year of two digits depends on the transform's clock."""
    monkeypatch.setattr(TimestampConverterValue, "clock", ManualClock(4_102_444_800_000))  # the year 2100
    found = applied(TimestampConverterValue, "50-05-01", target_type="Date", format="yy-MM-dd")
    assert found.value == dt.date(2050, 5, 1)
