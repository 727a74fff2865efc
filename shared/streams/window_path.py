"""Tumbling and hopping windows over whole batches.

Whether a window takes a record is decided by the stream time of the record's own moment alone, and nothing that is in
the store has a say in it: a window that a later record of the batch closes is closed after the batch, and until then
takes just those records that came before that one. So all records can be merged in any order, and none is taken singly
but to be found late.
"""

from __future__ import annotations

import numpy as np

from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.batch_values import TakenValues
from penstock.shared.streams.column_path import ColumnPath, Moments
from penstock.shared.streams.state.column_window_store import ColumnWindowStore
from penstock.shared.streams.state.window_merge import take_into_windows
from penstock.shared.streams.time_windows import TimeWindowAggregate


class WindowPath(ColumnPath):
    """Takes the batches of a source whose records go into tumbling or hopping windows."""

    _operator: TimeWindowAggregate
    _store: ColumnWindowStore

    @property
    def records_min(self) -> int:
        """So many records that there are as many updates of windows as other paths want records."""
        return max(1, self._task.columns_min // self._operator.windows.per_record)

    @property
    def _patience_ms(self) -> int:
        return self._operator.windows.patience_ms

    def _take_keyed(self, columns: Columns, values: TakenValues, at: Int64Array) -> None:
        operator = self._operator
        grace = operator.windows.grace_ms
        before_ms, patience_ms = operator.stream_time_ms, grace - 1  # an end is in no window
        moments = Moments(columns.timestamps[at], at, before_ms, patience_ms, operator.closed_by_ms)
        places, first, last = self._find_late(columns, values, at, moments)
        if len(places):
            states = [column[places] for column in values.states]
            take_into_windows(self._store, values.codes[places], first, last, states)
        operator.stream_time_ms = int(moments.times[-1])
        operator.close_batch(operator.close_time(operator.stream_time_ms) + 1, moments, columns)

    def _find_late(
        self, columns: Columns, values: TakenValues, at: Int64Array, moments: Moments
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The places of records that a window takes, with the numbers of their first and last; of others none does."""
        windows, context = self._operator.windows, self._operator.context
        close_times = moments.closing - windows.grace_ms
        first, last = windows.numbers(columns.timestamps[at])
        taken_from = np.maximum(first, (close_times - windows.size_ms) // windows.advance_ms + 1)
        missed = int((np.minimum(taken_from, last + 1) - first).sum())
        if not missed:
            return at, first, last
        is_late = taken_from > last
        late = zip(at[is_late].tolist(), close_times[is_late].tolist(), moments.times[is_late].tolist(), strict=True)
        for place, close_time, stream_time in late:
            context.emit_late(self._record(columns, values, place), close_time, stream_time)
        context.count_missed(missed)
        return at[~is_late], taken_from[~is_late], last[~is_late]
