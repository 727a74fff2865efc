"""A task's punctuation schedules: a queue for each of the two times, and the grids to take up after a restore."""

from __future__ import annotations

from datetime import timedelta

from shared.streams.processor import interval_ms
from shared.streams.punctuation import PunctuationQueue, PunctuationType, Punctuator, Schedule

NOT_INITIALIZED = "schedule() may be called in a processor's init() or later, not while it is made"


class TaskSchedules:
    """`restored` are the next due times of named schedules as of the last commit, until they are scheduled again."""

    def __init__(self) -> None:
        self.stream_time, self.wall_clock = PunctuationQueue(), PunctuationQueue()
        self.restored: dict[str, int] = {}

    def schedule(
        self,
        interval: timedelta | int,
        type_: PunctuationType,
        callback: Punctuator,
        *,
        now_ms: int,
        start_ms: int | None,
        name: str | None,
    ) -> Schedule:
        """See `ProcessorContext.schedule`."""
        ms = interval_ms(interval)
        restored = self.restored.pop(name, None) if name is not None else None
        is_stream_time = type_ is PunctuationType.STREAM_TIME
        if restored is not None:
            due = restored
        elif start_ms is not None:
            due = start_ms
        else:
            due = 0 if is_stream_time else now_ms + ms
        return (self.stream_time if is_stream_time else self.wall_clock).schedule(ms, due, callback, name)

    def grids_ms(self) -> dict[str, int]:
        """The next due time of each named schedule."""
        return self.restored | self.stream_time.grids_ms() | self.wall_clock.grids_ms()
