"""The audit's own reference of Kafka's session rule."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compactor.sessions import assign, replay

GAP_MS = 10


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_without_closing_sessions_are_the_runs_of_sorted_times(times: list[int]) -> None:
    """Where nothing closes, a session is a run of sorted times of which none is more than the gap from the next."""
    ordered = sorted(times)
    cuts = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(ordered), 1) if b - a > GAP_MS), len(ordered)]
    runs = {(ordered[a], ordered[b - 1]) for a, b in itertools.pairwise(cuts)}
    placed = assign([(offset, time, -(10**6)) for offset, time in enumerate(times)], GAP_MS)
    assert {(start, end) for _, start, end in placed} == runs
    assert [offset for offset, _, _ in placed] == list(range(len(times)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=15))
def test_a_late_record_is_one_that_can_only_reach_closed_sessions(times: list[int]) -> None:
    """A record above the close time is never late; a late one leaves the others as they are without it."""
    close = [highest - GAP_MS for highest in itertools.accumulate(times, max)]
    records = list(zip(range(len(times)), times, close, strict=True))
    placed = assign(records, GAP_MS)
    late = {offset for offset, start, _ in placed if start is None}
    assert all(times[offset] < close[offset] for offset in late)
    kept = [record for record in records if record[0] not in late]
    assert assign(kept, GAP_MS) == [p for p in placed if p[0] not in late]


def test_replay_gives_one_row_a_record() -> None:
    """Groups stay apart, and a batch without groups gives an empty batch of the same columns."""
    record = pa.struct([("offset", pa.int64()), ("timestamp_ms", pa.int64()), ("close_ms", pa.int64())])
    schema = pa.schema([("partition", pa.int32()), ("batch_ms", pa.int64()), ("records", pa.list_(record))])
    groups = [
        {"partition": 0, "batch_ms": 5, "records": [{"offset": 1, "timestamp_ms": 5, "close_ms": 0}]},
        {"partition": 1, "batch_ms": 5, "records": [{"offset": 1, "timestamp_ms": 6, "close_ms": 7}]},
    ]
    run = replay(GAP_MS)
    (rows,) = run(iter([pa.RecordBatch.from_pylist(groups, schema)]))
    assert [tuple(row.values()) for row in rows.to_pylist()] == [(0, 5, 1, 5, 5), (1, 5, 1, None, None)]
    (empty,) = run(iter([pa.RecordBatch.from_pylist([], schema)]))
    assert empty.schema == rows.schema
