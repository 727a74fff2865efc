"""DropHeaders, InsertHeader and HeaderFrom."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.record import Header
from penstock.shared.connect.schema import INT8, INT32, STRING, Field, Schema
from penstock.shared.connect.transforms.headers import DropHeaders, HeaderFromValue, InsertHeader
from tests.shared.connect.transforms.transforming import configured, record

ONE = (Header("a", 1), Header("b", 2), Header("a", 3))


def headers(transform: object, **more: object) -> tuple[Header, ...]:
    found = transform.apply(record(headers=ONE, **more))  # type: ignore[attr-defined]
    return tuple(found.headers)


def test_headers_are_dropped_by_name() -> None:
    """All headers with a listed name are dropped."""
    assert headers(configured(DropHeaders, headers="a,z")) == (Header("b", 2),)


def test_a_header_is_inserted_with_its_type() -> None:
    """An inserted header's type is inferred from the literal."""
    inserted = headers(configured(InsertHeader, header="n", value_literal="5"))
    assert inserted == (*ONE, Header("n", 5, INT8))
    assert headers(configured(InsertHeader, header="n", value_literal="five"))[-1] == Header("n", "five", STRING)


def test_fields_are_copied_or_moved_into_headers() -> None:
    """A copied field stays in the value; a moved field is removed from value and schema."""
    copied = configured(HeaderFromValue, fields="x", headers="h", operation="copy").apply(record({"x": 1, "y": 2}))
    assert copied is not None
    assert (copied.value, copied.headers) == ({"x": 1, "y": 2}, (Header("h", 1),))
    schema = Schema.struct("S", Field("x", INT32), Field("y", INT32))
    moved = configured(HeaderFromValue, fields="x", headers="h", operation="move").apply(
        record({"x": 1, "y": 2}, schema)
    )
    assert moved is not None
    assert (moved.value, moved.headers) == ({"y": 2}, (Header("h", 1, INT32),))
    assert moved.value_schema == Schema.struct("S", Field("y", INT32))
    with pytest.raises(DataError, match="Unknown field: z"):
        configured(HeaderFromValue, fields="z", headers="h", operation="copy").apply(record({"x": 1, "y": 2}, schema))
    with pytest.raises(ConfigError, match="same number"):
        configured(HeaderFromValue, fields="x,y", headers="h", operation="copy")
