"""Restoring live sessions by the batch: columns of a snapshot straight into the columns of a store."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.common.records import Int64Array
from shared.streams.state.column_store import LIVE, NEVER, NONE, PERSISTED, ColumnSessionStore


def load_many(
    store: ColumnSessionStore, raw: list[bytes], starts: Int64Array, ends: Int64Array, states: list[Any]
) -> None:
    """Restore live sessions by key as bytes, bounds and state columns; none of them may be there already."""
    codes, rows = codes_of(store, raw), store.table.allocate_many(len(raw))
    arrays, heads = store.table.arrays, store.key_table.arrays["head"]
    columns = {"key": codes, "start": starts, "end": ends, "next": NONE, "flags": LIVE | PERSISTED}
    for name, column in {**columns, **dict(zip(store.state_names, states, strict=True))}.items():
        arrays[name][rows] = column
    store.wheel.add_many(rows, ends)
    store.count += len(rows)
    store.sum_max = max(store.sum_max, store.columns.largest(states))
    alone = np.bincount(codes, minlength=store.key_table.used)[codes] == 1
    alone &= heads[codes] == NONE
    heads[codes[alone]] = rows[alone]
    others: dict[int, list[int]] = {}
    for code, row in zip(codes[~alone].tolist(), rows[~alone].tolist(), strict=True):
        others.setdefault(code, []).append(row)
    for code, own in others.items():
        store.relink(code, store.chain_of(code) + own)


def codes_of(store: ColumnSessionStore, raw: list[bytes]) -> Int64Array:
    """The numbers of many keys, new ones where need be."""
    codes, names = store.codes, store.names
    new = [key for key in dict.fromkeys(raw) if key not in codes]
    numbers = store.key_table.allocate_many(len(new))
    heads, older = store.key_table.arrays["head"], store.key_table.arrays["older_end"]
    heads[numbers], older[numbers] = NONE, NEVER
    codes.update(zip(new, numbers.tolist(), strict=True))
    if new and int(numbers.min()) == len(names):
        names += new
    else:
        for code, key in zip(numbers.tolist(), new, strict=True):
            if code == len(names):
                names.append(key)
            else:
                names[code] = key
    return np.fromiter(map(codes.__getitem__, raw), np.int64, len(raw))
