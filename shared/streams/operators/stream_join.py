"""Joins of two streams: records of one key whose timestamps are within the join window.

A left record at `ts` matches the right records of its key from `ts - before_ms` to `ts + after_ms`. A pair is
forwarded once, when the second of the two arrives, with the higher of their timestamps. The join has one stream time
for both sides. A left record expires when stream time has passed its window and the grace: it is joined with no later
record. A left record that arrives after that is late. A right record is late if all left records that it could match
have expired.

In a left join, a left record without a match is forwarded with None when it expires. A left record without a key is
forwarded with None at once, and does not advance stream time.

The close time is stream time minus the grace. It decides both which records are late and when left records expire. It
never goes back, even if the application restarts with a longer grace. So no left record that was already forwarded with
None is joined later.

>>> JoinWindows.of(10, grace=5)
JoinWindows(before_ms=10, after_ms=10, grace_ms=5)

Source of the semantics: JoinWindows and KStreamKStreamJoin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Self

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregation, Column, ColumnValue
from penstock.shared.streams.durations import duration_ms
from penstock.shared.streams.operators.tables import Joiner
from penstock.shared.streams.processor import NO_TIME, Processor, ProcessorContext, TimedProcessor
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.join_store import JoinRow, JoinStore
from penstock.shared.streams.state.persistent_stores import PersistentJoinStore
from penstock.shared.streams.topology import KeyType
from penstock.shared.streams.user_code import user_copy
from penstock.shared.streams.window_result import WindowResult, with_bytes_key
from penstock.shared.streams.windows.size_limits import check_key

LEFT = 0
RIGHT = 1


@dataclass(frozen=True, slots=True)
class JoinWindows:
    """How far before and after a left record its right ones may be, and the grace period, in ms."""

    before_ms: int
    after_ms: int
    grace_ms: int = 0

    def __post_init__(self) -> None:
        for name in ("before_ms", "after_ms", "grace_ms"):
            if type(ms := getattr(self, name)) is not int:
                raise ConfigError(
                    f"JoinWindows: {name} must be a whole number of ms, got {ms!r}; JoinWindows.of() takes a timedelta"
                )
        if self.before_ms + self.after_ms < 0:
            raise ConfigError(
                f"a join window ends before it starts: {self.before_ms} ms before, {self.after_ms} ms after"
            )
        if self.grace_ms < 0:
            raise ConfigError(f"join grace must not be negative, got {self.grace_ms}")

    @classmethod
    def of(cls, difference: timedelta | int, grace: timedelta | int = 0) -> Self:
        """Return the windows of a stream join: records at most `difference` apart, in either order.

        Durations are timedelta or ms.
        """
        ms = duration_ms(difference, "JoinWindows: difference", 0)
        return cls(ms, ms, duration_ms(grace, "JoinWindows: grace", 0))

    def reach(self, side: int) -> tuple[int, int]:
        """Return how far before and after a record of that side the other side's records may be."""
        return (self.before_ms, self.after_ms) if side == LEFT else (self.after_ms, self.before_ms)

    def limit(self, side: int, close_time_ms: int) -> int:
        """Return the timestamp below which a record of the side `side` is late, and removed from the store.

        `close_time_ms` is stream time minus the grace. A left record is kept until its window and the grace have
        passed (a negative `after_ms` counts as 0), a right one while it can match a left record that is not late.
        """
        # With a negative `after_ms`, matching right records have lower timestamps, so a left record waits for the grace
        # only.
        left = close_time_ms - max(0, self.after_ms)
        return left if side == LEFT else left - self.before_ms


class Remembered(NamedTuple):
    """One record of a side, and whether it has been joined.

    Only left records are marked when a later record matches them.
    """

    value: Any
    joined: bool


class JoinRows(Aggregation[tuple[Remembered, ...]]):
    """The records of one key and timestamp, in order of arrival."""

    function = "join"
    state_columns = (Column("json", "binary"),)
    result_type = "json"

    def __init__(self, value_type: Any, window_key: KeyType = "string") -> None:
        """`window_key` is the type of the windows' keys, if the values are windows' results."""
        type_ = Any if value_type is dict else value_type
        self._restored = with_bytes_key if value_type is WindowResult and window_key == "bytes" else None
        self._decode = msgspec.json.Decoder(list[tuple[type_, bool]]).decode  # type: ignore[valid-type]

    def initial(self) -> tuple[Remembered, ...]:
        return ()

    def add(self, state: tuple[Remembered, ...], value: Any) -> tuple[Remembered, ...]:
        return (*state, value)

    def merge(self, earlier: tuple[Remembered, ...], later: tuple[Remembered, ...]) -> tuple[Remembered, ...]:
        return earlier + later

    def to_columns(self, state: tuple[Remembered, ...]) -> tuple[ColumnValue, ...]:
        return (msgspec.json.encode(state),)

    def from_columns(self, columns: Sequence[Any]) -> tuple[Remembered, ...]:
        rows = tuple(Remembered(*row) for row in self._decode(columns[0]))
        if self._restored is None:
            return rows
        return tuple(row._replace(value=self._restored(row.value)) for row in rows)

    def result(self, state: tuple[Remembered, ...]) -> Any:
        return [row.value for row in state]


class Sided(NamedTuple):
    """A value for a join, with its side."""

    side: int
    value: Any


class JoinSide(Processor):
    """Marks each record with its side of the join."""

    def __init__(self, side: int) -> None:
        self._side = side

    def process(self, record: Record) -> None:
        self.context.forward(record._replace(value=Sided(self._side, record.value)))


class StreamJoin(TimedProcessor):
    """Joins the records that its two `JoinSide`s forward; `stores` are the left and the right store's names."""

    def __init__(self, stores: tuple[str, str], windows: JoinWindows, joiner: Joiner, *, left: bool) -> None:
        self.store_name = stores[LEFT]
        self._store_names = stores
        self.windows = windows
        self._joiner = joiner
        self._left = left
        self.stream_time_ms = NO_TIME
        self._stores: tuple[JoinStore | PersistentJoinStore, JoinStore | PersistentJoinStore]

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._stores = (context.store(self._store_names[LEFT]), context.store(self._store_names[RIGHT]))

    def process(self, record: Record) -> None:
        side, value = record.value
        # KIP-962: a left record without a key is kept, because no right record can match. KStreamKStreamJoin advances
        # its time with such a record and with skipped ones. Here only records that are taken advance it.
        if record.key is None and value is not None and self._left and side == LEFT:
            ((remembered,),) = self._stores[LEFT].check(b"", [(Remembered(value, False),)])
            self.context.forward(record._replace(value=self._joiner(remembered.value, None)))
            return
        if record.key is None or value is None:
            self.context.count_skipped("null key" if record.key is None else "null value")
            return
        if not self.context.takes_time(record.timestamp, max(self.windows.before_ms, self.windows.after_ms, 0)):
            return
        check_key(record.key, self._store_names[side], self.context.key_bytes_max)
        at = record.timestamp
        stream_time = max(self.stream_time_ms, record.timestamp)
        close_time = self._close_time(stream_time)
        if at < self.windows.limit(side, close_time):
            self.context.emit_late(record._replace(value=value), close_time, stream_time)
            self._forward_unjoined()
            return
        before, after = self.windows.reach(side)
        # If this record advances the close time, rows that have expired are in the store until `_forward_unjoined`.
        earliest = max(at - before, self.windows.limit(1 - side, close_time))
        found = self._stores[1 - side].fetch_range(record.key, earliest, at + after)
        joined = [(row.start, other.value) for row in found for other in row.states[0]]
        remembered = Remembered(value, bool(joined))
        existing = self._stores[side].fetch(record.key, at)
        rows = (remembered,) if existing is None else (*existing.states[0], remembered)
        # Checked and copied before the joiner is called, because it may change its arguments. It gets the value as a
        # restore gives it, as it does if the record arrives before its match.
        states = self._stores[side].check(record.key, [rows])
        value = states[0][-1].value
        results = [
            Record(
                record.key, self._join_values(side, user_copy(value), user_copy(other)), max(then, at), record.headers
            )
            for then, other in joined
        ]
        # Up to here nothing has changed, so an error of the check or the joiner rejects the record.
        self.stream_time_ms = stream_time
        self._forward_unjoined()
        # In `_forward_unjoined` of a left join only unmatched left records are forwarded alone. KStreamKStreamJoin
        # removes a matched one from its outer store. An inner join marks them too: its state may go on in a left join.
        if side == RIGHT:
            self._mark_rows_joined(found)
        self._stores[side].put(record.key, at, at, states)
        # Last, so that an error of a node below finds the store complete, and costs one output.
        for result in results:
            self.context.forward(result)

    def advance_time(self, stream_time_ms: int) -> None:
        if stream_time_ms > self.stream_time_ms:
            self.stream_time_ms = stream_time_ms
            self._forward_unjoined()

    def _close_time(self, stream_time_ms: int) -> int:
        due = stream_time_ms - self.windows.grace_ms
        known = self.close_time_ms
        return due if known is None or due > known else known

    def _forward_unjoined(self) -> None:
        """Drop the records that cannot match any more; a left join forwards the left ones without a match."""
        close_time = self._close_time(self.stream_time_ms)
        # KStreamKStreamJoin emits such records at most once a second. Here they are emitted with the record that closes
        # their window.
        if close_time == self.close_time_ms:
            return
        self.close_time_ms = close_time
        for row in self._stores[LEFT].take_before(self.windows.limit(LEFT, close_time)):
            for remembered in row.states[0] if self._left else ():
                if not remembered.joined:
                    self._forward_alone(Record(row.key, remembered.value, row.start))
        self._stores[RIGHT].take_before(self.windows.limit(RIGHT, close_time))

    def _forward_alone(self, record: Record) -> None:
        try:
            joined = record._replace(value=self._joiner(record.value, None))
        except Exception as e:
            self.context.reject_output(record, e)
            return
        self.context.forward(joined)

    def results_from_ms(self) -> int:
        close_time = self.close_time_ms
        if close_time is None:
            return NO_TIME
        return min(self.windows.limit(side, close_time) for side in (LEFT, RIGHT))

    def _join_values(self, side: int, value: Any, other: Any) -> Any:
        return self._joiner(value, other) if side == LEFT else self._joiner(other, value)

    def _mark_rows_joined(self, rows: Sequence[JoinRow]) -> None:
        for row in rows:
            if not all(remembered.joined for remembered in row.states[0]):
                states = [tuple(remembered._replace(joined=True) for remembered in row.states[0])]
                self._stores[LEFT].put(row.key, row.start, row.end, states)
