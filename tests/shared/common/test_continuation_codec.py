"""Continuations of queries."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.continuation_codec import ContinuationCodec, WrongContinuation
from penstock.shared.common.row_positions import LivePosition, RowPosition, WindowPosition

NUMBERS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.one_of(
    st.builds(RowPosition, NUMBERS, st.binary(), NUMBERS),
    st.builds(WindowPosition, NUMBERS, NUMBERS, NUMBERS, st.binary()),
    st.builds(LivePosition, NUMBERS, st.text(), NUMBERS, st.text(), NUMBERS),
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


def test_none_is_the_first_page_and_the_last_answer() -> None:
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
    for kind in (WindowPosition, LivePosition):
        with pytest.raises(WrongContinuation):
            ContinuationCodec[Any](kind, "app", "store", None, b"k").decode(text)
    assert text is not None
    with pytest.raises(WrongContinuation, match="is invalid"):
        PAGES.decode(text[:-2])
