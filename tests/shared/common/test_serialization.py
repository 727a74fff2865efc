"""Keys and values to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError, SerializationError
from penstock.shared.common.serialization import (
    bytes_deserializer,
    bytes_serializer,
    json_deserializer,
    json_serializer,
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
    """Any JSON value is read back as it was written."""
    assert json_deserializer("t", json_serializer("t", value)) == value


@given(st.text())
def test_strings_round_trip(text: str) -> None:
    """Any text is read back as it was written."""
    assert string_deserializer("t", string_serializer("t", text)) == text


@pytest.mark.parametrize("value", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_bytes(value: Any) -> None:
    """Whatever holds bytes becomes bytes, and bytes stay the same object."""
    assert bytes_serializer("t", value) == b"ab"
    assert type(bytes_serializer("t", value)) is bytes
    data = b"x"
    assert bytes_serializer("t", data) is bytes_deserializer("t", data) is data


@pytest.mark.parametrize(
    "both", [bytes_serializer, bytes_deserializer, string_serializer, string_deserializer, json_serializer]
)
def test_none_stays_none(both: Any) -> None:
    """A tombstone is no value: it is neither written as one nor read as one."""
    assert both("t", None) is None
    assert json_deserializer("t", None) is struct_deserializer(Click)("t", None) is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bytes_serializer("t", "text"), "t: expected bytes, got str; set a serializer"),
        (lambda: string_serializer("t", b"x"), "t: expected str, got bytes"),
        (lambda: string_serializer("t", "a\ud800"), "t: not encodable as UTF-8: surrogates not allowed at 1"),
        (lambda: string_deserializer("t", b"a\xff"), "t: not UTF-8: invalid start byte at byte 1"),
        (lambda: json_serializer("t", object()), "t: not encodable as JSON"),
        (lambda: json_serializer("t", {1j: 1}), "t: not encodable as JSON"),
        (lambda: json_deserializer("t", b""), "t: not JSON"),
        (lambda: json_deserializer("t", b"{} {}"), "t: not JSON"),
        (lambda: json_deserializer("t", b'"\xff"'), "t: not JSON"),
        (lambda: json_deserializer("t", b"[" * 100_000), "t: not JSON"),
        (lambda: struct_deserializer(Click)("t", b'{"ms":"1"}'), r"t: Expected `int`, got `str` - at `\$.ms`"),
        (lambda: struct_deserializer(Click)("t", b"{}"), "t: Object missing required field `ms`"),
        (lambda: struct_deserializer(Click)("t", b"{"), "t: not JSON"),
    ],
)
def test_failures_say_topic_and_reason(call: Any, said: str) -> None:
    """What cannot be written or read is a SerializationError, which is a DataError, with topic and reason."""
    with pytest.raises(SerializationError, match=said) as raised:
        call()
    assert isinstance(raised.value, DataError)


def test_too_deep_to_write() -> None:
    """A value nested without end is refused, not a crash."""
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(SerializationError, match="not encodable as JSON"):
        json_serializer("t", deep)
