"""A clock that moves only when a test advances it."""

from __future__ import annotations


class ManualClock:
    """`penstock.shared.common.clock.Clock` for tests.

    >>> clock = ManualClock(1_000)
    >>> clock.advance(5)
    >>> clock.now_ms(), clock.monotonic_ms()
    (1005, 5)
    """

    def __init__(self, now_ms: int = 0) -> None:
        self._start = now_ms
        self._now = now_ms

    def now_ms(self) -> int:
        return self._now

    def monotonic_ms(self) -> int:
        return self._now - self._start

    def advance(self, ms: int) -> None:
        """Move forward by `ms`, which must not be negative."""
        if ms < 0:
            raise ValueError("a clock only moves forward")
        self._now += ms
