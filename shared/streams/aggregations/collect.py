"""Aggregations that collect the values of a field up to a limit: all of them, or each value once.

Collected values are in order of arrival. When two sessions are merged, the values of the earlier session come first.
Values are kept as plain JSON: a struct is a dict at once. None is skipped. A value that is NaN or infinite is restored
as NaN.

>>> pages = CollectList("page", limit=2).bind(dict)
>>> state = pages.initial()
>>> for page in "abc":
...     state = pages.add(state, {"page": page})
>>> pages.result(state), pages.to_columns(state)
(['a', 'b'], (b'["a","b"]', 3))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import (
    Column,
    ColumnValue,
    OfField,
)

# The default limit of values per window. A commit writes all values of a changed window.
COLLECT_LIMIT = 1_000

# A msgspec Decoder cannot be pickled for Spark's workers.
_decode = msgspec.json.decode


Collected = tuple[tuple[Any, ...], int]
"""Values in order, and the number of values that there were."""


class _Collect(OfField[Collected]):
    """State: values up to the limit, and the number of all values."""

    state_columns = (Column("json", "binary"), Column("n", "int64"))
    result_type = "json"

    def __init__(self, field: str, limit: int = COLLECT_LIMIT) -> None:
        super().__init__(field)
        if type(limit) is not int or limit < 1:
            raise ConfigError(f"{self.function}({field!r}): the limit must be an int of at least 1, got {limit!r}")
        self.limit = limit
        self.parameters = (limit,)

    def initial(self) -> Collected:
        return ((), 0)

    def add(self, state: Collected, value: Any) -> Collected:
        field_value = self._plain_json(self._field_value(value))
        return state if field_value is None else self.merge(state, ((field_value,), 1))

    def to_columns(self, state: Collected) -> tuple[ColumnValue, ...]:
        return (msgspec.json.encode(state[0]), state[1])

    def from_columns(self, columns: Sequence[Any]) -> Collected:
        # None is no value, so `null` is a number that JSON lacks.
        values = (math.nan if value is None else value for value in _decode(columns[0], type=list))
        return (tuple(values), int(columns[1]))

    def result(self, state: Collected) -> list[Any]:
        return list(state[0])


class CollectList(_Collect):
    """At most `limit` values of a field, in order of arrival. When sessions are merged, the earlier one's come first.

    The state's column `n` counts all values, including those beyond the limit.
    """

    function = "collect_list"

    def merge(self, earlier: Collected, later: Collected) -> Collected:
        capacity = self.limit - len(earlier[0])
        return (earlier[0] + later[0][:capacity] if capacity > 0 else earlier[0], earlier[1] + later[1])


class CollectSet(_Collect):
    """At most `limit` different values of a field, in the order of their first arrival.

    When sessions are merged, the values of the earlier session come first. Two values are equal if their JSON is
    equal. The state's column `n` counts all records that had a value.
    """

    function = "collect_set"

    def merge(self, earlier: Collected, later: Collected) -> Collected:
        values = earlier[0]
        if len(values) < self.limit:
            # By JSON, because values may be lists or objects, which are not hashable. It also keeps 1, 1.0 and true
            # apart.
            known = {self._json(value): value for value in values}
            for value in later[0]:
                known.setdefault(self._json(value), value)
            values = tuple(known.values())[: self.limit]
        return (values, earlier[1] + later[1])
