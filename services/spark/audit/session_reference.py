"""Kafka's session rule, record by record: the audit's own reference implementation.

It runs in Spark's Python workers over records in the order of key and arrival. It assigns each record to a session;
Spark sums the sessions' values. Each record comes with the close time when it arrived: a session that ends before the
close time is closed. Example: with a gap of 10 and no grace period, the close times of records at 0, 8 and 25 are -10,
-2 and 15. After them, a record at 12 is late. A record at 16 is not late and joins [25, 25]:

>>> sessions = OpenSessions(10)
>>> records = [(0, 0, -10), (1, 8, -2), (2, 25, 15), (3, 12, 15), (4, 16, 15)]
>>> assigned = [one for record in records for one in sessions.take(*record)]
>>> sorted([*assigned, *sessions.close()])
[(0, 0, 8), (1, 0, 8), (2, 16, 25), (3, None, None), (4, 16, 25)]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = "partition int, offset bigint, start_ms bigint, end_ms bigint"
"""The columns of `replay`'s rows, in SQL."""
_SCHEMA = pa.schema(
    [("partition", pa.int32()), ("offset", pa.int64()), ("start_ms", pa.int64()), ("end_ms", pa.int64())]
)
Assigned = tuple[int, int | None, int | None]


class OpenSessions:
    """The open sessions of one key: those that end at the close time or later.

    Adding n records takes n log n steps if few sessions are open at a time.
    """

    def __init__(self, gap_ms: int) -> None:
        self._gap_ms = gap_ms
        self._starts = list[int]()
        self._ends = list[int]()
        self._members = list[list[int]]()

    def take(self, offset: int, time: int, close: int) -> Iterator[Assigned]:
        """Add a record that arrived at this close time.

        Yields records whose session is final, as (offset, start, end). Start and end are None for a late record.
        """
        if self._ends and self._ends[0] < close:
            yield from self.close(bisect_left(self._ends, close))
        # Open sessions are more than the gap apart. So their order by start is also their order by end, and the
        # sessions that a record merges are adjacent.
        first = bisect_left(self._ends, time - self._gap_ms)
        last = bisect_right(self._starts, time + self._gap_ms, first)
        start = time
        end = time
        members = [offset]
        if first < last:
            start = min(time, self._starts[first])
            end = max(time, self._ends[last - 1])
            # Move the records of the smaller sessions to the largest one.
            lists = sorted(self._members[first:last], key=len)
            members = lists.pop()
            members.append(offset)
            for more in lists:
                members += more
        if end < close:
            yield offset, None, None
            return
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._members[first:last] = [members]

    def close(self, count: int | None = None) -> Iterator[Assigned]:
        """Yield the records of the first `count` sessions (default: all) and remove these sessions."""
        for start, end, members in zip(self._starts[:count], self._ends[:count], self._members[:count], strict=True):
            for offset in members:
                yield offset, start, end
        del self._starts[:count], self._ends[:count], self._members[:count]


def assign_sessions(records: DataFrame, gap_ms: int) -> DataFrame:
    """Return records with all their columns and their session's `start_ms` and `end_ms`, null for a late record.

    The columns `partition`, `key`, `offset`, `timestamp_ms` and `close_ms` determine the sessions. `close_ms` is
    the close time when the record arrived.
    """
    used = records.select("partition", "key", "offset", "timestamp_ms", "close_ms")
    # One task has all records of a key, in the order of their arrival.
    in_order = used.repartition("partition", "key").sortWithinPartitions("partition", "key", "offset")
    return records.join(in_order.mapInArrow(replay(gap_ms), COLUMNS), ["partition", "offset"])


def replay(gap_ms: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for mapInArrow that assigns records to sessions: one row of COLUMNS for each record.

    Its input is records (partition, key, offset, timestamp_ms, close_ms) in the order of partition, key and offset. It
    holds the records of one key's open sessions in memory.
    """

    def replay_batches(batches: Iterator[Any]) -> Iterator[Any]:
        key = None
        sessions = OpenSessions(gap_ms)
        for batch in batches:
            assigned = list[tuple[Any, ...]]()
            for partition, name, *record in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if (partition, name) != key:
                    assigned += _rows_of_key(key, sessions.close())
                    key = (partition, name)
                    sessions = OpenSessions(gap_ms)
                assigned += _rows_of_key(key, sessions.take(*record))
            yield _record_batch(assigned)
        yield _record_batch(_rows_of_key(key, sessions.close()))

    return replay_batches


def _rows_of_key(key: tuple[int, bytes] | None, assigned: Iterable[Assigned]) -> list[tuple[Any, ...]]:
    return [] if key is None else [(key[0], *one) for one in assigned]


def _record_batch(rows: list[tuple[Any, ...]]) -> Any:
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
