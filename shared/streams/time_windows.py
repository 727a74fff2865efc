"""Tumbling and hopping windows: fixed spans of time that begin at multiples of the advance.

A record is in every window that began at most `size_ms` before it; the end of a window is not in it. With a size of
10 and an advance of 5, a record at 12 is in [5, 15) and [10, 20); the first start is 0, so one at 3 is in [0, 10)
alone. A window closes when the operator's stream time has reached its end and the grace: from then on it takes
nothing. A record that is too late for some of its windows counts in the others; it is late when it is too late for all.

>>> windows = TimeWindows(size_ms=10, advance_ms=5, grace_ms=0)
>>> list(windows.starts(12)), list(windows.starts(3))
([5, 10], [0])

Source of the semantics: KStreamWindowAggregate. A result's timestamp is the highest of its records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations import Aggregation
from penstock.shared.streams.column_aggregate import ColumnAggregate
from penstock.shared.streams.latest import LATEST
from penstock.shared.streams.processor import Record
from penstock.shared.streams.state.column_window_store import ColumnWindowStore
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.state.window_store import InMemoryWindowStore
from penstock.shared.streams.window_limits import check_key
from penstock.shared.streams.windowed_aggregate import Emit, WindowKey

WINDOWS_MAX = 10_000  # that one record is in: each is a write


@dataclass(frozen=True, slots=True)
class TimeWindows:
    """Size, advance (the size itself: tumbling) and grace period in ms."""

    size_ms: int
    advance_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.size_ms < 1:
            raise ConfigError(f"window size must be at least 1 ms, got {self.size_ms}")
        if not 1 <= self.advance_ms <= self.size_ms:
            raise ConfigError(f"window advance must be from 1 ms to the size {self.size_ms}, got {self.advance_ms}")
        if self.size_ms > self.advance_ms * WINDOWS_MAX:
            raise ConfigError(
                f"a record would be in more than {WINDOWS_MAX} windows: size {self.size_ms}, advance {self.advance_ms}"
            )
        if self.grace_ms < 0:
            raise ConfigError(f"window grace must not be negative, got {self.grace_ms}")

    @property
    def patience_ms(self) -> int:
        """How much later than its start a window is closed at the latest: size and grace."""
        return self.size_ms + self.grace_ms

    @property
    def per_record(self) -> int:
        """How many windows a record is in at most."""
        return -(-self.size_ms // self.advance_ms)

    def starts(self, timestamp: int) -> range:
        """The starts of all windows that a record at `timestamp` is in."""
        first = max(0, timestamp - self.size_ms + self.advance_ms) // self.advance_ms * self.advance_ms
        return range(first, timestamp + 1, self.advance_ms) if self.advance_ms < self.size_ms else _one(first)

    def numbers(self, timestamps: Int64Array) -> tuple[Int64Array, Int64Array]:
        """As `starts`, of many records: the first and the last one, by their numbers: start by advance."""
        earliest = np.maximum(timestamps - self.size_ms + self.advance_ms, 0)
        return earliest // self.advance_ms, timestamps // self.advance_ms


def _one(start: int) -> range:
    return range(start, start + 1)


class FixedWindowAggregate(ColumnAggregate):
    """Base of the aggregates over windows of one size: where states are kept, how results go out."""

    _store: InMemoryWindowStore | ColumnWindowStore | PersistentWindowStore

    def results(self, states: list[Any]) -> dict[str, Any]:
        results = super().results(states)
        del results[LATEST]
        return results

    def _add_all(self, record: Record, many: Sequence[list[Any]]) -> None:
        """Put a record into the states of several windows: into all, or raise and leave those of the store."""
        if len(many) == 1:
            self._add(record, many[0])
            return
        for i in self._last:
            self.aggregations[i].check(record.value)
        for states in many:
            for i in self._first:
                states[i] = self.aggregations[i].add_at(states[i], record.value, record.timestamp)
            if self._state_bytes_max is not None:
                self._check_entry(record.key, states, self._state_bytes_max)
        for states in many:
            for i in self._last:
                states[i] = self.aggregations[i].add_at(states[i], record.value, record.timestamp)

    def _put(self, at: WindowKey, states: list[Any]) -> None:
        self._store.put(at.key, at.start, at.end, states)
        if self.emit == "on_update" and not self._updates_in_rows:
            # Only now: what refuses the result must find that the store took the record.
            self._update(at, states, (), shown=True)

    def _result_time(self, at: WindowKey, states: list[Any] | None) -> int:
        return at.end if states is None else int(states[0])


class TimeWindowAggregate(FixedWindowAggregate):
    """Aggregates records of a key into tumbling or hopping windows; the first aggregation is `Latest`."""

    def __init__(
        self, store_name: str, windows: TimeWindows, aggregations: Mapping[str, Aggregation[Any]], emit: Emit
    ) -> None:
        super().__init__(store_name, aggregations, emit)
        self.windows = windows

    def process(self, record: Record) -> None:
        if record.key is None:
            self.context.count_skipped("null key")
            return
        if not self.context.takes_time(record.timestamp, self.windows.size_ms):
            return
        stream_time = max(record.timestamp, self.stream_time_ms)
        close_time, size = self.close_time(stream_time), self.windows.size_ms
        starts = self.windows.starts(record.timestamp)
        taken = [start for start in starts if start + size > close_time]
        if taken:
            self._take(record, taken)
        else:
            self.context.emit_late(record, close_time, stream_time)
        self.stream_time_ms = stream_time  # only now: a record that an aggregation refused does not move time
        if missed := len(starts) - len(taken):
            self.context.count_missed(missed)
        self._close(close_time + 1)

    def advance_time(self, stream_time_ms: int) -> None:
        if stream_time_ms > self.stream_time_ms:
            self.stream_time_ms = stream_time_ms
            self._close(self.close_time(stream_time_ms) + 1)

    def results_from_ms(self) -> int:
        """A result has the timestamp of its window's latest record, which may be its first moment."""
        return self.closed_by_ms - self.windows.patience_ms

    def close_time(self, stream_time: int) -> int:
        """Windows that end by this are closed."""
        return self.closing_ms(stream_time) - self.windows.grace_ms

    def _take(self, record: Record, starts: Sequence[int]) -> None:
        key, changed = record.key, []
        found = [self._store.fetch(key, start) for start in starts]
        if None in found:  # what the store has was checked when it came
            check_key(key, self.store_name, self._key_bytes_max)
        for start, window in zip(starts, found, strict=True):
            states = list(window.states) if window is not None else [a.initial() for a in self.aggregations]
            changed.append((WindowKey(key, start, start + self.windows.size_ms), states))
        self._add_all(record, [states for _, states in changed])
        for at, states in changed:
            self._put(at, states)
