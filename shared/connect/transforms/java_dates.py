"""Java's date patterns (SimpleDateFormat), for writing and reading times in UTC.

>>> pattern = DatePattern("yyyy-MM-dd'T'HH:mm:ss.SSSX")
>>> at = dt.datetime(2024, 2, 29, 13, 5, 6, 789_000, tzinfo=dt.UTC)
>>> pattern.format(at), pattern.parse("2024-02-29T15:05:06.789+02", now_ms=0) == at
('2024-02-29T13:05:06.789Z', True)
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping

from penstock.shared.common.errors import ConfigError, DataError

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TOKEN = re.compile(r"'((?=')|(?:[^']|'')+)'|([a-zA-Z])\2*|([^a-zA-Z']+)")

_NUMBERS: dict[str, Callable[[dt.datetime], int]] = {
    "M": lambda at: at.month,
    "d": lambda at: at.day,
    "D": lambda at: at.timetuple().tm_yday,
    "H": lambda at: at.hour,
    "k": lambda at: at.hour or 24,
    "K": lambda at: at.hour % 12,
    "h": lambda at: at.hour % 12 or 12,
    "m": lambda at: at.minute,
    "s": lambda at: at.second,
    "S": lambda at: at.microsecond // 1000,
    "u": lambda at: at.isoweekday(),
}
ZONES = "zZX"
CENTURY_BEFORE_YEARS = 80
"""How many years before the present the century of two-digit years begins, as in SimpleDateFormat."""


class DatePattern:
    """One Java date pattern. `Y` is the calendar year, as `y`.

    Raises ConfigError for an open quote, for more than three X in a row, and for any letter that is not supported, such
    as Java's G, L, w, W and F.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        # A token is (letter, count, ""), or ("", 0, text) for literal text.
        self._tokens: list[tuple[str, int, str]] = []
        at = 0
        while at < len(pattern):
            match = TOKEN.match(pattern, at)
            if match is None:
                raise ConfigError(f"{pattern!r} is not a date pattern: an open quote")
            at = match.end()
            if match[2]:
                if match[2] not in _NUMBERS and match[2] not in "yYEa" + ZONES:
                    raise ConfigError(f"{pattern!r} is not a date pattern: Illegal pattern character '{match[2]}'")
                if match[2] == "X" and len(match[0]) > 3:
                    raise ConfigError(f"{pattern!r} is not a date pattern: more than three X in a row")
                self._tokens.append((match[2], len(match[0]), ""))
            else:
                text = match[3] if match[1] is None else (match[1].replace("''", "'") or "'")
                self._tokens.append(("", 0, text))
        groups = [self._regex_group_of_token(index) for index in range(len(self._tokens))]
        self._regex = re.compile("".join(groups), re.IGNORECASE)

    def __repr__(self) -> str:
        return f"<DatePattern {self.pattern}>"

    def format(self, at: dt.datetime) -> str:
        """Return the time as text, in UTC."""
        at = (at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)
        return "".join(
            _format_date_letter(letter, count, at) if letter else text for letter, count, text in self._tokens
        )

    def parse(self, text: str, now_ms: int) -> dt.datetime:
        """Return the time at the start of a text. Raises DataError if the text does not match the pattern.

        A zone must be Z, UTC, GMT or an offset such as +01:00 or GMT+01:00. Names such as CET do not match.

        If the pattern has `y` or `yy` and the text's year has two digits, the time is in the 100 years that begin 80
        years before `now_ms`, as in Java.
        """
        match = self._regex.match(text)
        if match is None:
            raise self._parse_error(text)
        found = {"y": 1970, "M": 1, "d": 1, "m": 0, "s": 0, "S": 0}
        # In the order in which the text has them: a field that is given again comes last.
        hours: list[tuple[str, int]] = []
        offset = dt.timedelta(0)
        day_of_year: int | None = None
        century_start: dt.datetime | None = None
        try:
            # 1. Read each token's number or name.
            for index, (letter, count, _) in enumerate(self._tokens):
                value = match[f"g{index}"] if letter else ""
                if letter in ("y", "Y"):
                    found["y"] = int(value)
                    # As in Java, only a year of exactly two digits is within the 100 years; "3" is the year 3.
                    if count <= 2 and len(value) == 2 and value.isdigit():
                        century_start = _century_start(now_ms)
                        found["y"] += century_start.year - century_start.year % 100
                elif letter == "M" and count >= 3:
                    found["M"] = [month[:3].lower() for month in MONTHS].index(value[:3].lower()) + 1
                elif letter == "a":
                    hours.append(("a", 12 * (value.lower() == "pm")))
                elif letter and letter in ZONES:
                    offset = _parse_utc_offset(value)
                # The hour of midnight is 24 with k, 12 with h, and 0 with H and K.
                elif letter in ("H", "k"):
                    hours.append(("H", 0 if (letter, int(value)) == ("k", 24) else int(value)))
                elif letter in ("h", "K"):
                    hours.append(("h", 0 if (letter, int(value)) == ("h", 12) else int(value)))
                elif letter == "D":
                    day_of_year = int(value)
                elif letter in found:
                    found[letter] = int(value)
                    if letter == "d":
                        # If the pattern has both a day of the month and a day of the year, the last one counts.
                        day_of_year = None
            # 2. The last value of each kind of hour counts. The hour of the day (H, k) counts before that of the half
            # day, unless both the hour of the half day and am or pm are given, and one of these is last. A day of the
            # year counts from January.
            last = dict(hours)
            if "H" not in last or ({"h", "a"} <= last.keys() and hours[-1][0] != "H"):
                found["H"] = last.get("h", 0) + last.get("a", 0)
            else:
                found["H"] = last["H"]
            if day_of_year is not None:
                found |= {"M": 1, "d": day_of_year}
            # 3. Convert to UTC. A time before the 100 years of two-digit years is moved by 100 years.
            at = _time_of_numbers(found) - offset
            if century_start is not None and at < century_start:
                at = _time_of_numbers({**found, "y": found["y"] + 100}) - offset
            return at
        except (ValueError, OverflowError):
            raise self._parse_error(text) from None

    def _parse_error(self, text: str) -> DataError:
        return DataError(f"Could not parse timestamp: value ({text}) does not match pattern ({self.pattern})")

    def _regex_group_of_token(self, index: int) -> str:
        letter, count, text = self._tokens[index]
        if not letter:
            return re.escape(text)
        following, following_count, _ = self._tokens[index + 1] if index + 1 < len(self._tokens) else ("", 0, "")
        digits_follow = following in (*_NUMBERS, "y", "Y") and (following != "M" or following_count < 3)
        # As in Java, blanks before a field are skipped.
        group = f"[ \\t]*(?P<g{index}>"
        if letter == "M" and count >= 3:
            return f"{group}{'|'.join(f'{month}|{month[:3]}' for month in MONTHS)})"
        if letter == "E":
            return f"{group}{'|'.join(f'{day}|{day[:3]}' for day in DAYS)})"
        if letter == "a":
            return f"{group}am|pm)"
        if letter in ZONES:
            return f"{group}GMT[+-]\\d?\\d:\\d\\d|GMT(?![+-])|Z|UTC|[+-]\\d\\d(?::?\\d\\d)?)"
        return f"{group}\\d{{{count}}})" if digits_follow else f"{group}-?\\d+)"


def _format_date_letter(letter: str, count: int, at: dt.datetime) -> str:
    if letter in ("y", "Y"):
        return f"{at.year % 100:02d}" if count == 2 else f"{at.year:0{count}d}"
    if letter == "M" and count >= 3:
        return MONTHS[at.month - 1] if count > 3 else MONTHS[at.month - 1][:3]
    if letter == "E":
        return DAYS[at.weekday()] if count > 3 else DAYS[at.weekday()][:3]
    if letter == "a":
        return "PM" if at.hour >= 12 else "AM"
    if letter in ZONES:
        return {"X": "Z", "Z": "+0000", "z": "UTC"}[letter]
    return f"{_NUMBERS[letter](at):0{count}d}"


def _century_start(now_ms: int) -> dt.datetime:
    now = dt.datetime.fromtimestamp(now_ms / 1000, dt.UTC)
    return now.replace(year=now.year - CENTURY_BEFORE_YEARS)


def _time_of_numbers(found: Mapping[str, int]) -> dt.datetime:
    """Return the time in UTC. Lenient, as in Java: the 31st of April is the 1st of May."""
    year = found["y"] + (found["M"] - 1) // 12
    month = (found["M"] - 1) % 12 + 1
    return (
        dt.datetime(year, month, 1, tzinfo=dt.UTC)
        + dt.timedelta(days=found["d"] - 1, hours=found["H"], minutes=found["m"], seconds=found["s"])
        + dt.timedelta(milliseconds=found["S"])
    )


def _parse_utc_offset(text: str) -> dt.timedelta:
    offset = text.upper().removeprefix("GMT")
    if offset in ("", "Z", "UTC"):
        return dt.timedelta(0)
    digits = offset[1:].replace(":", "")
    hours, minutes = (digits[:-2], digits[-2:]) if len(digits) > 2 else (digits, 0)
    from_utc = dt.timedelta(hours=int(hours), minutes=int(minutes))
    return -from_utc if offset[0] == "-" else from_utc
