"""Live windows as rows of arrays, and the kernels that change them.

The table owns the arrays, makes them larger where a kernel says so, and hands out what came of a batch. It knows nothing
of a task: who takes what was refused, late or closed is the operator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.keys import Int32Array, KeyIndex

Kind = Literal["session", "tumbling", "hopping", "sliding", "table"]

ROWS_MIN = 64
GROWTH = 1.25
OUTPUTS_MIN = 256
BUCKETS = 1_024
BUCKETS_PER_PATIENCE = 512
"""So many buckets the wheel has for the time for which a window lives at least; it has twice as many in all."""
NO_FRONT = -(2**62)


@dataclass(frozen=True, slots=True)
class Rule:
    """What kind of windows, and their times in ms: `span_ms` is the gap, the size or the difference."""

    kind: Kind
    span_ms: int = 0
    grace_ms: int = 0
    advance_ms: int = 0

    @property
    def bounds(self) -> int:
        """How many cells of a row are bounds."""
        return 4 if self.kind == "session" else 2

    @property
    def kept_ms(self) -> int:
        """How long a closed window is kept, for others to begin with what it holds."""
        return 2 * self.span_ms if self.kind == "sliding" else 0

    @property
    def bucket_ms(self) -> int:
        """The width of the wheel's buckets."""
        return max(1, (self.span_ms + self.grace_ms + self.kept_ms) // BUCKETS_PER_PATIENCE)


class Values(NamedTuple):
    """What a batch's records give to the aggregations that look at a number: cells, and whether there is one."""

    cells: Int64Array
    has: NDArray[np.uint8]

    @classmethod
    def none(cls, count: int) -> Values:
        """Of aggregations that look at nothing."""
        return cls(np.zeros((0, count), np.int64), np.zeros((0, count), np.uint8))


class WindowTable:
    """The live windows of one store, by `rule`; `program` has what each aggregation does (`kernels`), its first cell
    and its row of values; there are `state_cells` cells of numbers."""

    def __init__(self, rule: Rule, program: Sequence[tuple[int, int, int]], state_cells: int) -> None:
        self.rule, self.base = rule, rule.bounds
        self.program: Int64Array = np.array(program, np.int64).reshape(-1, 3)
        self.has_objects = bool((self.program[:, 0] == k.OBJECT).any())
        self.keys = KeyIndex()
        self.meta: Int64Array = np.zeros(k.META, np.int64)
        self.meta[[k.STREAM_TIME, k.CLOSE_TIME]] = -1
        self.meta[k.FRONT] = NO_FRONT
        self._width = self.base + state_cells
        self.cells: Int64Array = np.zeros((0, self._width), np.int64)
        self.links: Int32Array = np.zeros((0, k.LINKS), np.int32)
        self.heads: Int32Array = np.zeros(0, np.int32)
        self._free: Int32Array = np.zeros(0, np.int32)
        self._ring: Int32Array = np.full(BUCKETS, k.NONE, np.int32)
        self._heap = self._pending = self._spare = self.changed = np.zeros(0, np.int32)
        self._dues: Int64Array = np.zeros(0, np.int64)
        self._add_rows(ROWS_MIN)
        self.late: Int64Array = np.zeros((OUTPUTS_MIN, 3), np.int64)
        self.closed: Int64Array = np.zeros((OUTPUTS_MIN, k.CLOSED_COLUMNS + state_cells), np.int64)
        self.deleted: Int64Array = np.zeros((OUTPUTS_MIN, 3), np.int64)
        self.updates: Int64Array = np.zeros((OUTPUTS_MIN, k.UPDATE_COLUMNS + state_cells), np.int64)
        self.steps: Int64Array = np.zeros((OUTPUTS_MIN if self.has_objects else 0, 3), np.int64)
        self.logs_updates = False
        self._seen: list[Int32Array] = []
        """Numbers of keys that came by since the last commit."""

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
        self, times: Int64Array, codes: Int32Array, values: Values, first: int = 0, *, closes: bool = True
    ) -> tuple[int, int | None]:
        """Take records from `first` on, until all are taken or one is refused.

        Gives how many are taken, and the aggregation that refuses the next one. Outputs add up until `clear`.
        """
        self._seen.append(codes)
        if len(self.heads) < self.keys.capacity:
            self.heads = _grown(self.heads, self.keys.capacity, k.NONE)
        while True:
            result = self._kernel(times, codes, values, first, closes)
            first = int(self.meta[k.TAKEN])
            if result == k.DONE:
                return len(times), None
            if result == k.REFUSED_RECORD:
                return first, int(self.meta[k.REFUSED_BY])
            self._make_room(result)

    def advance(self, stream_time_ms: int, index: int = k.NONE) -> None:
        """Move time on, and close what is due."""
        meta, rule = self.meta, self.rule
        meta[k.STREAM_TIME] = max(meta[k.STREAM_TIME], stream_time_ms)
        waits = rule.grace_ms + (rule.span_ms if rule.kind == "session" else 0)
        meta[k.CLOSE_TIME] = max(meta[k.CLOSE_TIME], meta[k.STREAM_TIME] - waits)
        self.close_due(index)

    def close_due(self, index: int) -> None:
        """Close what ends below the close time; `index` says which record of the batch brought it about."""
        rule = self.rule
        while not k.close_due(
            index, rule.kind == "sliding", rule.kind == "session", self.base, rule.bucket_ms, rule.kept_ms,
            self.links, self.cells, self.heads, self._free, self._ring, self._heap, self._dues, self._pending,
            self._spare, self.keys.arena, self.keys.places, self.keys.sizes, self.closed, self.deleted, self.changed,
            self.steps, self.has_objects, self.meta,
        ):  # fmt: skip
            self._make_room(k.FULL)

    def _kernel(self, times: Int64Array, codes: Int32Array, values: Values, first: int, closes: bool) -> int:
        rule, keys = self.rule, self.keys
        batch = (times, codes, first, len(times), values.cells, values.cells.view(np.float64), values.has)
        rows = (self.links, self.cells, self.floats, self.heads, self._free)
        outputs = (self.updates, self.logs_updates, self.steps, self.has_objects, self.meta)
        if rule.kind == "table":
            result: int = k.take_rows(*batch, self.program, self.base, *rows, self.changed, *outputs)
            return result
        wheel = (self._ring, self._heap, self._dues, self._pending, self._spare)
        rest = (closes, self.program, self.base, rule.bucket_ms, *rows, *wheel, keys.arena, keys.places, keys.sizes)
        rest = (*rest, self.late, self.closed, self.deleted, self.changed, *outputs)
        if rule.kind == "session":
            result = k.take_sessions(*batch, rule.span_ms, rule.grace_ms, *rest)
        elif rule.kind == "sliding":
            result = k.take_sliding_windows(*batch, rule.span_ms, rule.grace_ms, *rest)
        else:
            result = k.take_time_windows(*batch, rule.span_ms, rule.advance_ms, rule.grace_ms, *rest)
        return result

    # --- what came of records ---

    def clear(self) -> None:
        """Forget late, closed and updated windows and steps that were handed out."""
        self.meta[[k.LATE, k.MISSED, k.CLOSED, k.UPDATES, k.STEPS]] = 0

    def rows_of(self, code: int) -> list[int]:
        """The rows of a key in order of start."""
        rows, row = [], int(self.heads[code]) if 0 <= code < len(self.heads) else k.NONE
        while row != k.NONE:
            rows.append(row)
            row = int(self.links[row, k.NEXT])
        return rows[::-1]

    def live_rows(self) -> Int64Array:
        """All rows that are live."""
        return np.flatnonzero(self.links[:, k.KEY] != k.NONE)

    def changed_rows(self) -> Int64Array:
        """The live rows that have changed since the last commit."""
        rows = self.changed[: self.meta[k.CHANGED]].astype(np.int64)
        links = self.links[rows]
        return rows[(links[:, k.KEY] != k.NONE) & (links[:, k.FLAGS] & k.DIRTY != 0)]

    def committed(self) -> None:
        """The changes are in the changelog now: what is shown is what there is; keys without a window go."""
        listed = self.changed[: self.meta[k.CHANGED]]
        rows = self.changed_rows()
        self.links[listed, k.FLAGS] &= ~(k.LISTED | k.DIRTY)
        self.links[rows, k.FLAGS] |= k.PERSISTED
        if self.rule.kind == "session":
            self.cells[rows, k.SHOWN_START], self.cells[rows, k.SHOWN_END] = (
                self.cells[rows, k.START],
                self.cells[rows, k.END],
            )
        self.meta[[k.CHANGED, k.DELETED]] = 0
        seen, self._seen = self._seen, []
        gone = self._closed_codes
        self._closed_codes = []
        if seen or gone:
            candidates = np.unique(np.concatenate([*seen, *gone]))
            self.keys.release(candidates[candidates != k.NONE], self.heads != k.NONE)

    # --- restoring ---

    def load(self, key: bytes, start: int, end: int, cells: Sequence[int | float]) -> int:
        raise NotImplementedError

    # --- room ---

    _closed_codes: list[Int32Array] = []

    def _make_room(self, result: int) -> None:
        if result == k.ROWS:
            self._add_rows(max(int(len(self.links) * GROWTH), len(self.links) + ROWS_MIN))
            return
        meta = self.meta
        for name, used in (("late", k.LATE), ("closed", k.CLOSED), ("deleted", k.DELETED), ("updates", k.UPDATES)):
            array = getattr(self, name)
            if meta[used] * 2 >= len(array) - 8:
                setattr(self, name, _grown(array, 2 * len(array)))
        if self.has_objects and meta[k.STEPS] * 2 >= len(self.steps) - 32:
            self.steps = _grown(self.steps, 2 * len(self.steps))

    def _add_rows(self, capacity: int) -> None:
        had = len(self.links)
        self.cells, self.links = _grown(self.cells, capacity), _grown(self.links, capacity, k.NONE)
        self.links[had:, k.FLAGS] = 0
        new = np.arange(capacity - 1, had - 1, -1, dtype=np.int32)
        free = np.zeros(capacity, np.int32)
        count = int(self.meta[k.FREE])
        free[: len(new)], free[len(new) : len(new) + count] = new, self._free[:count]
        self._free = free
        self.meta[k.FREE] = count + len(new)
        self._heap, self._dues = _grown(self._heap, capacity), _grown(self._dues, capacity)
        self._pending, self._spare = _grown(self._pending, capacity), _grown(self._spare, capacity)
        self.changed = _grown(self.changed, capacity)


def _grown(array: NDArray[Any], size: int, fill: int = 0) -> NDArray[Any]:
    grown = np.full((size, *array.shape[1:]), fill, array.dtype)
    grown[: len(array)] = array
    return grown
