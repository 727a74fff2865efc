"""Durations as people write them.

>>> parse_ms("30m"), parse_ms("1.5s"), parse_ms("250ms"), parse_ms("2d")
(1800000, 1500, 250, 172800000)
>>> parse_ms("half an hour")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: 'half an hour' is not a duration: write a number and ms, s, m, h or d, such as 30m
"""

from __future__ import annotations

import re

from penstock.shared.common.errors import ConfigError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def parse_ms(text: str) -> int:
    """A duration in ms. Raises ConfigError if the text is not a duration, or not a whole number of ms."""
    match = _DURATION.fullmatch(text.strip())
    ms = float(match[1]) * _UNITS_MS[match[2]] if match else 0.5
    if ms != int(ms):
        raise ConfigError(f"{text!r} is not a duration: write a number and ms, s, m, h or d, such as 30m")
    return int(ms)
