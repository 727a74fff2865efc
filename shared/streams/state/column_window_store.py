"""Live tumbling and hopping windows as columns: one window at a time or a batch at once.

A window is known by its key and start, and `index` knows its row. All windows are equally long, nothing merges, and
none is taken out but by closing: so a commit deletes and retracts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import FloatArray, NumberArray, StateColumns
from penstock.shared.streams.state.column_store import DIRTY, LIVE, ColumnStore
from penstock.shared.streams.state.row_index import NEVER, RowIndex
from penstock.shared.streams.state.window_store import ClosedWindow, Window, WindowChanges

ONE = np.int32(1)
"""Of the type of what it is added to: numpy is a hundred times as fast then."""


class ColumnWindowStore(ColumnStore):
    """Window store in columns, for windows that begin at multiples of the advance; used as `InMemoryWindowStore` is."""

    KEY_COLUMNS: ClassVar = {"windows": ("int32", 0)}
    FINAL = ClosedWindow

    def __init__(self, name: str, columns: StateColumns, *, size_ms: int, advance_ms: int, text_keys: bool) -> None:
        super().__init__(name, columns, bucket_ms=advance_ms, text_keys=text_keys)
        self.size_ms, self.advance_ms = size_ms, advance_ms
        self.index = RowIndex(self.table)

    # --- one window at a time ---

    def fetch(self, key: Any, start: int) -> Window | None:
        """The key's window that starts there, None where there is none; a copy, good until the store is changed."""
        row = self._find(key, start)
        return None if row < 0 else self.row(row, key)

    def put(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Set a window's states; one that is not there yet is added."""
        row, flags = self._find(key, start), self.table.views["flags"]
        if row < 0:
            self.changed.dirty.append(self._add(key, start, end, states, LIVE | DIRTY))
        else:
            if not flags[row] & DIRTY:
                flags[row] |= DIRTY
                self.changed.dirty.append(row)
            self._set_states(row, states)
        self.touched = True

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a window that is not there is no error, since a snapshot may be ahead of the log."""
        row = self._find(key, start)
        if row >= 0:
            self._die(np.array([row]))
            self.table.views["start"][row] = NEVER
            self.key_table.views["windows"][self.table.views["key"][row]] -= 1

    def row(self, row: int, key: Any = None) -> Window:
        """One window as an object; `key` is its key, where that is at hand."""
        views = self.table.views
        if key is None:
            key = self.key_of(self.names[views["key"][row]])
        return Window(key, views["start"][row], views["end"][row], self._states(row), persisted=True)

    def rows_of(self, key: Any) -> list[Window]:
        """The key's live windows in order of start."""
        return sorted(self.rows_of_many([key]), key=lambda window: window.start)

    def rows_of_many(self, keys: Iterable[Any]) -> Iterator[Window]:
        """The live windows of these keys in any order: all rows are looked through, once for all keys."""
        codes = [code for code in map(self._known, keys) if code >= 0]
        wanted = np.zeros(self.key_table.used, np.bool_)
        wanted[codes] = True
        rows = self.live_rows()
        for row in rows[wanted[self.table.arrays["key"][rows]]].tolist():
            yield self.row(row)

    # --- a batch at once ---

    def add_many(self, codes: Int64Array, starts: Int64Array, columns: list[NumberArray]) -> None:
        """Add windows, none of which are there."""
        rows, arrays = self.table.allocate_many(len(codes)), self.table.arrays
        ends = starts + self.size_ms
        arrays["key"][rows], arrays["start"][rows], arrays["end"][rows] = codes, starts, ends
        arrays["flags"][rows] = LIVE | DIRTY
        self._write(rows, columns)
        self.attach(codes, rows)
        self.wheel.add_many(rows, ends)
        self.count += len(rows)
        self.changed.dirty_many.append(rows)

    def change_many(self, rows: Int64Array, columns: list[NumberArray]) -> None:
        """Give live windows new states."""
        flags = self.table.arrays["flags"]
        clean = rows[flags[rows] & DIRTY == 0]
        flags[clean] |= DIRTY
        self._write(rows, columns)
        self.changed.dirty_many.append(clean)

    def _write(self, rows: Int64Array, columns: list[NumberArray]) -> None:
        for name, column in zip(self.state_names, columns, strict=True):
            self.table.arrays[name][rows] = column
        self.touched = True

    def magnitudes(self) -> FloatArray:
        """Those of the key's largest window: no window is joined with another one."""
        return self.columns.largest(*self._live_states())

    # --- what a commit writes ---

    def changes(self) -> WindowChanges:
        """All changes since the last `committed()`, as objects."""
        return WindowChanges(self._as_finals(self.finals()), [], [self.row(row) for row in self.dirty_rows().tolist()])

    # --- how windows are found ---

    def attach(self, codes: Int64Array, rows: Int64Array) -> None:
        """Let live rows be found by their keys and starts, none of which are found yet."""
        np.add.at(self.key_table.arrays["windows"], codes, ONE)
        self.index.add(rows)

    def _attach_one(self, code: int, row: int) -> None:
        self.key_table.views["windows"][code] += 1
        self.index.add_one(row)

    def _detach(self, rows: Int64Array, codes: Int64Array, starts: Int64Array, ends: Int64Array, flags: Any) -> None:
        self.table.arrays["start"][rows] = NEVER
        np.subtract.at(self.key_table.arrays["windows"], codes, ONE)

    def _have_rows(self) -> NDArray[np.bool_]:
        return np.asarray(self.key_table.arrays["windows"][: self.key_table.used] > 0)

    def _find(self, key: Any, start: int) -> int:
        code = self._known(key)
        return -1 if code < 0 else self.index.find_one(code, start)
