"""Kafka's flexible encoding, written and read by hand, against another reading of it and against bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.connection.flexible import NO_TAGS, Reader, leader_in, text, uvarint
from penstock.shared.testing.fake_broker.codec import Message, Schema

TAGGED = Schema(
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
def test_varints_come_back(value: int) -> None:
    """What was written is read, to the last byte and not further."""
    reader = Reader(memoryview(uvarint(value) + b"\xff"))
    assert reader.uvarint() == value
    assert reader.take(struct.Struct("B")) == (0xFF,)


@pytest.mark.parametrize(
    ("value", "data"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**32, "8080808010")]
)
def test_varints_by_hand(value: int, data: str) -> None:
    """Seven bits a byte, the lowest first, the eighth says that more follow."""
    assert uvarint(value) == bytes.fromhex(data)


@given(st.none() | st.text(max_size=300))
def test_texts_come_back(value: str | None) -> None:
    """None, the empty text and one whose length takes two bytes are all different."""
    reader = Reader(memoryview(text(value)))
    assert reader.text() == value
    with pytest.raises(IndexError):
        reader.uvarint()


def test_data_is_not_copied() -> None:
    """What is given is a view of the response; none and nothing are both empty."""
    response = bytearray(b"\x03ab\x01\x00")
    reader = Reader(memoryview(response))
    data = reader.data()
    response[1:3] = b"cd"
    assert bytes(data) == b"cd"
    assert (bytes(reader.data()), bytes(reader.data())) == (b"", b"")
    assert reader.size == len(response)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x05abc", b"\x01\x00\x09a"])
def test_a_response_that_ends_too_early(data: bytes) -> None:
    """A length that points past the end is an error, never less data than was promised."""
    reader = Reader(memoryview(data))
    with pytest.raises(IndexError):
        reader.tags() if data[:1] == b"\x01" else reader.data()


def test_a_shape_that_ends_too_early() -> None:
    """So is a field of a fixed shape."""
    with pytest.raises(struct.error):
        Reader(memoryview(b"\x00\x01\x02")).take(struct.Struct(">i"))


@given(st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1), st.none() | st.text(max_size=200))
def test_the_leader_among_other_tags(node: int, epoch: int, words: str | None) -> None:
    """The leader is found wherever another writer puts it; a node below zero is none."""
    pair = (node << 32) + (epoch & 0xFFFF_FFFF)
    message = Message(number=1, leader=Message(pair=pair), words=words)
    reader = Reader(memoryview(TAGGED.encode(message, 0)), 1)
    tags = reader.tags()
    assert leader_in(tags, 0) == (node if node >= 0 else None)
    assert leader_in(tags, 7) is None


def test_no_tags() -> None:
    """Nearly every struct ends so."""
    assert Reader(memoryview(NO_TAGS)).tags() == {}
