"""The operator of aggregations without windows: one row a key, forwarded on update.

It has a time, as windows have: the highest timestamp of a record with a key. Nothing closes, and no record is late. A
row is forwarded with the timestamp of its key's latest record, as in Kafka Streams' `KStreamAggregate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.windows.kinds import Rule
from penstock.shared.streams.windows.window_aggregate import WindowAggregate
from penstock.shared.streams.windows.window_results import WindowResults


class KeyAggregate(WindowAggregate):
    """Aggregates the records of each key into its row."""

    def __init__(self, store_name: str, aggregations: Mapping[str, Aggregation[Any]]) -> None:
        super().__init__(store_name, Rule("table"), aggregations, "on_update")

    def results_from_ms(self) -> int:
        """Return stream time, or the earliest time of a changed row if the commit forwards the rows."""
        return self.stream_time_ms if self._emits_each_update else self._changed_from_ms()

    def _changed_from_ms(self) -> int:
        """Return the earliest time of a changed row; stream time if none has changed."""
        table = self.store.table
        latest = table.cells[table.changed_rows(), table.base + self._columns.program[0][1]]
        return int(latest.min(initial=self.stream_time_ms))

    def _make_window_results(self, windows: Any, *, by_time: bool = False, **options: Any) -> WindowResults:
        return super()._make_window_results(windows, by_time=by_time, has_bounds=False)
