"""Session windows over whole batches: a source's columns go into the store without an object a record.

Where a source feeds one session window and nothing else, and all of its aggregations are numbers (see `columnar`), a
batch is taken at once: keys become numbers, records are sorted by key and time, cut where the gap is exceeded, and the
runs merged into the store. What comes of it is what comes of the records one by one. Why that is so:

A record that is no further behind the stream time of its moment than the grace period finds every session of its key
within the gap, since whatever ends within the gap before it ends at or above the close time; so records of this kind
can be merged in any order. One that is further behind does so too where it is itself at or above the close time of its
moment and the latest of what lies before it within the gap is as well (`_misfits`). A key that has a record for which
this cannot be shown is taken record by record, though against the close times of the batch's moments. Sessions are
closed after the batch, each as of the record that passed it.

Closed sessions are handed on when the batch is done, so nothing below the window may tell the time: a processor of the
user's own there has its source taken record by record. What is updated is handed on by the commit, either way.

What no column holds, such as a value that cannot be decoded, takes the way of single records: the batch is cut before
it and after it, and where a STREAM_TIME schedule is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shared.common.records import Columns, Int64Array
from shared.streams.batch_values import BatchValues, TakenValues
from shared.streams.columnar import INT64_SAFE, NumberArray
from shared.streams.processor import INT64_MAX, Record
from shared.streams.session_windows import SessionAggregate
from shared.streams.state.column_merge import cuts, merge_runs, sorted_order
from shared.streams.state.column_session_store import ColumnSessionStore
from shared.streams.state.column_store import NONE
from shared.streams.topology import SourceNode

if TYPE_CHECKING:
    from shared.streams.stream_task import StreamTask
    from shared.streams.wiring import Wiring

COLUMNS_MIN = 32
"""Fewer records are taken one by one: a batch costs some hundred calls of numpy, however small it is."""

ODD_SHARE_MAX = 1 / 16
"""A batch of which more than this has to be taken one by one is not taken apart any more."""


def column_paths(task: StreamTask, wiring: Wiring) -> dict[str, ColumnPath]:
    """The sources of a task that can be taken as columns, by topic."""
    found = {}
    for source in task.topology.sources():
        below = task.topology.children[source.name]
        operator = wiring.processors.get(below[0]) if len(below) == 1 else None
        if type(operator) is SessionAggregate:
            store = task.stores[operator.store_name]
            in_order = operator.emit == "on_update" and not task.deduplicate_updates
            at_moment = operator.emit == "on_close" and _sees_time(task, wiring, below[0])
            if isinstance(store, ColumnSessionStore) and not in_order and not at_moment:
                found[source.topic] = ColumnPath(task, source, operator, store)
    return found


def _sees_time(task: StreamTask, wiring: Wiring, name: str) -> bool:
    """Whether a node below this one may see when it is given a result: that of a batch comes at the batch's end."""
    names = list(task.topology.children[name])
    for one in names:
        names += task.topology.children[one]
    return any(one in wiring.processors and wiring.processors[one].sees_time for one in names)


class Moments:
    """The operator's stream time after each of some records; `at` are their places in the batch."""

    def __init__(self, times: Int64Array, at: Int64Array, before_ms: int, patience_ms: int) -> None:
        """`patience_ms` is gap and grace."""
        self.times: Int64Array = np.maximum.accumulate(times)
        np.maximum(self.times, before_ms, out=self.times)
        self._at, self._patience_ms = at, patience_ms

    def closed_at(self, ends: Int64Array) -> Int64Array:
        """The stream time at which sessions with these ends were closed."""
        first = np.searchsorted(self.times, ends + self._patience_ms, side="right")
        return np.asarray(self.times[first])

    def places(self, closed_at: Int64Array) -> Int64Array:
        """The places of the records that brought these stream times."""
        return np.asarray(self._at[np.searchsorted(self.times, closed_at)])


class ColumnPath:
    """Takes the batches of one source for one task."""

    def __init__(
        self, task: StreamTask, source: SourceNode, operator: SessionAggregate, store: ColumnSessionStore
    ) -> None:
        self._task, self._operator, self._store = task, operator, store
        self._values = BatchValues(source, store, task.key_bytes_max)

    def take(self, columns: Columns) -> None:
        """Take a batch, in parts where it has to be cut; none of them is begun where there is no more time."""
        if not len(columns) or columns.timestamps.max() > INT64_MAX - self._operator.windows.patience_ms - 1:
            self._task.take_records(columns)
            return
        values = self._values.of(columns)
        if values is None or len(values.odd) > len(columns) * ODD_SHARE_MAX or self._may_overflow(values.states):
            self._task.take_records(columns)
            return
        odd = iter(values.odd)
        next_odd = next(odd, len(columns))
        start = 0
        while start < len(columns):
            if start == next_odd:
                self._task.take_records(columns[start : start + 1])
                start, next_odd = start + 1, next(odd, len(columns))
                if not self._task.has_time():
                    return
                continue
            stop = self._until_due(columns.timestamps[start:next_odd]) + start
            if stop - start < self._task.columns_min:
                self._task.take_records(columns[start:stop])
            else:
                self._take_part(columns, values, start, stop)
            if not self._task.has_time():
                return
            start = stop

    def _until_due(self, timestamps: Int64Array) -> int:
        """How many records until a STREAM_TIME schedule is due, the one that makes it so with them."""
        due = self._task.schedules.stream_time.next_due_ms()
        if due is None:
            return len(timestamps)
        if due <= self._task.stream_time_ms:
            return 1
        is_due = timestamps >= due
        return int(np.argmax(is_due)) + 1 if is_due.any() else len(timestamps)

    def _take_part(self, columns: Columns, values: TakenValues, start: int, stop: int) -> None:
        task = self._task
        task.stream_time_ms = max(task.stream_time_ms, int(columns.timestamps[start:stop].max()))
        last = columns.record(stop - 1)
        self._store.touched = True  # what is taken in bulk cannot be refused record by record
        try:
            task.in_hand(last)
            at = np.arange(start, stop)
            has_key = values.codes[start:stop] != NONE
            if not has_key.all():
                null = at[~has_key]
                task.in_hand(columns.record(int(null[-1])))
                task.count_skipped("null key", len(null))
                task.in_hand(last)
                at = at[has_key]
            if len(at):
                self._take_keyed(columns, values, at)
        except Exception as e:
            raise task.spoilt(e) from e
        task.taken(last, stop - start)

    def _take_keyed(self, columns: Columns, values: TakenValues, at: Int64Array) -> None:
        operator = self._operator
        windows = operator.windows
        codes, times = values.codes[at], columns.timestamps[at]
        moments = Moments(times, at, operator.stream_time_ms, windows.gap_ms + windows.grace_ms)
        order = sorted_order(codes, times)
        slow = self._slow_keys(codes[order], times[order], order, moments.times)
        if len(slow):
            is_slow = np.isin(codes, slow)
            order = order[~is_slow[order]]
            self._take_singly(columns, values, at[is_slow], moments.times[is_slow])
        if len(order):
            codes, times = codes[order], times[order]
            first = np.flatnonzero(cuts(codes, times, times, windows.gap_ms))
            last = np.append(first[1:], len(times)) - 1
            places = at[order]
            states = self._store.columns.reduce([column[places] for column in values.states], first)
            merge_runs(self._store, codes[first], times[first], times[last], states, windows.gap_ms)
        operator.stream_time_ms = int(moments.times[-1])
        operator.close_batch(windows.close_time(operator.stream_time_ms), moments, columns)

    def _take_singly(self, columns: Columns, values: TakenValues, at: Int64Array, moments: Int64Array) -> None:
        """Take records of keys that need it one by one, closing nothing: what is closed is not found anyway."""
        key_of = self._store.key_of
        for place, moment in zip(at.tolist(), moments.tolist(), strict=True):
            record = columns.record(place)
            self._task.in_hand(record)
            value = record.value if values.decoded is None else values.decoded[place]
            assert record.key is not None
            self._operator.take(Record(key_of(record.key), value, record.timestamp, record.headers), moment)

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

    def _may_overflow(self, states: list[NumberArray]) -> bool:
        """Whether an int64 sum might leave 64 bits: then, record by record, the one that does so is refused."""
        store = self._store
        added = store.columns.magnitude(states)
        if store.sum_max + added >= INT64_SAFE:
            arrays, used = store.table.arrays, store.table.used
            store.sum_max = store.columns.largest([arrays[name][:used] for name in store.state_names])
            if store.sum_max + added >= INT64_SAFE:
                return True
        store.sum_max += added
        return False
