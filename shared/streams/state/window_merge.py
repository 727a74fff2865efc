"""Batches into a store of tumbling or hopping windows.

Records of a key that are in the same windows are reduced first, to one pane: of hopping windows many records make few
panes, and only panes are put into each of their windows. A window is said by its number: its start is that times the
advance. Sizes that the advance does not divide, and records that were too late for some of their windows, make panes
of their own and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.common.records import Int64Array
from shared.streams.columnar import NumberArray
from shared.streams.state.column_merge import sorted_order
from shared.streams.state.column_window_store import ColumnWindowStore

PAIRS_AT_ONCE = 1 << 18
"""Panes in windows that are in memory at a time, one pane's windows more at most: some MiB."""


def take_into_windows(
    store: ColumnWindowStore, codes: Int64Array, first: Int64Array, last: Int64Array, columns: Sequence[NumberArray]
) -> None:
    """Take records into their keys' windows from number `first` to `last`, which are not below it."""
    (codes, last, more), columns = _reduced(store, (codes, last, last - first), columns)
    if not more.any():
        _merge(store, codes, last * store.advance_ms, columns)
        return
    sizes = more + 1
    until = np.cumsum(sizes)
    start = 0
    while start < len(codes):
        before = int(until[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(until, before + PAIRS_AT_ONCE, side="right")))
        panes = np.repeat(np.arange(start, stop), sizes[start:stop])
        numbers = last[panes] - until[panes] + np.arange(before + 1, before + 1 + len(panes))
        pairs = codes[panes], numbers
        (own, numbers), merged = _reduced(store, pairs, [column[panes] for column in columns])
        _merge(store, own, numbers * store.advance_ms, merged)
        start = stop


def _reduced(
    store: ColumnWindowStore, by: tuple[Int64Array, ...], columns: Sequence[NumberArray]
) -> tuple[list[Int64Array], list[NumberArray]]:
    """Rows that are equal in all of `by` as one each: these, and the states."""
    order = sorted_order(*by)
    ordered = [column[order] for column in by]
    new = np.zeros(len(order), np.bool_)
    new[0] = True
    for column in ordered:
        new[1:] |= column[1:] != column[:-1]
    groups = np.flatnonzero(new)
    return [column[groups] for column in ordered], store.columns.reduce([c[order] for c in columns], groups)


def _merge(store: ColumnWindowStore, codes: Int64Array, starts: Int64Array, columns: list[NumberArray]) -> None:
    """Take the states of different windows into the store."""
    rows = store.index.find(codes, starts)
    known = rows >= 0
    if known.any():
        old = rows[known]
        stored = store.columns.opened([store.table.arrays[name][old] for name in store.state_names])
        pairs = [_in_turns(own, column[known]) for own, column in zip(stored, columns, strict=True)]
        store.change_many(old, store.columns.closed(store.columns.reduce(pairs, np.arange(0, 2 * len(old), 2))))
        codes, starts, columns = codes[~known], starts[~known], [column[~known] for column in columns]
    if len(codes):
        store.add_many(codes, starts, store.columns.closed(columns))


def _in_turns(stored: NumberArray, taken: NumberArray) -> NumberArray:
    pairs = np.empty(2 * len(stored), stored.dtype)
    pairs[0::2], pairs[1::2] = stored, taken
    return pairs
