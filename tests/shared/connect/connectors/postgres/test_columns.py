"""Conversion of column texts of logical decoding to values."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.connect.connectors.postgres.columns import TYPE_NAMES, value_from
from penstock.shared.connect.errors import ConnectError

OIDS = {name: oid for oid, name in TYPE_NAMES.items()}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int8", "-9223372036854775808", -(2**63)),
        ("float8", "1e-300", 1e-300),
        ("float4", "-Infinity", -math.inf),
        ("bool", "t", True),
        ("bool", "f", False),
        ("bytea", r"\x", b""),
        ("bytea", r"\x00ff", b"\x00\xff"),
        ("numeric", "12345678901234567890.125", Decimal("12345678901234567890.125")),
        ("date", "2024-02-29", dt.date(2024, 2, 29)),
        ("date", "infinity", dt.date.max),
        ("time", "23:59:59.999999", dt.time(23, 59, 59, 999_999)),
        ("timestamp", "2024-01-01 12:00:00", dt.datetime(2024, 1, 1, 12)),
        ("timestamp", "-infinity", dt.datetime.min),
        ("timestamptz", "1999-12-31 23:59:59.5+00", dt.datetime(1999, 12, 31, 23, 59, 59, 500_000, tzinfo=dt.UTC)),
    ],
)
def test_values_equal_the_drivers(kind: str, text: str, value: Any) -> None:
    """Texts of all types are converted to the driver's values; infinite times become the minimum and the maximum."""
    assert value_from(OIDS[kind], text) == value


def test_other_types_are_text() -> None:
    """Values of all other types are text."""
    assert value_from(2950, "{1,2}") == "{1,2}"


@pytest.mark.parametrize(("kind", "text"), [("date", "0044-03-15 BC"), ("timestamptz", "10000-01-01 00:00:00+00")])
def test_a_time_out_of_pythons_range_is_an_error(kind: str, text: str) -> None:
    """A time that Python cannot represent is an error."""
    with pytest.raises(ConnectError, match="cannot represent"):
        value_from(OIDS[kind], text)
