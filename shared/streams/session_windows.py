"""Session windows: the record-by-record rule of Kafka Streams, emitted on close or on update.

A session is all records of a key of which each lies within `gap_ms` of another; it closes when the operator's stream
time has passed its end by more than gap and grace. With a gap of 10 and no grace, records at 0, 8 and 25 of one key:
8 extends the session [0, 0] to [0, 8]; 25 lies 17 after its end, so it starts [25, 25], and since the close time is
now 25 - 0 - 10 = 15 > 8, [0, 8] is closed. A record at 12 comes too late (12 < 15); one at 16 does not, it merges into
[16, 25].

Source of the semantics: KStreamSessionWindowAggregate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations import Aggregation
from penstock.shared.streams.column_aggregate import ColumnAggregate
from penstock.shared.streams.processor import Record
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.persistent_stores import PersistentSessionStore
from penstock.shared.streams.state.session_store import InMemorySessionStore, Session
from penstock.shared.streams.window_limits import check_key
from penstock.shared.streams.windowed_aggregate import Emit, WindowKey


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """The inactivity gap and the grace period in ms."""

    gap_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.gap_ms < 1:
            raise ConfigError(f"session gap must be at least 1 ms, got {self.gap_ms}")
        if self.grace_ms < 0:
            raise ConfigError(f"session grace must not be negative, got {self.grace_ms}")

    @property
    def patience_ms(self) -> int:
        """How much later than its end a session is closed at the latest: gap and grace."""
        return self.gap_ms + self.grace_ms


class SessionAggregate(ColumnAggregate):
    """Aggregates records of a key into sessions."""

    def __init__(
        self, store_name: str, windows: SessionWindows, aggregations: Mapping[str, Aggregation[Any]], emit: Emit
    ) -> None:
        super().__init__(store_name, aggregations, emit)
        self.windows = windows
        self._store: InMemorySessionStore | ColumnSessionStore | PersistentSessionStore

    def process(self, record: Record) -> None:
        if record.key is None:
            self.context.count_skipped("null key")
            return
        if not self.context.takes_time(record.timestamp, self.windows.patience_ms):
            return
        stream_time = max(record.timestamp, self.stream_time_ms)
        self.take(record, stream_time)
        self.stream_time_ms = stream_time  # only now: a record that an aggregation refused does not move time
        self._close(self.close_time(stream_time))

    def advance_time(self, stream_time_ms: int) -> None:
        """Move the operator's time on without a record."""
        if stream_time_ms > self.stream_time_ms:
            self.stream_time_ms = stream_time_ms
            self._close(self.close_time(stream_time_ms))

    def results_from_ms(self) -> int:
        return self.closed_by_ms - self.windows.patience_ms

    def close_time(self, stream_time: int) -> int:
        """Sessions that end below this are closed."""
        return self.closing_ms(stream_time) - self.windows.patience_ms

    def take(self, record: Record, stream_time: int) -> None:
        """Merge a record into its key's sessions, or find it late; `stream_time` is the operator's with it."""
        timestamp, gap = record.timestamp, self.windows.gap_ms
        close_time = self.close_time(stream_time)
        found = self._store.find(record.key, max(timestamp - gap, close_time), timestamp + gap)
        start = min(timestamp, found[0].start) if found else timestamp
        end = max(timestamp, found[-1].end) if found else timestamp
        if end < close_time:
            self.context.emit_late(record, close_time, stream_time)
        else:
            self._merge(record, found, start, end)

    def _merge(self, record: Record, found: list[Session], start: int, end: int) -> None:
        if not found:  # what the store has was checked when it came
            check_key(record.key, self.store_name, self._key_bytes_max)
        states = list(found[0].states) if found else [a.initial() for a in self.aggregations]
        for other in found[1:]:
            states = [a.merge(x, y) for a, x, y in zip(self.aggregations, states, other.states, strict=True)]
        self._add(record, states)
        before = [WindowKey(s.key, s.start, s.end) for s in found] if self.emit == "on_update" else []
        for other in found[1:]:
            self._store.remove(other)
        if found:
            self._store.extend(found[0], start, end, states)
        else:
            self._store.put(Session(record.key, start, end, states))
        if (
            self.emit == "on_update" and not self._updates_in_rows
        ):  # only now: what refuses the result must find that the store took the record
            at, retracted = WindowKey(record.key, start, end), before if start != end else []
            self._update(at, states, retracted, shown=bool(before) and not retracted)
