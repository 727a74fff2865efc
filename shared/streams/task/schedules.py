"""A task's punctuation schedules: a queue for each of the two times, and the grids to continue after a restore.

A grid is the series of a schedule's due times. A named schedule's grid is kept under its node, name, type and interval.
So one processor in two nodes has two grids, and a schedule with a new type or interval begins a new grid.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.processor import interval_ms
from penstock.shared.streams.punctuation import (
    SWEEP_MIN,
    PunctuationQueue,
    PunctuationType,
    Punctuator,
    Schedule,
    Start,
)
from penstock.shared.streams.user_code import plain

NOT_INITIALIZED = "schedule() may be called in a processor's init() or later, not while it is made"


class TaskSchedules:
    """`restored` are the next due times of named schedules as of the last commit, until they are scheduled again.

    A wall-clock schedule is due within one interval whatever was restored, because clocks differ and are corrected.
    `has_new_grid` means that a named schedule began a grid that no commit contains yet.
    """

    def __init__(self) -> None:
        self.stream_time = PunctuationQueue()
        self.wall_clock = PunctuationQueue()
        self.restored: dict[str, int] = {}
        self.has_new_grid = False
        self._named: dict[str, Schedule] = {}
        self._sweep_at = SWEEP_MIN

    def schedule(
        self,
        interval: timedelta | int,
        type_: PunctuationType,
        callback: Punctuator,
        *,
        now_ms: int,
        start: Start,
        name: str | None,
        node: str | None,
    ) -> Schedule:
        """See `ProcessorContext.schedule`. `node` is the processor's; None for schedules of the task's owner."""
        ms = interval_ms(interval, "schedule: interval")
        start_ms = _start_ms(start)
        if not isinstance(type_, PunctuationType):
            known = " or ".join(map(str, PunctuationType))
            raise ConfigError(f"schedule: type must be {known}, got {type_!r}")
        callback = plain("schedule: callback", callback)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"schedule: name must be text, got {name!r}")
        full_name = grid = restored = None
        if name is not None:
            full_name = name if node is None else f"{node}/{name}"
            if full_name in self._named and not self._named[full_name].cancelled:
                where = f"node {node!r}" if node is not None else "the task"
                raise ConfigError(
                    f"{where} has a schedule named {name!r} already: cancel it first, or name this another"
                )
            grid = f"{full_name} ({type_.value}, every {ms} ms)"
            restored = self.restored.pop(grid, None)
            # The grid of another type or interval, which no schedule continues.
            for other in [key for key in self.restored if key.startswith(f"{full_name} (")]:
                del self.restored[other]
            # Kafka Streams begins every schedule again after a restart or a rebalance. A named one continues, so its
            # grid must be committed even if no record comes.
            self.has_new_grid |= restored is None
        is_stream_time = type_ is PunctuationType.STREAM_TIME
        if restored is not None:
            due = restored if is_stream_time else _limit_due_time(restored, now_ms, ms, start_ms or 0)
        elif start_ms is not None:
            # As KIP-1146 (anchored punctuation), for both types.
            due = start_ms
        else:
            # As StreamTask.schedule: stream time is aligned with 0, the wall clock with now.
            due = 0 if is_stream_time else now_ms + ms
        made = (self.stream_time if is_stream_time else self.wall_clock).schedule(ms, due, callback, grid)
        if full_name is not None:
            if len(self._named) >= self._sweep_at:
                self._named = {key: one for key, one in self._named.items() if not one.cancelled}
                self._sweep_at = max(SWEEP_MIN, 2 * len(self._named))
            self._named[full_name] = made
        return made

    def grids_ms(self) -> dict[str, int]:
        """Return the next due time of each named schedule."""
        return self.restored | self.stream_time.grids_ms() | self.wall_clock.grids_ms()


def _limit_due_time(due_ms: int, now_ms: int, interval_ms: int, start_ms: int) -> int:
    """Return a wall-clock grid's next point: at most one interval ahead, or at most as far as the configured start.

    The clock of another instance, or this one's before a correction, may have been ahead.

    >>> _limit_due_time(due_ms=3_670, now_ms=0, interval_ms=300, start_ms=0)
    70
    """
    ahead_ms = due_ms - max(now_ms + interval_ms, start_ms)
    return due_ms - max(0, -(-ahead_ms // interval_ms)) * interval_ms


def _start_ms(start: Start) -> int | None:
    """Return a start as ms since the epoch."""
    if start is None:
        return None
    if isinstance(start, datetime) and start.tzinfo is not None:
        start = start - datetime(1970, 1, 1, tzinfo=UTC)
    ms: Any = start / timedelta(milliseconds=1) if isinstance(start, timedelta) else start
    is_number = isinstance(ms, int | float) and not isinstance(ms, bool) and math.isfinite(ms)
    if not is_number or ms != int(ms) or ms < 0:
        raise ConfigError(
            "schedule: start must be a whole number of ms since the epoch, at least 0, as a number, a timedelta or a "
            f"datetime with a time zone, got {start!r}"
        )
    return int(ms)
