"""Pages of query results: ranges of keys, the order of rows, and continuations."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.continuation_codec import ContinuationCodec, WrongContinuation
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.row_positions import (
    OpenPosition,
    RowPosition,
    WindowPosition,
    row_order,
)

NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1)
POSITIONS = st.one_of(
    st.builds(RowPosition, NUMBERS, st.binary(), NUMBERS),
    st.builds(WindowPosition, NUMBERS, NUMBERS, NUMBERS, st.binary()),
    st.builds(OpenPosition, NUMBERS, st.text(), NUMBERS, st.text(), NUMBERS),
)
PAGES = ContinuationCodec(RowPosition, "app", "store", None, b"k")
POSITION = RowPosition(3, b"ann", 5)


@given(POSITIONS)
def test_a_position_round_trips(position: Any) -> None:
    """Any position round-trips as text that is valid in a URL."""
    pages: ContinuationCodec[Any] = ContinuationCodec(type(position), "app", None, b"x", 1)
    text = pages.encode(position)
    assert text is not None
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)
    assert pages.decode(text) == position


def test_none_is_the_first_page_and_the_last_response() -> None:
    """None is the continuation of the first page and of the last response."""
    assert (PAGES.encode(None), PAGES.decode(None)) == (None, None)


@pytest.mark.parametrize("wrong", ["", "x", "%%", "é", "a" * 999, "ksQI", "wA", "gqFhAQ"])
def test_an_invalid_continuation_is_shown(wrong: str) -> None:
    """The error for an invalid continuation contains it or its beginning."""
    with pytest.raises(WrongContinuation, match=f"^continuation '{re.escape(wrong[:100])}…?'"):
        PAGES.decode(wrong)


def test_a_continuation_of_another_query_is_rejected() -> None:
    """A continuation of another application, store or kind of query is an error, as is a truncated one."""
    text = PAGES.encode(POSITION)
    others: list[Any] = [("app", "store", None, "k"), ("app", "store"), ("app2", "store", None, b"k")]
    for other in others:
        with pytest.raises(WrongContinuation, match=f"{text}'.*another query"):
            ContinuationCodec(RowPosition, *other).decode(text)
    for kind in (WindowPosition, OpenPosition):
        with pytest.raises(WrongContinuation):
            ContinuationCodec[Any](kind, "app", "store", None, b"k").decode(text)
    assert text is not None
    with pytest.raises(WrongContinuation, match="is invalid"):
        PAGES.decode(text[:-2])


@pytest.mark.parametrize("number", [-(2**63), 2**63, 2**64 - 1])
def test_a_number_that_no_row_has_is_invalid(number: int) -> None:
    """A forged time that does not fit 64 bits, or only without its sign, is rejected before a store is searched."""
    with pytest.raises(WrongContinuation, match="is invalid"):
        PAGES.decode(PAGES.encode(POSITION._replace(start=number)))
    opens = ContinuationCodec(OpenPosition, "app")
    with pytest.raises(WrongContinuation, match="is invalid"):
        opens.decode(opens.encode(OpenPosition(number, "s", 0, "k", 0)))


@given(st.binary(max_size=3), NUMBERS, st.binary(max_size=3), NUMBERS)
def test_rows_are_ordered(key: bytes, start: int, other: bytes, other_start: int) -> None:
    """Different rows have different orders, and rows of one key are ordered by start."""
    orders = row_order(key, start), row_order(other, other_start)
    assert (orders[0] == orders[1]) == ((key, start) == (other, other_start))
    assert (row_order(key, start) < row_order(key, other_start)) == (start < other_start)


def test_open_windows_that_end_last_come_first() -> None:
    """Open windows are ordered by latest end, then by store, partition, key and start."""
    positions = [
        OpenPosition(-8, "a", 0, "a", 0),
        OpenPosition(-9, "b", 0, "k", 2),
        OpenPosition(-9, "b", 0, "k", 1),
    ]
    assert sorted(positions) == [positions[2], positions[1], positions[0]]


@given(st.text(), st.text(), st.text())
def test_the_order_of_text_is_that_of_its_bytes(low: str, key: str, high: str) -> None:
    """A range of text contains the same keys as a comparison of the texts."""
    assert KeyRange.of(low=low, high=high).has(key.encode()) is (low <= key <= high)


def test_a_record_without_a_key_is_in_no_range() -> None:
    """A record without a key is not even in the unbounded range."""
    assert not KeyRange.of().has(None)


def test_bounds_that_are_no_text() -> None:
    """A bound that is no UTF-8 is a ConfigError for text keys."""
    assert KeyRange.of(low="ä").texts() == ("ä", None)
    with pytest.raises(ConfigError, match=r"b'\\xff'"):
        KeyRange.of(b"\xff").texts()
