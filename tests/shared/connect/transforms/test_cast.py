"""Cast: results of each type, and invalid values."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.schema import INT32, INT64, OPTIONAL_STRING, Field, Schema, SchemaType
from penstock.shared.connect.transforms.cast import TYPES, CastKey, CastValue, cast
from tests.shared.connect.transforms.transforming import applied, configured, record

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (300, "int8", 44),  # wraps, as Java's narrowing does
        (-129, "int8", 127),
        (1 << 40, "int32", 0),
        (3.9, "int32", 3),
        (-3.9, "int16", -3),
        (1e300, "int64", (1 << 63) - 1),
        (float("nan"), "int32", 0),
        (True, "int64", 1),
        ("12", "int16", 12),
        ("1.5", "float64", 1.5),
        (7, "float32", 7.0),
        (0, "boolean", False),
        (2.5, "boolean", True),
        ("TRUE", "boolean", True),
        (True, "string", "true"),
        (1.0, "string", "1.0"),
        (b"\x00\x01", "string", "AAE="),
        (AT, "int64", 1704164645678),
        (AT.date(), "int32", 19724),
        (AT, "string", "2024-01-02T03:04:05.678Z"),
        (None, "int8", None),
    ],
)
def test_values_are_cast_as_java_casts_them(value: Any, target: str, expected: Any) -> None:
    """Values are cast as in Java."""
    assert cast(value, TYPES[target]) == expected


@pytest.mark.parametrize(
    ("value", "target"),
    [("128", "int8"), ("x", "int32"), ("1.0", "int32"), ("maybe", "boolean"), ([], "int32"), ({}, "string")],
)
def test_values_that_cannot_be_cast_are_errors(value: Any, target: str) -> None:
    """Text that is no number or does not fit, and structures, are DataErrors."""
    with pytest.raises(DataError):
        cast(value, TYPES[target])


def test_fields_of_maps_and_structs_are_cast() -> None:
    """Fields are cast and the schema follows; other fields are unchanged, and optional fields stay optional."""
    assert applied(CastValue, {"a": "1", "b": 2}, spec="a:int32").value == {"a": 1, "b": 2}
    schema = Schema.struct("S", Field("a", OPTIONAL_STRING), Field("b", INT64))
    found = applied(CastValue, {"a": "1", "b": 2}, schema, spec="a:int32,b:string")
    assert found.value == {"a": 1, "b": "2"}
    assert found.value_schema is not None
    types = [(f.name, f.schema.type, f.schema.optional) for f in found.value_schema.fields]
    assert types == [("a", SchemaType.INT32, True), ("b", SchemaType.STRING, False)]


def test_the_whole_is_cast() -> None:
    """A spec without a field name casts the whole key or value."""
    found = applied(CastValue, 5, INT32, spec="string")
    assert (found.value, found.value_schema) == ("5", Schema(SchemaType.STRING))
    key = configured(CastKey, spec="int64").apply(record(key="7"))
    assert key is not None
    assert key.key == 7


def test_a_tombstone_passes() -> None:
    """A tombstone is unchanged."""
    assert applied(CastValue, None, spec="a:int32").value is None


@pytest.mark.parametrize("spec", ["", "a:int7", "int8,a:int8", "a"])
def test_invalid_specs_are_errors(spec: str) -> None:
    """A spec with an unknown type, mixed forms or no type is a ConfigError."""
    with pytest.raises(ConfigError):
        configured(CastValue, spec=spec)
