"""JsonConverter: envelopes, plain JSON, logical types, and invalid input."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.connect.converters.json import NO_JSON, JsonConverter, value_from_json
from penstock.shared.connect.schema import (
    BYTES,
    FLOAT64,
    INT32,
    INT64,
    OPTIONAL_INT32,
    STRING,
    Field,
    Schema,
    SchemaType,
    date_schema,
    decimal_schema,
    time_schema,
    timestamp_schema,
)

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)


def converter(**settings: str) -> JsonConverter:
    made = JsonConverter()
    made.configure({name.replace("_", "."): value for name, value in settings.items()}, False)
    return made


CASES: list[tuple[Schema, Any, Any]] = [
    (INT32, 7, 7),
    (BYTES, b"\x00\xff", "AP8="),
    (Schema(SchemaType.FLOAT64), 1.5, 1.5),
    (Schema.array(STRING), ["a"], ["a"]),
    (Schema.map(STRING, INT32), {"a": 1}, {"a": 1}),
    (Schema.map(INT32, STRING), {1: "a"}, [[1, "a"]]),
    (Schema.struct("S", Field("a", INT32), Field("b", OPTIONAL_INT32)), {"a": 1, "b": None}, {"a": 1, "b": None}),
    (decimal_schema(2), Decimal("-1.28"), "gA=="),
    (decimal_schema(0), Decimal(128), "AIA="),
    (date_schema(), AT.date(), 19724),
    (time_schema(), AT.time(), 11045678),
    (timestamp_schema(), AT, 1704164645678),
    (INT64.as_optional(), None, None),
]


@pytest.mark.parametrize(("schema", "value", "payload"), CASES)
def test_values_keep_their_schema_in_an_envelope(schema: Schema, value: Any, payload: Any) -> None:
    """A value with an envelope is read back with its schema."""
    data = converter().from_connect_data("t", schema, value)
    assert data is not None
    assert json.loads(data)["payload"] == payload
    assert converter().to_connect_data("t", data) == (schema, value)


def test_plain_json_has_no_schema() -> None:
    """Without envelopes values have no schema."""
    plain = converter(schemas_enable="false")
    assert plain.to_connect_data("t", b'{"a":[1,null]}') == (None, {"a": [1, None]})
    assert plain.from_connect_data("t", None, {"a": b"x"}) == b'{"a":"eA=="}'
    assert plain.from_connect_data("t", None, None) is None
    assert plain.to_connect_data("t", None) == plain.to_connect_data("t", b"") == (None, None)
    assert plain.to_connect_values("t", [b"1", None]) == (None, [1, None])
    assert plain.to_connect_values("t", [b"1", b"{"]) is None
    assert converter().to_connect_values("t", [b"1"]) is None


@pytest.mark.parametrize(
    "attribute", ['"name":["n"]', '"version":"1"', '"version":true', '"doc":{}', '"parameters":["a"]']
)
def test_attributes_of_another_type_are_ignored(attribute: str) -> None:
    """As in Kafka Connect, an attribute of a schema is ignored if its value has another type than it must have."""
    data = f'{{"schema":{{"type":"int32",{attribute}}},"payload":1}}'.encode()
    assert converter().to_connect_data("t", data) == (INT32, 1)


def test_invalid_bytes_have_kafka_connects_messages() -> None:
    """Invalid JSON and invalid envelopes are DataErrors with Kafka Connect's messages."""
    for data in (b"not json", b'{"broken":', b'"\xff"', b"[" * 100_000):
        plain = converter(schemas_enable="false")
        with pytest.raises(DataError) as raised:
            plain.to_connect_data("t", data)
        assert str(raised.value) == NO_JSON
        assert plain.to_connect_values("t", [data]) is None
    decimals = (
        '{"type":"struct","fields":[{"field":"a","type":"bytes","name":"org.apache.kafka.connect.data.Decimal"}]}'
    )
    for schema, payload in (
        ("null", b'"\xff"'),
        ("null", b"1e999"),
        ("1e999", b"1"),
        (decimals, b"1e9999999999999999999"),
        ("null", b"[" * 100_000),
        ("[" * 100_000, b"1"),
    ):
        with pytest.raises(DataError):
            converter().to_connect_data("t", b'{"schema":' + schema.encode() + b',"payload":' + payload + b"}")
    for data in (b'{"a":1}', b"5", b'{"schema":null,"payload":1,"more":2}'):
        with pytest.raises(DataError, match='"schema" and "payload"'):
            converter().to_connect_data("t", data)
    for schema in (
        *('{"type":"int99"}', '{"type":"array"}', '{"type":"struct","fields":[{"type":"int32"}]}', "5"),
        *('{"type":["int32"]}', '{"type":{}}', '{"type":"int32","parameters":{"a":1}}'),
    ):
        with pytest.raises(DataError):
            converter().to_connect_data("t", b'{"schema":' + schema.encode() + b',"payload":1}')


def test_values_must_be_of_their_schema() -> None:
    """A value that does not match its schema is a DataError in both directions."""
    for schema, value in (
        (INT32, "x"),
        (INT32, None),
        (STRING, 5),
        (date_schema(), AT),
        (decimal_schema(1), Decimal("1.25")),
    ):
        with pytest.raises(DataError):
            converter().from_connect_data("t", schema, value)
    maps = b'{"schema":{"type":"map","keys":{"type":"int32"},"values":{"type":"string"}},"payload":{"1":"a"}}'
    with pytest.raises(DataError, match="array of pairs"):
        converter().to_connect_data("t", maps)
    for kind, payload in (
        ("int8", "300"),
        ("int8", "300.0"),
        ("int64", "5.5"),
        ("string", "5"),
        ("boolean", "1"),
        ("bytes", '"?"'),
        ("int32", "null"),
        ("float64", '"1"'),
    ):
        with pytest.raises(DataError):
            converter().to_connect_data("t", f'{{"schema":{{"type":"{kind}"}},"payload":{payload}}}'.encode())


@pytest.mark.parametrize("number", [5.0, Decimal("5.0"), Decimal("0.5E+1")])
def test_a_whole_number_is_an_integer(number: Any) -> None:
    """JSON does not distinguish 5.0 from 5, so both are an integer."""
    value = value_from_json(INT64, number)
    assert (value, type(value)) == (5, int)


@pytest.mark.parametrize("text", ["5.5", "9223372036854775808", "1E+999999999", "1E-999999999"])
def test_a_decimal_that_is_not_whole_or_too_large_is_no_integer(text: str) -> None:
    """It is an error, also if its exponent is huge."""
    with pytest.raises(DataError, match="type INT64"):
        value_from_json(INT64, Decimal(text))


def test_null_becomes_a_default() -> None:
    """A null becomes the schema's default unless `replace.null.with.default` is false."""
    schema = Schema(SchemaType.INT32, optional=True, default=5)
    data = b'{"schema":{"type":"int32","optional":true,"default":5},"payload":null}'
    assert converter().to_connect_data("t", data) == (schema, 5)
    assert converter(replace_null_with_default="false").to_connect_data("t", data)[1] is None


def test_decimals_may_be_numbers() -> None:
    """`decimal.format=NUMERIC` writes every digit of a decimal, and both formats are read without a float."""
    numeric = converter(decimal_format="numeric")
    for text in ("1.25", "12345678901234567.89", "-0.1", "0.30", "1E+3"):
        data = numeric.from_connect_data("t", decimal_schema(2), Decimal(text))
        assert data is not None
        assert data.endswith(f'"payload":{text}}}'.encode())
        assert str(converter().to_connect_data("t", data)[1]) == text
    schema = Schema.struct(None, Field("d", decimal_schema(2)), Field("f", Schema(SchemaType.FLOAT64)))
    value = {"d": Decimal("0.1"), "f": 0.1}
    assert numeric.to_connect_data("t", numeric.from_connect_data("t", schema, value)) == (schema, value)
    for bad in (b"1E+999999999", b"true", b'"x"'):
        data = b'{"schema":' + numeric._schema_bytes(decimal_schema(2)) + b',"payload":' + bad + b"}"
        with pytest.raises(DataError):
            numeric.to_connect_data("t", data)
    with pytest.raises(DataError, match="NaN"):
        numeric.from_connect_data("t", decimal_schema(2), Decimal("NaN"))


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_floats_without_a_json_number_are_text(value: float, text: str) -> None:
    """NaN and infinity are written as Kafka Connect's text, with and without a schema. With a schema they are read."""
    schema = Schema.struct(None, Field("a", FLOAT64), Field("b", Schema.array(Schema(SchemaType.FLOAT32))))
    data = converter().from_connect_data("t", schema, {"a": value, "b": [value]})
    assert data is not None
    assert json.loads(data)["payload"] == {"a": text, "b": [text]}
    _, read = converter().to_connect_data("t", data)
    assert str(read) == str({"a": value, "b": [value]})
    plain = converter(schemas_enable="false")
    assert plain.from_connect_data("t", None, {"a": [value]}) == f'{{"a":["{text}"]}}'.encode()


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_every_decimal_round_trips(value: Decimal) -> None:
    """Every decimal is read back unchanged."""
    data = converter().from_connect_data("t", decimal_schema(3), value)
    assert converter().to_connect_data("t", data)[1] == value
