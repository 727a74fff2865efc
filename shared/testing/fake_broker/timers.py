"""Answers that are not yet available, and timers, without an event loop.

A handler returns a `Later` instead of an answer if a broker would wait: for data, or for a group's other members. The
connection adds a callback for the answer. Time passes only by calls of `Timers.run`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Later:
    """A future answer. Only the first `resolve` counts."""

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def __repr__(self) -> str:
        return f"Later({self.value!r})" if self.is_done else "Later()"

    def resolve(self, value: Any) -> None:
        """Set the answer."""
        if not self.is_done:
            self.is_done = True
            self.value = value
            then = self._then
            self._then = []
            for call in then:
                call(value)

    def then(self, call: Callable[[Any], None]) -> None:
        """Call `call` with the answer, at once if it is available."""
        if self.is_done:
            call(self.value)
        else:
            self._then.append(call)


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
