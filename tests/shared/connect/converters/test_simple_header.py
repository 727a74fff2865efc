"""SimpleHeaderConverter: text from which types are inferred."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from penstock.shared.connect.converters.simple_header import SimpleHeaderConverter
from penstock.shared.connect.schema import BOOLEAN, FLOAT64, INT8, INT16, INT64, STRING

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "value", [5, -300, 1 << 40, 1.5, True, "text", "", AT, AT.date(), AT.time(), [1, "a"], {"a": None}, "{open"]
)
def test_values_round_trip_as_text(value: Any) -> None:
    """Values are written as text and read back as the same value."""
    converter = SimpleHeaderConverter()
    assert converter.to_connect_header("t", "h", converter.from_connect_header("t", "h", None, value))[1] == value


def test_types_are_inferred() -> None:
    """A whole number gets the smallest type that holds it, and other text the type that it looks like."""
    converter = SimpleHeaderConverter()
    found = [
        converter.to_connect_header("t", "h", text)[0] for text in (b"1", b"300", b"5000000000", b"1e3", b"false", b"x")
    ]
    assert found == [INT8, INT16, INT64, FLOAT64, BOOLEAN, STRING]
    assert converter.to_connect_header("t", "h", None) == (None, None)
    assert converter.to_connect_header("t", "h", b"\xff") == (STRING, "\ufffd")
    deep = "[" * 100_000 + "]" * 100_000
    assert converter.to_connect_header("t", "h", deep.encode()) == (STRING, deep)
    assert converter.from_connect_header("t", "h", None, None) is None
    assert converter.from_connect_header("t", "h", None, b"ab") == b"YWI="
