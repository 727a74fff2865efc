"""Points in time as people write them.

>>> time_ms("1357002000000"), time_ms("-5"), time_ms("2013-01-01"), time_ms("2013-01-01T01:00+01:00")
(1357002000000, -5, 1356998400000, 1356998400000)
>>> time_ms("yesterday")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
shared.common.errors.ConfigError: 'yesterday' is no time: write ISO 8601, such as 2013-01-31T05:00 (UTC), or ms...
"""

from __future__ import annotations

from datetime import UTC, datetime

from shared.common.errors import ConfigError


def time_ms(text: str) -> int:
    """Ms since the epoch, of a number or of ISO 8601 (UTC where it does not say otherwise); ConfigError for neither."""
    if text.removeprefix("-").isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        said = "write ISO 8601, such as 2013-01-31T05:00 (UTC), or ms since the epoch"
        raise ConfigError(f"{text!r} is no time: {said}") from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
