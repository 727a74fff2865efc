"""The timeout of handler calls: one timer for all running calls, instead of one for each.

All calls have the same timeout, so they expire in the order in which they began. The task of an expired call is
cancelled. If the call does not end, the task is cancelled again after the same time. When the call ends, only the
cancellations by this module are reverted (`Task.uncancel`), as in `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
from typing import Any

TIMER_RESOLUTION_S = 0.001
"""How long before its time a timer may fire."""


class CallLimits:
    """The limits of the calls on one event loop. A task has at most one call in flight."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        # The entries are in the order of their times.
        self._ends: dict[asyncio.Task[Any], float] = {}
        self._cancelled: dict[asyncio.Task[Any], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"CallLimits({self.timeout_ms} ms, {len(self._ends)} calls)"

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Start the limit of the task's call."""
        loop = task.get_loop()
        end = loop.time() + self.timeout_ms / 1000
        self._ends[task] = end
        if self._timer is None:
            self._timer = loop.call_at(end, self._cancel_what_is_over, loop)

    def end(self, task: asyncio.Task[Any]) -> bool:
        """End the limit of the task's call. If the limit cancelled the task, revert that and return True."""
        del self._ends[task]
        if not self._cancelled:
            return False
        # Only the cancellations of this limit are reverted. One by another caller stays in force.
        times = self._cancelled.pop(task, 0)
        for _ in range(times):
            task.uncancel()
        return times > 0

    def _cancel_what_is_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, end in list(self._ends.items()):
            # All limits are equal, so the first task that is not over ends the search.
            if end > now + TIMER_RESOLUTION_S:
                self._timer = loop.call_at(end, self._cancel_what_is_over, loop)
                return
            task.cancel()
            self._cancelled[task] = self._cancelled.get(task, 0) + 1
            # To the end of the order: a task that continues is cancelled again after the same time.
            del self._ends[task]
            self._ends[task] = now + self.timeout_ms / 1000
        if self._ends:
            self._timer = loop.call_at(next(iter(self._ends.values())), self._cancel_what_is_over, loop)
