"""Places in history as a person writes them."""

from __future__ import annotations

import pytest

from penstock.services.spark.backfill_inputs import require_in_order
from penstock.services.spark.settings import BackfillSettings, time_ms
from penstock.shared.common.errors import ConfigError

NEEDED = ["--application", "banks", "--lake", "lake", "--topology", "my:build"]


@pytest.mark.parametrize(
    ("text", "ms"),
    [("0", 0), ("2013-01-01T01:00:00+01:00", 1356998400000), ("2013-01-01 00:00:00.5", 1356998400500)],
)
def test_times(text: str, ms: int) -> None:
    """A time is a number of milliseconds or ISO 8601, UTC where it does not say otherwise."""
    assert time_ms(text) == ms


def test_what_is_no_time() -> None:
    """A date that is none is refused as it was written."""
    with pytest.raises(ConfigError, match="2013-13-01"):
        time_ms("2013-13-01")


@pytest.mark.parametrize("start", ["earliest", "0:7", "0:7,1:9", "1357002000000", "2013-01-01T00:00:00Z"])
def test_places_are_settings(start: str) -> None:
    """Every form of a place is taken as a setting."""
    assert BackfillSettings.load([*NEEDED, "--start", start], environ={}).start == start


def test_a_place_that_is_none_is_refused_by_name() -> None:
    """A wrong place ends the command before Spark starts."""
    with pytest.raises(ConfigError, match="start"):
        BackfillSettings.load([*NEEDED, "--start", "yesterday"], environ={})


@pytest.mark.parametrize(("start", "end"), [("2013-01-02", "2013-01-01"), ("7", "7"), ("2013-01-01", "1356998399999")])
def test_times_that_end_before_they_begin_are_refused(start: str, end: str) -> None:
    """However each is written, and before Spark starts."""
    with pytest.raises(ConfigError, match=f"end={end} must be after start={start}"):
        BackfillSettings.load([*NEEDED, "--start", start, "--end", end], environ={})
    assert BackfillSettings.load([*NEEDED, "--start", end, "--end", "2014-01-01"], environ={}).start == end


def test_offsets_that_end_before_they_begin_are_refused() -> None:
    """By partition; one from which nothing is taken is none of them."""
    with pytest.raises(ConfigError, match="start is after end: t-0 from offset 150 to 20, t-2 from offset 5 to 4"):
        require_in_order("t", {0: 150, 1: 9, 2: 5}, {0: 20, 1: 9, 2: 4})
    require_in_order("t", {0: 0, 1: 9}, {0: 20, 1: 9})
