"""Timers without an event loop: time passes only by calls of `Timers.run`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    """A scheduled call, unless it is cancelled."""

    __slots__ = ("call", "due_ms")

    def __init__(self, due_ms: int, call: Callable[[int], None]) -> None:
        self.due_ms = due_ms
        self.call: Callable[[int], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timers:
    """Scheduled calls, by due time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()

    def at(self, due_ms: int, call: Callable[[int], None]) -> Timer:
        """Schedule `call(now_ms)` for `due_ms`."""
        timer = Timer(due_ms, call)
        heapq.heappush(self._heap, (due_ms, next(self._count), timer))
        return timer

    @property
    def next_ms(self) -> int | None:
        """The time of the next call; None if there is none."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, now_ms: int) -> None:
        """Make all calls that are due."""
        while (due_ms := self.next_ms) is not None and due_ms <= now_ms:
            timer = heapq.heappop(self._heap)[2]
            call = timer.call
            timer.call = None
            assert call is not None, "next_ms drops what was cancelled"
            call(now_ms)
