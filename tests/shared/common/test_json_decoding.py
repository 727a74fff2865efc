"""Decoding of JSON from outside: each kind of invalid data is one error."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from penstock.shared.common.json_decoding import (
    JSON_ERRORS,
    InvalidJson,
    JsonTypeMismatch,
    decode_json,
    decode_schema,
    invalid_json,
)

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
