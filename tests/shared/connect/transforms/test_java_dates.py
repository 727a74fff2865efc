"""Times are formatted and parsed by Java's date patterns as in Java."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.transforms.java_dates import DatePattern

NOW_MS = round(dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC).timestamp() * 1000)
AT = dt.datetime(2024, 2, 9, 15, 4, 5, 67_000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("yyyyMMdd", "20240209"),
        ("d MMM yy", "9 Feb 24"),
        ("EEEE, d MMMM yyyy", "Friday, 9 February 2024"),
        ("hh:mm a", "03:04 PM"),
        ("HH:mm:ss.SSS Z", "15:04:05.067 +0000"),
        ("'it''s' HH 'o''clock'", "it's 15 o'clock"),
        ("D", "40"),
        ("yyyy-MM-dd'T'HH:mm:ssXXX", "2024-02-09T15:04:05Z"),
    ],
)
def test_times_are_written_as_java_writes_them(pattern: str, text: str) -> None:
    """Times are formatted as in Java, in UTC and English."""
    assert DatePattern(pattern).format(AT) == text


@pytest.mark.parametrize(
    ("pattern", "text", "iso"),
    [
        ("yyyy-MM-dd HH:mm", "2024-02-30 10:00", "2024-03-01T10:00:00+00:00"),  # lenient
        ("dd/MM/yy hh a", "09/02/24 12 am", "2024-02-09T00:00:00+00:00"),
        ("yyyy-MM-dd'T'HH:mm:ssXXX", "2024-02-09T15:04:05-01:30", "2024-02-09T16:34:05+00:00"),
        ("yyyyMMddHHmmssSSS", "20240209150405067", "2024-02-09T15:04:05.067000+00:00"),
        ("d MMM yyyy", "9 feb 2024 and more", "2024-02-09T00:00:00+00:00"),
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
    for pattern in ("b", "'open"):
        with pytest.raises(ConfigError):
            DatePattern(pattern)


@given(st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)))
def test_times_round_trip(at: dt.datetime) -> None:
    """A formatted time is parsed back to the ms."""
    pattern = DatePattern("yyyy-MM-dd'T'HH:mm:ss.SSSX")
    assert pattern.parse(pattern.format(at), NOW_MS) == at.replace(microsecond=at.microsecond // 1000 * 1000)
