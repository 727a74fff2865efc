"""Session windows: the record-by-record rule of Kafka Streams, emitted on close or on update.

A session is all records of a key of which each lies within `gap_ms` of another; it closes when the operator's stream
time has passed its end by more than gap and grace. With a gap of 10 and no grace, records at 0, 8 and 25 of one key:
8 extends the session [0, 0] to [0, 8]; 25 lies 17 after its end, so it starts [25, 25], and since the close time is
now 25 - 0 - 10 = 15 > 8, [0, 8] is closed. A record at 12 comes too late (12 < 15); one at 16 does not, it merges into
[16, 25].

Source of the semantics: KStreamSessionWindowAggregate. On update, results of one commit are reduced to the last per
window, and a window is retracted (value None) only if an earlier commit had shown it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from shared.common.errors import ConfigError, RecordTooLarge
from shared.streams.aggregations import Aggregation
from shared.streams.processor import Processor, ProcessorContext, Record
from shared.streams.state.session_store import InMemorySessionStore, Session
from shared.streams.window_limits import check_key, name_window

Emit = Literal["on_close", "on_update"]

NO_TIME = -1
FIXED_COLUMN_BYTES = 8
STATE_BYTES_SPARE = 16 * 1024  # of a changelog entry, for its envelope and what changes its state in place


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

    def close_time(self, stream_time: int) -> int:
        """Sessions that end below this are closed."""
        return stream_time - self.grace_ms - self.gap_ms


class WindowKey(NamedTuple):
    """The key of a windowed result: the record key and the window's bounds in ms (a session's end is inclusive)."""

    key: Any
    start: int
    end: int


class WindowResult(msgspec.Struct, frozen=True):
    """A window's results by name."""

    key: Any
    start: int
    end: int
    results: dict[str, Any]

    def to_json(self) -> bytes:
        """One flat object: key, start, end, then the results."""
        return msgspec.json.encode({"key": self.key, "start": self.start, "end": self.end, **self.results})


class SessionAggregate(Processor):
    """Aggregates records of a key into sessions."""

    def __init__(
        self, store_name: str, windows: SessionWindows, aggregations: Mapping[str, Aggregation[Any]], emit: Emit
    ) -> None:
        self.store_name, self.windows, self.emit = store_name, windows, emit
        self.names = tuple(aggregations)
        self.aggregations = tuple(aggregations.values())
        # What changes its state in place goes last, so that an error in another leaves the session as it was.
        self._first = tuple(i for i, a in enumerate(self.aggregations) if not a.in_place)
        self._last = tuple(i for i, a in enumerate(self.aggregations) if a.in_place)
        self._check_first = tuple(a for a in self.aggregations if a.in_place)[1:]  # of several, the others beforehand
        self.stream_time_ms = NO_TIME
        self._updates: dict[WindowKey, tuple[list[Any] | None, bool]] = {}
        self._store: InMemorySessionStore

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._store = context.store(self.store_name)
        self._state_bytes_max, self._key_bytes_max = context.state_bytes_max, context.key_bytes_max

    def process(self, record: Record) -> None:
        if record.key is None:
            self.context.count_skipped("null key")
            return
        timestamp = record.timestamp
        stream_time = max(timestamp, self.stream_time_ms)
        close_time = self.windows.close_time(stream_time)
        gap = self.windows.gap_ms
        found = self._store.find(record.key, max(timestamp - gap, close_time), timestamp + gap)
        start = min(timestamp, found[0].start) if found else timestamp
        end = max(timestamp, found[-1].end) if found else timestamp
        if end < close_time:
            self.context.emit_late(record, close_time, stream_time)
        else:
            self._merge(record, found, start, end)
        self.stream_time_ms = stream_time  # only now: a record that an aggregation refused does not move time
        self._close(close_time)

    def advance_time(self, stream_time_ms: int) -> None:
        """Move the operator's time on without a record."""
        if stream_time_ms > self.stream_time_ms:
            self.stream_time_ms = stream_time_ms
            self._close(self.windows.close_time(stream_time_ms))

    def commit(self) -> None:
        for at, (states, shown) in self._updates.items():
            if states is not None or shown:
                self._forward(at, states)
        self._updates.clear()

    def results(self, states: list[Any]) -> dict[str, Any]:
        """The named results of a session's states."""
        return {n: a.result(s) for n, a, s in zip(self.names, self.aggregations, states, strict=True)}

    def _merge(self, record: Record, found: list[Session], start: int, end: int) -> None:
        if not found:  # what the store has was checked when it came
            check_key(record.key, self.store_name, self._key_bytes_max)
        states = list(found[0].states) if found else [a.initial() for a in self.aggregations]
        for other in found[1:]:
            states = [a.merge(x, y) for a, x, y in zip(self.aggregations, states, other.states, strict=True)]
        for aggregation in self._check_first:
            aggregation.check(record.value)
        for i in self._first:
            states[i] = self.aggregations[i].add(states[i], record.value)
        if self._state_bytes_max is not None:
            self._check_entry(record.key, states, self._state_bytes_max)
        for i in self._last:
            states[i] = self.aggregations[i].add(states[i], record.value)
        before = [WindowKey(s.key, s.start, s.end) for s in found] if self.emit == "on_update" else []
        for other in found[1:]:
            self._store.remove(other)
        if found:
            self._store.extend(found[0], start, end, states)
        else:
            self._store.put(Session(record.key, start, end, states))
        if self.emit == "on_update":  # only now: what refuses the result must find that the store took the record
            self._update(WindowKey(record.key, start, end), before, states, retract=(start != end))

    def _check_entry(self, key: str | bytes, states: list[Any], bytes_max: int) -> None:
        columns = [c for a, s in zip(self.aggregations, states, strict=True) for c in a.to_columns(s)]
        size = len(key if isinstance(key, bytes) else key.encode())
        size += sum(len(column) if isinstance(column, bytes) else FIXED_COLUMN_BYTES for column in columns)
        if size > bytes_max - STATE_BYTES_SPARE:
            raise RecordTooLarge(
                f"store {self.store_name!r}: a key and a state of {size} bytes; max_request_size={bytes_max}"
            )

    def _update(self, at: WindowKey, found: list[WindowKey], states: list[Any], retract: bool) -> None:
        if not self.context.deduplicate_updates:
            self._forward_update(at, found if retract else [], states)
            return
        updates = self._updates
        if retract:
            for old in found:
                shown = updates.pop(old, (None, True))[1]
                updates[old] = (None, shown)
        shown = updates.pop(at, (None, bool(found) and not retract))[1]
        updates[at] = (list(states), shown)

    def _forward_update(self, at: WindowKey, retracted: list[WindowKey], states: list[Any]) -> None:
        for old in retracted:
            self._forward(old, None)
        self._forward(at, states)

    def _close(self, close_time: int) -> None:
        for closed in self._store.close_before(close_time, self.stream_time_ms):
            if self.emit == "on_close":
                self._forward(WindowKey(closed.key, closed.start, closed.end), closed.states)

    def _forward(self, at: WindowKey, states: list[Any] | None) -> None:
        """Hand a window's result on, or None that it is retracted. Whose result an error is about, its note says."""
        try:
            result = None if states is None else WindowResult(at.key, at.start, at.end, self.results(states))
            self.context.forward(Record(at, result, at.end))
        except Exception as e:
            e.add_note(f"the result of {name_window(self.store_name, *at)}")
            raise
