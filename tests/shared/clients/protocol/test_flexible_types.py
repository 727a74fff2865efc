"""Kafka's flexible encoding, checked against a second implementation and against literal bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.flexible_types import (
    NO_TAGS,
    FlexibleReader,
    encode_compact_string,
    encode_unsigned_varint,
    leader_in,
)
from penstock.shared.testing.fake_broker.codec import Message, MessageSchema

TAGGED = MessageSchema(
    """
number int8
leader {} 0+ tag 0
  pair int64
words ?string 0+ tag 5
""",
    flexible=0,
)
"""The leader's struct as one number, since its own tags would come after it: node and epoch, 32 bits each."""


@given(st.integers(0, 2**40))
def test_varints_round_trip(value: int) -> None:
    """A varint is decoded to the value that was encoded, and exactly its bytes are consumed."""
    reader = FlexibleReader(memoryview(encode_unsigned_varint(value) + b"\xff"))
    assert reader.unsigned_varint() == value
    assert reader.read_struct(struct.Struct("B")) == (0xFF,)


@pytest.mark.parametrize(
    ("value", "data"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**32, "8080808010")]
)
def test_varints_by_hand(value: int, data: str) -> None:
    """A varint has seven bits a byte, the lowest first. The eighth bit marks that more bytes follow."""
    assert encode_unsigned_varint(value) == bytes.fromhex(data)


@given(st.none() | st.text(max_size=300))
def test_strings_round_trip(value: str | None) -> None:
    """None, the empty string and a string with a two-byte length are distinct."""
    reader = FlexibleReader(memoryview(encode_compact_string(value)))
    assert reader.compact_string() == value
    with pytest.raises(IndexError):
        reader.unsigned_varint()


def test_data_is_not_copied() -> None:
    """Decoded bytes are a view of the response. Null and empty bytes both decode to empty."""
    response = bytearray(b"\x03ab\x01\x00")
    reader = FlexibleReader(memoryview(response))
    data = reader.compact_bytes()
    response[1:3] = b"cd"
    assert bytes(data) == b"cd"
    assert (bytes(reader.compact_bytes()), bytes(reader.compact_bytes())) == (b"", b"")
    assert reader.size == len(response)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x05abc", b"\x01\x00\x09a"])
def test_a_response_that_ends_too_early(data: bytes) -> None:
    """A length that points past the end is an error. Shorter data is never returned."""
    reader = FlexibleReader(memoryview(data))
    with pytest.raises(IndexError):
        reader.tagged_fields() if data[:1] == b"\x01" else reader.compact_bytes()


def test_a_shape_that_ends_too_early() -> None:
    """A struct of fixed size that is cut off is an error."""
    with pytest.raises(struct.error):
        FlexibleReader(memoryview(b"\x00\x01\x02")).read_struct(struct.Struct(">i"))


@given(st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1), st.none() | st.text(max_size=200))
def test_the_leader_among_other_tags(node: int, epoch: int, words: str | None) -> None:
    """The leader is found at any position among the tagged fields. A negative node id means no leader."""
    pair = (node << 32) + (epoch & 0xFFFF_FFFF)
    message = Message(number=1, leader=Message(pair=pair), words=words)
    reader = FlexibleReader(memoryview(TAGGED.encode(message, 0)), 1)
    tags = reader.tagged_fields()
    assert leader_in(tags, 0) == (node if node >= 0 else None)
    assert leader_in(tags, 7) is None


def test_no_tags() -> None:
    """A struct without tagged fields ends with a zero byte."""
    assert FlexibleReader(memoryview(NO_TAGS)).tagged_fields() == {}
