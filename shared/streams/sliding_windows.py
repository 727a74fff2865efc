"""Sliding windows: a window ends at each record and another starts just after it, where it holds something.

Both bounds are inclusive and `difference_ms` apart, so two records are in one window where they lie no further apart.
With a difference of 10 and records at 20 and 25 of one key: 20 makes [10, 20]; 25 makes [21, 31] (what comes after 20
and is within reach) and [15, 25], which holds both. Records that are nearer to 0 than the difference share [0, 10] as
their left window, since no window starts before 0.

A window takes nothing once it ends before the close time, stream time less grace. It is kept until no record that is
still taken can reach it, since windows to its right can be made from what it holds. A record is late where not even a
window that starts just after it could take anything.

Source of the semantics: Kafka's SlidingWindows and KStreamSlidingWindowAggregate, the order of results among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations import Aggregation
from penstock.shared.streams.processor import ProcessorContext, Record
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.state.window_store import InMemoryWindowStore, Window
from penstock.shared.streams.time_windows import FixedWindowAggregate
from penstock.shared.streams.window_limits import check_key
from penstock.shared.streams.windowed_aggregate import Emit, WindowKey


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """The greatest time difference of two records in a window, and the grace period, in ms."""

    difference_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.difference_ms < 0:
            raise ConfigError(f"window time difference must not be negative, got {self.difference_ms}")
        if self.grace_ms < 0:
            raise ConfigError(f"window grace must not be negative, got {self.grace_ms}")

    @property
    def retention_ms(self) -> int:
        """No window that starts more than this before the close time is within reach of a record that is still taken.

        Such a record is at most `difference_ms` older than the close time and looks back `2 * difference_ms`.
        """
        return 3 * self.difference_ms


@dataclass(slots=True)
class _Plan:
    """What a record does: windows in the order in which their results go out.

    Those of `with_record` get it; one that is not among them is made from another and does not.
    """

    windows: list[tuple[int, list[Any]]] = field(default_factory=list)
    with_record: list[list[Any]] = field(default_factory=list)
    missed: int = 0


class SlidingWindowAggregate(FixedWindowAggregate):
    """Aggregates records of a key into sliding windows; the first aggregation is `Latest`."""

    _store: InMemoryWindowStore | PersistentWindowStore

    def __init__(
        self, store_name: str, windows: SlidingWindows, aggregations: Mapping[str, Aggregation[Any]], emit: Emit
    ) -> None:
        super().__init__(store_name, aggregations, emit)
        self.windows = windows
        self._close_time = -1

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._store.mark_closed_before(self.stream_time_ms - self.windows.grace_ms)

    def process(self, record: Record) -> None:
        if record.key is None:
            self.context.count_skipped("null key")
            return
        if not self.context.takes_time(record.timestamp, self.windows.difference_ms + 1):
            return
        at, difference = record.timestamp, self.windows.difference_ms
        stream_time = max(at, self.stream_time_ms)
        self._close_time = close_time = stream_time - self.windows.grace_ms
        plan = _Plan(missed=1)
        if at + 1 + difference > close_time:
            plan = self._plan_early(record) if at < difference else self._plan(record)
            self._carry_out(record, plan)
        if not plan.with_record:
            self.context.emit_late(record, close_time, stream_time)
        self.stream_time_ms = stream_time  # only now: a record that an aggregation refused does not move time
        if plan.missed:
            self.context.count_missed(plan.missed)
        self._close(close_time)

    def advance_time(self, stream_time_ms: int) -> None:
        if stream_time_ms > self.stream_time_ms:
            self.stream_time_ms = stream_time_ms
            self._close(stream_time_ms - self.windows.grace_ms)

    def results_from_ms(self) -> int:
        return self.closed_by_ms - self.windows.grace_ms - self.windows.difference_ms

    def _close(self, limit: int) -> None:
        super()._close(limit)
        self._store.expire_before(limit - self.windows.retention_ms)

    def _carry_out(self, record: Record, plan: _Plan) -> None:
        check_key(record.key, self.store_name, self._key_bytes_max)
        self._add_all(record, plan.with_record)
        for start, states in plan.windows:
            self._put(WindowKey(record.key, start, start + self.windows.difference_ms), states)

    def _found(self, key: Any, at: int) -> list[Window]:
        return list(self._store.fetch_range(key, max(0, at - 2 * self.windows.difference_ms), at + 1))

    def _add_to(self, plan: _Plan, start: int, states: list[Any] | None) -> None:
        """Plan to put the record into a window of these states, None for a new one; missed where it is closed."""
        if start + self.windows.difference_ms < self._close_time:
            plan.missed += 1
            return
        states = [a.initial() for a in self.aggregations] if states is None else list(states)
        plan.windows.append((start, states))
        plan.with_record.append(states)

    def _copy(self, states: list[Any]) -> list[Any]:
        return [a.copy(s) for a, s in zip(self.aggregations, states, strict=True)]

    def _plan(self, record: Record) -> _Plan:
        plan, at, difference = _Plan(), record.timestamp, self.windows.difference_ms
        starts: set[int] = set()
        left: Window | None = None
        right: list[Any] | None = None
        previous: int | None = None
        has_left = has_right = False
        for window in reversed(self._found(record.key, at)):
            starts.add(window.start)
            if window.start == at + 1:
                has_right = True
            elif window.end > at:
                if right is None:
                    right = self._copy(window.states)
                self._add_to(plan, window.start, window.states)
            elif window.end == at:
                has_left = True
                self._add_to(plan, window.start, window.states)
                if window.states[0] == at:  # another record of this moment has made every window there is to make
                    return plan
                previous = window.states[0]
            else:
                left, previous = window, window.states[0]
                break
        if previous is not None and previous + 1 not in starts and previous + 1 + difference >= at:
            self._add_to(plan, previous + 1, None)
        if not has_left:
            reaches = left is not None and previous is not None and at - difference <= previous
            self._add_to(plan, at - difference, self._copy(left.states) if left is not None and reaches else None)
        if not has_right and right is not None and right[0] > at:
            plan.windows.append((at + 1, right))
        return plan

    def _plan_early(self, record: Record) -> _Plan:
        """For a record whose left window would start before 0: [0, difference] stands for it."""
        plan, at = _Plan(), record.timestamp
        starts: set[int] = set()
        combined: Window | None = None
        right: list[Any] | None = None
        has_right = False
        for window in self._found(record.key, at):
            starts.add(window.start)
            if window.start == 0:
                combined = window
            elif window.start <= at:
                right = self._copy(window.states)
                self._add_to(plan, window.start, window.states)
            else:
                has_right = True
        if right is None and combined is not None and combined.states[0] > at:
            right = self._copy(combined.states)
        if not has_right and right is not None and right[0] > at:
            plan.windows.append((at + 1, right))
        if combined is not None and combined.states[0] < at and combined.states[0] + 1 not in starts:
            self._add_to(plan, combined.states[0] + 1, None)
        self._add_to(plan, 0, None if combined is None else combined.states)
        return plan
