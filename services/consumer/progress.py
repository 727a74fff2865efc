"""Detects a stuck runner: a partition has lag, and none of its records was finished for longer than the limit.

Each partition is checked separately, because progress in one does not mean progress in another. A member that is
outside the group for longer than the limit is stuck too.

>>> watch = ProgressWatch(stuck_after_ms=1_000)
>>> watch.observe(500, lags={"clicks-0": 40, "clicks-1": 9}, finished={"clicks-0": 3})
>>> watch.observe(1_400, lags={"clicks-0": 40, "clicks-1": 5}, finished={"clicks-0": 3, "clicks-1": 4})
>>> watch.trouble(1_500), watch.trouble(1_501)
('', 'clicks-0: 40 records behind, none finished for 1001 ms')
>>> watch.observe(1_600, lags={"clicks-0": 0}, finished={"clicks-0": 3})             # nothing to do is not stuck
>>> watch.trouble(9_999)
''
>>> watch.trouble(9_999, rebalance_ms=1_001)
'not in the group: its rebalance takes 1001 ms so far'
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Part:
    lag: int
    finished: int
    well_ms: int


class ProgressWatch:
    """Observes the lag and the number of finished records of each partition, and reports stuck partitions."""

    def __init__(self, stuck_after_ms: int) -> None:
        self.stuck_after_ms = stuck_after_ms
        self._parts: dict[Hashable, _Part] = {}

    @property
    def lag(self) -> int:
        """The sum of the partitions' lags, in records."""
        return sum(part.lag for part in self._parts.values())

    def observe(self, now_ms: int, lags: Mapping[Hashable, int], finished: Mapping[Hashable, int]) -> None:
        """Take the current values of all owned partitions.

        `lags` are the numbers of unfinished records, `finished` the total numbers of finished ones. A partition that
        `lags` does not name is no longer owned.
        """
        parts = {}
        for key, lag in lags.items():
            count, before = finished.get(key, 0), self._parts.get(key)
            waits = before is not None and before.lag > 0 and lag > 0 and before.finished == count
            parts[key] = _Part(lag, count, before.well_ms if before is not None and waits else now_ms)
        self._parts = parts

    def without_progress_ms(self, now_ms: int) -> int:
        """Returns the longest time in ms that a partition has had lag without a finished record."""
        return max((now_ms - part.well_ms for part in self._parts.values() if part.lag), default=0)

    def stuck(self, now_ms: int) -> bool:
        return self.without_progress_ms(now_ms) > self.stuck_after_ms

    def trouble(self, now_ms: int, rebalance_ms: float = 0) -> str:
        """Returns the reason why the runner is stuck, "" if it is not.

        `rebalance_ms` is the time since the member began to join the group.
        """
        if rebalance_ms > self.stuck_after_ms:
            return f"not in the group: its rebalance takes {rebalance_ms:.0f} ms so far"
        stuck = [
            f"{key}: {part.lag} records behind, none finished for {now_ms - part.well_ms} ms"
            for key, part in self._parts.items()
            if part.lag and now_ms - part.well_ms > self.stuck_after_ms
        ]
        return "; ".join(sorted(stuck))

    def __repr__(self) -> str:
        return f"ProgressWatch(lag={self.lag}, {len(self._parts)} partitions)"
