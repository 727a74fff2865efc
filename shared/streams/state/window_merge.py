"""Batches into a store of tumbling or hopping windows.

Records of a key that are in the same windows are reduced first, to one pane: of hopping windows many records make few
panes, and only panes are put into each of their windows. A window is said by its number: its start is that times the
advance. Sizes that the advance does not divide, and records that were too late for some of their windows, make panes
of their own and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import NumberArray
from penstock.shared.streams.state.column_merge import sorted_order
from penstock.shared.streams.state.column_window_store import ColumnWindowStore

PAIRS_AT_ONCE = 1 << 18
"""Of panes and windows that are in memory at a time, one pane's at least: some MiB."""


def take_into_windows(
    store: ColumnWindowStore, codes: Int64Array, first: Int64Array, last: Int64Array, columns: Sequence[NumberArray]
) -> None:
    """Take records into their keys' windows from number `first` to `last`, which are not below it."""
    # Of records of one moment those that came later are in fewer windows: so their panes stand behind.
    order, groups = _grouped((codes, last, first - last), in_runs=False)
    columns = store.columns.reduce([column[order] for column in columns], groups, order)
    at = order[groups]
    codes, last, more = codes[at], last[at], (last - first)[at]
    most = int(more.max())
    if not most:
        _merge(store, codes, last * store.advance_ms, columns)
        return
    panes_at_once = max(1, PAIRS_AT_ONCE // (most + 1))
    start = 0
    while start < len(codes):
        stop = min(start + panes_at_once, len(codes))
        if store.columns.in_order:  # what came for one window is put there at once
            stop = int(np.searchsorted(codes, codes[stop - 1], side="right"))
        part = slice(start, stop)
        _take_panes(store, codes[part], last[part], more[part], [column[part] for column in columns])
        start = stop


def _take_panes(
    store: ColumnWindowStore, codes: Int64Array, last: Int64Array, more: Int64Array, columns: Sequence[NumberArray]
) -> None:
    """Take panes into `more` windows before their last one, and into that."""
    back = np.arange(int(more.max()) + 1)[:, np.newaxis]
    is_in = back <= more
    panes = np.broadcast_to(np.arange(len(codes)), is_in.shape)[is_in]
    numbers = (last - back)[is_in]  # all panes' last windows, then all that lie one before: each in order
    order, groups = _grouped((codes[panes], numbers), in_runs=True)
    panes = panes[order]
    at = panes[groups]
    none_stored = np.zeros(len(panes), np.bool_)
    merged = store.columns.merge([column[panes] for column in columns], groups, none_stored)
    _merge(store, codes[at], numbers[order[groups]] * store.advance_ms, merged)


def _grouped(by: tuple[Int64Array, ...], *, in_runs: bool) -> tuple[Int64Array, Int64Array]:
    """The order by these columns, and where in it groups of equal ones begin."""
    order = sorted_order(*by, in_runs=in_runs)
    new = np.zeros(len(order), np.bool_)
    new[0] = True
    for column in by:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def _merge(store: ColumnWindowStore, codes: Int64Array, starts: Int64Array, columns: list[NumberArray]) -> None:
    """Take the states of different windows into the store."""
    rows = store.index.find(codes, starts)
    known = rows >= 0
    if known.any():
        old = rows[known]
        stored = store.columns.opened([store.table.arrays[name][old] for name in store.state_names])
        pairs = [_in_turns(own, column[known]) for own, column in zip(stored, columns, strict=True)]
        is_stored = np.arange(2 * len(old)) % 2 == 0
        merged = store.columns.merge(pairs, np.arange(0, 2 * len(old), 2), is_stored)
        store.change_many(old, store.columns.closed(merged))
        codes, starts, columns = codes[~known], starts[~known], [column[~known] for column in columns]
    if len(codes):
        store.add_many(codes, starts, store.columns.closed(columns))


def _in_turns(stored: NumberArray, taken: NumberArray) -> NumberArray:
    pairs = np.empty(2 * len(stored), stored.dtype)
    pairs[0::2], pairs[1::2] = stored, taken
    return pairs
