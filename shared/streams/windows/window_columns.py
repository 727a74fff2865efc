"""Windows in columns: the form in which a store returns changed and closed windows, and restores live ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows.key_index import NONE
from penstock.shared.streams.windows.state_columns import Column

EMPTY: Int64Array = np.empty(0, np.int64)


@dataclass(slots=True)
class WindowColumns:
    """Windows as columns: keys, bounds in ms, states; `closed_at` is the stream time of each close, or empty."""

    keys: PackedBytes
    starts: Int64Array
    ends: Int64Array
    columns: list[Column]
    closed_at: Int64Array = field(default_factory=lambda: EMPTY)

    @classmethod
    def joined(cls, parts: Sequence[WindowColumns], types: Sequence[str]) -> WindowColumns:
        """Return the windows of all parts, in order; `types` are the types of their state columns."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(PackedBytes.of([]), EMPTY, EMPTY, [np.empty(0, type_) for type_ in types])
        columns = [np.concatenate(many) for many in zip(*(part.columns for part in parts), strict=True)]
        bounds = [np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "ends", "closed_at")]
        return cls(PackedBytes.joined([part.keys for part in parts]), bounds[0], bounds[1], columns, bounds[2])

    def __len__(self) -> int:
        return len(self.keys)

    def tuples(self) -> Iterator[tuple[Any, ...]]:
        """Yield one tuple a window: its key, start and end, then the values of its state columns."""
        return zip(self.keys, *(column.tolist() for column in [self.starts, self.ends, *self.columns]), strict=True)

    def chosen(self, indexes: Any) -> WindowColumns:
        """Return the windows at these indexes, or selected by a mask."""
        at = np.arange(len(self))[indexes]
        columns = [column[at] for column in self.columns]
        closed_at = self.closed_at[at] if len(self.closed_at) else EMPTY
        return WindowColumns(self.keys.at(at), self.starts[at], self.ends[at], columns, closed_at)


def newest_of_each_window(codes: Any, starts: Int64Array) -> Int64Array:
    """Return the indexes, ascending, of the newest row of each window: the last row with a key's code and a start.

    Rows must be ordered from old to new. `codes` are small numbers from 0.

    >>> newest_of_each_window(np.array([7, 8, 7, 7], np.int32), np.array([0, 0, 5, 0])).tolist()
    [1, 2, 3]
    >>> newest_of_each_window(np.array([8, 7], np.int32), np.array([0, 0])).tolist()
    [0, 1]
    """
    indexes = np.arange(len(codes))
    last = np.empty(int(codes.max(initial=NONE)) + 1, np.int64)
    last[codes] = indexes
    if (last[codes] == indexes).all():
        # Each code occurs once.
        return indexes
    # The sort is stable, so the newest of equal windows comes last.
    order = np.lexsort((starts, codes))
    codes = codes[order]
    starts = starts[order]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (codes[1:] != codes[:-1]) | (starts[1:] != starts[:-1])
    found: Int64Array = np.sort(order[is_last])
    return found
