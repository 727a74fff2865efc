"""Session windows over whole batches: sort, cut where the gap is exceeded, merge the runs into the store.

A record that is no further behind the stream time of its moment than the grace period finds every session of its key
within the gap, since whatever ends within the gap before it ends at or above the close time; so records of this kind
can be merged in any order. One that is further behind does so too where it is itself at or above the close time of its
moment and the latest of what lies before it within the gap is as well (`_misfits`). A key that has a record for which
this cannot be shown is taken record by record, though against the close times of the batch's moments. Sessions are
closed after the batch, each as of the record that passed it.

Lists go by the order of arrival, which is that of single records where none of them joins two sessions: a key where one
does is taken record by record for them (`arrival_order`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shared.common.records import Columns, Int64Array
from shared.streams.batch_values import TakenValues
from shared.streams.column_path import ColumnPath, Moments
from shared.streams.session_windows import SessionAggregate
from shared.streams.state.arrival_order import merging_keys
from shared.streams.state.column_merge import cuts, merge_runs, sorted_order
from shared.streams.state.column_session_store import ColumnSessionStore
from shared.streams.state.column_store import NONE


class SessionPath(ColumnPath):
    """Takes the batches of a source whose records go into sessions."""

    _operator: SessionAggregate
    _store: ColumnSessionStore

    @property
    def _patience_ms(self) -> int:
        return self._operator.windows.patience_ms

    def _take_keyed(self, columns: Columns, values: TakenValues, at: Int64Array) -> None:
        operator = self._operator
        windows = operator.windows
        codes, times = values.codes[at], columns.timestamps[at]
        moments = Moments(times, at, operator.stream_time_ms, windows.gap_ms + windows.grace_ms)
        order = sorted_order(codes, times)
        slow = self._slow_keys(codes[order], times[order], order, moments.times)
        if self._store.columns.in_order:
            quick = order[~np.isin(codes[order], slow)]
            merging = merging_keys(self._store, codes[quick], times[quick], quick, windows.gap_ms)
            slow = np.concatenate((slow, merging))
        if len(slow):
            is_slow = np.isin(codes, slow)
            order = order[~is_slow[order]]
            self._take_singly(columns, values, at[is_slow], moments.times[is_slow])
        if len(order):
            codes, times = codes[order], times[order]
            first = np.flatnonzero(cuts(codes, times, times, windows.gap_ms))
            last = np.append(first[1:], len(times)) - 1
            places = at[order]
            states = self._store.columns.reduce([column[places] for column in values.states], first, places)
            merge_runs(self._store, codes[first], times[first], times[last], states, windows.gap_ms)
        operator.stream_time_ms = int(moments.times[-1])
        operator.close_batch(windows.close_time(operator.stream_time_ms), moments, columns)

    def _take_singly(self, columns: Columns, values: TakenValues, at: Int64Array, moments: Int64Array) -> None:
        """Take records of keys that need it one by one, closing nothing: what is closed is not found anyway."""
        for place, moment in zip(at.tolist(), moments.tolist(), strict=True):
            self._operator.take(self._record(columns, values, place), moment)

    def _slow_keys(self, codes: Int64Array, times: Int64Array, order: Int64Array, moments: Int64Array) -> Int64Array:
        """The keys with records that cannot be shown to find what belongs to them; all is in order of key and time."""
        windows = self._operator.windows
        deep = np.flatnonzero(moments[order] - times > windows.grace_ms)
        if not len(deep):
            return deep
        close_times = moments[order[deep]] - windows.grace_ms - windows.gap_ms
        before = np.maximum(deep - 1, 0)
        shown = (deep > 0) & (codes[before] == codes[deep]) & (order[before] < order[deep])
        shown &= (times[before] >= close_times) & (times[deep] >= close_times)
        misfits = self._misfits(codes, times, order, deep[~shown], close_times[~shown])
        return np.unique(np.fromiter(misfits, np.int64))

    def _misfits(
        self, codes: Int64Array, times: Int64Array, order: Int64Array, deep: Int64Array, close_times: Int64Array
    ) -> Iterator[int]:
        gap = self._operator.windows.gap_ms
        store_rows = self._store.table.views
        for place, close_time in zip(deep.tolist(), close_times.tolist(), strict=True):
            code, time = int(codes[place]), int(times[place])
            if time < close_time:
                yield code
                continue
            latest = max((e for r in self._store.chain_of(code) if (e := store_rows["end"][r]) <= time), default=NONE)
            at = place - 1
            while at >= 0 and codes[at] == code and times[at] >= max(time - gap, latest):
                if order[at] < order[place]:
                    latest = int(times[at])
                    break
                at -= 1
            if time - gap <= latest < close_time:
                yield code
