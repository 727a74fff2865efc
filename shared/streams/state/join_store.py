"""The records of one side of a stream join, by key and timestamp, with the changes for the next commit.

>>> store = JoinStore("s")
>>> store.put("ann", 0, 0, [1]); store.put("ann", 10, 10, [2]); store.put("bob", 0, 0, [3])
>>> [(row.key, row.start) for row in store.take_before(5)], [(row.start, row.states) for row in store.rows_of("ann")]
([('ann', 0), ('bob', 0)], [(10, [2])])
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from penstock.shared.streams.state.row_store import RowStore

_start = attrgetter("start")

HEAP_SPARE = 1_024
"""The entries of removed rows that the heap may hold without a cleanup, besides as many as there are rows."""


class JoinRow:
    """The records of one side of a join with one key and timestamp (ms).

    `persisted` means that the changelog has a live entry for this key and timestamp.
    """

    __slots__ = ("end", "key", "live", "persisted", "start", "states")

    def __init__(self, key: Any, start: int, end: int, states: list[Any], persisted: bool = False) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.states = states
        self.persisted = persisted
        self.live = True

    def __repr__(self) -> str:
        return f"JoinRow({self.key!r}, {self.start}, {self.states})"


class JoinStore(RowStore[JoinRow]):
    """The rows of one side of a stream join, in memory. The owner calls `check` before `put`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._rows: dict[Any, list[JoinRow]] = {}
        self._open: list[tuple[int, int, JoinRow]] = []
        self._pushed = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"JoinStore({self.name!r}, {self._count} live, {len(self._dirty)} dirty)"

    def fetch(self, key: Any, start: int) -> JoinRow | None:
        """Return the key's row that starts there, or None."""
        own = self._rows.get(key, ())
        at = bisect_left(own, start, key=_start)
        return own[at] if at < len(own) and own[at].start == start else None

    def fetch_range(self, key: Any, earliest: int, latest: int) -> Sequence[JoinRow]:
        """Return the key's rows that start from `earliest` to `latest`, both inclusive, in order of start."""
        own = self._rows.get(key, ())
        return own[bisect_left(own, earliest, key=_start) : bisect_left(own, latest + 1, key=_start)]

    def put(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Set a row's states; add the row if it does not exist."""
        row = self.fetch(key, start)
        if row is None:
            row = self._add_row(JoinRow(key, start, end, states))
        else:
            row.states = states
        self._mark_row_dirty(row)

    def take_before(self, limit: int) -> list[JoinRow]:
        """Remove and return all rows that end before `limit`, in order of (start, key)."""
        removed = []
        while self._open and self._open[0][0] < limit:
            row = heapq.heappop(self._open)[2]
            # Rows that were removed before stay in the heap.
            if row.live:
                self._take_out(row)
                self._mark_row_removed(row)
                removed.append(row)
        return sorted(removed, key=lambda w: (w.start, w.key))

    def rows(self) -> Iterator[JoinRow]:
        """Yield all rows."""
        for own in self._rows.values():
            yield from own

    def rows_of(self, key: Any) -> list[JoinRow]:
        """Return the key's rows in order of start."""
        return list(self._rows.get(key, ()))

    def evict(self, key: Any) -> int:
        """Drop a key's rows from memory, because they are kept elsewhere; return their number."""
        own = self._rows.pop(key, ())
        for row in own:
            row.live = False
        self._count -= len(own)
        self._sweep_heap()
        return len(own)

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one row; it replaces one with the same key and start."""
        self.unload(key, start)
        self._add_row(JoinRow(key, start, end, states, persisted=True))

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a missing row is no error."""
        if (row := self.fetch(key, start)) is not None:
            self._take_out(row)

    def _add_row(self, row: JoinRow) -> JoinRow:
        own = self._rows.setdefault(row.key, [])
        # Out-of-order records are the exception.
        if own and own[-1].start > row.start:
            insort(own, row, key=_start)
        else:
            own.append(row)
        self._count += 1
        self._pushed += 1
        heapq.heappush(self._open, (row.end, self._pushed, row))
        return row

    def _take_out(self, row: JoinRow) -> None:
        own = self._rows[row.key]
        if len(own) == 1:
            del self._rows[row.key]
        else:
            del own[bisect_left(own, row.start, key=_start)]
        row.live = False
        self._count -= 1
        self._sweep_heap()

    def _sweep_heap(self) -> None:
        """Drop the entries of removed rows, if there are too many. A restore and a standby pop none."""
        if len(self._open) > 2 * self._count + HEAP_SPARE:
            self._open = [entry for entry in self._open if entry[2].live]
            heapq.heapify(self._open)
