"""Kafka's session rule, record by record: the audit's own plain reference.

Runs in Spark's Python workers over groups of records that lie within reach of each other; a group is one row with its
records in arrival order. It says where each record belongs, not what the session's values are: those are summed by
Spark. With a gap of 10 and no grace, records at 0, 8 and 25 meet close times of -10, -2 and 15; after them one at 12
is late, and one at 16 is not, and joins [25, 25]:

>>> assign([(0, 0, -10), (1, 8, -2), (2, 25, 15), (3, 12, 15), (4, 16, 15)], 10)
[(0, 0, 8), (1, 0, 8), (2, 16, 25), (3, None, None), (4, 16, 25)]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

_ROW = (
    *(("partition", pa.int32()), ("batch_ms", pa.int64())),
    *(("offset", pa.int64()), ("start_ms", pa.int64()), ("end_ms", pa.int64())),
)
Assigned = tuple[int, int | None, int | None]


def assign(records: Sequence[tuple[int, int, int]], gap_ms: int) -> list[Assigned]:
    """(offset, time, close time on arrival) in arrival order to (offset, start, end), None and None for a late one.

    The close time never falls, so a session below it is never looked at again. The others are more than the gap apart,
    which puts them in one order by start and by end: those in reach of a record lie together. Each record that is
    taken heads the session that it makes; what it merges has it as parent. So n records take n log n steps.
    """
    starts, ends, heads, closed = list[int](), list[int](), list[int](), 0
    parents: list[int | None] = [None] * len(records)
    bounds: list[tuple[int, int] | None] = [None] * len(records)
    for nth, (_, time, close) in enumerate(records):
        closed = bisect_left(ends, close, closed)
        first = bisect_left(ends, time - gap_ms, closed)
        last = bisect_right(starts, time + gap_ms, first)
        start, end = (min(time, starts[first]), max(time, ends[last - 1])) if first < last else (time, time)
        if end < close:
            continue
        for merged in heads[first:last]:
            parents[merged] = nth
        starts[first:last], ends[first:last], heads[first:last] = [start], [end], [nth]
        bounds[nth] = (start, end)
    for nth in reversed(range(len(records))):  # a parent comes after its children
        if (parent := parents[nth]) is not None:
            bounds[nth] = bounds[parent]
    return sorted((offset, *(of or (None, None))) for (offset, _, _), of in zip(records, bounds, strict=True))


def replay(gap_ms: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: groups (partition, batch_ms, records: offset, timestamp_ms, close_ms) to one row a record."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            groups = zip(*(batch.column(c).to_pylist() for c in ("partition", "batch_ms", "records")), strict=True)
            rows = [
                (partition, batch_ms, *assigned)
                for partition, batch_ms, records in groups
                for assigned in assign([(r["offset"], r["timestamp_ms"], r["close_ms"]) for r in records], gap_ms)
            ]
            columns = list(zip(*rows, strict=True)) or [()] * len(_ROW)
            arrays = [pa.array(column, type_) for column, (_, type_) in zip(columns, _ROW, strict=True)]
            yield pa.record_batch(arrays, names=[name for name, _ in _ROW])

    return run
