"""What all windowed aggregates have in common, whatever their windows are.

An operator has a time of its own, the highest timestamp of a record with a key, which closes its windows and is kept
in the progress record under its store's name. Its results go out one by one (`on_close`), or on update: there the
results of one commit are reduced to the last per window, and a window is retracted (value None) only if an earlier
commit had shown it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Literal, NamedTuple

import msgspec

from penstock.shared.common.errors import RecordTooLarge
from penstock.shared.streams.aggregations import Aggregation
from penstock.shared.streams.processor import K, Processor, ProcessorContext, Record
from penstock.shared.streams.window_limits import name_window

Emit = Literal["on_close", "on_update"]

NO_TIME = -1
FIXED_COLUMN_BYTES = 8
STATE_BYTES_SPARE = 16 * 1024  # of a changelog entry, for its envelope and what changes its state in place


class WindowKey(NamedTuple, Generic[K]):
    """The key of a windowed result: the record key and the window's bounds in ms.

    The end of a session and of a sliding window is inclusive, that of a tumbling or hopping window is not.
    """

    key: K
    start: int
    end: int


class WindowResult(msgspec.Struct, Generic[K], frozen=True):
    """A window's results by name."""

    key: K
    start: int
    end: int
    results: dict[str, Any]

    def to_json(self) -> bytes:
        """One flat object: key, start, end, then the results."""
        return msgspec.json.encode({"key": self.key, "start": self.start, "end": self.end, **self.results})


class TimedProcessor(Processor):
    """A processor with a time of its own, which is state: the task keeps it under the name of the store."""

    store_name: str
    stream_time_ms: int = NO_TIME
    closed_by_ms: int = NO_TIME
    """What this time closes was closed, and no more: set by what closes. It is the stream time, but where a gap or
    grace was changed: later after longer ones, until time has reached it; earlier after shorter ones, until a record or
    an advance closes what is due."""

    def closing_ms(self, stream_time_ms: int) -> int:
        """The time by which windows close at a stream time."""
        closed_by_ms = self.closed_by_ms
        return stream_time_ms if stream_time_ms > closed_by_ms else closed_by_ms  # noqa: FURB136  (once a record: max is slow)

    @abstractmethod
    def advance_time(self, stream_time_ms: int) -> None:
        """Move the operator's time on without a record."""

    @abstractmethod
    def results_from_ms(self) -> int:
        """No result still to come has an earlier timestamp, by what was closed; there must be a time."""


class WindowedAggregate(TimedProcessor):
    """Base of the operators that aggregate records into windows."""

    def __init__(self, store_name: str, aggregations: Mapping[str, Aggregation[Any]], emit: Emit) -> None:
        self.store_name, self.emit = store_name, emit
        self.names = tuple(aggregations)
        self.aggregations = tuple(aggregations.values())
        # What changes its state in place goes last, so that an error in another leaves the window as it was.
        self._first = tuple(i for i, a in enumerate(self.aggregations) if not a.in_place)
        self._last = tuple(i for i, a in enumerate(self.aggregations) if a.in_place)
        self._check_first = tuple(a for a in self.aggregations if a.in_place)[1:]  # of several, the others beforehand
        self.stream_time_ms = NO_TIME
        self._updates: dict[WindowKey, tuple[list[Any] | None, bool]] = {}
        self._state_bytes_max: int | None = None

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._state_bytes_max, self._key_bytes_max = context.state_bytes_max, context.key_bytes_max

    def commit(self) -> None:
        for at, (states, shown) in self._updates.items():
            if states is not None or shown:
                self._forward(at, states)
        self._updates.clear()

    def results(self, states: list[Any]) -> dict[str, Any]:
        """The named results of a window's states."""
        return {n: a.result(s) for n, a, s in zip(self.names, self.aggregations, states, strict=True)}

    def _add(self, record: Record, states: list[Any]) -> None:
        """Put a record into `states`, or raise and leave the states of the store as they were."""
        for aggregation in self._check_first:
            aggregation.check(record.value)
        for i in self._first:
            states[i] = self.aggregations[i].add_at(states[i], record.value, record.timestamp)
        if self._state_bytes_max is not None:
            self._check_entry(record.key, states, self._state_bytes_max)
        for i in self._last:
            states[i] = self.aggregations[i].add_at(states[i], record.value, record.timestamp)

    def _check_entry(self, key: str | bytes, states: list[Any], bytes_max: int) -> None:
        columns = [c for a, s in zip(self.aggregations, states, strict=True) for c in a.to_columns(s)]
        size = len(key if isinstance(key, bytes) else key.encode())
        size += sum(len(column) if isinstance(column, bytes) else FIXED_COLUMN_BYTES for column in columns)
        if size > bytes_max - STATE_BYTES_SPARE:
            raise RecordTooLarge(
                f"store {self.store_name!r}: a key and a state of {size} bytes; max_request_size={bytes_max}"
            )

    def _update(self, at: WindowKey, states: list[Any], retracted: Iterable[WindowKey], *, shown: bool) -> None:
        """Forward a window's new states on update, now or with the commit.

        `retracted` are windows that are no more; `shown` says whether an earlier commit may have shown this one.
        """
        if not self.context.deduplicate_updates:
            for old in retracted:
                self._forward(old, None)
            self._forward(at, states)
            return
        updates = self._updates
        for old in retracted:
            was_shown = updates.pop(old, (None, True))[1]
            updates[old] = (None, was_shown)
        shown = updates.pop(at, (None, shown))[1]
        updates[at] = (list(states), shown)

    def _forward(self, at: WindowKey, states: list[Any] | None) -> None:
        """Hand a window's result on, or None that it is retracted. Whose result an error is about, its note says."""
        try:
            try:
                result = None if states is None else WindowResult(at.key, at.start, at.end, self.results(states))
            except Exception as e:
                self.context.refuse_output(Record(at, None, self._result_time(at, states)), e)
                return
            self.context.forward(Record(at, result, self._result_time(at, states)))
        except Exception as e:
            e.add_note(f"the result of {name_window(self.store_name, *at)}")
            raise

    def _result_time(self, at: WindowKey, states: list[Any] | None) -> int:
        return at.end
