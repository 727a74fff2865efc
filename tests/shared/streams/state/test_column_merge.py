"""Sorting and cutting in bulk, where numbers fit into one integer and where they do not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.state.column_merge import cuts, joined_by_runs, sorted_order

times = st.one_of(st.integers(0, 50), st.integers(0, 2**62))
spans = st.one_of(st.integers(0, 80), st.integers(0, 2**60))
pairs = st.lists(st.tuples(st.integers(0, 2**30), times), min_size=1, max_size=40)


@given(pairs)
def test_sorted_as_python_sorts(given_pairs: list[tuple[int, int]]) -> None:
    """The order is by code, then time, then place, however far the numbers are apart."""
    codes, stamps = (np.array(column) for column in zip(*given_pairs, strict=True))
    expected = sorted(range(len(given_pairs)), key=lambda i: given_pairs[i])
    assert sorted_order(codes, stamps).tolist() == expected


@given(
    pairs, st.integers(1, 60), st.lists(st.one_of(st.integers(0, 80), st.integers(0, 2**60)), min_size=40, max_size=40)
)
def test_cut_where_the_gap_after_all_before_is_exceeded(
    given_pairs: list[tuple[int, int]], gap: int, lengths: list[int]
) -> None:
    """A group begins with each code, and where an interval starts more than the gap after the latest end before it."""
    intervals = sorted(
        (code, start, start + length) for (code, start), length in zip(given_pairs, lengths, strict=False)
    )
    expected, latest = [], 0
    for i, (code, start, end) in enumerate(intervals):
        new = i == 0 or code != intervals[i - 1][0]
        expected.append(new or start - latest > gap)
        latest = end if new else max(latest, end)
    codes, starts, ends = (np.array(column) for column in zip(*intervals, strict=True))
    assert cuts(codes, starts, ends, gap).tolist() == expected


def grouped_by_records(runs: list[tuple[int, int]], stored: list[tuple[int, int]], gap: int) -> set[tuple[int, ...]]:
    """The sessions that there are after each run joined those within the gap of it, as starts of what is in them."""
    sessions = [(start, end, (start,)) for start, end in stored]
    for start, end in runs:
        within = [s for s in sessions if s[0] - gap <= end and s[1] + gap >= start]
        members = tuple(sorted((start, *(at for s in within for at in s[2]))))
        whole = min(start, *(s[0] for s in within), start), max(end, *(s[1] for s in within), end), members
        sessions = [s for s in sessions if s not in within] + [whole]
    return {members for _, _, members in sessions}


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30), st.booleans()), min_size=1, max_size=12))
def test_stored_sessions_are_joined_by_runs_alone(steps: list[tuple[int, int, bool]]) -> None:
    """The gap may have been shorter when sessions were stored: closer ones stay what they are without a record."""
    gap, runs, stored = 40, list[tuple[int, int]](), list[tuple[int, int]]()
    for step, length, is_run in steps:
        mine = runs if is_run else stored
        start = (mine[-1][1] + gap if is_run else mine[-1][1]) + step if mine else step
        mine.append((start, start + length))
    both = sorted([(*run, False) for run in runs] + [(*session, True) for session in stored])
    starts, ends = np.array([of[0] for of in both]), np.array([of[1] for of in both])
    new = cuts(np.zeros(len(both), np.int64), starts, ends, gap)
    first = joined_by_runs(new, starts, ends, np.array([of[2] for of in both]), gap)
    found = {tuple(part) for part in np.split(starts, first[1:]) for part in [part.tolist()]}
    assert found == grouped_by_records(runs, stored, gap)
