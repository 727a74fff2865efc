"""The audit's reference implementation of Kafka's session rule."""

from __future__ import annotations

import itertools
from time import process_time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.spark.audit.session_reference import Assigned, OpenSessions, replay
from tests.property_tests import examples

GAP_MS = 10
LONG_SECONDS_MAX = 20  # CPU; usually a second, while a quadratic algorithm takes half an hour


def assign(records: list[tuple[int, int, int]]) -> list[Assigned]:
    """One key's records with their sessions, by offset. `records` are (offset, time, close time when it arrived)."""
    sessions = OpenSessions(GAP_MS)
    assigned = [one for record in records for one in sessions.take(*record)]
    return sorted([*assigned, *sessions.close()])


def by_the_rule(records: list[tuple[int, int, int]]) -> list[Assigned]:
    """The rule in its plain form: each record is compared with every session."""
    sessions: list[tuple[int, int, list[int]]] = []
    late: list[int] = []
    for offset, time, close in records:
        found = [s for s in sessions if s[1] >= max(time - GAP_MS, close) and s[0] <= time + GAP_MS]
        start, end = min([time, *(s[0] for s in found)]), max([time, *(s[1] for s in found)])
        if end < close:
            late.append(offset)
            continue
        sessions = [s for s in sessions if s not in found]
        sessions.append((start, end, [offset, *(o for s in found for o in s[2])]))
    assigned: list[Assigned] = [(offset, s[0], s[1]) for s in sessions for offset in s[2]]
    return sorted([*assigned, *((offset, None, None) for offset in late)])


@settings(deadline=None, max_examples=examples(500))
@given(st.lists(st.integers(0, 150), max_size=40), st.integers(0, 60))
def test_every_record_is_where_the_rule_has_it(times: list[int], behind: int) -> None:
    """Records join sessions, start them and are late as the rule requires.

    The records' order and the progress of time do not matter.
    """
    close = [highest - behind for highest in itertools.accumulate(times, max)]
    records = list(zip(range(len(times)), times, close, strict=True))
    assert assign(records) == by_the_rule(records)


@pytest.mark.parametrize("step", [1, -1, 7919])
def test_a_long_session_takes_no_longer_a_record(step: int) -> None:
    """A quarter of a million records of one session are assigned in seconds, in order, backwards and mixed."""
    number = 250_000
    times = [i * step % number * GAP_MS for i in range(number)]
    begun = process_time()
    assigned = assign([(i, at, -(10**6)) for i, at in enumerate(times)])
    assert process_time() - begun < LONG_SECONDS_MAX
    assert {(start, end) for _, start, end in assigned} == {(0, (number - 1) * GAP_MS)}


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_without_closing_sessions_are_the_runs_of_sorted_times(times: list[int]) -> None:
    """If nothing closes, a session is a sequence of sorted times with distances of at most the gap."""
    ordered = sorted(times)
    cuts = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(ordered), 1) if b - a > GAP_MS), len(ordered)]
    runs = {(ordered[a], ordered[b - 1]) for a, b in itertools.pairwise(cuts)}
    assigned = assign([(offset, time, -(10**6)) for offset, time in enumerate(times)])
    assert {(start, end) for _, start, end in assigned} == runs
    assert [offset for offset, _, _ in assigned] == list(range(len(times)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=15))
def test_a_late_record_is_one_that_can_only_reach_closed_sessions(times: list[int]) -> None:
    """A record above the close time is never late. A late record does not change the sessions of the others."""
    close = [highest - GAP_MS for highest in itertools.accumulate(times, max)]
    records = list(zip(range(len(times)), times, close, strict=True))
    assigned = assign(records)
    late = {offset for offset, start, _ in assigned if start is None}
    assert all(times[offset] < close[offset] for offset in late)
    kept = [record for record in records if record[0] not in late]
    assert assign(kept) == [p for p in assigned if p[0] not in late]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 80)), max_size=25), st.integers(1, 30))
def test_replay_returns_one_row_per_record(records: list[tuple[str, int]], rows: int) -> None:
    """Keys and partitions stay separate, however records are batched.

    Records of sessions that stay open follow in a later batch.
    """
    names = ("partition", "key", "offset", "timestamp_ms", "close_ms")
    highest = [at - GAP_MS for at in itertools.accumulate((at for _, at in records), max)]
    given_rows = [
        dict(zip(names, (p, key.encode(), i, at, highest[i]), strict=True))
        for p in (0, 1)
        for i, (key, at) in enumerate(records)
    ]
    given_rows.sort(key=lambda row: (row["partition"], row["key"], row["offset"]))
    types = (pa.int32(), pa.binary(), pa.int64(), pa.int64(), pa.int64())
    table = pa.Table.from_pylist(given_rows, pa.schema(list(zip(names, types, strict=True))))
    found = list(replay(GAP_MS)(iter(table.to_batches(max_chunksize=rows))))
    expected = []
    for p in (0, 1):
        for key in "abc":
            own = [(i, at, highest[i]) for i, (name, at) in enumerate(records) if name == key]
            expected += [(p, *assigned) for assigned in assign(own)]
    assigned = [tuple(row.values()) for batch in found for row in batch.to_pylist()]
    assert sorted(assigned) == sorted(expected)
    assert {batch.schema for batch in found} == {found[0].schema}


def test_replay_forgets_what_is_closed() -> None:
    """A record is returned with the batch in which the close time passes its session."""
    schema = pa.schema(
        [("partition", pa.int32()), ("key", pa.binary()), *((n, pa.int64()) for n in ("offset", "at", "close"))]
    )
    batches = [
        pa.RecordBatch.from_pylist([dict(zip(schema.names, (0, b"k", *row), strict=True))], schema)
        for row in ((0, 5, -5), (1, 6, -4), (2, 50, 40), (3, 41, 40))
    ]
    rows = [[tuple(row.values()) for row in batch.to_pylist()] for batch in replay(GAP_MS)(iter(batches))]
    assert rows == [[], [], [(0, 0, 5, 6), (0, 1, 5, 6)], [], [(0, 2, 41, 50), (0, 3, 41, 50)]]
