"""Detects that the consumer is stuck, for its health check: no record is finished, or it is not in the group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Progress:
    """Records that wait, the total number of finished ones, and when something was finished or nothing waited."""

    lag: int
    finished: int
    well_ms: int

    def next(self, lag: int, finished: int, now_ms: int) -> _Progress:
        waits = self.lag > 0 and lag > 0 and self.finished == finished
        return _Progress(lag, finished, self.well_ms if waits else now_ms)


_NO_PROGRESS = _Progress(0, 0, 0)


class ProgressWatch:
    """Detects a consumer that is stuck for longer than `stuck_after_ms`, in one of three ways:

    1. A partition has lag, and none of its records was finished.
    2. Under exactly-once, finished records wait for the commit of their transaction, and no other record was finished.
    3. A rebalance has not ended.

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

    def __init__(self, stuck_after_ms: int) -> None:
        self.stuck_after_ms = stuck_after_ms
        # By partition, because progress in one does not mean progress in another.
        self._partitions: dict[Hashable, _Progress] = {}
        self._uncommitted = _NO_PROGRESS

    @property
    def lag(self) -> int:
        """The sum of the watched partitions' lags and of the uncommitted records."""
        return sum(partition.lag for partition in self._partitions.values()) + self._uncommitted.lag

    def observe(self, now_ms: int, lags: Mapping[Hashable, int], finished: Mapping[Hashable, int]) -> None:
        """Take the current progress of all owned partitions.

        `lags` are the numbers of unfinished records, `finished` the total numbers of finished ones. A partition that
        `lags` does not name is no longer owned.
        """
        self._partitions = {
            key: self._partitions.get(key, _NO_PROGRESS).next(lag, finished.get(key, 0), now_ms)
            for key, lag in lags.items()
        }

    def observe_uncommitted(self, now_ms: int, uncommitted: int, finished: int) -> None:
        """Take the number of finished records whose transaction is not committed, and of all finished records."""
        self._uncommitted = self._uncommitted.next(uncommitted, finished, now_ms)

    def trouble(self, now_ms: int, rebalance_ms: float = 0) -> str:
        """Return the reason why no progress is made, "" if the consumer is not stuck.

        `rebalance_ms` is the time since the current rebalance began; 0 if there is none.
        """
        if rebalance_ms > self.stuck_after_ms:
            return f"not in the group: its rebalance takes {rebalance_ms:.0f} ms so far"
        stuck = sorted(
            f"{key}: {partition.lag} records behind, none finished for {ms} ms"
            for key, partition in self._partitions.items()
            if (ms := self._stuck_ms(partition, now_ms))
        )
        if ms := self._stuck_ms(self._uncommitted, now_ms):
            records = self._uncommitted.lag
            stuck.append(f"{records} finished records are not committed, and none was finished for {ms} ms")
        return "; ".join(stuck)

    def _stuck_ms(self, progress: _Progress, now_ms: int) -> int:
        """Return how long records have waited without progress; 0 if that is not longer than the limit."""
        ms = now_ms - progress.well_ms
        return ms if progress.lag and ms > self.stuck_after_ms else 0

    def __repr__(self) -> str:
        return f"ProgressWatch(lag={self.lag}, {len(self._partitions)} partitions)"
