"""Decides when a repeated failure is logged: at once, then after waits that double, and once more when it is over.

>>> failure = RepeatedFailure()
>>> [failure.failed(at_ms) for at_ms in (0, 100, 9_999)]
[{}, None, None]
>>> failure.failed(10_000), failure.failed(20_000), failure.failed(30_000)
({'failures': 4, 'for_ms': 10000}, None, {'failures': 6, 'for_ms': 30000})
>>> failure.succeeded(31_000), failure.succeeded(31_100)
({'failures': 6, 'for_ms': 31000}, None)
"""

from __future__ import annotations

from penstock.shared.common.backoff import ExponentialBackoff

LOG_BACKOFF = ExponentialBackoff(10_000, 300_000)
"""The waits between two lines. A failure that ends within the first wait makes two lines, at its start and at its end.
One that lasts for hours still appears near the end of the log."""


class RepeatedFailure:
    """Counts the failures in a row of one operation that its caller retries, and decides which ones to log.

    All times are from one monotonic clock.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._lines = 0
        self._since_ms = 0
        self._next_ms = 0

    def __repr__(self) -> str:
        return f"<RepeatedFailure {self._failures} in a row>"

    @property
    def failures(self) -> int:
        """The number of failures in a row."""
        return self._failures

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def failed(self, now_ms: int) -> dict[str, int] | None:
        """Record a failure. Returns the fields to log, or None if this failure is not to be logged.

        The first failure in a row is logged without fields (`{}`). The fields of later ones are the number of failures
        in a row, and the time since the first.
        """
        self._failures += 1
        if self._failures == 1:
            self._lines = 0
            self._since_ms = now_ms
        elif now_ms < self._next_ms:
            return None
        self._lines += 1
        self._next_ms = now_ms + int(LOG_BACKOFF.wait_ms(self._lines))
        return {"failures": self._failures, "for_ms": now_ms - self._since_ms} if self._failures > 1 else {}

    def succeeded(self, now_ms: int) -> dict[str, int] | None:
        """Record a success. Returns the fields to log, or None if the previous attempt did not fail."""
        failures = self._failures
        self._failures = 0
        return {"failures": failures, "for_ms": now_ms - self._since_ms} if failures else None
