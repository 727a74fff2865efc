"""A CSV file's times: text to ms since the epoch, and what can be said where that fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

EPOCH_FORMATS = {"epoch": 1_000.0, "epoch_s": 1_000.0, "epoch_ms": 1.0, "epoch_us": 0.001}
POSSIBLE = "epoch, epoch_ms, epoch_us or a strptime format such as '%d.%m.%Y %H:%M'"
GUESSED_FROM_MS = 946_684_800_000  # 2000: an earlier time is a sign that a guessed format is wrong
UNLIKELY_BEFORE_MS = 315_532_800_000  # 1980: where an epoch in too small a unit ends up
SHOWN_MAX = 40  # characters of a text that is no time

Parse = Callable[[str], int]


class NoTime(ValueError):
    """A text that is no event time; the message says why."""


def time_parser(time_format: str | None, latest_ms: int) -> Parse:
    """Text to ms since the epoch, by `epoch`, `epoch_ms`, `epoch_us`, a strptime format, or ISO 8601 by default.

    A time without zone is taken as UTC. The parser raises NoTime for text that does not fit, and for times that Kafka
    cannot hold (before 1970) or the ingest does not take (after `latest_ms`).

    >>> parse = time_parser("%d.%m.%Y %H:%M", 2_000_000_000_000)
    >>> parse("01.01.2013 10:15"), time_parser("epoch", 2_000_000_000_000)("1357035300.25")
    (1357035300000, 1357035300250)
    >>> parse("yesterday")
    Traceback (most recent call last):
        ...
    penstock.services.local.demo.event_time.NoTime: 'yesterday' does not fit --time-format '%d.%m.%Y %H:%M'
    """
    read = _reader(time_format)
    wanted = "is no ISO 8601 time" if time_format is None else f"does not fit --time-format {time_format!r}"

    def parse(text: str) -> int:
        try:
            at_ms = read(text)
        except (ValueError, OverflowError) as e:
            if "bad directive" in str(e) or "stray %" in str(e):
                raise NoTime(f"--time-format: {e}") from None
            raise NoTime(f"{text[:SHOWN_MAX]!r} {wanted}") from None
        if not 0 <= at_ms <= latest_ms:
            where = "before 1970" if at_ms < 0 else "in the future"
            said = "" if time_format is None else f" by --time-format {time_format!r}"
            raise NoTime(f"{text[:SHOWN_MAX]!r} is a time {where}{said}")
        return at_ms

    return parse


def formats_that_fit(text: str, latest_ms: int) -> list[str]:
    """What makes a time of this century of the text: `--time-format …`, or `ISO 8601`, which is the default.

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
    """What is wrong where an epoch format makes a time before 1980 of the text, and another makes one of this century.

    >>> better_unit("1714557600", "epoch_ms", 2_000_000_000_000)
    "'1714557600' is a time in 1970 by --time-format epoch_ms; --time-format epoch reads it"
    >>> better_unit("1714557600", "epoch", 2_000_000_000_000)
    """
    if time_format not in EPOCH_FORMATS:
        return None
    at_ms, fitting = time_parser(time_format, latest_ms)(text), formats_that_fit(text, latest_ms)
    if at_ms >= UNLIKELY_BEFORE_MS or not fitting:
        return None
    year = datetime.fromtimestamp(at_ms / 1_000, UTC).year
    return f"{text[:SHOWN_MAX]!r} is a time in {year} by --time-format {time_format}; {fitting[0]} reads it"


def _reader(time_format: str | None) -> Parse:
    factor = EPOCH_FORMATS.get(time_format or "")
    if factor is not None:
        return lambda text: round(float(text) * factor)

    def read(text: str) -> int:
        at = datetime.strptime(text, time_format) if time_format else datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)

    return read
