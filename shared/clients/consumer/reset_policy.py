"""The reset policy (`auto_offset_reset`): where a consumer begins if it has no position, or one that is not in the log.

>>> ResetPolicy.parse("earliest").spec(now_ms=0)
'earliest'
>>> ResetPolicy.parse("by_duration:PT1H30M").spec(now_ms=10_000_000)
4600000
>>> ResetPolicy.parse("by_duration:7d").duration_ms
604800000
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.time_text import duration_ms

RESET_POLICIES = ("earliest", "latest", "none")
BY_DURATION = "by_duration:"
_ISO = re.compile(
    r"P(?:(?P<d>\d+)D)?(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d{1,3})?)S)?)?", re.IGNORECASE
)
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}


@dataclass(frozen=True, slots=True)
class ResetPolicy:
    """One of Kafka's reset policies; `duration_ms` is set under `by_duration` alone."""

    name: str
    duration_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResetPolicy:
        """Parse a reset policy: `earliest`, `latest`, `none`, or `by_duration:` with a duration.

        The duration is in ISO 8601 (`P7D`, `PT1H30M`), or like `90m`.

        Raises ConfigError for anything else. `by_duration` is KIP-1106.
        """
        if text in RESET_POLICIES:
            return cls(text)
        if not text.startswith(BY_DURATION):
            raise ConfigError(f"{text!r} is none of {', '.join(RESET_POLICIES)} and {BY_DURATION}<duration>")
        return cls("by_duration", _duration_ms(text.removeprefix(BY_DURATION)))

    @property
    def is_none(self) -> bool:
        """Whether the policy finds no position, so that a missing one is an error."""
        return self.name == "none"

    def spec(self, now_ms: int) -> str | int:
        """Return what the policy looks up: `earliest`, `latest`, or the first record at or after this time in ms."""
        return self.name if self.duration_ms is None else max(0, now_ms - self.duration_ms)


def _duration_ms(text: str) -> int:
    match = _ISO.fullmatch(text)
    if match is None or not any(match.groupdict().values()):
        if text[:1] in ("P", "p"):
            raise ConfigError(f"{text!r} is not a duration: write one such as P7D, PT1H30M or 90m")
        return duration_ms(text)
    return sum(round(float(n) * _UNITS_MS[unit]) for unit, n in match.groupdict().items() if n)


EARLIEST = ResetPolicy("earliest")
LATEST = ResetPolicy("latest")
