"""Kafka's session rule, record by record: the audit's own plain reference.

Runs in Spark's Python workers over groups of records that lie within reach of each other; a group is one row with its
records in arrival order. It says where each record belongs, not what the session's values are: those are summed by
Spark. With a gap of 10 and no grace, records at 0, 8 and 25 meet close times of -10, -2 and 15; after them one at 12
is late, and one at 16 is not, and joins [25, 25]:

>>> assign([(0, 0, -10), (1, 8, -2), (2, 25, 15), (3, 12, 15), (4, 16, 15)], 10)
[(0, 0, 8), (1, 0, 8), (2, 16, 25), (3, None, None), (4, 16, 25)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

_ROW = (
    *(("partition", pa.int32()), ("batch_ms", pa.int64())),
    *(("offset", pa.int64()), ("start_ms", pa.int64()), ("end_ms", pa.int64())),
)
Assigned = tuple[int, int | None, int | None]


def assign(records: list[tuple[int, int, int]], gap_ms: int) -> list[Assigned]:
    """(offset, time, close time on arrival) in arrival order to (offset, start, end), None and None for a late one."""
    sessions: list[tuple[int, int, list[int]]] = []
    late: list[int] = []
    for offset, time, close in records:
        earliest_end = max(time - gap_ms, close)
        found = [s for s in sessions if s[1] >= earliest_end and s[0] <= time + gap_ms]
        start = min([time, *(s[0] for s in found)])
        end = max([time, *(s[1] for s in found)])
        if end < close:
            late.append(offset)
            continue
        sessions = [s for s in sessions if s not in found]
        sessions.append((start, end, [offset, *(o for s in found for o in s[2])]))
    placed: list[Assigned] = [(offset, s[0], s[1]) for s in sessions for offset in s[2]]
    return sorted([*placed, *((offset, None, None) for offset in late)])


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
