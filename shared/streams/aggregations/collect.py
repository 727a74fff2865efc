"""Aggregations that keep values unchanged: the first, the last, all values up to a limit, or each value once.

`First` and `Last` depend on event time, so their results do not depend on the order of arrival. Among several records
with one timestamp, the first to arrive is the first, and the last to arrive is the last. Lists are in order of arrival,
with an earlier session's values before a later one's. Values are kept as JSON; `First` and `Last` of a field that is
typed `int` or `float` keep int64 or float64. None is not a value.

>>> last = Last("page").bind(dict)
>>> state = last.add_at(last.add_at(last.initial(), {"page": "b"}, 20), {"page": "a"}, 10)
>>> last.result(state), last.to_columns(state)
('b', (20, b'"b"'))
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.streams.aggregations.aggregation import (
    Column,
    ColumnValue,
    NumberType,
    OfField,
    ResultType,
    types_of,
)

COLLECT_LIMIT = 1_000  # the default number of values of one window; all of them are written with every change

_decode = msgspec.json.decode  # a Decoder cannot be pickled for Spark's workers

TimedValue = tuple[int, Any]
"""A timestamp and its value; the value is None if there is none yet."""


class _ByTime(OfField[TimedValue]):
    """State: one value and its time. `type` is that of a field of numbers, None if the field may be anything."""

    type: NumberType | None = None

    def _bind_field(self, hint: Any) -> None:
        # A field that may be a bool, or an int as well as a float, is kept unchanged: True is not 1, and 3 is not 3.0.
        options = types_of(hint)
        self.type = "int64" if options == {int} else "float64" if options == {float} else None

    @property
    def state_columns(self) -> tuple[Column, ...]:
        value = Column("json", "binary") if self.type is None else Column("value", self.type)
        return (Column("at_ms", "int64"), value)

    @property
    def result_type(self) -> ResultType:
        return self.type or "json"

    def initial(self) -> TimedValue:
        return (-1, None)

    def add(self, state: TimedValue, value: Any) -> TimedValue:
        """Add a value as if all records had the same timestamp."""
        return self.add_at(state, value, 0)

    def add_at(self, state: TimedValue, value: Any, timestamp_ms: int) -> TimedValue:
        return self.merge(state, (timestamp_ms, self._field_value(value) if self.type is None else self.number(value)))

    def number(self, value: Any) -> float | int | None:
        """Return the record's number, for a field of numbers. Raises DataError for another type."""
        field_value = self._field_value(value)
        return field_value if field_value is None or self.type is None else self._require_number(field_value, self.type)

    def merge(self, earlier: TimedValue, later: TimedValue) -> TimedValue:
        if later[1] is None:
            return earlier
        return later if earlier[1] is None or self._replaces_kept_value(later[0], earlier[0]) else earlier

    @abstractmethod
    def _replaces_kept_value(self, new_ms: int, old_ms: int) -> bool: ...

    def to_columns(self, state: TimedValue) -> tuple[ColumnValue, ...]:
        if self.type is not None:
            return (state[0], 0 if state[1] is None else state[1])
        return (state[0], b"" if state[1] is None else msgspec.json.encode(state[1]))

    def from_columns(self, columns: Sequence[Any]) -> TimedValue:
        if self.type is not None:
            return (int(columns[0]), columns[1] if columns[0] >= 0 else None)
        return (int(columns[0]), _decode(columns[1]) if columns[1] else None)

    def result(self, state: TimedValue) -> Any:
        return state[1]


class First(_ByTime):
    """A field's value in the record with the lowest timestamp."""

    function = "first"

    def _replaces_kept_value(self, new_ms: int, old_ms: int) -> bool:
        return new_ms < old_ms


class Last(_ByTime):
    """A field's value in the record with the highest timestamp."""

    function = "last"

    def _replaces_kept_value(self, new_ms: int, old_ms: int) -> bool:
        return new_ms >= old_ms


Collected = tuple[tuple[Any, ...], int]
"""Values in order, and the number of values that there were."""


class _Collect(OfField[Collected]):
    """State: values up to the limit, and the number of all values."""

    state_columns = (Column("json", "binary"), Column("n", "int64"))
    result_type = "json"

    def __init__(self, field: str, limit: int = COLLECT_LIMIT) -> None:
        super().__init__(field)
        if limit < 1:
            raise ConfigError(f"{self.function}({field!r}): the limit must be at least 1, got {limit}")
        self.limit = limit
        self.parameters = (limit,)

    def initial(self) -> Collected:
        return ((), 0)

    def add(self, state: Collected, value: Any) -> Collected:
        field_value = self._field_value(value)
        return state if field_value is None else self.merge(state, ((field_value,), 1))

    @abstractmethod
    def merge(self, earlier: Collected, later: Collected) -> Collected: ...

    def to_columns(self, state: Collected) -> tuple[ColumnValue, ...]:
        return (msgspec.json.encode(state[0]), state[1])

    def from_columns(self, columns: Sequence[Any]) -> Collected:
        return (tuple(_decode(columns[0])), int(columns[1]))

    def result(self, state: Collected) -> list[Any]:
        return list(state[0])


class CollectList(_Collect):
    """A field's values in order of arrival, the first `limit` of them.

    The state's column `n` counts all values, so it shows how many the limit left out.
    """

    function = "collect_list"

    def merge(self, earlier: Collected, later: Collected) -> Collected:
        capacity = self.limit - len(earlier[0])
        return (earlier[0] + later[0][:capacity] if capacity > 0 else earlier[0], earlier[1] + later[1])


class CollectSet(_Collect):
    """A field's different values, in the order of their first arrival, the first `limit` of them.

    Values are equal if their JSON is. The state's column `n` counts all records that had a value.
    """

    function = "collect_set"

    def merge(self, earlier: Collected, later: Collected) -> Collected:
        values = earlier[0]
        if len(values) < self.limit:
            # By JSON, because values may be lists or objects, which are not hashable. It also keeps 1, 1.0 and true
            # apart.
            known = {self._set_member_json(value): value for value in values}
            for value in later[0]:
                known.setdefault(self._set_member_json(value), value)
            values = tuple(known.values())[: self.limit]
        return (values, earlier[1] + later[1])

    def _set_member_json(self, value: Any) -> bytes:
        try:
            return msgspec.json.encode(value, order="deterministic")
        except (TypeError, ValueError) as e:
            raise DataError(f"{self.function}({self.field!r}): {value!r} has no JSON: {e}") from None
