"""Closing windows of a store of columns by the batch: what is due comes from the wheel, what has grown goes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.state.column_store import LIVE, ColumnStore
from penstock.shared.streams.state.session_changes import Windows, distinct


def close_due(store: ColumnStore, close_time: int, closed_at: Callable[[Int64Array], Int64Array]) -> Windows | None:
    """Take out the windows that end below `close_time`, in order of (end, start, key); None where there are none.

    `closed_at` says of ends at which stream time they were passed.
    """
    rows = _passed(store, store.wheel.due_many(close_time), close_time, store.wheel.add_many)
    return store.take_out(rows, closed_at(store.table.arrays["end"][rows])) if len(rows) else None


def close_at_once(store: ColumnStore, due: list[int], close_time: int, stream_time: int) -> Windows | None:
    """As `close_due`, at one stream time, of rows that the wheel gave out."""
    rows = _passed(store, np.array(due, np.int64), close_time, store.wheel.add_each)
    return store.take_out(rows, np.full(len(rows), stream_time, np.int64)) if len(rows) else None


def _passed(
    store: ColumnStore, due: Int64Array, close_time: int, put_back: Callable[[Int64Array, Int64Array], None]
) -> Int64Array:
    """Of rows that the wheel gave out, those that end below `close_time`, in order of (end, start, key).

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
    return rows if len(rows) < 2 else _in_order(store, rows)


def _in_order(store: ColumnStore, rows: Int64Array) -> Int64Array:
    """Rows in order of end, start and key; only keys of windows with the same bounds are looked at."""
    arrays = store.table.arrays
    rows = rows[np.lexsort((arrays["start"][rows], arrays["end"][rows]))]
    starts, ends = arrays["start"][rows], arrays["end"][rows]
    is_same = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])
    if is_same.any():
        tied = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
        codes = arrays["key"][rows[tied]]
        known = distinct(codes)
        keys = store.raw_keys(known)
        ranks = np.empty(len(keys), np.int64)
        ranks[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
        order = np.lexsort((ranks[np.searchsorted(known, codes)], starts[tied], ends[tied]))
        rows[tied] = rows[tied[order]]
    return np.asarray(rows)
