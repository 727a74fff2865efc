"""Ranges of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange


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
