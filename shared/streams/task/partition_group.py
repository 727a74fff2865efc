"""The input partitions of one part of a topology, and which of their records is next: the one of the lowest timestamp.

Which record is the lowest can only be said while every partition has one at hand. Where one has none, what is known of
it decides: as long as it may have records that were not fetched yet, the others wait; where it surely has none, they
wait for `max_task_idle_ms` more, for a record that may still be written. With -1 nothing waits for anything.

>>> group = PartitionGroup(["left", "right"], max_task_idle_ms=0)
>>> group.is_ready(0, {})
False

Source of the semantics: PartitionGroup and `max.task.idle.ms`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.shared.common.records import Columns

NEVER_WAIT = -1

Lags = Mapping[str, int | None]
"""By topic, how many records are known to be at the broker beyond those at hand; None or missing: that is not known."""


class _Sized:
    """The offsets of records that came together, and how many bytes they have up to each, once that is asked."""

    def __init__(self, columns: Columns) -> None:
        self._columns: Columns | None = columns
        self.offsets, self._ends = columns.offsets, columns.offsets

    def from_offset(self, offset: int) -> int:
        """The bytes of the records from an offset on."""
        if self._columns is not None:
            self._ends, self._columns = np.cumsum(self._columns.sizes()), None
        before = int(np.searchsorted(self.offsets, offset))
        return int(self._ends[-1]) - (int(self._ends[before - 1]) if before else 0)


class RecordQueue:
    """The records of one partition that are at hand, in offset order."""

    def __init__(self) -> None:
        self._columns: deque[Columns] = deque()
        self._sized: deque[_Sized] = deque()
        self._next_offset = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RecordQueue({self._length} records, next {self._next_offset})"

    def add(self, columns: Columns) -> None:
        """Append consecutive records; those that are at hand already, or were, are left out."""
        if len(columns) and columns.offsets[0] < self._next_offset:
            columns = columns[int(np.searchsorted(columns.offsets, self._next_offset)) :]
        if len(columns):
            self._columns.append(columns)
            self._sized.append(_Sized(columns))
            self._length += len(columns)
            self._next_offset = int(columns.offsets[-1]) + 1

    @property
    def bytes(self) -> int:
        """Of the records at hand: keys, values and headers. What is processed as soon as it comes is never measured."""
        if not self._length:
            return 0
        first = int(self._columns[0].offsets[0])
        while self._sized[0].offsets[-1] < first:
            self._sized.popleft()
        return sum(one.from_offset(first) for one in self._sized)

    def head_ms(self) -> int:
        """The timestamp of the next record; there must be one."""
        return int(self._columns[0].timestamps[0])

    def take_until(self, limit_ms: int | None, records_max: int | None = None) -> Columns:
        """Take out the next records up to the first that is later than the limit; there must be one to take."""
        columns = self._columns.popleft()
        at = len(columns) if records_max is None else min(len(columns), records_max)
        if limit_ms is not None:
            later = np.flatnonzero(columns.timestamps[:at] > limit_ms)
            if len(later):
                at = int(later[0])
        if at < len(columns):
            self._columns.appendleft(columns[at:])
            columns = columns[:at]
        self._length -= len(columns)
        if not self._length:
            self._sized.clear()
        return columns

    def put_back(self, columns: Columns) -> None:
        """Have the last of what was taken out be next again."""
        if not self._length:
            self._sized.append(_Sized(columns))
        self._columns.appendleft(columns)
        self._length += len(columns)

    def clear(self) -> None:
        """Forget everything: the next records are those after a new position."""
        self._columns.clear()
        self._sized.clear()
        self._next_offset = self._length = 0


class PartitionGroup:
    """The queues of the topics that feed each other's records' order; of equal timestamps the first topic's is next."""

    def __init__(self, topics: Sequence[str], max_task_idle_ms: int) -> None:
        self.queues = {topic: RecordQueue() for topic in topics}
        self._max_task_idle_ms = max_task_idle_ms
        self._deadlines_ms: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"PartitionGroup({self.queues})"

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def is_ready(self, now_ms: int, lags: Lags) -> bool:
        """Whether there is a record that may be taken now."""
        empty = [topic for topic, queue in self.queues.items() if not queue]
        for topic in self.queues.keys() - set(empty):
            self._deadlines_ms.pop(topic, None)
        if len(empty) == len(self.queues):
            return False
        may = [self._may_do_without(topic, now_ms, lags) for topic in empty]  # each one's wait begins at once
        return self._max_task_idle_ms == NEVER_WAIT or all(may)

    def _may_do_without(self, topic: str, now_ms: int, lags: Lags) -> bool:
        if lags.get(topic) != 0:
            self._deadlines_ms.pop(topic, None)
            return False
        deadline_ms = self._deadlines_ms.setdefault(topic, now_ms + self._max_task_idle_ms)
        return now_ms >= deadline_ms

    def next_run(self, records_max: int | None = None) -> Columns:
        """Take out the next record, and those of its partition that would be next after it. The group must be ready."""
        heads = [(queue.head_ms(), order, topic) for order, (topic, queue) in enumerate(self.queues.items()) if queue]
        (_, order, topic), *others = sorted(heads)
        if not others:
            return self.queues[topic].take_until(None, records_max)
        limit_ms, other, _ = others[0]
        return self.queues[topic].take_until(limit_ms if order < other else limit_ms - 1, records_max)

    def clear(self) -> None:
        """Forget all records at hand."""
        self._deadlines_ms.clear()
        for queue in self.queues.values():
            queue.clear()
