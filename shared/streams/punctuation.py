"""Punctuation: callbacks on a grid of stream time or wall-clock time, after Kafka Streams' PunctuationQueue.

A grid is the series of a schedule's due times. By default, a STREAM_TIME schedule is first due at 0, so it fires with
the first record, or at once if a STREAM_TIME callback creates it. A WALL_CLOCK_TIME schedule is first due at now +
interval. For both types, `start` sets another first due time. A schedule that is due is called once with the current
time, however many intervals were missed. Its next due time stays on the grid:

>>> queue = PunctuationQueue()
>>> called = []
>>> schedule = queue.schedule(5, first_due_ms=5, callback=called.append)
>>> queue.may_punctuate(21), called, schedule.due_ms
(True, [21], 25)
>>> schedule.cancel()
>>> queue.may_punctuate(99), called
(False, [21])

A task has a queue for the wall clock, and one for the stream time of each sub-topology (`TaskSchedules`). After a
restore it continues the grids of named schedules. A grid is identified by the schedule's node, name, type and interval.
So one processor in two nodes has two grids, and a schedule with a new type or interval begins a new grid. Each commit
writes all grids of a task in one record, so their bytes are limited (`grids_bytes_max_of`).
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError, RecordTooLarge
from penstock.shared.common.time_text import EPOCH
from penstock.shared.streams.durations import duration_ms
from penstock.shared.streams.user_code import plain

Punctuator = Callable[[int], None]
"""Called with the stream time or wall-clock time in ms at which it fires."""

Start = datetime | timedelta | int | None
"""The begin of a schedule's grid: ms since the epoch, an equivalent timedelta, or a datetime with a time zone."""

DUE_BYTES_MAX = 21
"""The bytes of a grid in the JSON of a progress record besides its text: a colon, an int64 and a comma."""

SWEEP_MIN = 64
"""Cancelled schedules are removed from a queue of this size, or of twice the size after the last removal if higher."""

CLOSED = "schedule() may not be called in a processor's close() or later: the punctuator would never be called"
NOT_INITIALIZED = "schedule() may be called in a processor's init() or later, not while it is made"


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
    on_cancel: Callable[[], None] | None = field(default=None, repr=False)

    def cancel(self) -> None:
        """Cancel the punctuation schedule; allowed from within the callback."""
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel()

    def advance(self, now_ms: int) -> None:
        """Advance the punctuation to the next point of its grid after `now_ms`."""
        # As PunctuationSchedule.next: missed points of the grid are skipped, and the grid stays.
        missed = (now_ms - self.due_ms) // self.interval_ms
        self.due_ms += (missed + 1) * self.interval_ms


class PunctuationQueue:
    """The schedules of one task that follow the same time, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Schedule]] = []
        self._numbers = itertools.count()
        self._sweep_at = SWEEP_MIN

    def __repr__(self) -> str:
        waiting = [(due, schedule.name) for due, _, schedule in sorted(self._heap) if not schedule.cancelled]
        return f"PunctuationQueue({waiting})"

    def schedule(self, interval_ms: int, first_due_ms: int, callback: Punctuator, name: str | None = None) -> Schedule:
        """Add a schedule. `interval_ms` must be at least 1."""
        schedule = Schedule(interval_ms, first_due_ms, callback, name)
        self._push_schedule(schedule)
        return schedule

    def may_punctuate(self, now_ms: int) -> bool:
        """Call every punctuation that is due at `now_ms`; return whether anything was called."""
        called = False
        while self._heap and self._heap[0][0] <= now_ms:
            schedule = heapq.heappop(self._heap)[2]
            # A cancelled schedule may still be in the heap. A callback may also cancel its own schedule, so this is
            # checked again after the call, as in PunctuationQueue.mayPunctuate.
            if schedule.cancelled:
                continue
            schedule.callback(now_ms)
            called = True
            if not schedule.cancelled:
                schedule.advance(now_ms)
                self._push_schedule(schedule)
        return called

    def next_due_ms(self) -> int | None:
        """Return when the earliest punctuation is due, or None."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def grids_ms(self) -> dict[str, int]:
        """Return, by grid, the next due time of each named schedule that is not cancelled, for the task's progress.

        A schedule's `name` here is the text of its grid: node, name, type and interval.
        """
        return {s.name: s.due_ms for _, _, s in self._heap if s.name is not None and not s.cancelled}

    def _push_schedule(self, schedule: Schedule) -> None:
        # Cancelled schedules would otherwise stay until they are due.
        if len(self._heap) >= self._sweep_at:
            self._heap = [item for item in self._heap if not item[2].cancelled]
            heapq.heapify(self._heap)
            # A removal looks at every schedule, so the next one waits until there are twice as many as were kept.
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._heap))
        # Of schedules that are due at once, the first to be added fires first. A PriorityQueue leaves that open.
        heapq.heappush(self._heap, (schedule.due_ms, next(self._numbers), schedule))


def grids_bytes_max_of(record_bytes_max: int) -> int:
    """Return the limit of the bytes that a task's grids take in a progress record: three quarters of the limit for one.

    The other quarter is for the offsets, times and store schemas of the topology.

    >>> grids_bytes_max_of(1024 * 1024)
    786432
    """
    return record_bytes_max * 3 // 4


class TaskSchedules:
    """The punctuation schedules of one task."""

    def __init__(
        self,
        source_topics: Mapping[str, tuple[str, ...]],
        all_topics: tuple[str, ...],
        grids_bytes_max: int,
        stream_time_ms: Callable[[Iterable[str]], int],
    ) -> None:
        """`source_topics` drive the stream time of each node's schedules; `all_topics` that of the task's owner.

        `stream_time_ms` returns the stream time of source topics.
        """
        self._source_topics = source_topics
        self._all_topics = all_topics
        self._stream_time_ms = stream_time_ms
        self.stream_time: dict[tuple[str, ...], PunctuationQueue] = {}
        """By the source topics that drive the stream time."""
        self.wall_clock = PunctuationQueue()
        self.has_new_grid = False
        """Whether a named schedule began a grid that no commit contains yet."""
        # By node and name: the active named schedules, and the restored grids, with their due times, of those that were
        # not scheduled again yet.
        self._named: dict[str, Schedule] = {}
        self._restored: dict[str, tuple[str, int]] = {}
        # The bytes that these schedules and restored grids take in a progress record.
        self._grids_bytes = 0
        self._grids_bytes_max = grids_bytes_max

    def restore(self, grids_ms: Mapping[str, int]) -> None:
        """Continue the grids of a progress record, by their due times, once they are scheduled again."""
        self._restored = {_name_of_grid(grid): (grid, due) for grid, due in grids_ms.items()}
        self._grids_bytes = sum(_grid_bytes(grid) for grid, _ in self._restored.values())
        # Restored grids continue, even if the limit is lower now.
        self._grids_bytes_max = max(self._grids_bytes_max, self._grids_bytes)

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
        """Add a punctuation, as `ProcessorContext.schedule`; `node` is the processor's, None for the task's owner.

        Raises RecordTooLarge if the task's grids would take more than `grids_bytes_max` bytes.
        """
        ms = duration_ms(interval, "schedule: interval")
        start_ms = _grid_start_ms(start)
        if not isinstance(type_, PunctuationType):
            known = " or ".join(map(str, PunctuationType))
            raise ConfigError(f"schedule: type must be {known}, got {type_!r}")
        callback = plain("schedule: callback", callback)
        if name is not None and (not isinstance(name, str) or not name or "/" in name):
            raise ConfigError(f"schedule: name must be text without '/', got {name!r}")
        full_name = None
        grid = None
        restored = None
        if name is not None:
            full_name = name if node is None else f"{node}/{name}"
            where = f"node {node!r}" if node is not None else "the task"
            if full_name in self._named:
                raise ConfigError(
                    f"{where} has a schedule named {name!r} already: cancel it first, or name this another"
                )
            grid = f"{full_name} ({type_.value}, every {ms} ms)"
            before, due_before = self._restored.get(full_name, (None, 0))
            total = self._grids_bytes + _grid_bytes(grid) - (0 if before is None else _grid_bytes(before))
            if before is None and total > self._grids_bytes_max:
                total -= self._forget_outdated(now_ms)
            # Restored names keep their room, even if the limit is lower now or the text of their grid is longer.
            if before is not None:
                self._grids_bytes_max = max(self._grids_bytes_max, total)
            elif total > self._grids_bytes_max:
                raise RecordTooLarge(
                    f"{where}: schedule {name!r}: with {len(self._named)} named schedules and {len(self._restored)} "
                    f"restored ones, those of the task would take {total} bytes of a commit's progress record; at most "
                    f"{self._grids_bytes_max} fit, three quarters of max_request_size. Keep due times in a store and "
                    "read them in one schedule, or increase max_request_size and the changelog topic's "
                    "max.message.bytes"
                )
            self._grids_bytes = total
            # A restored grid with another type or interval is forgotten.
            self._restored.pop(full_name, None)
            if before == grid:
                restored = due_before
            # Kafka Streams begins every schedule again after a restart or a rebalance. A named one continues, so its
            # grid must be committed even if no record comes. A commit may have left out an outdated one.
            if before != grid or self._is_outdated(grid, due_before, now_ms):
                self.has_new_grid = True
        is_stream_time = type_ is PunctuationType.STREAM_TIME
        if restored is not None:
            due = restored if is_stream_time else _limit_due_time(restored, now_ms, ms, start_ms)
        elif start_ms is not None:
            # As KIP-1146 (anchored punctuation), for both types.
            due = start_ms
        else:
            # As StreamTask.schedule: stream time is aligned with 0, the wall clock with now.
            due = 0 if is_stream_time else now_ms + ms
        queue = self.wall_clock
        if is_stream_time:
            queue = self.stream_time.setdefault(self.topics_of(node), PunctuationQueue())
        made = queue.schedule(ms, due, callback, grid)
        if full_name is not None:
            self._named[full_name] = made
            made.on_cancel = partial(self._forget_named, full_name)
        return made

    def topics_of(self, node: str | None) -> tuple[str, ...]:
        """Return the source topics that drive the stream time of a node's schedules; all, if there is no such node."""
        return self._all_topics if node is None else self._source_topics.get(node, self._all_topics)

    def grids_ms(self, now_ms: int) -> dict[str, int]:
        """Return the next due times to commit, by grid.

        A restored grid without a schedule is included until its due time has passed by more than its interval.
        Otherwise the grids of names that are never used again would accumulate. Until the next restore, a later
        schedule still continues it, unless its room was needed.
        """
        kept = {grid: due for grid, due in self._restored.values() if not self._is_outdated(grid, due, now_ms)}
        for queue in (*self.stream_time.values(), self.wall_clock):
            kept |= queue.grids_ms()
        return kept

    def _forget_outdated(self, now_ms: int) -> int:
        """Forget the restored grids that commits leave out; return their bytes."""
        outdated = {name: grid for name, (grid, due) in self._restored.items() if self._is_outdated(grid, due, now_ms)}
        for name in outdated:
            del self._restored[name]
        freed = sum(map(_grid_bytes, outdated.values()))
        self._grids_bytes -= freed
        return freed

    def _is_outdated(self, grid: str, due_ms: int, now_ms: int) -> bool:
        stream_time_ms = self._stream_time_ms(self.topics_of(self._node_of_grid(grid)))
        return _is_outdated(grid, due_ms, stream_time_ms=stream_time_ms, now_ms=now_ms)

    def _forget_named(self, full_name: str) -> None:
        cancelled = self._named.pop(full_name)
        assert cancelled.name is not None
        self._grids_bytes -= _grid_bytes(cancelled.name)

    def _node_of_grid(self, grid: str) -> str | None:
        """Return the node in the text of a grid; None if the topology has no such node."""
        # A node's name may contain "/", a schedule's may not.
        node = grid.rpartition("/")[0]
        return node if node in self._source_topics else None


def _name_of_grid(grid: str) -> str:
    """Return the node and name in the text of a grid.

    >>> _name_of_grid("node/mine (stream_time, every 7 ms)")
    'node/mine'
    """
    return grid.rpartition(" (")[0]


def _grid_bytes(grid: str) -> int:
    return len(msgspec.json.encode(grid)) + DUE_BYTES_MAX


def _is_outdated(grid: str, due_ms: int, *, stream_time_ms: int, now_ms: int) -> bool:
    """Return whether a grid's due time has passed by more than its interval.

    >>> _is_outdated("node/mine (stream_time, every 7 ms)", 100, stream_time_ms=107, now_ms=0)
    False
    >>> _is_outdated("node/mine (stream_time, every 7 ms)", 100, stream_time_ms=108, now_ms=0)
    True
    """
    type_, _, interval = grid.rpartition(" (")[2].removesuffix(" ms)").partition(", every ")
    passed_ms = (stream_time_ms if type_ == PunctuationType.STREAM_TIME.value else now_ms) - due_ms
    return passed_ms > int(interval)


def _limit_due_time(due_ms: int, now_ms: int, interval_ms: int, start_ms: int | None) -> int:
    """Return a restored wall-clock due time, moved back on its grid until it is at most one interval from now.

    If `start_ms` is later than one interval from now, it is the limit instead.

    >>> _limit_due_time(due_ms=3_670, now_ms=0, interval_ms=300, start_ms=None)
    70
    """
    # The due time may be later than the limit, because it was computed by another instance's clock, or by this one's
    # before a correction.
    limit_ms = now_ms + interval_ms
    if start_ms is not None:
        limit_ms = max(limit_ms, start_ms)
    ahead_ms = due_ms - limit_ms
    return due_ms - max(0, -(-ahead_ms // interval_ms)) * interval_ms


def _grid_start_ms(start: Start) -> int | None:
    """Return the start of a punctuation schedule's grid as ms since the epoch; None if there is none."""
    if start is None:
        return None
    if isinstance(start, datetime) and start.tzinfo is not None:
        start = start - EPOCH
    if isinstance(start, timedelta):
        whole, rest = divmod(start, timedelta(milliseconds=1))
        ms: Any = whole if not rest else math.nan
    else:
        ms = start
    is_number = isinstance(ms, int | float) and not isinstance(ms, bool) and math.isfinite(ms)
    if not is_number or ms != int(ms) or ms < 0:
        raise ConfigError(
            "schedule: start must be a whole number of ms since the epoch, at least 0, as a number, a timedelta or a "
            f"datetime with a time zone, got {start!r}"
        )
    return int(ms)
