"""Windows over whole batches: a source's columns go into the store without an object a record.

Where a source feeds one window and nothing else (`column_choice`), and none of its aggregations is a user's own
(`columnar`), a batch is taken at once: keys become numbers, records are sorted and reduced, and what is left is merged
into the store. What comes of it is what comes of the records one by one; why that is so for each kind of window,
`session_path` and `window_path` say.

Windows are closed after the batch, each as of the record that passed it. They are handed on when the batch is done, so
nothing below the window may tell the time: a processor of the user's own there has its source taken record by record.
What is updated is handed on by the commit, either way.

What no column holds, such as a value that cannot be decoded, takes the way of single records: the batch is cut before
it and after it, and where a STREAM_TIME schedule is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.batch_values import BatchValues, TakenValues
from penstock.shared.streams.chain import Chain
from penstock.shared.streams.column_aggregate import ColumnAggregate
from penstock.shared.streams.columnar import INT64_SAFE
from penstock.shared.streams.processor import INT64_MAX, Record
from penstock.shared.streams.state.column_store import NONE, ColumnStore
from penstock.shared.streams.topology import SourceNode
from penstock.shared.streams.windowed_aggregate import NO_TIME

if TYPE_CHECKING:
    from penstock.shared.streams.stream_task import StreamTask

COLUMNS_MIN = 32
"""Fewer records are taken one by one: a batch costs some hundred calls of numpy, however small it is."""


class Moments:
    """The operator's stream time after each of some records; `at` are their places in the batch.

    `closing` are the times by which windows close: the same, but where `closed_by_ms` is later (`TimedProcessor`).
    """

    def __init__(
        self, times: Int64Array, at: Int64Array, before_ms: int, patience_ms: int, closed_by_ms: int = NO_TIME
    ) -> None:
        """A window is closed once time lies by more than `patience_ms` behind its end."""
        self.times: Int64Array = np.maximum.accumulate(times)
        np.maximum(self.times, before_ms, out=self.times)
        self.closing = np.maximum(self.times, closed_by_ms) if closed_by_ms > before_ms else self.times
        self._at, self._patience_ms = at, patience_ms

    def closed_at(self, ends: Int64Array) -> Int64Array:
        """The stream time at which windows with these ends were closed."""
        first = np.searchsorted(self.closing, ends + self._patience_ms, side="right")
        return np.asarray(self.times[first])

    def places(self, closed_at: Int64Array) -> Int64Array:
        """The places of the records that brought these stream times."""
        return np.asarray(self._at[np.searchsorted(self.times, closed_at)])


class ColumnPath(ABC):
    """Takes the batches of one source for one task; of fewer than `records_min` records each is taken by itself."""

    def __init__(
        self,
        task: StreamTask,
        source: SourceNode,
        operator: ColumnAggregate,
        store: ColumnStore,
        chain: Chain | None = None,
    ) -> None:
        self._task, self._source, self._operator, self._store, self._chain = task, source, operator, store, chain
        self._values = BatchValues(source, store, task.key_bytes_max, chain)

    @property
    def records_min(self) -> int:
        """As the task says now: none is taken as columns while one of its records is too slow (`slow_steps`)."""
        return self._task.columns_min

    @property
    @abstractmethod
    def _patience_ms(self) -> int:
        """How much later than its time a record's windows may end, and be closed."""

    @abstractmethod
    def _take_keyed(self, columns: Columns, values: TakenValues, at: Int64Array) -> None:
        """Take the records in these places, all of which have a key."""

    def take(self, columns: Columns) -> None:
        """Take a batch, in parts where it has to be cut; none of them is begun where there is no more time.

        What went through the functions before the window is taken in any case: they are not called again, and one
        that took long was called for the last record that is taken.
        """
        self._take(columns)
        if self._chain is not None:
            self._chain.forget()

    def _take(self, columns: Columns) -> None:
        if not len(columns) or columns.timestamps.max() > INT64_MAX - self._patience_ms - 1:
            self._take_records(columns)
            return
        values = self._values.of(columns)
        if values is None or self._may_overflow(values):
            self._take_records(columns)
            return
        self._take_values(columns[: len(values.codes)], values)

    def _take_records(self, columns: Columns) -> None:
        if self._chain is None:
            self._task.take_records(columns)
            return
        seen = self._chain.seen(columns)
        for place in range(seen):
            self._task.take_records(columns[place : place + 1], self._chain.forward)
        if seen < len(columns) and (not seen or self._task.has_time()):
            self._task.take_records(columns[seen:], self._chain.forward)

    def _take_values(self, columns: Columns, values: TakenValues) -> None:
        odd = iter(values.odd)
        next_odd = next(odd, len(columns))
        start = 0
        while start < len(columns):
            if start == next_odd:
                self._take_records(columns[start : start + 1])
                start, next_odd = start + 1, next(odd, len(columns))
                if not self._goes_on():
                    return
                continue
            stop = self._until_due(columns.timestamps[start:next_odd]) + start
            if stop - start < self.records_min:
                self._take_records(columns[start:stop])
            else:
                self._take_part(columns, values, start, stop)
            if not self._goes_on():
                return
            start = stop

    def _goes_on(self) -> bool:
        return self._chain is not None or self._task.has_time()

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
            if values.is_out is not None:
                at = at[~values.is_out[start:stop]]
            has_key = values.codes[at] != NONE
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

    def _may_overflow(self, values: TakenValues) -> bool:
        """Whether an int64 sum might leave 64 bits: then, record by record, the one that does so is refused.

        What is cheap to know is enough as a rule; where it is not, each key is looked at by itself.
        """
        store, of = self._store, self._store.columns
        added = of.magnitude(values.states)
        if store.sum_max + added >= INT64_SAFE:
            keyed = np.flatnonzero(values.codes != NONE)
            codes = values.codes[keyed]
            by_key = of.magnitudes([column[keyed] for column in values.states], codes, store.key_table.used)
            added = float(by_key.max(initial=0))
            if store.sum_max + added >= INT64_SAFE:
                stored = store.magnitudes()
                if ((stored + by_key)[codes] >= INT64_SAFE).any():
                    return True
                store.sum_max = float(stored.max(initial=0))
        store.sum_max += added
        return False

    def _record(self, columns: Columns, values: TakenValues, place: int) -> Record:
        """One record as it is taken singly, and as the one in hand."""
        record = columns.record(place)
        self._task.in_hand(record)
        value = record.value if values.decoded is None else values.decoded[place]
        assert record.key is not None
        return Record(self._store.key_of(record.key), value, record.timestamp, record.headers)
