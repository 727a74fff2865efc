"""The time limit of handler calls (an edge): one timer for all that run, where each of them could have one.

All calls have the same limit, so they end in the order in which they began. A call that is over has its task
cancelled, and again after the same time where it goes on regardless; what somebody else cancelled meanwhile stays
cancelled, by the task's count of cancellations, as in `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
from typing import Any

TIMER_RESOLUTION_S = 0.001
"""A timer may fire so much before the time that it was set to."""


class CallLimits:
    """Of one event loop; a task has one call under way."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._ends: dict[asyncio.Task[Any], float] = {}  # in their order
        self._cancelled: dict[asyncio.Task[Any], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"CallLimits({self.timeout_ms} ms, {len(self._ends)} calls)"

    def begin(self, task: asyncio.Task[Any]) -> None:
        """The task's call begins."""
        loop = task.get_loop()
        self._ends[task] = end = loop.time() + self.timeout_ms / 1000
        if self._timer is None:
            self._timer = loop.call_at(end, self._cancel_what_is_over, loop)

    def end(self, task: asyncio.Task[Any]) -> bool:
        """The task's call has ended; whether it was cancelled here, which is taken back."""
        del self._ends[task]
        if not self._cancelled:
            return False
        times = self._cancelled.pop(task, 0)
        for _ in range(times):
            task.uncancel()
        return times > 0

    def _cancel_what_is_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        for task, end in list(self._ends.items()):
            if end > now + TIMER_RESOLUTION_S:
                self._timer = loop.call_at(end, self._cancel_what_is_over, loop)
                return
            task.cancel()
            self._cancelled[task] = self._cancelled.get(task, 0) + 1
            del self._ends[task]
            self._ends[task] = now + self.timeout_ms / 1000
        if self._ends:
            self._timer = loop.call_at(next(iter(self._ends.values())), self._cancel_what_is_over, loop)
