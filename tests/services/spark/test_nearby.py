"""Ranges of time that corrections read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.spark.nearby import RANGES_MAX, joined

RANGES = st.lists(st.tuples(st.integers(-500, 5_000), st.integers(0, 40)), max_size=3 * RANGES_MAX)


@given(RANGES)
def test_joined_ranges_hold_all_that_was_asked_for(parts: list[tuple[int, int]]) -> None:
    """They are few, apart, in order, hold every range, and asking for what they hold changes nothing."""
    ranges = [(first, first + length) for first, length in parts]
    found = joined(ranges)
    assert len(found) <= RANGES_MAX
    assert found == sorted(found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    assert all(any(first <= a and b <= last for first, last in found) for a, b in ranges)
    assert joined([*found, *ranges]) == found


def test_the_nearest_become_one() -> None:
    """Beyond the limit it is the smallest holes that are read too, and far ranges stay apart."""
    near = [(10 * i, 10 * i + 7) for i in range(RANGES_MAX)]
    assert joined([*near, (10**6, 10**6 + 1)]) == [(0, 10 * RANGES_MAX - 3), (10**6, 10**6 + 1)]
