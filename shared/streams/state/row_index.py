"""Which row a window is in, by its key's number and its start: a hash table that is asked for many at once.

A slot holds a row's number and nothing else; whether it is the one that is looked for the row itself says. So a row
that is no more need not be taken out, only its start made `NEVER`: its slot leads on to the next one like any other
that is not it. Such slots go when the table is made anew, which is when half of it is taken.

>>> table = GrowingColumns({"key": "int32", "start": "int64"})
>>> index, rows = RowIndex(table), table.allocate_many(2)
>>> table.arrays["key"][rows], table.arrays["start"][rows] = [7, 7], [0, 10]
>>> index.add(rows)
>>> index.find(np.array([7, 7, 8]), np.array([10, 20, 0])).tolist(), index.find_one(7, 0)
([1, -1, -1], 0)
>>> table.arrays["start"][1] = NEVER
>>> index.find_one(7, 10)
-1
"""

from __future__ import annotations

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.state.growing import GrowingColumns

NONE = -1
NEVER = -(2**63)
"""The start of a row that is no more."""

SLOTS_BITS_MIN = 8
SLOTS_PER_ROW = 3
"""At least so many a row a table has when it is made: half of them are taken before it is made anew."""

# Of odd numbers with bits all over; what is multiplied with them differs in its high bits where it does in any.
_OF_KEY, _OF_START, _OF_BOTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93
_HALF, _BITS, _MASK = 32, 64, 2**64 - 1


class RowIndex:
    """An index of the rows of `table`, which has `key` and `start`; a row is added once both are set."""

    def __init__(self, table: GrowingColumns) -> None:
        self._table = table
        self._taken = 0
        self._make(SLOTS_BITS_MIN)

    def __repr__(self) -> str:
        return f"<RowIndex of {len(self._slots)} slots, {self._taken} of them taken>"

    def find(self, codes: Int64Array, starts: Int64Array) -> Int64Array:
        """The rows of these keys and starts, NONE where there is none."""
        keys, own, slots = self._table.arrays["key"], self._table.arrays["start"], self._slots
        at = self._slots_of(codes, starts)
        found = slots[at].astype(np.int64)
        asked = np.flatnonzero(found >= 0)
        while len(asked):
            rows = found[asked]
            asked = asked[(keys[rows] != codes[asked]) | (own[rows] != starts[asked])]
            at[asked] = at[asked] + 1 & self._last
            found[asked] = slots[at[asked]]
            asked = asked[found[asked] >= 0]
        return found

    def find_one(self, code: int, start: int) -> int:
        """As `find`, of one row."""
        keys, own, slots = self._table.views["key"], self._table.views["start"], self._view
        at = self._slot_of(code, start)
        while (row := slots[at]) >= 0 and (keys[row] != code or own[row] != start):
            at = at + 1 & self._last
        return row

    def add(self, rows: Int64Array) -> None:
        """Have rows found, none of which is yet."""
        if not self._has_room(len(rows)):
            return
        slots = self._slots
        at = self._slots_of(self._table.arrays["key"][rows].astype(np.int64), self._table.arrays["start"][rows])
        while len(rows):
            free = slots[at] < 0
            slots[at[free]] = rows[free]  # of several for one slot the last one has it
            others = slots[at] != rows
            rows, at = rows[others], at[others] + 1 & self._last

    def add_one(self, row: int) -> None:
        """As `add`, of one row."""
        if not self._has_room(1):
            return
        at = self._slot_of(self._table.views["key"][row], self._table.views["start"][row])
        while self._view[at] >= 0:
            at = at + 1 & self._last
        self._view[at] = row

    @property
    def bytes(self) -> int:
        """Memory of the slots."""
        return self._slots.nbytes

    def _has_room(self, rows: int) -> bool:
        """Take so many slots; where there are too few, make the table anew with all rows that there are by now."""
        self._taken += rows
        if self._taken * 2 <= len(self._slots):
            return True
        live = np.flatnonzero(self._table.arrays["start"][: self._table.used] != NEVER)
        self._make(max(SLOTS_BITS_MIN, (len(live) * SLOTS_PER_ROW).bit_length()))
        self._taken = 0
        self.add(live)
        return False

    def _make(self, bits: int) -> None:
        self._slots = np.full(1 << bits, NONE, np.int32)
        self._view = memoryview(self._slots.data)
        self._last, self._shift = (1 << bits) - 1, _BITS - bits

    def _slots_of(self, codes: Int64Array, starts: Int64Array) -> Int64Array:
        mixed = codes.astype(np.uint64) * np.uint64(_OF_KEY) + starts.astype(np.uint64) * np.uint64(_OF_START)
        mixed ^= mixed >> np.uint64(_HALF)
        mixed *= np.uint64(_OF_BOTH)
        return (mixed >> np.uint64(self._shift)).astype(np.int64)

    def _slot_of(self, code: int, start: int) -> int:
        mixed = code * _OF_KEY + start * _OF_START & _MASK
        mixed = (mixed ^ mixed >> _HALF) * _OF_BOTH & _MASK
        return mixed >> self._shift
