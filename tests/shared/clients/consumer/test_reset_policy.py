"""Reset policies are parsed from `auto_offset_reset`."""

from __future__ import annotations

import pytest

from penstock.shared.clients.consumer.reset_policy import ResetPolicy
from penstock.shared.common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("P7D", 604_800_000),
        ("PT1H30M", 5_400_000),
        ("P1DT2H3M4.5S", 93_784_500),
        ("pt0.25s", 250),
        ("90m", 5_400_000),
        ("250ms", 250),
    ],
)
def test_durations(text: str, ms: int) -> None:
    """A duration is ISO 8601, as in Java, or in the settings' own notation. It is subtracted from the current time."""
    policy = ResetPolicy.parse(f"by_duration:{text}")
    assert (policy.duration_ms, policy.spec(100_000_000_000), policy.is_none) == (ms, 100_000_000_000 - ms, False)


def test_names() -> None:
    """The other policies are found by name. `none` means no policy."""
    assert [ResetPolicy.parse(name).spec(5) for name in ("earliest", "latest")] == ["earliest", "latest"]
    assert [ResetPolicy.parse(name).is_none for name in ("none", "latest")] == [True, False]


def test_longer_than_time() -> None:
    """A duration that reaches before 1970 leads to timestamp 0."""
    assert ResetPolicy.parse("by_duration:P100D").spec(5) == 0


@pytest.mark.parametrize(
    "text",
    ["", "Earliest", "by_duration:", "by_duration:P", "by_duration:PT", "by_duration:P1Y", "by_duration:-PT1S", "7d"],
)
def test_invalid_policies_are_rejected(text: str) -> None:
    """Any other text is rejected with its value."""
    with pytest.raises(ConfigError):
        ResetPolicy.parse(text)
