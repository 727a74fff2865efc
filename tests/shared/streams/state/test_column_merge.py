"""Sorting and cutting in bulk, where numbers fit into one integer and where they do not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.streams.state.column_merge import cuts, sorted_order

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
