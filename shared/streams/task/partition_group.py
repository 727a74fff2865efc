"""The input partitions of one sub-topology, processed in the order of timestamps.

The next record of the group is the one with the lowest timestamp. It is known only if every partition has a fetched
record. If a partition has none, its lag at the broker decides:

- If the partition has records that are not fetched yet, or if the lag is not known, the other partitions wait.
- If the lag is 0, they wait for up to `max_task_idle_ms` from then on, because a record may still be written.

With `max_task_idle_ms` = -1 they never wait.

>>> group = PartitionGroup(["left", "right"], max_task_idle_ms=0)
>>> group.is_ready(0, {})
False

Source of the semantics: PartitionGroup, and `max.task.idle.ms` as of KIP-353 and KIP-695.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.shared.common.records import INT64_MAX, Columns

NEVER_WAIT = -1

Lags = Mapping[str, int | None]
"""By topic, the number of records at the broker beyond the fetched ones; None or absent: unknown."""


class _QueuedSizes:
    """The offsets of one fetch's records, and their cumulated sizes, which are computed on first use."""

    def __init__(self, columns: Columns) -> None:
        self._columns: Columns | None = columns
        self.offsets = columns.offsets
        self._ends = columns.offsets

    def from_offset(self, offset: int) -> int:
        """Return the bytes of the partition's queued records of this fetch from an offset on."""
        if self._columns is not None:
            self._ends = np.cumsum(self._columns.sizes())
            self._columns = None
        before = int(np.searchsorted(self.offsets, offset))
        return int(self._ends[-1]) - (int(self._ends[before - 1]) if before else 0)


class RecordQueue:
    """The fetched records of one partition, in offset order."""

    def __init__(self) -> None:
        self._columns: deque[Columns] = deque()
        self._sized: deque[_QueuedSizes] = deque()
        self._next_offset = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RecordQueue({self._length} records, next {self._next_offset})"

    def add(self, columns: Columns) -> None:
        """Append consecutive records, except those that have been appended before."""
        known = int(np.searchsorted(columns.offsets, self._next_offset))
        if known:
            columns = columns[known:]
        if len(columns):
            self._columns.append(columns)
            self._sized.append(_QueuedSizes(columns))
            self._length += len(columns)
            self._next_offset = int(columns.offsets[-1]) + 1

    @property
    def bytes(self) -> int:
        """Return the bytes of the queued keys, values and headers."""
        if not self._length:
            return 0
        # A fetch is taken in several runs. Its sizes stay until its last record is taken.
        first = int(self._columns[0].offsets[0])
        while self._sized[0].offsets[-1] < first:
            self._sized.popleft()
        return sum(one.from_offset(first) for one in self._sized)

    def head_ms(self) -> int:
        """Return the timestamp of the next record; the queue must not be empty."""
        return int(self._columns[0].timestamps[0])

    def take_until(self, limit_ms: int | None, records_max: int | None = None) -> Columns:
        """Remove and return the next records, all of one fetch: those before the first that is later than `limit_ms`.

        They are at most `records_max`. The queue must not be empty.
        """
        columns = self._columns.popleft()
        at = len(columns) if records_max is None else min(len(columns), records_max)
        if limit_ms is not None:
            # A partition is processed in offset order, and its timestamps need not ascend. So the run ends at the first
            # later record, even if earlier ones follow it.
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

    def take_later(self, limit_ms: int, records_max: int | None = None) -> Columns:
        """As `take_until`, but take the records before the first that is not later than `limit_ms`."""
        earlier = np.flatnonzero(self._columns[0].timestamps[:records_max] <= limit_ms)
        return self.take_until(None, int(earlier[0]) if len(earlier) else records_max)

    def put_back(self, columns: Columns) -> None:
        """Put back the last of the records that were taken, so that they are next again."""
        # `take_until` dropped the sizes when it emptied the queue.
        if not self._length:
            self._sized.append(_QueuedSizes(columns))
        self._columns.appendleft(columns)
        self._length += len(columns)

    def clear(self) -> None:
        """Drop all records; the next ones follow a new position."""
        self._columns.clear()
        self._sized.clear()
        self._next_offset = 0
        self._length = 0


class PartitionGroup:
    """The queues of topics whose records are merged by timestamp; of equal timestamps the first topic's goes first."""

    def __init__(self, topics: Sequence[str], max_task_idle_ms: int) -> None:
        self.queues = {topic: RecordQueue() for topic in topics}
        self._max_task_idle_ms = max_task_idle_ms
        self._waits_since_ms: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"PartitionGroup({self.queues})"

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def is_ready(self, now_ms: int, lags: Lags) -> bool:
        """Return whether a record may be taken now: whether the wait for each empty partition is over.

        The lag of an empty partition must have been 0 for `max_task_idle_ms`, unless that is -1. If no partition has a
        record, return False.
        """
        empty = [topic for topic, queue in self.queues.items() if not queue]
        # 1. Forget the waits for partitions that have records now.
        for topic, queue in self.queues.items():
            if queue:
                self._waits_since_ms.pop(topic, None)
        # 2. Without a record in any partition, the group is not ready.
        if not len(self):
            return False
        # 3. If a lag is unknown or above 0, the wait for this partition begins again later. This is a list and not a
        # generator, because `all` would stop at the first partition that must be waited for. The waits for the others
        # would then begin later.
        may = [self._may_do_without(topic, now_ms, lags) for topic in empty]
        return self._max_task_idle_ms == NEVER_WAIT or all(may)

    def _may_do_without(self, topic: str, now_ms: int, lags: Lags) -> bool:
        # Records are at the broker, or the lag is unknown. The wait begins when the lag is known to be 0 (KIP-695).
        if lags.get(topic) != 0:
            self._waits_since_ms.pop(topic, None)
            return False
        # If the clock was set back, the wait begins again.
        since_ms = min(now_ms, self._waits_since_ms.get(topic, now_ms))
        self._waits_since_ms[topic] = since_ms
        return now_ms - since_ms >= self._max_task_idle_ms

    def next_run(self, records_max: int | None = None, latest_ms: int = INT64_MAX) -> Columns:
        """Remove and return the next records: of one partition, from one fetch, at most `records_max`.

        The group must be ready. The records end before the first that is later than the next record of another
        partition. Of equal timestamps, that of the group's first topic goes first. Records later than `latest_ms` are
        rejected, so their timestamps do not count: they go before all others.
        """
        # PartitionGroup takes one record at a time from the queue with the lowest timestamp. A run has the same order.
        # The order of topics decides between equal timestamps, where the PriorityQueue of Kafka Streams leaves it open,
        # so a repeated run gives equal results.
        heads = [(queue.head_ms(), order, topic) for order, (topic, queue) in enumerate(self.queues.items()) if queue]
        (_, order, topic), *others = sorted(heads)
        if not others:
            return self.queues[topic].take_until(None, records_max)
        last_ms, _, last = others[-1]
        if last_ms > latest_ms:
            return self.queues[last].take_later(latest_ms, records_max)
        limit_ms, other, _ = others[0]
        return self.queues[topic].take_until(limit_ms if order < other else limit_ms - 1, records_max)

    def clear(self) -> None:
        """Drop all fetched records."""
        self._waits_since_ms.clear()
        for queue in self.queues.values():
            queue.clear()
