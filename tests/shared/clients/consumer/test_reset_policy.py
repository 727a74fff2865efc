"""`auto_offset_reset` as text."""

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
    """ISO 8601 as Java's consumer takes it, or a duration as elsewhere; it is counted back from now."""
    policy = ResetPolicy.parse(f"by_duration:{text}")
    assert (policy.duration_ms, policy.spec(100_000_000_000), policy.is_none) == (ms, 100_000_000_000 - ms, False)


def test_names() -> None:
    """The other policies are looked up by their names; `none` is no policy."""
    assert [ResetPolicy.parse(name).spec(5) for name in ("earliest", "latest")] == ["earliest", "latest"]
    assert [ResetPolicy.parse(name).is_none for name in ("none", "latest")] == [True, False]


def test_longer_than_time() -> None:
    """A duration from before 1970 leads to the first record of all."""
    assert ResetPolicy.parse("by_duration:P100D").spec(5) == 0


@pytest.mark.parametrize(
    "text",
    ["", "Earliest", "by_duration:", "by_duration:P", "by_duration:PT", "by_duration:P1Y", "by_duration:-PT1S", "7d"],
)
def test_what_is_none(text: str) -> None:
    """Anything else is refused with what was written."""
    with pytest.raises(ConfigError):
        ResetPolicy.parse(text)
