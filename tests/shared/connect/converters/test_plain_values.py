"""Converters of plain values: strings, bytes and primitives, and headers as text from which types are inferred."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.converter import Converter
from penstock.shared.connect.converters.plain import (
    BooleanConverter,
    ByteArrayConverter,
    DoubleConverter,
    FloatConverter,
    IntegerConverter,
    LongConverter,
    ShortConverter,
    StringConverter,
)
from penstock.shared.connect.converters.simple_header import SimpleHeaderConverter
from penstock.shared.connect.schema import BOOLEAN, FLOAT64, INT8, INT16, INT64, STRING, Field, Schema, decimal_schema

ROW = Schema.struct(
    None,
    Field("id", INT64),
    Field("n", decimal_schema(2, optional=True)),
    Field("rows", Schema.array(Schema.struct(None, Field("id", INT64)), optional=True)),
)

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("kind", "value", "data"),
    [
        (StringConverter, "é", b"\xc3\xa9"),
        (ByteArrayConverter, b"\x00", b"\x00"),
        (ShortConverter, -2, b"\xff\xfe"),
        (IntegerConverter, 1, b"\x00\x00\x00\x01"),
        (LongConverter, 1, b"\x00\x00\x00\x00\x00\x00\x00\x01"),
        (FloatConverter, 1.5, b"\x3f\xc0\x00\x00"),
        (FloatConverter, 21.3, b"\x41\xaa\x66\x66"),
        (DoubleConverter, 1.5, b"\x3f\xf8\x00\x00\x00\x00\x00\x00"),
        (BooleanConverter, True, b"\x01"),
    ],
)
def test_values_are_written_as_java_writes_them(kind: type[Converter], value: Any, data: bytes) -> None:
    """Values are written as Java's converters write them and read back, and null stays null."""
    converter = kind()
    assert converter.from_connect_data("t", None, value) == data
    schema, read = converter.to_connect_data("t", data)
    assert read == value
    assert schema is not None
    assert schema.optional
    assert converter.from_connect_data("t", None, None) is None
    assert converter.to_connect_data("t", None)[1] is None


@pytest.mark.parametrize(
    ("kind", "value", "data"),
    [
        (ShortConverter, 40_000, b"\x00"),
        (IntegerConverter, 1.5, b"\x00" * 5),
        (LongConverter, True, b""),
        (FloatConverter, "x", b"\x00"),
        (BooleanConverter, 1, b"\x02"),
    ],
)
def test_invalid_values_bytes_and_schemas_are_data_errors(kind: type[Converter], value: Any, data: bytes) -> None:
    """Values of another type or range, bytes of another length and schemas of another type are DataErrors."""
    with pytest.raises(DataError):
        kind().from_connect_data("t", None, value)
    with pytest.raises(DataError):
        kind().to_connect_data("t", data)
    with pytest.raises(DataError):
        kind().from_connect_data("t", STRING, value)


def test_the_byte_converter_accepts_only_bytes() -> None:
    """The byte converter accepts bytes and bytes schemas only."""
    with pytest.raises(DataError):
        ByteArrayConverter().from_connect_data("t", None, "x")
    with pytest.raises(DataError):
        ByteArrayConverter().from_connect_data("t", STRING, b"x")


def test_the_string_converter_accepts_other_types() -> None:
    """Other values are written as Java's toString, and invalid UTF-8 is read with replacement characters."""
    converter = StringConverter()
    assert [converter.from_connect_data("t", None, value) for value in (5, True, 1.5)] == [b"5", b"true", b"1.5"]
    assert converter.to_connect_data("t", b"\xff")[1] == "\ufffd"
    assert converter.to_connect_values("t", [b"a", None])[1] == ["a", None]
    latin = StringConverter()
    latin.configure({"converter.encoding": "ISO-8859-1"}, True)
    assert latin.from_connect_data("t", None, "é") == b"\xe9"
    for name in ("x-none", "hex", "idna", "undefined", "a\0"):
        with pytest.raises(ConfigError, match=r"converter\.encoding"):
            StringConverter().configure({"converter.encoding": name}, False)


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        ({"a": 1, "b": None, "c": {"d": ["x", None]}}, None, "{a=1, b=null, c={d=[x, null]}}"),
        ({"n": Decimal("1.50"), "id": 1, "none": None}, ROW, "Struct{id=1,n=1.50}"),
        ({"id": 1, "rows": [{"id": 2}]}, ROW, "Struct{id=1,rows=[Struct{id=2}]}"),
        (AT.replace(microsecond=1), None, "2024-01-02T03:04:05.000001+00:00"),
        ({"y": AT.replace(year=33).date(), "t": dt.time(3, 0, 0, 1)}, None, "{y=0033-01-02, t=03:00:00.000001}"),
        (bytearray(b"ab"), None, "YWI="),
        ([np.float64(1.5), np.float64(1e10)], None, "[1.5, 1.0E10]"),
        ([1e7, -1.5e-4, 1234567.5, 0.0, float("-inf")], None, "[1.0E7, -1.5E-4, 1234567.5, 0.0, -Infinity]"),
    ],
)
def test_the_string_converter_writes_other_values_as_java(value: Any, schema: Schema | None, text: str) -> None:
    """Structs, maps, lists and floats are written as Java's toString. Times are ISO 8601, and bytes base64."""
    assert StringConverter().from_connect_data("t", schema, value) == text.encode()


@pytest.mark.parametrize(
    "value",
    [
        5,
        -300,
        1 << 40,
        1.5,
        True,
        "text",
        "",
        AT,
        AT.replace(year=33),
        AT.date(),
        AT.time(),
        [1, "a"],
        {"a": None},
        "{open",
    ],
)
def test_headers_round_trip_as_text(value: Any) -> None:
    """Values are written as text and read back as the same value."""
    converter = SimpleHeaderConverter()
    assert converter.to_connect_header("t", "h", converter.from_connect_header("t", "h", None, value))[1] == value


@pytest.mark.parametrize(("value", "text"), [(1e7, b"1.0E7"), (1e-5, b"1.0E-5"), (1.5, b"1.5"), (float("nan"), b"NaN")])
def test_a_float_in_a_header_is_written_as_java(value: float, text: bytes) -> None:
    """A float is written as Java's toString."""
    assert SimpleHeaderConverter().from_connect_header("t", "h", None, value) == text


@pytest.mark.parametrize(
    ("text", "value", "scale"),
    [
        ("13088165645273925489", Decimal(13088165645273925489), 0),
        ("9" * 25, Decimal("9" * 25), 0),
        ("-9223372036854775809", Decimal(-9223372036854775809), 0),
        ("9e999", Decimal("9e999"), -999),
    ],
)
def test_numbers_beyond_the_other_types_are_decimals(text: str, value: Decimal, scale: int) -> None:
    """A header's number that no integer or float holds is read as a Decimal, and written with all its digits."""
    converter = SimpleHeaderConverter()
    schema, found = converter.to_connect_header("t", "h", text.encode())
    assert (schema, found) == (decimal_schema(scale), value)
    written = converter.from_connect_header("t", "h", schema, found)
    assert converter.to_connect_header("t", "h", written) == (schema, found)


def test_types_of_headers_are_inferred() -> None:
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
