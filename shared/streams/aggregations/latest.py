"""The highest timestamp of the records of a window or a row: an aggregation that the DSL adds to the user's.

It becomes the timestamp of the result. The DSL does not add it to session windows, because the timestamp of a session's
result is the session's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.shared.streams.aggregations.aggregation import Aggregation, Column, ColumnValue

LATEST = "latest_ms"
"""The name of this aggregation, which comes before all others; no result may have the name."""


class Latest(Aggregation[int]):
    """The highest timestamp of a window's records; an operator's own, kept beside the user's aggregations."""

    function = "latest"
    state_columns = (Column("ms", "int64"),)
    result_type = "int64"

    def initial(self) -> int:
        return -1

    def add(self, state: int, value: Any) -> int:
        return state

    def add_at(self, state: int, value: Any, timestamp_ms: int) -> int:
        return max(state, timestamp_ms)

    def merge(self, earlier: int, later: int) -> int:
        return max(earlier, later)

    def to_columns(self, state: int) -> tuple[ColumnValue, ...]:
        return (state,)

    def from_columns(self, columns: Sequence[Any]) -> int:
        return int(columns[0])

    def result(self, state: int) -> int:
        return state
