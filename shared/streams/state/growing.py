"""Columns that grow: numpy arrays with room to spare, each with a view for single values.

A numpy array is fast for many values at a time and slow for one; a memoryview over the same memory gives and takes one
value as a plain Python number three times as fast. Of a column of objects the view is the array itself, which gives and
takes them as they are. Both are renewed together when the columns grow, so nobody keeps them across an `allocate`. What
is in a row of objects lives until something else is put there, or None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.shared.common.records import Int64Array

CAPACITY_MIN = 64
GROWTH = 1.25
"""By so much columns grow: what a million rows leave unused stays below a quarter, and each is copied four times."""


class GrowingColumns:
    """Parallel columns by name; rows are taken with `allocate` and given back with `free`."""

    def __init__(self, types: dict[str, str]) -> None:
        self._types = types
        self.capacity = 0
        self.used = 0
        self._free: list[int] = []
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.views: dict[str, Any] = {}
        self._grow(CAPACITY_MIN)

    def __repr__(self) -> str:
        return f"<GrowingColumns {', '.join(self._types)}: {self.used - len(self._free)} rows of {self.capacity}>"

    def allocate(self) -> int:
        """One row; what is in it is whatever was there before."""
        if self._free:
            return self._free.pop()
        if self.used == self.capacity:
            self._grow(self.used + 1)
        self.used += 1
        return self.used - 1

    def allocate_many(self, count: int) -> Int64Array:
        """`count` rows."""
        reused = min(count, len(self._free))
        rows = np.empty(count, np.int64)
        if reused:
            rows[:reused] = self._free[-reused:]
            del self._free[-reused:]
        if reused < count:
            new = count - reused
            if self.used + new > self.capacity:
                self._grow(self.used + new)
            rows[reused:] = np.arange(self.used, self.used + new)
            self.used += new
        return rows

    def free(self, row: int) -> None:
        """Give one row back."""
        self._free.append(row)

    def free_many(self, rows: Int64Array) -> None:
        """Give rows back."""
        self._free += rows.tolist()

    @property
    def bytes(self) -> int:
        """Memory of the columns; of objects that of the references to them."""
        return sum(array.nbytes for array in self.arrays.values())

    def _grow(self, least: int) -> None:
        capacity = max(CAPACITY_MIN, least, int(self.capacity * GROWTH))
        for name, type_ in self._types.items():
            grown = np.full(capacity, None) if type_ == "object" else np.zeros(capacity, np.dtype(type_))
            if self.capacity:
                grown[: self.used] = self.arrays[name][: self.used]
            self.arrays[name] = grown
            self.views[name] = grown if type_ == "object" else memoryview(grown.data)
        self.capacity = capacity
