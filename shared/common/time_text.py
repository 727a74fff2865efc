"""Points in time and durations as people write them.

>>> time_ms("1357002000000"), time_ms("-5"), time_ms("2013-01-01"), time_ms("2013-01-01T01:00+01:00")
(1357002000000, -5, 1356998400000, 1356998400000)
>>> time_ms("yesterday")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: 'yesterday' is not a valid time: write ISO 8601, such as 2013-01-31T05:00 (UTC), or ms...
>>> time_ms("99999999999999999999")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: '99999999999999999999' is not a valid time: more ms than Kafka has room for (from -...
>>> duration_ms("30m"), duration_ms("1.5s"), duration_ms("250ms"), duration_ms("2d")
(1800000, 1500, 250, 172800000)
>>> duration_ms("half an hour")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: 'half an hour' is not a duration: write a number and ms, s, m, h or d, such as 30m
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Literal

from penstock.shared.common.errors import ConfigError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
# As a number of ms, such a date would be within the first day of 1970.
_BASIC_DATE = re.compile(r"([12]\d{3})(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])", re.ASCII)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIME_MS_MIN = -(2**63)
TIME_MS_MAX = 2**63 - 1
# A number with more characters is rejected. Python cannot parse one with more than 4300 digits.
DIGITS_MAX = 40
# An error shows at most this many characters of a wrong number or duration.
SHOWN_MAX = 40

TimeUnit = Literal["s", "ms", "us", "ns"]
"""The unit of a number since the epoch."""


def utc_text(ms: int) -> str:
    """A time in the form that `time_ms` reads: ISO 8601 in UTC, or ms if it is outside Python's calendar.

    >>> utc_text(1_500), utc_text(10**15), time_ms(utc_text(-1))
    ('1970-01-01T00:00:01.500', '1000000000000000', -1)
    """
    try:
        return (EPOCH + timedelta(milliseconds=ms)).replace(tzinfo=None).isoformat(timespec="milliseconds")
    except OverflowError:
        return str(ms)


def time_ms(text: str) -> int:
    """Ms since the epoch, from a number of ms or an ISO 8601 time (UTC by default).

    Raises ConfigError for any other text, for a number beyond 64 bits, and for a date without hyphens (`20130131`).
    """
    if date := _BASIC_DATE.fullmatch(text):
        raise ConfigError(f"{text!r} is not a valid time: write {'-'.join(date.groups())} if it is a date")
    if text.removeprefix("-").isdecimal():
        ms = int(text) if len(text) <= DIGITS_MAX else TIME_MS_MAX + 1
        if not TIME_MS_MIN <= ms <= TIME_MS_MAX:
            message = f"more ms than Kafka has room for (from {TIME_MS_MIN} to {TIME_MS_MAX})"
            raise ConfigError(f"{text[:SHOWN_MAX]!r} is not a valid time: {message}")
        return ms
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        message = "write ISO 8601, such as 2013-01-31T05:00 (UTC), or ms since the epoch"
        raise ConfigError(f"{text!r} is not a valid time: {message}") from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def require_time(text: str) -> str:
    """Return the text of a record's time unchanged. Raises ValueError if it is invalid or before 1970."""
    try:
        ms = time_ms(text)
    except ConfigError as e:
        raise ValueError(str(e)) from None
    if ms < 0:
        raise ValueError("must not be before 1970: Kafka has no negative timestamps")
    return text


def duration_ms(text: str) -> int:
    """A duration in ms. Raises ConfigError if the text is not a duration, not a whole number of ms, or more ms than
    Kafka has room for.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is not None and len(match[1]) <= DIGITS_MAX:
        # Exact: as floats, 1.1 hours would not be a whole number of ms.
        ms = Fraction(match[1]) * _UNITS_MS[match[2]]
        if ms.denominator == 1 and ms <= TIME_MS_MAX:
            return int(ms)
    raise ConfigError(f"{text[:SHOWN_MAX]!r} is not a duration: write a number and ms, s, m, h or d, such as 30m")
