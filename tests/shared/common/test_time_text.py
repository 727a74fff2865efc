"""Points in time and durations as text."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.time_text import duration_ms, time_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1.001s", 1_001), ("1.1h", 3_960_000), ("0.07m", 4_200), ("4.35s", 4_350), ("1.0ms", 1), ("0.5 s", 500)],
)
def test_a_fraction_that_is_a_whole_number_of_ms(text: str, ms: int) -> None:
    """The product is exact: no error of a binary fraction makes it a fraction of a ms."""
    assert duration_ms(text) == ms


def test_large_durations() -> None:
    """A large number keeps all its digits, up to the most ms that Kafka has room for."""
    assert duration_ms("9007199254740993ms") == 2**53 + 1
    assert duration_ms(f"{2**63 - 1}ms") == 2**63 - 1


@pytest.mark.parametrize(
    "text", ["1.0001s", "0.5ms", "9" * 400 + "s", f"{2**63}ms", "-1s", "1e3s", "", "1." + "0" * 50]
)
def test_other_texts_are_rejected(text: str) -> None:
    """A fraction of a ms, a number beyond 64 bits, and any other text are no duration."""
    with pytest.raises(ConfigError, match="is not a duration"):
        duration_ms(text)


def test_a_date_without_hyphens_is_rejected() -> None:
    """ISO 8601's basic form of a date could also be a number of ms. Eight digits that are no date are ms."""
    with pytest.raises(ConfigError, match="2013-01-31"):
        time_ms("20130131")
    assert [time_ms(text) for text in ("20131301", "20130132", "02013013", "-20130131")] == [
        20_131_301,
        20_130_132,
        2_013_013,
        -20_130_131,
    ]
