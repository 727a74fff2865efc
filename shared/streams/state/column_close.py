"""Closing windows of a store of columns by the batch: what is due comes from the wheel, what has grown goes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared.common.records import Int64Array
from shared.streams.state.column_store import LIVE, ColumnStore
from shared.streams.state.session_changes import Windows


def close_due(store: ColumnStore, close_time: int, closed_at: Callable[[Int64Array], Int64Array]) -> Windows | None:
    """Take out the windows that end below `close_time`, in order of (end, start), or give None where there are none.

    `closed_at` says of ends at which stream time they were passed.
    """
    rows = _passed(store, store.wheel.due_many(close_time), close_time, store.wheel.add_many)
    return store.take_out(rows, closed_at(store.table.arrays["end"][rows])) if len(rows) else None


def close_at_once(store: ColumnStore, due: list[int], close_time: int, stream_time: int) -> Windows | None:
    """As `close_due`, at one stream time, of rows that the wheel gave out; of equal bounds in order of the keys."""
    rows = _passed(store, np.array(due, np.int64), close_time, store.wheel.add_each)
    if not len(rows):
        return None
    arrays = store.table.arrays
    starts, ends = arrays["start"][rows], arrays["end"][rows]
    if ((starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])).any():
        keys = store.raw_keys(arrays["key"][rows])
        rows = rows[sorted(range(len(rows)), key=keys.__getitem__)]
        rows = rows[np.lexsort((arrays["start"][rows], arrays["end"][rows]))]
    return store.take_out(rows, np.full(len(rows), stream_time, np.int64))


def _passed(
    store: ColumnStore, due: Int64Array, close_time: int, put_back: Callable[[Int64Array, Int64Array], None]
) -> Int64Array:
    """Of rows that the wheel gave out, those that end below `close_time`, in order of (end, start).

    What has died is made free, what ends later is put back into the wheel.
    """
    if not len(due):
        return due
    arrays = store.table.arrays
    live = arrays["flags"][due] & LIVE != 0
    store.table.free_many(due[~live])
    rows = due[live]
    ends = arrays["end"][rows]
    later = ends >= close_time
    put_back(rows[later], ends[later])
    rows = rows[~later]
    return np.asarray(rows[np.lexsort((arrays["start"][rows], ends[~later]))])
