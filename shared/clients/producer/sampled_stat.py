"""The rate, average and maximum of recent values, for the table of the producer's metrics (Java: `SampledStat`)."""

from __future__ import annotations

from collections import deque

ELAPSED_MS_MIN = 1_000
"""The shortest time that a rate is computed over. Over less it would be mostly chance."""


class _Window:
    __slots__ = ("count", "highest", "start_ms", "total")

    def __init__(self, start_ms: float) -> None:
        self.start_ms = start_ms
        self.count = 0
        self.total = 0.0
        self.highest = 0.0


class SampledStat:
    """Recent values of a metric: their rate, average and maximum.

    Time is divided into windows of `window_ms`. The newest `windows` of them are kept; an older one is dropped as a
    whole. With two windows of 30 s the results cover the last 30 to 60 s:

    >>> sizes = SampledStat(window_ms=30_000, windows=2)
    >>> for now_ms, size in ((0, 100), (20_000, 300), (40_000, 500)):
    ...     sizes.record(size, now_ms)
    >>> sizes.average(50_000), sizes.highest(50_000), sizes.per_second(50_000)
    (300.0, 500.0, 18.0)
    >>> sizes.average(61_000), sizes.highest(200_000)
    (500.0, 0.0)
    """

    def __init__(self, window_ms: float, windows: int) -> None:
        self._window_ms = window_ms
        self._count = windows
        self._windows: deque[_Window] = deque()

    def __repr__(self) -> str:
        return f"<SampledStat {sum(window.count for window in self._windows)} values>"

    def record(self, value: float, now_ms: float) -> None:
        """Record a value in the newest window."""
        windows = self._windows
        if not windows or now_ms >= windows[-1].start_ms + self._window_ms:
            self._drop_expired_windows(now_ms)
            windows.append(_Window(now_ms))
        window = windows[-1]
        window.count += 1
        window.total += value
        window.highest = max(window.highest, float(value))

    def average(self, now_ms: float) -> float:
        """The average of the recent values; 0 if there are none."""
        self._drop_expired_windows(now_ms)
        count = sum(window.count for window in self._windows)
        return self._sum_of_windows() / count if count else 0.0

    def highest(self, now_ms: float) -> float:
        """The maximum of the recent values; 0 if there are none."""
        self._drop_expired_windows(now_ms)
        return max((window.highest for window in self._windows), default=0.0)

    def per_second(self, now_ms: float) -> float:
        """The sum of the recent values, divided by the seconds since the first of them."""
        self._drop_expired_windows(now_ms)
        if not self._windows:
            return 0.0
        return self._sum_of_windows() * 1_000 / max(now_ms - self._windows[0].start_ms, ELAPSED_MS_MIN)

    def _sum_of_windows(self) -> float:
        return sum(window.total for window in self._windows)

    def _drop_expired_windows(self, now_ms: float) -> None:
        while self._windows and now_ms - self._windows[0].start_ms >= self._window_ms * self._count:
            self._windows.popleft()
