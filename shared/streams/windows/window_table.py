"""Live windows as rows of arrays, and the calls of the kernels that change them.

The table owns the arrays, enlarges them when a kernel needs room, and returns the outcome of a batch. It knows nothing
of a task: the operator handles rejected and late records, and closed windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.key_index import GROWTH, Int32Array, KeyIndex, grown_array
from penstock.shared.streams.windows.state_columns import RecordNumbers
from penstock.shared.streams.windows.window_rule import WindowRule

ROWS_MIN = 64
OUTPUTS_MIN = 256
BUCKETS = 1_024
_OUTPUT_ARRAYS = {
    ("late",): k.LATE,
    ("closed",): k.CLOSED,
    ("deleted",): k.DELETED,
    ("updates",): k.UPDATES,
    ("steps",): k.STEPS,
    ("_pending", "_spare"): k.PENDING,
    ("_heap", "_dues"): k.HEAP,
}
"""The arrays that a kernel can find full, and the counters of their elements."""
NO_CLOSE_TIME = -(2**62)
"""Earlier than all times: nothing was closed yet."""
REMOVED_MIN = 1_024
"""`drop` and `roll_back` free the removed rows if these outnumber the live rows by more than this."""
IDLE_KEYS_MIN = 1_024
"""If the index has at most this many keys, it is not searched for keys without a window."""


class TableMark(NamedTuple):
    """A key's rows, and all counters of the table, before a record."""

    code: int
    rows: Int64Array
    cells: Int64Array
    flags: NDArray[np.uint8]
    head: int
    meta: Int64Array


class WindowTable:
    """The live windows of one store, by `rule`.

    `program` and `state_cells` are `program` and `cells` of the store's `StateColumns`.
    """

    def __init__(self, rule: WindowRule, program: Sequence[tuple[int, int, int]], state_cells: int) -> None:
        self.rule = rule
        self.base = k.LINK_CELLS + rule.bounds
        self.program: Int64Array = np.array(program, np.int64).reshape(-1, 3)
        self.has_objects = bool((self.program[:, 0] == k.OBJECT).any())
        self.keys = KeyIndex()
        self.meta: Int64Array = np.zeros(k.META, np.int64)
        self.meta[k.STREAM_TIME] = -1
        self.meta[[k.CLOSE_TIME, k.FRONT]] = NO_CLOSE_TIME
        self._width = self.base + state_cells
        self.cells: Int64Array = np.zeros((0, self._width), np.int64)
        self.links: Int32Array = self.cells.view(np.int32)
        self.flags: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.heads: Int32Array = np.zeros(0, np.int32)
        self._free: Int32Array = np.zeros(0, np.int32)
        self._ring: Int32Array = np.full(BUCKETS, k.NONE, np.int32)
        self._heap: Int32Array = np.zeros(OUTPUTS_MIN, np.int32)
        self._dues: Int64Array = np.zeros(OUTPUTS_MIN, np.int64)
        self._pending: Int64Array = np.zeros((OUTPUTS_MIN, k.PENDING_COLUMNS), np.int64)
        self._spare: Int64Array = np.zeros((OUTPUTS_MIN + k.DIGIT_ROWS, k.PENDING_COLUMNS), np.int64)
        self.changed: Int32Array = np.zeros(0, np.int32)
        self._add_rows(ROWS_MIN)
        self.late: Int64Array = np.zeros((OUTPUTS_MIN, k.LATE_COLUMNS), np.int64)
        self.closed: Int64Array = np.zeros((OUTPUTS_MIN, k.CLOSED_COLUMNS + state_cells), np.int64)
        self.deleted: Int64Array = np.zeros((OUTPUTS_MIN, 4), np.int64)
        self.updates: Int64Array = np.zeros((OUTPUTS_MIN, k.UPDATE_COLUMNS + state_cells), np.int64)
        self.steps: Int64Array = np.zeros((OUTPUTS_MIN if self.has_objects else 0, 3), np.int64)
        self.logs_updates = False

    def __len__(self) -> int:
        return int(self.meta[k.LIVE])

    def __repr__(self) -> str:
        return f"<WindowTable of {len(self)} {self.rule.kind} windows, {len(self.keys)} keys>"

    @property
    def floats(self) -> NDArray[np.float64]:
        """The cells as float64."""
        return self.cells.view(np.float64)

    # --- records ---

    def take(
        self, times: Int64Array, codes: Int32Array, values: RecordNumbers, *, closes: bool = True
    ) -> tuple[int, int | None]:
        """Take records until all are taken or one is rejected.

        Return how many were taken, and the index of the aggregation that rejects the next record, or None. Late
        records, closed windows, updates and steps are kept until `clear`, deleted windows until `committed`.
        """
        self._see_keys()
        first = 0
        while True:
            result = self._run_kernel(times, codes, values, first, closes)
            first = int(self.meta[k.PROCESSED])
            if result == k.DONE:
                return len(times), None
            if result == k.REJECTED:
                return first, int(self.meta[k.REJECTED_BY])
            # Nothing of the record at `first` was applied. After the arrays have grown, the kernel continues with it.
            self._grow_arrays(result)
            # The kernel had taken the record and was closing when an output was full.
            if self.meta[k.CLOSING]:
                self.close_due(first - 1)

    def advance(self, stream_time_ms: int, index: int = k.NONE) -> None:
        """Advance time, and close the due windows."""
        meta = self.meta
        meta[k.STREAM_TIME] = max(meta[k.STREAM_TIME], stream_time_ms)
        if self.rule.kind == "table":
            # The rows of a table never close.
            return
        meta[k.CLOSE_TIME] = max(meta[k.CLOSE_TIME], meta[k.STREAM_TIME] - self.rule.waits_ms)
        self.close_due(index)

    def close_due(self, index: int) -> None:
        """Close windows whose last moment is below the close time; `index` is the record that caused it, or NONE."""
        rule = self.rule
        while not k.close_due(
            index, rule.retains, rule.kind == "session", self.base, rule.bucket_ms, rule.retained_ms, self.links,
            self.flags, self.cells, self.heads, self._free, self._ring, self._heap, self._dues, self._pending,
            self._spare, self.keys.arena, self.keys.offsets, self.keys.sizes, self.closed, self.deleted, self.changed,
            self.steps, self.has_objects, self.meta,
        ):  # fmt: skip
            self._grow_arrays(k.FULL)

    def _run_kernel(self, times: Int64Array, codes: Int32Array, values: RecordNumbers, first: int, closes: bool) -> int:
        rule = self.rule
        keys = self.keys
        batch = (times, codes, first, len(times), values.cells, values.cells.view(np.float64), values.has)
        rows = (self.links, self.flags, self.cells, self.floats, self.heads, self._free)
        outputs = (self.updates, self.logs_updates, self.steps, self.has_objects, self.meta)
        if rule.kind == "table":
            result: int = k.take_rows(*batch, self.program, self.base, *rows, self.changed, *outputs)
            return result
        wheel = (self._ring, self._heap, self._dues, self._pending, self._spare)
        index = (keys.arena, keys.offsets, keys.sizes)
        all_outputs = (self.late, self.closed, self.deleted, self.changed, *outputs)
        rest = (closes, self.program, self.base, rule.bucket_ms, *rows, *wheel, *index, *all_outputs)
        if rule.kind == "session":
            result = k.take_sessions(*batch, rule.span_ms, rule.grace_ms, *rest)
        elif rule.kind == "sliding":
            result = k.take_sliding_windows(*batch, rule.span_ms, rule.grace_ms, *rest)
        else:
            result = k.take_time_windows(*batch, rule.span_ms, rule.advance_ms, rule.grace_ms, *rest)
        return result

    # --- outcome of records ---

    def clear(self) -> None:
        """Drop the late records, closed windows, updates and steps, which the caller has read."""
        self.meta[[k.LATE, k.MISSED, k.CLOSED, k.UPDATES, k.STEPS]] = 0

    def latest_row(self, code: int) -> int:
        """Return the row of a key with the latest start, or NONE."""
        return int(self.heads[code]) if 0 <= code < len(self.heads) else k.NONE

    def rows_of(self, code: int) -> Int64Array:
        """Return the rows of a key in order of start."""
        latest = self.latest_row(code)
        rows: Int64Array = np.empty(ROWS_MIN, np.int64)
        count = k.rows_of(latest, self.links, rows)
        if count > len(rows):
            rows = np.empty(count, np.int64)
            k.rows_of(latest, self.links, rows)
        return rows[len(rows) - count :]

    def codes_between(self, low: int, high: int) -> Int64Array:
        """Return the numbers of the keys that have a row, and whose `key_hash` is from `low` to `high`, in no order."""
        self._see_keys()
        codes = self.keys.codes_between(low, high)
        return np.asarray(codes[self.heads[codes] != k.NONE])

    def rows_at(self, codes: Int32Array, starts: Int64Array) -> Int64Array:
        """Return the rows of the windows of these keys and starts, without missing ones."""
        self._see_keys()
        rows = np.empty(len(codes), np.int64)
        k.rows_at(codes, starts, self.links, self.cells, self.heads, rows)
        return np.asarray(rows[rows != k.NONE])

    def live_rows(self) -> Int64Array:
        """Return all live rows."""
        return np.asarray(np.flatnonzero(self.links[:, k.KEY] != k.NONE))

    def changed_rows(self) -> Int64Array:
        """Return the live rows that have changed since the last commit."""
        rows = self.changed[: self.meta[k.CHANGED]].astype(np.int64)
        return np.asarray(rows[(self.links[rows, k.KEY] != k.NONE) & (self.flags[rows] & k.DIRTY != 0)])

    def moved_rows(self) -> Int64Array:
        """Return the changed rows whose bounds differ from the last commit."""
        rows = self.changed_rows()
        # Only sessions can change their bounds.
        if self.rule.kind != "session":
            return rows[:0]
        rows = rows[self.flags[rows] & k.PERSISTED != 0]
        cells = self.cells[rows]
        is_moved = cells[:, k.START] != cells[:, k.SHOWN_START]
        return np.asarray(rows[is_moved | (cells[:, k.END] != cells[:, k.SHOWN_END])])

    def committed(self) -> None:
        """Mark the changes as committed, and release keys without a window."""
        listed = self.changed[: self.meta[k.CHANGED]]
        rows = self.changed_rows()
        # Also of rows that were removed, because they are used again for other windows.
        self.flags[listed] &= 0xFF ^ (k.LISTED | k.DIRTY)
        self.flags[rows] |= k.PERSISTED
        if self.rule.kind == "session":
            self.cells[rows, k.SHOWN_START : k.SHOWN_END + 1] = self.cells[rows, k.START : k.END + 1]
        self.meta[[k.CHANGED, k.DELETED]] = 0
        self.release_keys()

    def release_keys(self) -> None:
        """Release the numbers of keys without a window if there are many. All changes must be committed."""
        keys = self.keys
        # The search visits all keys. It is worth its cost if at least half of them have no window.
        if len(keys) > IDLE_KEYS_MIN and len(keys) > 2 * len(self):
            has_row = np.zeros(keys.capacity, np.bool_)
            has_row[: len(self.heads)] = self.heads[: keys.capacity] != k.NONE
            keys.release(np.flatnonzero(~has_row & (keys.sizes != k.NONE)), has_row)

    # --- undoing a record ---

    def mark(self, code: int) -> TableMark:
        """Copy all that a record of this key can change, for `roll_back`.

        The next `take` must have one record, and close nothing.
        """
        self._see_keys()
        needed = self.rule.rows_per_record
        if self.meta[k.FREE] < needed:
            self._add_rows(len(self.flags) + max(needed, ROWS_MIN))
        rows = self.rows_of(code)
        return TableMark(code, rows, self.cells[rows], self.flags[rows], int(self.heads[code]), self.meta.copy())

    def roll_back(self, mark: TableMark) -> None:
        """Undo everything since the mark; new rows are freed like removed ones."""
        meta = self.meta
        was = mark.meta
        # Rows that the record took from the free list are still behind its end.
        new = self._free[meta[k.FREE] : was[k.FREE]]
        # A row may be in the list of changed rows from another use since the commit. Its flag must stay, or it would be
        # listed twice.
        listed = new[np.isin(new, self.changed[: was[k.CHANGED]])]
        self.links[new, k.KEY] = k.NONE
        self.flags[new] = 0
        self.flags[listed] = k.LISTED
        self.cells[mark.rows] = mark.cells
        self.flags[mark.rows] = mark.flags
        self.heads[mark.code] = mark.head
        free = int(meta[k.FREE])
        heap = int(meta[k.HEAP])
        meta[:] = was
        # New rows stay in the wheel, and become free when it visits them. A table's rows are in no wheel.
        if self.rule.kind != "table":
            meta[k.FREE] = free
            meta[k.HEAP] = heap
        self._sweep_many()

    # --- restoring ---

    def load(self, codes: Int32Array, starts: Int64Array, ends: Int64Array, cells: Int64Array) -> Int64Array:
        """Restore windows as of the last commit, and return their rows. The table must not contain them yet."""
        count = len(codes)
        self._see_keys()
        if self.meta[k.FREE] < count:
            self._add_rows(max(int(len(self.flags) * GROWTH), len(self.flags) + count))
        if self.meta[k.HEAP] + count > len(self._heap):
            size = max(2 * len(self._heap), int(self.meta[k.HEAP]) + count)
            self._heap = grown_array(self._heap, size)
            self._dues = grown_array(self._dues, size)
        rows = np.empty(count, np.int64)
        rule = self.rule
        k.load_rows(
            codes, starts, ends, cells, rule.retains, rule.retained_ms, rule.kind == "table", self.base, rule.bucket_ms,
            rows, self.links, self.flags, self.cells, self.heads, self._free, self._ring, self._heap, self._dues,
            self.meta,
        )  # fmt: skip
        return rows

    def drop(self, rows: Int64Array) -> None:
        """Remove rows as if they had never existed."""
        k.drop_rows(rows, self.rule.kind == "table", self.links, self.flags, self.heads, self._free, self.meta)
        self._sweep_many()

    def _sweep_many(self) -> None:
        """Free the removed rows if they outnumber the live ones by more than REMOVED_MIN."""
        # Removed rows wait in the wheel for their bucket. Many of them, for example after a restore, would make the
        # table grow.
        removed = len(self.flags) - int(self.meta[k.FREE]) - len(self)
        if self.rule.kind != "table" and removed > len(self) + REMOVED_MIN:
            self.sweep()

    def sweep(self) -> None:
        """Free the removed rows that are still in the wheel."""
        k.sweep(self._ring, self._heap, self._dues, self.links, self._free, self.meta)

    def begin(self, stream_time_ms: int, close_time_ms: int) -> None:
        """Continue at these times, after windows were loaded."""
        self.meta[k.STREAM_TIME] = stream_time_ms
        self.meta[k.CLOSE_TIME] = close_time_ms
        if self.rule.retains:
            rows = self.live_rows()
            self.flags[rows[self.cells[rows, k.END] < close_time_ms]] |= k.RETAINED

    # --- room ---

    def _see_keys(self) -> None:
        if len(self.heads) < self.keys.capacity:
            self.heads = grown_array(self.heads, self.keys.capacity, k.NONE)

    def _grow_arrays(self, result: int) -> None:
        if result == k.ROWS:
            self._add_rows(max(int(len(self.flags) * GROWTH), len(self.flags) + ROWS_MIN))
            return
        used = {names: int(self.meta[count]) for names, count in _OUTPUT_ARRAYS.items()}
        # The kernel does not return which array was full. Enlarge those that are at least half full.
        short = [names for names, count in used.items() if 0 < len(getattr(self, names[0])) <= 2 * count]
        # If none is half full, one record needs more than half of an array. Enlarge all of them.
        for names in short or used:
            for name in names:
                array = getattr(self, name)
                setattr(self, name, grown_array(array, 2 * len(array)))

    def _add_rows(self, capacity: int) -> None:
        previous = len(self.flags)
        self.cells = grown_array(self.cells, capacity)
        self.flags = grown_array(self.flags, capacity)
        self.links = self.cells.view(np.int32)
        self.links[previous:, k.KEY] = k.NONE
        # Rows are taken from the end of the free list: first the ones freed before, then new ones with the lowest
        # number first.
        new = np.arange(capacity - 1, previous - 1, -1, dtype=np.int32)
        free = np.zeros(capacity, np.int32)
        count = int(self.meta[k.FREE])
        free[: len(new)] = new
        free[len(new) : len(new) + count] = self._free[:count]
        self._free = free
        self.meta[k.FREE] = count + len(new)
        self.changed = grown_array(self.changed, capacity)
