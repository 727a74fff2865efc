"""Session windows over whole batches: sort, cut where the gap is exceeded, merge the runs into the store.

A record that is no further behind the stream time of its moment than the grace period finds every session of its key
within the gap, since whatever ends within the gap before it ends at or above the close time; so records of this kind
can be merged in any order. One that is further behind does so too where it is itself at or above the close time of its
moment and the latest of what lies before it within the gap is as well (`_slow_keys`); of stored sessions all must be,
where a gap that was shorter left several within it. A key that has a record for which this cannot be shown is taken
record by record, though against the close times of the batch's moments. Sessions are closed after the batch, each as of
the record that passed it.

Lists go by the order of arrival, which is that of single records where none of them joins two sessions: a key where one
does is taken record by record for them (`arrival_order`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.batch_values import TakenValues
from penstock.shared.streams.column_path import ColumnPath, Moments
from penstock.shared.streams.processor import INT64_MAX
from penstock.shared.streams.session_windows import SessionAggregate
from penstock.shared.streams.state.arrival_order import merging_keys
from penstock.shared.streams.state.column_merge import cuts, merge_runs, sorted_order
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.column_store import NEVER


class SessionPath(ColumnPath):
    """Takes the batches of a source whose records go into sessions."""

    _operator: SessionAggregate
    _store: ColumnSessionStore

    _is_crowded: bool | None = None
    """Whether sessions were stored no more than the gap apart, which was shorter then; None before the first batch."""

    @property
    def _patience_ms(self) -> int:
        return self._operator.windows.patience_ms

    def _take_keyed(self, columns: Columns, values: TakenValues, at: Int64Array) -> None:
        operator = self._operator
        windows = operator.windows
        codes, times = values.codes[at], columns.timestamps[at]
        moments = Moments(times, at, operator.stream_time_ms, windows.patience_ms, operator.closed_by_ms)
        order = sorted_order(codes, times)
        slow = self._slow_keys(codes[order], times[order], order, moments.closing)
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
        operator.close_batch(operator.close_time(operator.stream_time_ms), moments, columns)

    def _take_singly(self, columns: Columns, values: TakenValues, at: Int64Array, moments: Int64Array) -> None:
        """Take records of keys that need it one by one, closing nothing: what is closed is not found anyway."""
        for place, moment in zip(at.tolist(), moments.tolist(), strict=True):
            self._operator.take(self._record(columns, values, place), moment)

    def _slow_keys(self, codes: Int64Array, times: Int64Array, order: Int64Array, moments: Int64Array) -> Int64Array:
        """The keys with records that cannot be shown to find what belongs to them; all is in order of key and time.

        `moments` are the times by which windows close, in the order of arrival.
        """
        windows = self._operator.windows
        deep = np.flatnonzero(moments[order] - times > windows.grace_ms)
        if not len(deep):
            return deep
        close_times = moments[order[deep]] - windows.grace_ms - windows.gap_ms
        before = np.maximum(deep - 1, 0)
        shown = (deep > 0) & (codes[before] == codes[deep]) & (order[before] < order[deep])
        shown &= (times[before] >= close_times) & (times[deep] >= close_times)
        deep, close_times = deep[~shown], close_times[~shown]
        latest = np.maximum(self._latest_arrived(codes, times, order, deep), self._latest_stored(codes, times, deep))
        in_reach = latest >= times[deep] - windows.gap_ms
        is_misfit = (times[deep] < close_times) | (in_reach & (latest < close_times))
        if self._is_crowded is None:
            self._is_crowded = self._store.is_crowded(windows.gap_ms)
        if self._is_crowded:  # behind the latest others may be in reach, which are closed
            earliest = self._earliest_stored(codes[deep], times[deep] - windows.gap_ms)
            is_misfit |= earliest < close_times
        return np.unique(codes[deep[is_misfit]])

    def _latest_arrived(self, codes: Int64Array, times: Int64Array, order: Int64Array, deep: Int64Array) -> Int64Array:
        """The time of the latest record before each of these in time that came before it, too; NEVER without one."""
        before = previous_lower(order, deep)
        is_own = (before >= 0) & (codes[before] == codes[deep])
        return np.where(is_own, times[before], NEVER)

    def _latest_stored(self, codes: Int64Array, times: Int64Array, deep: Int64Array) -> Int64Array:
        """The end of the latest stored session that ends by the time of each of these records; NEVER without one."""
        store, codes, times = self._store, codes[deep], times[deep]
        heads = store.key_table.arrays["head"][codes]
        head_ends = np.where(heads >= 0, store.table.arrays["end"][heads], NEVER)
        older_ends = store.key_table.arrays["older_end"][codes]
        found = np.where(head_ends <= times, head_ends, older_ends)
        beyond = np.flatnonzero(found > times)
        for own, ends in self._ends_by_key(codes, beyond):
            found[own] = ends[np.searchsorted(ends, times[own], side="right") - 1]
        return found

    def _earliest_stored(self, codes: Int64Array, earliest_ends: Int64Array) -> Int64Array:
        """The lowest end of a key's stored sessions that is not below this, for each; INT64_MAX without one."""
        found = np.full(len(codes), INT64_MAX)
        for own, ends in self._ends_by_key(codes, np.arange(len(codes))):
            found[own] = ends[np.searchsorted(ends, earliest_ends[own])]
        return found

    def _ends_by_key(self, codes: Int64Array, at: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """For each key of the records in these places, in order of `codes`: its places, and its stored sessions' ends.

        They rise from NEVER to INT64_MAX. There is one walk a key, however many of its records there are.
        """
        for own in np.split(at, np.flatnonzero(np.diff(codes[at])) + 1) if len(at) else ():
            chain = self._store.chain_of(int(codes[own[0]]))
            yield own, np.concatenate(([NEVER], self._store.table.arrays["end"][chain[::-1]], [INT64_MAX]))


def previous_lower(values: Int64Array, at: Int64Array) -> Int64Array:
    """The nearest place before each of these places that holds a lower value; -1 where none does.

    By lowest values of stretches of 1, 2, 4, ... places: as many steps as the length has bits, whatever the order.

    >>> previous_lower(np.array([3, 1, 4, 5, 2]), np.arange(5)).tolist()
    [-1, -1, 1, 2, 1]
    """
    lowest = [values]
    while 2 * (width := 1 << (len(lowest) - 1)) <= len(values):
        lowest.append(np.minimum(lowest[-1][:-width], lowest[-1][width:]))
    ends, own = at.copy(), values[at]
    for bits, lows in reversed(list(enumerate(lowest))):
        starts = ends - (1 << bits)
        passes = (starts >= 0) & (lows[np.maximum(starts, 0)] >= own)
        ends = np.where(passes, starts, ends)
    return ends - 1
