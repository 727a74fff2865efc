"""The orders of rows and of live windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.row_positions import LivePosition, live_order, row_order

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.binary(max_size=3), NUMBERS, st.binary(max_size=3), NUMBERS)
def test_rows_are_ordered(key: bytes, start: int, other: bytes, other_start: int) -> None:
    """Different rows have different orders, and rows of one key are ordered by start."""
    orders = row_order(key, start), row_order(other, other_start)
    assert (orders[0] == orders[1]) == ((key, start) == (other, other_start))
    assert (row_order(key, start) < row_order(key, other_start)) == (start < other_start)


def test_live_windows_that_end_last_come_first() -> None:
    """Live windows are ordered by latest end, then by store, partition, key and start."""
    positions = [LivePosition(8, "a", 0, "a", 0), LivePosition(9, "b", 0, "k", 2), LivePosition(9, "b", 0, "k", 1)]
    assert sorted(positions, key=live_order) == [positions[2], positions[1], positions[0]]
    assert [live_order(position).position() for position in positions] == positions
