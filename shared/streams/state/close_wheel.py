"""When rows are due to be looked at: buckets of time, so that closing costs what closes and never a walk over all.

A row is put where its end lies; when time has passed that bucket, the row is either closed or, where its end has grown
since, put where it lies now. So a row that grows costs nothing until its old end comes by. Each row is in the wheel
exactly once, from `add` until `due` gave it out: a row is not to be used again before.

With buckets of 10 ms, rows 1 and 2 that end at 5 and 27:

>>> ends = {1: 5, 2: 27}
>>> wheel = CloseWheel(10, lambda rows: np.array([ends[row] for row in rows.tolist()]))
>>> wheel.add(1, 5); wheel.add(2, 27)
>>> wheel.due(20), wheel.due(20), wheel.due(28)
([1], [], [2])
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable

import numpy as np

from penstock.shared.common.records import Int64Array

ROW = "i"
"""Rows are kept as int32."""

SINGLY_SHARE_MAX = 1 / 8
"""Where more than this of the front is due, what is left is made a heap anew: to take them out singly costs more."""


class CloseWheel:
    """Rows by the bucket of `width_ms` in which they ended when they were put there; `ends_of` says where they end."""

    def __init__(self, width_ms: int, ends_of: Callable[[Int64Array], Int64Array]) -> None:
        self._width_ms, self._ends_of = width_ms, ends_of
        self._buckets: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._front: list[tuple[int, int]] = []
        """What lies in the bucket that time is in, as a heap by end: looked at record by record."""
        self._front_bucket: int | None = None

    def __repr__(self) -> str:
        return f"<CloseWheel of {self._width_ms} ms, {len(self)} rows in {len(self._buckets)} buckets>"

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._buckets.values()))

    def add(self, row: int, end: int) -> None:
        """A row that ends at `end`."""
        bucket = end // self._width_ms
        if self._front_bucket is not None and bucket <= self._front_bucket:
            heapq.heappush(self._front, (end, row))
        else:
            self._bucket(bucket).append(row)

    def add_many(self, rows: Int64Array, ends: Int64Array) -> None:
        """Rows with their ends."""
        if len(rows):
            self._leave_front()
            self._file(rows, ends)

    def add_each(self, rows: Int64Array, ends: Int64Array) -> None:
        """As `add_many`, of a few rows while records are looked at one by one: the front stays as it is."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self.add(row, end)

    def _file(self, rows: Int64Array, ends: Int64Array) -> None:
        buckets = ends // self._width_ms
        order = np.argsort(buckets, kind="stable")
        buckets, sorted_rows = buckets[order], rows[order].astype(np.int32)
        first = np.flatnonzero(np.concatenate(([True], buckets[1:] != buckets[:-1])))
        for bucket, part in zip(buckets[first].tolist(), np.split(sorted_rows, first[1:]), strict=True):
            self._bucket(bucket).frombytes(part.tobytes())

    def due(self, time_ms: int) -> list[int]:
        """Take out the rows that ended below `time_ms` when they were put in; cheap to ask again and again."""
        bucket = time_ms // self._width_ms
        if bucket != self._front_bucket:
            if not self._front and (not self._order or self._order[0] > bucket):
                return []
            self._enter(bucket)
        front = self._front
        due: list[int] = []
        singly_max = len(front) * SINGLY_SHARE_MAX
        while front and front[0][0] < time_ms:
            if len(due) > singly_max:
                due += [row for end, row in front if end < time_ms]
                self._front = [item for item in front if item[0] >= time_ms]
                heapq.heapify(self._front)
                break
            due.append(heapq.heappop(front)[1])
        return due

    def due_many(self, time_ms: int) -> Int64Array:
        """As `due`, and with them what else lies in the bucket that time is in: some of it may be for later."""
        self._leave_front()
        bucket, found = time_ms // self._width_ms, array(ROW)
        while self._order and self._order[0] <= bucket:
            found += self._buckets.pop(heapq.heappop(self._order))
        return np.frombuffer(found, np.int32).astype(np.int64)

    def _enter(self, bucket: int) -> None:
        self._front_bucket = bucket
        while self._order and self._order[0] <= bucket:
            rows = np.frombuffer(self._buckets.pop(heapq.heappop(self._order)), np.int32).astype(np.int64)
            ends = self._ends_of(rows)
            is_later = ends // self._width_ms > bucket
            if is_later.any():
                self._file(rows[is_later], ends[is_later])
            self._front += zip(ends[~is_later].tolist(), rows[~is_later].tolist(), strict=True)
        heapq.heapify(self._front)

    def _leave_front(self) -> None:
        front, self._front, self._front_bucket = self._front, [], None
        for end, row in front:
            self._bucket(end // self._width_ms).append(row)

    def _bucket(self, number: int) -> array[int]:
        rows = self._buckets.get(number)
        if rows is None:
            rows = self._buckets[number] = array(ROW)
            heapq.heappush(self._order, number)
        return rows
