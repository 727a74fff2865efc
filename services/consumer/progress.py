"""Whether the runner gets on: there is lag, and nothing was finished for too long, means that it is stuck.

>>> watch = ProgressWatch(stuck_after_ms=1_000, now_ms=0)
>>> watch.observe(now_ms=500, lag=40, finished=3)
>>> watch.stuck(now_ms=1_400), watch.stuck(now_ms=1_501)
(False, True)
>>> watch.observe(now_ms=1_600, lag=0, finished=3)             # nothing to do is not stuck
>>> watch.stuck(now_ms=9_999)
False
"""

from __future__ import annotations


class ProgressWatch:
    """Fed with the lag and the count of finished records, asked whether they mean trouble."""

    def __init__(self, stuck_after_ms: int, now_ms: int) -> None:
        self.stuck_after_ms = stuck_after_ms
        self.lag = 0
        self.finished = 0
        self._well_ms = now_ms

    def observe(self, now_ms: int, lag: int, finished: int) -> None:
        """`lag` in records not finished, `finished` the running count."""
        if self.lag == 0 or lag == 0 or finished != self.finished:
            self._well_ms = now_ms
        self.lag, self.finished = lag, finished

    def without_progress_ms(self, now_ms: int) -> int:
        """How long there has been lag without a record finished."""
        return now_ms - self._well_ms if self.lag else 0

    def stuck(self, now_ms: int) -> bool:
        return self.without_progress_ms(now_ms) > self.stuck_after_ms

    def __repr__(self) -> str:
        return f"ProgressWatch(lag={self.lag}, finished={self.finished})"
