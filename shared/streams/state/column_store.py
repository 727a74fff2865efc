"""Live windows as columns, whatever their kind.

A window is a row of numpy columns: bounds, key number, states. A key is known by a number too, for as long as it has a
window or came by of late. `ColumnSessionStore` and `ColumnWindowStore` say how a key's rows are found.

What the next commit writes is not kept beside the rows but read off them: a row that is DIRTY has changed since, one
that is PERSISTED was in the commit before. Of rows that went, finals, deletions and retractions are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import FloatArray, NumberArray, StateColumns
from penstock.shared.streams.state.close_wheel import CloseWheel
from penstock.shared.streams.state.growing import GrowingColumns
from penstock.shared.streams.state.session_changes import ColumnChanges, Windows
from penstock.shared.streams.state.store import Changes, FinalRow, LiveRow

LIVE, DIRTY, PERSISTED = 1, 2, 4
NONE = -1
NEVER = -(2**63)
IDLE_KEYS_MIN = 4_096
"""So many keys without a window are remembered at least; more are forgotten once they outnumber those with one."""


class ColumnStore(ABC):
    """Base of the stores in columns; `touched` is set by every change, for its owner to see and take back.

    `codes` has the number of each known key, and -1 for no key. The wheel's buckets are `bucket_ms` wide.
    """

    ROW_COLUMNS: ClassVar[dict[str, str]] = {}
    """What a row has beside bounds, key and states, with types."""
    FINAL: ClassVar[Callable[..., FinalRow]]
    """Makes a window that was closed of key, start, end, the time of closing, and states."""
    KEY_COLUMNS: ClassVar[dict[str, tuple[str, int]]] = {}
    """What a key has, with types and a new key's values."""

    def __init__(self, name: str, columns: StateColumns, *, bucket_ms: int, text_keys: bool) -> None:
        self.name, self.columns, self._text_keys = name, columns, text_keys
        self.state_names = tuple(f"s{i}" for i in range(len(columns.types)))
        self._object_names = tuple(n for n, t in zip(self.state_names, columns.types, strict=True) if t == "object")
        own = {"start": "int64", "end": "int64", "key": "int32", "flags": "uint8"}
        self.table = GrowingColumns(own | self.ROW_COLUMNS | dict(zip(self.state_names, columns.types, strict=True)))
        self.key_table = GrowingColumns({name: type_ for name, (type_, _) in self.KEY_COLUMNS.items()})
        self.codes: dict[bytes | None, int] = {None: NONE}
        self.names: list[bytes] = []
        """Keys by their numbers."""
        self.wheel = CloseWheel(bucket_ms, lambda rows: self.table.arrays["end"][rows])
        self.changed = ColumnChanges(columns)
        self.count = 0
        self.sum_max = 0.0
        """What a batch may add to of one key, as `magnitudes` has it, is not larger; it may be less."""
        self.touched = False

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.count} live, {len(self.codes) - 1} keys)"

    # --- what the kinds of windows differ in ---

    @abstractmethod
    def attach(self, codes: Int64Array, rows: Int64Array) -> None:
        """Let live rows be found by their keys, none of which are found yet."""

    @abstractmethod
    def _attach_one(self, code: int, row: int) -> None:
        """As `attach`, of one row."""

    @abstractmethod
    def row(self, row: int, key: Any = None) -> LiveRow:
        """One row as an object: a copy, good until the store is changed; `key` is its key, where that is at hand."""

    @abstractmethod
    def rows_of(self, key: Any) -> Iterable[LiveRow]:
        """The key's live rows in order of start."""

    @abstractmethod
    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a row that is not there is no error, since a snapshot may be ahead of the log."""

    @abstractmethod
    def changes(self) -> Changes:
        """All changes since the last `committed()`, as objects."""

    @abstractmethod
    def _detach(self, rows: Int64Array, codes: Int64Array, starts: Int64Array, ends: Int64Array, flags: Any) -> None:
        """Rows with these keys, bounds and flags were closed, and are not live any more."""

    @abstractmethod
    def magnitudes(self) -> FloatArray:
        """By key number: how large, signs aside, int64 sums are to which one group of a batch is added at the most."""

    @abstractmethod
    def _have_rows(self) -> NDArray[np.bool_]:
        """Whether keys have a live row, by their numbers."""

    # --- keys ---

    def code_of(self, raw: bytes) -> int:
        """The number of a key, a new one if need be."""
        code = self.codes.get(raw)
        if code is None:
            code = self.codes[raw] = self.key_table.allocate()
            for name, (_, value) in self.KEY_COLUMNS.items():
                self.key_table.views[name][code] = value
            if code == len(self.names):
                self.names.append(raw)
            else:
                self.names[code] = raw
        return code

    def add_keys(self, raw: Sequence[bytes]) -> None:
        """Give numbers to keys, each different and without one."""
        numbers, names = self.key_table.allocate_many(len(raw)), self.names
        for name, (_, value) in self.KEY_COLUMNS.items():
            self.key_table.arrays[name][numbers] = value
        codes = numbers.tolist()
        self.codes.update(zip(raw, codes, strict=True))
        names += [b""] * (self.key_table.used - len(names))
        for code, key in zip(codes, raw, strict=True):
            names[code] = key

    def raw_keys(self, codes: Int64Array) -> list[bytes]:
        """Keys by number, as bytes."""
        return list(map(self.names.__getitem__, codes.tolist()))

    def key_of(self, raw: bytes) -> str | bytes:
        """A key as records have it."""
        if not self._text_keys:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def keys_of(self, raw: Sequence[bytes]) -> list[str | bytes]:
        """As `key_of`, of many."""
        if not self._text_keys:
            return list(raw)
        try:
            return list(map(bytes.decode, raw))
        except UnicodeDecodeError:
            return list(map(self.key_of, raw))

    def keys(self) -> Iterator[str | bytes]:
        """The keys that there are at the first look, and some that have nothing any more."""
        return (self.key_of(raw) for raw in list(self.codes) if raw is not None)

    def _known(self, key: Any) -> int:
        if isinstance(key, str):
            try:
                key = key.encode()
            except UnicodeEncodeError:
                return NONE
        return self.codes.get(key, NONE) if isinstance(key, bytes) else NONE

    # --- one window at a time ---

    def close_before(self, limit: int, stream_time: int) -> list[FinalRow]:
        """Take out and return all windows whose end is below `limit`, in order of (end, start, key)."""
        return self.close(self.wheel.due(limit), limit, stream_time)

    def close(self, due: list[int], limit: int, stream_time: int) -> list[FinalRow]:
        """As `close_before`, of the rows that the wheel gave out."""
        if not due:
            return []
        views, gone = self.table.views, []
        for row in due:
            if not views["flags"][row] & LIVE:
                self.table.free(row)
            elif (end := views["end"][row]) >= limit:
                self.wheel.add(row, end)
            else:
                gone.append(row)
        gone.sort(key=lambda row: (views["end"][row], views["start"][row], self.names[views["key"][row]]))
        if not gone:
            return []
        rows = np.array(gone, np.int64)
        return self._as_finals(self.take_out(rows, np.full(len(rows), stream_time, np.int64)))

    def rows(self) -> Iterator[LiveRow]:
        """All live windows."""
        for row in self.live_rows().tolist():
            yield self.row(row)

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live window; one with the same key and start is replaced."""
        self.unload(key, start)
        self._add(key, start, end, states, LIVE | PERSISTED)

    # --- what a commit writes ---

    def finals(self) -> Windows:
        """The windows that were closed."""
        return self.changed.finals(self.raw_keys)

    def live(self) -> Windows:
        """The live windows that changed."""
        rows = self.dirty_rows()
        arrays = self.table.arrays
        own = [arrays[name][rows] for name in self.state_names]
        return Windows(self.raw_keys(arrays["key"][rows]), arrays["start"][rows], arrays["end"][rows], own)

    def deleted(self) -> tuple[list[bytes], list[int]]:
        """Keys and starts under which the last commit's windows are no longer, closed ones aside."""
        return [], []

    def retracted(self) -> tuple[list[bytes], list[int], list[int]]:
        """Keys, starts and ends of the windows that the last commit had and that are now within others."""
        return [], [], []

    def updated(self) -> Windows:
        """The windows that changed, those that were closed after it among them."""
        return self.live().followed_by(self.changed.finals(self.raw_keys, changed_only=True))

    def committed(self) -> None:
        """The changes are in the changelog, or on their way there: a commit that fails ends with a restored store."""
        rows = self.dirty_rows()
        self.table.arrays["flags"][rows] = LIVE | PERSISTED
        self.changed = ColumnChanges(self.columns)
        self._forget_idle_keys()

    def dirty_rows(self) -> Int64Array:
        """The live rows that changed."""
        rows = self.changed.dirty_rows()
        is_dirty = self.table.arrays["flags"][rows] & (LIVE | DIRTY) == LIVE | DIRTY
        return np.asarray(rows[is_dirty])

    # --- rows ---

    def live_rows(self) -> Int64Array:
        """All live rows."""
        return np.flatnonzero(self.table.arrays["flags"][: self.table.used] & LIVE)

    def _live_states(self) -> tuple[list[NumberArray], Int64Array, int]:
        """The states of live rows, their keys, and how many numbers keys have."""
        arrays, rows = self.table.arrays, self.live_rows()
        return [arrays[name][rows] for name in self.state_names], arrays["key"][rows], self.key_table.used

    def take_out(self, rows: Int64Array, closed_at: Int64Array) -> Windows:
        """Rows that were given out by the wheel and are closed; gives them as windows in the same order."""
        arrays = self.table.arrays
        columns = [arrays[name][rows] for name in self.state_names]
        codes, starts, ends = arrays["key"][rows].astype(np.int64), arrays["start"][rows], arrays["end"][rows]
        flags = arrays["flags"][rows]
        self.changed.closed(codes, starts, ends, closed_at, columns, flags & DIRTY != 0)
        self._die(rows)
        self._detach(rows, codes, starts, ends, flags)
        self.table.free_many(rows)
        return Windows(self.raw_keys(codes), starts, ends, columns, closed_at)

    def _as_finals(self, windows: Windows) -> list[Any]:
        """Closed windows as objects."""
        return [
            self.FINAL(self.key_of(raw), start, end, at, self.columns.states(states))
            for raw, start, end, at, *states in windows.tuples(closed=True)
        ]

    def _add(self, key: Any, start: int, end: int, states: list[Any], flags: int) -> int:
        code, row = self.code_of(key if isinstance(key, bytes) else key.encode()), self.table.allocate()
        views = self.table.views
        views["key"][row], views["start"][row], views["end"][row], views["flags"][row] = code, start, end, flags
        self._set_states(row, states)
        self._attach_one(code, row)
        self.wheel.add(row, end)
        self.count += 1
        return row

    def _set_states(self, row: int, states: list[Any]) -> None:
        views, values = self.table.views, self.columns.values(states)
        for name, value in zip(self.state_names, values, strict=True):
            views[name][row] = value
        if self.columns.sums:
            self.sum_max += max(abs(float(values[i])) for i in self.columns.sums)

    def _states(self, row: int) -> list[Any]:
        views = self.table.views
        return self.columns.states([views[name][row] for name in self.state_names])

    def _die(self, rows: Int64Array) -> None:
        """Live rows end; where the wheel still has them, it will give them out and so make them free."""
        self.table.arrays["flags"][rows] = 0
        for name in self._object_names:
            self.table.arrays[name][rows] = None
        self.count -= len(rows)
        self.touched = True

    def _forget_idle_keys(self) -> None:
        known = len(self.codes) - 1
        if known < IDLE_KEYS_MIN:
            return
        have_rows = self._have_rows()
        live = int(np.count_nonzero(have_rows))
        if known - live > max(IDLE_KEYS_MIN, live):
            codes, names = self.codes, self.names
            for code in np.flatnonzero(~have_rows).tolist():
                if codes.pop(names[code], None) is not None:
                    names[code] = b""
                    self.key_table.free(code)
