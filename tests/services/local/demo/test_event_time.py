"""Parsing of text as event time."""

from __future__ import annotations

import pytest

from penstock.services.local.demo.event_time import NoTime, better_unit, formats_that_fit, time_parser

AT_MS = 1_714_557_600_000
LATEST_MS = 2_000_000_000_000


@pytest.mark.parametrize(
    ("time_format", "text", "expected"),
    [
        (None, "2024-05-01 10:00:00", AT_MS),
        ("epoch", "1714557600.5", AT_MS + 500),
        ("epoch_ms", "1714557600000", AT_MS),
        ("epoch_us", "1714557600000000", AT_MS),
        ("%d/%m/%y %H:%M %z", "01/05/24 12:00 +0200", AT_MS),
    ],
)
def test_time_formats(time_format: str | None, text: str, expected: int) -> None:
    """Epochs, strptime formats and ISO 8601 are converted to ms since the epoch; without a zone the time is UTC."""
    assert time_parser(time_format, LATEST_MS)(text) == expected


@pytest.mark.parametrize(
    ("time_format", "text", "message"),
    [
        (None, "", "'' .*ISO 8601"),
        ("epoch", "nan", "'nan'.*--time-format 'epoch'"),
        ("epoch", "inf", "does not fit"),
        ("%H:%M", "10:00", "before 1970 by --time-format '%H:%M'"),
        (None, "2999-01-01", "in the future"),
        ("%", "x", "--time-format: stray %"),
        (None, "x" * 1_000, "'x{40}' is no"),
    ],
)
def test_an_invalid_time_is_an_error_with_its_reason(time_format: str | None, text: str, message: str) -> None:
    """The error has the shortened text and the reason."""
    with pytest.raises(NoTime, match=message):
        time_parser(time_format, LATEST_MS)(text)


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ("2024-05-01", ["ISO 8601"]),
        ("1714557600", ["--time-format epoch"]),
        ("1714557600000", ["--time-format epoch_ms"]),
        ("1714557600000000", ["--time-format epoch_us"]),
        ("1.5.24", []),
    ],
)
def test_formats_that_fit(text: str, fitting: list[str]) -> None:
    """Only formats that make the text a time of this century are suggested."""
    assert formats_that_fit(text, LATEST_MS) == fitting


@pytest.mark.parametrize(
    ("text", "time_format", "message"),
    [
        (
            "1714557600",
            "epoch_ms",
            "'1714557600' is a time in 1970 by --time-format epoch_ms; --time-format epoch reads it",
        ),
        ("1714557600000", "epoch_us", "--time-format epoch_ms reads it"),
        ("1714557600", "epoch_s", None),
        ("157766400000", "epoch_ms", None),
        ("1970-01-20", None, None),
    ],
)
def test_an_epoch_in_the_wrong_unit_is_detected(text: str, time_format: str | None, message: str | None) -> None:
    """Seconds read as milliseconds, which are times in January 1970, have a suggestion; true
    times of the seventies have none.
    """
    found = better_unit(text, time_format, LATEST_MS)
    assert found is message is None or (found is not None and message is not None and message in found)
