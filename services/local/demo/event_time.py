"""A CSV file's times: text to ms since the epoch, and hints if that fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

EPOCH_FORMATS = {"epoch": 1_000.0, "epoch_s": 1_000.0, "epoch_ms": 1.0, "epoch_us": 0.001}
POSSIBLE = "epoch, epoch_ms, epoch_us or a strptime format such as '%d.%m.%Y %H:%M'"
GUESSED_FROM_MS = 946_684_800_000  # 2000: an earlier time indicates that a guessed format is wrong
UNLIKELY_BEFORE_MS = 315_532_800_000  # 1980: an epoch read in too small a unit ends before this
SHOWN_MAX = 40  # characters of an invalid time in an error

Parse = Callable[[str], int]


class NoTime(ValueError):
    """A text that is not an event time. The message has the reason."""


def time_parser(time_format: str | None, latest_ms: int) -> Parse:
    """Return the parser of text to ms since the epoch.

    The format is `epoch`, `epoch_ms`, `epoch_us`, a strptime format, or ISO 8601 by default. A time without zone is
    UTC. The parser raises NoTime for text that does not fit, and for times that Kafka cannot store (before 1970) or
    that the ingest rejects (after `latest_ms`).

    >>> parse = time_parser("%d.%m.%Y %H:%M", 2_000_000_000_000)
    >>> parse("01.01.2013 10:15"), time_parser("epoch", 2_000_000_000_000)("1357035300.25")
    (1357035300000, 1357035300250)
    >>> parse("yesterday")
    Traceback (most recent call last):
        ...
    penstock.services.local.demo.event_time.NoTime: 'yesterday' does not fit --time-format '%d.%m.%Y %H:%M'
    """
    read = _event_time_reader(time_format)
    wanted = "is not an ISO 8601 time" if time_format is None else f"does not fit --time-format {time_format!r}"

    def parse_event_time(text: str) -> int:
        try:
            at_ms = read(text)
        except (ValueError, OverflowError) as e:
            if "bad directive" in str(e) or "stray %" in str(e):
                raise NoTime(f"--time-format: {e}") from None
            raise NoTime(f"{text[:SHOWN_MAX]!r} {wanted}") from None
        if not 0 <= at_ms <= latest_ms:
            where = "before 1970" if at_ms < 0 else "in the future"
            by_format = "" if time_format is None else f" by --time-format {time_format!r}"
            raise NoTime(f"{text[:SHOWN_MAX]!r} is a time {where}{by_format}")
        return at_ms

    return parse_event_time


def formats_that_fit(text: str, latest_ms: int) -> list[str]:
    """Return the formats that parse the text as a time of this century: `--time-format …`, or `ISO 8601`, the default.

    >>> formats_that_fit("1357035300123", 2_000_000_000_000), formats_that_fit("yesterday", 2_000_000_000_000)
    (['--time-format epoch_ms'], [])
    """
    fitting = []
    for name in (None, "epoch", "epoch_ms", "epoch_us"):
        try:
            if time_parser(name, latest_ms)(text) >= GUESSED_FROM_MS:
                fitting.append(f"--time-format {name}" if name else "ISO 8601")
        except NoTime:
            continue
    return fitting


def better_unit(text: str, time_format: str | None, latest_ms: int) -> str | None:
    """Return a hint if an epoch format parses the text as a time before 1980, and another one as one of this century.

    >>> better_unit("1714557600", "epoch_ms", 2_000_000_000_000)
    "'1714557600' is a time in 1970 by --time-format epoch_ms; --time-format epoch reads it"
    >>> better_unit("1714557600", "epoch", 2_000_000_000_000)
    """
    if time_format not in EPOCH_FORMATS:
        return None
    at_ms = time_parser(time_format, latest_ms)(text)
    fitting = formats_that_fit(text, latest_ms)
    if at_ms >= UNLIKELY_BEFORE_MS or not fitting:
        return None
    year = datetime.fromtimestamp(at_ms / 1_000, UTC).year
    return f"{text[:SHOWN_MAX]!r} is a time in {year} by --time-format {time_format}; {fitting[0]} reads it"


def _event_time_reader(time_format: str | None) -> Parse:
    factor = EPOCH_FORMATS.get(time_format or "")
    if factor is not None:
        return lambda text: round(float(text) * factor)

    def read_event_time(text: str) -> int:
        at = datetime.strptime(text, time_format) if time_format else datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)

    return read_event_time
