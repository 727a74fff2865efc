"""What the windowed aggregates have in common whose store may be one of columns.

Such a store closes many windows at once, and where results on update are reduced to the last of each commit anyway, it
is itself what knows which windows have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations import Aggregation
from penstock.shared.streams.processor import ProcessorContext
from penstock.shared.streams.state.column_close import close_at_once, close_due
from penstock.shared.streams.state.column_store import ColumnStore
from penstock.shared.streams.state.session_changes import Windows
from penstock.shared.streams.state.store import FinalRow
from penstock.shared.streams.window_results import WindowResults
from penstock.shared.streams.windowed_aggregate import Emit, WindowedAggregate, WindowKey

if TYPE_CHECKING:
    from penstock.shared.streams.column_path import Moments

CLOSE_AT_ONCE_MIN = 32
"""Where one record closes so many windows, it does so in columns: an object a window costs ten times as much."""


class ColumnAggregate(WindowedAggregate):
    """Base of the operators over windows whose states a store may keep as columns."""

    _store: Any

    def __init__(self, store_name: str, aggregations: Mapping[str, Aggregation[Any]], emit: Emit) -> None:
        super().__init__(store_name, aggregations, emit)
        self._updates_in_rows = False

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._store = context.store(self.store_name)
        in_columns = isinstance(self._store, ColumnStore)
        self._updates_in_rows = in_columns and self.emit == "on_update" and context.deduplicate_updates

    def commit(self) -> None:
        if not self._updates_in_rows:
            super().commit()
            return
        store: ColumnStore = self._store
        windows, retracted = store.updated(), store.retracted()
        if len(windows) or retracted[0]:
            of_store = self.store_name, self.names, store.columns, store.keys_of
            self.context.forward_results(WindowResults(*of_store, windows, retracted, by_time=True))

    def close_batch(self, limit: int, moments: Moments, source: Columns) -> None:
        """Close what ends below `limit`, as by the records of `source` one by one; `moments` knows them."""
        store: ColumnStore = self._store
        self.closed_by_ms = self.closing_ms(self.stream_time_ms)
        closed = close_due(store, limit, moments.closed_at)
        if closed is not None and self.emit == "on_close":
            self.context.forward_results(self._results_of(store, closed), source, moments.places(closed.closed_at))

    def _close(self, limit: int) -> None:
        """Close what ends below `limit`."""
        if self.closed_by_ms < self.stream_time_ms:
            self.closed_by_ms = self.stream_time_ms
        store = self._store
        closed_now: Sequence[FinalRow]
        if isinstance(store, ColumnStore):
            due = store.wheel.due(limit)
            if len(due) >= CLOSE_AT_ONCE_MIN:
                windows = close_at_once(store, due, limit, self.stream_time_ms)
                if windows is not None and self.emit == "on_close":
                    self.context.forward_results(self._results_of(store, windows))
                return
            closed_now = store.close(due, limit, self.stream_time_ms)
        else:
            closed_now = store.close_before(limit, self.stream_time_ms)
        for closed in closed_now:
            if self.emit == "on_close":
                self._forward(WindowKey(closed.key, closed.start, closed.end), closed.states)

    def _results_of(self, store: ColumnStore, windows: Windows) -> WindowResults:
        return WindowResults(self.store_name, self.names, store.columns, store.keys_of, windows)
