"""Serialization of keys and values, and the decoding of JSON from outside."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError, SerializationError
from penstock.shared.common.json_decoding import (
    JSON_ERRORS,
    InvalidJson,
    JsonTypeMismatch,
    decode_json,
    decode_schema,
    invalid_json,
)
from penstock.shared.common.serialization import (
    bytes_deserializer,
    bytes_serializer,
    double_deserializer,
    double_serializer,
    float_deserializer,
    float_serializer,
    integer_deserializer,
    integer_serializer,
    json_deserializer,
    json_serializer,
    long_deserializer,
    long_serializer,
    short_deserializer,
    short_serializer,
    string_deserializer,
    string_serializer,
    struct_deserializer,
)


class Click(msgspec.Struct):
    """A typed value."""

    ms: int


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values.filter(lambda value: value is not None))
def test_json_round_trips(value: Any) -> None:
    """Any JSON value round-trips."""
    assert json_deserializer("t", json_serializer("t", value)) == value


@given(st.text())
def test_strings_round_trip(text: str) -> None:
    """Any text round-trips."""
    assert string_deserializer("t", string_serializer("t", text)) == text


@pytest.mark.parametrize("value", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_bytes(value: Any) -> None:
    """Any bytes-like object becomes bytes, and bytes stay the same object."""
    assert bytes_serializer("t", value) == b"ab"
    assert type(bytes_serializer("t", value)) is bytes
    data = b"x"
    assert bytes_serializer("t", data) is bytes_deserializer("t", data) is data


@pytest.mark.parametrize(
    "both", [bytes_serializer, bytes_deserializer, string_serializer, string_deserializer, json_serializer]
)
def test_none_stays_none(both: Any) -> None:
    """None, a tombstone, is serialized and deserialized as None."""
    assert both("t", None) is None
    assert json_deserializer("t", None) is struct_deserializer(Click)("t", None) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bytes_serializer("t", "text"), "t: .*got str.*serializer"),
        (lambda: string_serializer("t", b"x"), "t: expected str, got bytes"),
        (lambda: string_serializer("t", "a\ud800"), "t: .*surrogates .* 1"),
        (lambda: string_deserializer("t", b"a\xff"), "t: not UTF-8.*byte 1"),
        (lambda: json_serializer("t", object()), "t: not encodable as JSON"),
        (lambda: json_serializer("t", {1j: 1}), "t: not encodable as JSON"),
        (lambda: json_deserializer("t", b""), "t: not JSON"),
        (lambda: json_deserializer("t", b"{} {}"), "t: not JSON"),
        (lambda: json_deserializer("t", b'"\xff"'), "t: not JSON"),
        (lambda: json_deserializer("t", b"[" * 100_000), "t: not JSON"),
        (lambda: struct_deserializer(Click)("t", b'{"ms":"1"}'), r"t: .*got `str`.*`\$.ms`"),
        (lambda: struct_deserializer(Click)("t", b"{}"), "t: .*field `ms`"),
        (lambda: struct_deserializer(Click)("t", b"{"), "t: not JSON"),
    ],
)
def test_errors_have_topic_and_reason(call: Any, message: str) -> None:
    """A value that cannot be serialized or deserialized is a SerializationError, which is a
    DataError, with topic and reason.
    """
    with pytest.raises(SerializationError, match=message) as raised:
        call()
    assert isinstance(raised.value, DataError)


NUMBERS: dict[str, tuple[Any, Any]] = {
    "short": (short_serializer, short_deserializer),
    "integer": (integer_serializer, integer_deserializer),
    "long": (long_serializer, long_deserializer),
    "float": (float_serializer, float_deserializer),
    "double": (double_serializer, double_deserializer),
}


@pytest.mark.parametrize(
    ("kind", "value", "data"),
    [
        ("short", 1, "0001"),
        ("short", -2, "fffe"),
        ("short", 2**15 - 1, "7fff"),
        ("short", -(2**15), "8000"),
        ("integer", 1, "00000001"),
        ("integer", -2, "fffffffe"),
        ("integer", 2**31 - 1, "7fffffff"),
        ("integer", -(2**31), "80000000"),
        ("long", 1, "0000000000000001"),
        ("long", -2, "fffffffffffffffe"),
        ("long", 2**63 - 1, "7fffffffffffffff"),
        ("long", -(2**63), "8000000000000000"),
        ("float", 1.5, "3fc00000"),
        ("float", -0.0, "80000000"),
        ("float", math.inf, "7f800000"),
        ("float", 2.0**-149, "00000001"),
        ("double", 0.1, "3fb999999999999a"),
        ("double", -0.0, "8000000000000000"),
        ("double", -math.inf, "fff0000000000000"),
        ("double", 5e-324, "0000000000000001"),
    ],
)
def test_numbers_are_the_bytes_of_kafkas_serializers(kind: str, value: float, data: str) -> None:
    """A number has the bytes of Kafka's Java serializer, and round-trips."""
    serialize, deserialize = NUMBERS[kind]
    assert serialize("t", value).hex() == data
    read = deserialize("t", bytes.fromhex(data))
    assert (read, math.copysign(1, read), type(read)) == (value, math.copysign(1, value), type(value))


@pytest.mark.parametrize(("kind", "data"), [("float", "7fc00000"), ("double", "7ff8000000000000")])
def test_not_a_number_is_java_s(kind: str, data: str) -> None:
    """NaN has Java's canonical form, whatever its sign."""
    serialize, deserialize = NUMBERS[kind]
    for nan in (math.nan, -math.nan):
        assert serialize("t", nan).hex() == data
    assert math.isnan(deserialize("t", bytes.fromhex(data)))


def test_floats_take_integers_and_round_to_the_nearest() -> None:
    """An int is serialized as the float of its value, and four bytes contain the nearest float."""
    assert double_serializer("t", 1) == double_serializer("t", 1.0)
    assert float_serializer("t", 0.1) == bytes.fromhex("3dcccccd")


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_pass_none(kind: str) -> None:
    """None, a tombstone, is None for number serializers too."""
    serialize, deserialize = NUMBERS[kind]
    assert serialize("t", None) is deserialize("t", None) is None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, value) for kind in NUMBERS for value in ("1", b"1", True, 1j)),
        *((kind, 1.0) for kind in ("short", "integer", "long")),
        ("short", 2**15),
        ("short", -(2**15) - 1),
        ("integer", 2**31),
        ("integer", -(2**31) - 1),
        ("long", 2**63),
        ("long", -(2**63) - 1),
        ("float", 1e39),
        ("float", 10**400),
        ("double", 10**400),
    ],
)
def test_an_invalid_number_is_an_error(kind: str, value: Any) -> None:
    """Another type, or a number that does not fit, is a SerializationError with the topic."""
    with pytest.raises(SerializationError, match=r"^t: "):
        NUMBERS[kind][0]("t", value)


@pytest.mark.parametrize(("kind", "size"), [("short", 2), ("integer", 4), ("long", 8), ("float", 4), ("double", 8)])
def test_numbers_of_another_length_are_an_error(kind: str, size: int) -> None:
    """Bytes of another length than the type's are a SerializationError with both lengths."""
    for length in (0, size - 1, size + 1):
        with pytest.raises(SerializationError, match=rf"^t: expected {size} bytes, got {length}"):
            NUMBERS[kind][1]("t", bytes(length))


def test_infinite_nesting_is_an_error() -> None:
    """A value that contains itself is a SerializationError."""
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(SerializationError, match="not encodable as JSON"):
        json_serializer("t", deep)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "kind", "error", "message"),
    [
        (b"{a}", Any, InvalidJson, "JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"a":', Any, InvalidJson, "Input data was truncated"),
        (b"", Any, InvalidJson, "Input data was truncated"),
        (b'"\xff"', Any, InvalidJson, "not UTF-8"),
        ('"\ud800"', Any, InvalidJson, "not UTF-8"),
        (DEEP, Any, InvalidJson, "nested too deeply"),
        (DEEP.decode(), Any, InvalidJson, "nested too deeply"),
        (DEEP, msgspec.Raw, InvalidJson, "nested too deeply"),
        (b'{"a":' + DEEP, dict[str, Any], InvalidJson, "nested too deeply"),
        (b'{"a":"b"}', dict[str, int], JsonTypeMismatch, "Expected `int`, got `str` - at `$[...]`"),
        (b"1e999", Any, JsonTypeMismatch, "Number out of range"),
    ],
    ids=str,
)
def test_invalid_data_is_one_error(data: bytes | str, kind: Any, error: type[InvalidJson], message: str) -> None:
    """Malformed, truncated, badly encoded and deeply nested JSON, and JSON of another type, are an InvalidJson."""
    with pytest.raises(InvalidJson) as raised:
        decode_json(data, kind)
    assert (type(raised.value), str(raised.value)) == (error, message)


def test_valid_data_is_decoded() -> None:
    """Bytes, text and Raw are decoded, also to a type."""
    assert decode_json(b'{"a":[1,null]}') == decode_json('{"a":[1,null]}') == {"a": [1, None]}
    assert decode_json(msgspec.Raw(b"[1]")) == [1]
    assert decode_json(b"[1]", tuple[int]) == (1,)


def test_a_prepared_decoder_has_the_same_errors() -> None:
    """What a prepared decoder raises is one of JSON_ERRORS, also with Decimal as its hook."""
    for data, message in ((DEEP, "nested too deeply"), (b"1e9999999999999999999", "Number out of range")):
        with pytest.raises(JSON_ERRORS) as raised:
            msgspec.json.Decoder(float_hook=Decimal).decode(data)
        assert str(invalid_json(raised.value)) == message


def test_a_schema_may_have_any_valid_json() -> None:
    """A schema may have lone surrogates and numbers that msgspec rejects."""
    text = r'{"pattern": "\ud800", "maximum": 1e400, "const": 1' + "0" * 400 + "}"
    expected = {"pattern": "\ud800", "maximum": float("inf"), "const": 10**400}
    assert decode_schema(text) == decode_schema(text.encode()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "Expecting value"), (b'"\xff"', "not UTF-8"), (DEEP, "nested too deeply"), ("NaN", "NaN is not JSON")],
    ids=str,
)
def test_an_invalid_schema_is_the_same_error(data: bytes | str, message: str) -> None:
    """JSON of a schema that is invalid is an InvalidJson too."""
    with pytest.raises(InvalidJson, match=message):
        decode_schema(data)
