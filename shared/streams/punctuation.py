"""Punctuation: callbacks on a grid of stream time or wall-clock time, after Kafka Streams' PunctuationQueue.

A STREAM_TIME schedule is first due at 0, so it fires with the first record. A WALL_CLOCK_TIME one is first due at
now + interval. `start` sets the grid of either. A schedule that is due is called once with the current time, however
many intervals were missed, and the next due time stays on the grid:

>>> queue = PunctuationQueue()
>>> called = []
>>> schedule = queue.schedule(5, first_due_ms=5, callback=called.append)
>>> queue.may_punctuate(21), called, schedule.due_ms
(True, [21], 25)
>>> schedule.cancel()
>>> queue.may_punctuate(99), called
(False, [21])
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from penstock.shared.common.errors import ConfigError

Punctuator = Callable[[int], None]
"""Called with the stream time or wall-clock time in ms at which it fires."""

Start = datetime | timedelta | int | None
"""The begin of a schedule's grid: ms since the epoch, an equivalent timedelta, or a datetime with a time zone."""

INTERVAL_MS_MIN = 1

SWEEP_MIN = 64
"""Cancelled schedules are removed from a queue of this size, or of twice the size after the last removal."""


class PunctuationType(enum.Enum):
    """The clock that a schedule follows."""

    STREAM_TIME = "stream_time"
    WALL_CLOCK_TIME = "wall_clock_time"


@dataclass(eq=False, slots=True)
class Schedule:
    """One schedule; what `context.schedule` returns (Kafka's Cancellable)."""

    interval_ms: int
    due_ms: int
    callback: Punctuator
    name: str | None = None
    cancelled: bool = field(default=False)

    def cancel(self) -> None:
        """Cancel the schedule; allowed from within the callback."""
        self.cancelled = True

    def advance(self, now_ms: int) -> None:
        """Advance to the next grid point after `now_ms`."""
        # As PunctuationSchedule.next: missed points of the grid are skipped, and the grid stays.
        missed = (now_ms - self.due_ms) // self.interval_ms
        self.due_ms += (missed + 1) * self.interval_ms


class PunctuationQueue:
    """The schedules of one task and one type, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Schedule]] = []
        self._added = 0
        self._sweep_at = SWEEP_MIN

    def __repr__(self) -> str:
        waiting = sorted((due, schedule.name) for due, _, schedule in self._heap if not schedule.cancelled)
        return f"PunctuationQueue({waiting})"

    def schedule(self, interval_ms: int, first_due_ms: int, callback: Punctuator, name: str | None = None) -> Schedule:
        """Add a schedule. Raises ConfigError if the interval is below 1 ms."""
        if interval_ms < INTERVAL_MS_MIN:
            raise ConfigError(f"a punctuation interval must be at least {INTERVAL_MS_MIN} ms, got {interval_ms}")
        schedule = Schedule(interval_ms, first_due_ms, callback, name)
        self._push_schedule(schedule)
        return schedule

    def may_punctuate(self, now_ms: int) -> bool:
        """Call everything that is due at `now_ms`; return whether anything was called."""
        called = False
        while self._heap and self._heap[0][0] <= now_ms:
            schedule = heapq.heappop(self._heap)[2]
            # A cancelled schedule stays in the heap until it is due. A callback may also cancel its own schedule, so
            # this is checked again after the call, as in PunctuationQueue.mayPunctuate.
            if schedule.cancelled:
                continue
            schedule.callback(now_ms)
            called = True
            if not schedule.cancelled:
                schedule.advance(now_ms)
                self._push_schedule(schedule)
        return called

    def next_due_ms(self) -> int | None:
        """Return when the earliest schedule is due, or None."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def grids_ms(self) -> dict[str, int]:
        """Return the next due time of each named schedule, for the task's progress."""
        return {s.name: s.due_ms for _, _, s in self._heap if s.name is not None and not s.cancelled}

    def _push_schedule(self, schedule: Schedule) -> None:
        # Cancelled schedules would otherwise stay until they are due.
        if len(self._heap) >= self._sweep_at:
            self._heap = [item for item in self._heap if not item[2].cancelled]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._heap))
        self._added += 1
        # Of schedules that are due at once, the first to be added fires first. A PriorityQueue leaves that open.
        heapq.heappush(self._heap, (schedule.due_ms, self._added, schedule))
