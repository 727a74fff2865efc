"""Durations as users pass them: a `timedelta`, or a whole number of ms."""

from __future__ import annotations

import math
from datetime import timedelta

from penstock.shared.common.errors import ConfigError


def duration_ms(interval: timedelta | int, argument: str = "a duration", least: int = 1) -> int:
    """Return a duration as whole ms. Raises ConfigError, naming the argument, if it is invalid or below `least` ms.

    >>> duration_ms(timedelta(minutes=30)), duration_ms(5.0)
    (1800000, 5)
    >>> duration_ms("30m", "gap")
    Traceback (most recent call last):
        ...
    penstock.errors.ConfigError: gap must be a timedelta or a whole number of ms and at least 1, got '30m'
    """
    ms = interval / timedelta(milliseconds=1) if isinstance(interval, timedelta) else interval
    is_number = isinstance(ms, int | float) and not isinstance(ms, bool) and math.isfinite(ms)
    if not is_number or ms != int(ms) or ms < least:
        message = f"{argument} must be a timedelta or a whole number of ms and at least {least}"
        raise ConfigError(f"{message}, got {interval!r}")
    return int(ms)
