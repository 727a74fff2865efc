"""Restoring live windows by the batch: columns of a snapshot straight into the columns of a store."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.state.column_store import LIVE, PERSISTED, ColumnStore


def load_many(store: ColumnStore, raw: list[bytes], starts: Int64Array, ends: Int64Array, states: list[Any]) -> None:
    """Restore live windows by key as bytes, bounds and state columns; none of them may be there already.

    Raises what reading a state raises, before anything is changed.
    """
    states = store.columns.from_changelog(states)
    codes, rows = codes_of(store, raw), store.table.allocate_many(len(raw))
    columns = {"key": codes, "start": starts, "end": ends, "flags": LIVE | PERSISTED}
    for name, column in {**columns, **dict(zip(store.state_names, states, strict=True))}.items():
        store.table.arrays[name][rows] = column
    store.wheel.add_many(rows, ends)
    store.count += len(rows)
    store.sum_max += store.columns.magnitude(states)
    store.attach(codes, rows)


def codes_of(store: ColumnStore, raw: list[bytes]) -> Int64Array:
    """The numbers of many keys, new ones where need be."""
    store.add_keys([key for key in dict.fromkeys(raw) if key not in store.codes])
    return np.fromiter(map(store.codes.__getitem__, raw), np.int64, len(raw))
