"""Aggregations that keep one value of a field by event time: the first, or the last.

`First` has the value of the record with the lowest timestamp, `Last` that of the record with the highest. Only among
records with the same timestamp does the order of arrival decide. The value of a field that is typed `int` or `float` is
kept as int64 or float64, any other value as plain JSON: a struct is a dict at once. None is skipped. A value kept as
JSON that is NaN or infinite is restored as NaN.

>>> last = Last("page").bind(dict)
>>> state = last.add_at(last.add_at(last.initial(), {"page": "b"}, 20), {"page": "a"}, 10)
>>> last.result(state), last.to_columns(state)
('b', (20, b'"b"'))
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.streams.aggregations.aggregation import (
    Column,
    ColumnValue,
    NumberType,
    OfField,
    ResultType,
    field_types,
)

# A msgspec Decoder cannot be pickled for Spark's workers.
_decode = msgspec.json.decode


TimedValue = tuple[int, Any]
"""A timestamp and its value; the value is None if there is none yet."""


class _FirstOrLast(OfField[TimedValue]):
    """The common part of `First` and `Last`; the state is one value and its record's timestamp.

    `type` is "int64" for a field that is typed `int` or `int | None`, and "float64" for `float` or `float | None`. For
    any other field it is None.
    """

    type: NumberType | None = None

    def _bind_field(self, hint: Any) -> None:
        # A field that may be a bool, or an int as well as a float, is kept unchanged: True is not 1, and 3 is not 3.0.
        options = field_types(hint)
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
        """Return the state with one more record's value, as if all records had the same timestamp."""
        return self.add_at(state, value, 0)

    def add_at(self, state: TimedValue, value: Any, timestamp_ms: int) -> TimedValue:
        added = self._plain_json(self._field_value(value)) if self.type is None else self.number(value)
        return self.merge(state, (timestamp_ms, added))

    def number(self, value: Any) -> float | int | None:
        """Return the field's value, as a number of `type` if that is set. None stays None.

        Raises DataError if any other value is not such a number.
        """
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
        # None is no value, so `null` is a number that JSON lacks.
        value = math.nan if columns[1] == b"null" else _decode(columns[1]) if columns[1] else None
        return (int(columns[0]), value)

    def result(self, state: TimedValue) -> Any:
        return state[1]


class First(_FirstOrLast):
    """The value of a field with the lowest timestamp, or the first to arrive with it; None is skipped."""

    function = "first"

    def _replaces_kept_value(self, new_ms: int, old_ms: int) -> bool:
        return new_ms < old_ms


class Last(_FirstOrLast):
    """The value of a field with the highest timestamp, or the last to arrive with it; None is skipped."""

    function = "last"

    def _replaces_kept_value(self, new_ms: int, old_ms: int) -> bool:
        return new_ms >= old_ms
