"""Continuations of queries."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.pagination import (
    Continuations,
    LivePosition,
    RowPosition,
    WindowPosition,
    WrongContinuation,
    live_order,
    row_order,
)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.one_of(
    st.builds(RowPosition, NUMBERS, st.binary(), NUMBERS),
    st.builds(WindowPosition, NUMBERS, NUMBERS, NUMBERS, st.binary()),
    st.builds(LivePosition, NUMBERS, st.text(), NUMBERS, st.text(), NUMBERS),
)
PAGES = Continuations(RowPosition, "app", "store", None, b"k")
POSITION = RowPosition(3, b"ann", 5)


@given(POSITIONS)
def test_a_position_round_trips(position: Any) -> None:
    """Any position round-trips as text that is valid in a URL."""
    pages: Continuations[Any] = Continuations(type(position), "app", None, b"x", 1)
    text = pages.text(position)
    assert text is not None
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)
    assert pages.position(text) == position


def test_none_is_the_first_page_and_the_last_answer() -> None:
    """None is the continuation of the first page and of the last answer."""
    assert (PAGES.text(None), PAGES.position(None)) == (None, None)


@pytest.mark.parametrize("wrong", ["", "x", "%%", "é", "a" * 999, "ksQI", "wA", "gqFhAQ"])
def test_an_invalid_continuation_is_shown(wrong: str) -> None:
    """The error for an invalid continuation contains it or its beginning."""
    with pytest.raises(WrongContinuation, match=f"^continuation '{re.escape(wrong[:100])}…?'"):
        PAGES.position(wrong)


def test_a_continuation_of_another_query_is_rejected() -> None:
    """A continuation of another application, store or kind of query is an error, as is a truncated one."""
    text = PAGES.text(POSITION)
    others: list[Any] = [("app", "store", None, "k"), ("app", "store"), ("app2", "store", None, b"k")]
    for other in others:
        with pytest.raises(WrongContinuation, match=f"{text}'.*another query"):
            Continuations(RowPosition, *other).position(text)
    for kind in (WindowPosition, LivePosition):
        with pytest.raises(WrongContinuation):
            Continuations[Any](kind, "app", "store", None, b"k").position(text)
    assert text is not None
    with pytest.raises(WrongContinuation, match="is invalid"):
        PAGES.position(text[:-2])


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
