"""Encoding and decoding of the wire format."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.testing.fake_broker.codec import (
    MalformedMessage,
    Message,
    MessageSchema,
    read_varint,
    write_varint,
)

EVERYTHING = """
flag bool
small int8
short int16
port uint16
number int32
long int64
part float64
text string
null ?string
blob bytes
id uuid
numbers []int32
texts ?[]string
rows []
  name string
  inner []
    n int32
  since_one int32 1+ = -1
until_zero int32 0-0
leader {} 2+ tag 0
  node int32 = -1
many [] 2+ tag 3
  n int32
"""

MESSAGES = st.builds(
    Message,
    flag=st.booleans(),
    small=st.integers(-128, 127),
    short=st.integers(-(2**15), 2**15 - 1),
    port=st.integers(0, 2**16 - 1),
    number=st.integers(-(2**31), 2**31 - 1),
    long=st.integers(-(2**63), 2**63 - 1),
    part=st.floats(allow_nan=False),
    text=st.text(),
    null=st.none() | st.text(),
    blob=st.binary(),
    id=st.uuids(),
    numbers=st.lists(st.integers(0, 9)),
    texts=st.none() | st.lists(st.text()),
    rows=st.lists(
        st.builds(
            Message,
            name=st.text(),
            inner=st.lists(st.builds(Message, n=st.integers(0, 9))),
            since_one=st.integers(0, 9),
        )
    ),
    until_zero=st.just(0),
    leader=st.none() | st.builds(Message, node=st.integers(0, 9)),
    many=st.lists(st.builds(Message, n=st.integers(0, 9))),
)


@given(MESSAGES)
def test_messages_round_trip(message: Message) -> None:
    """All fields round-trip in the newest version."""
    schema = MessageSchema(EVERYTHING, flexible=2)
    data = schema.encode(message, 2)
    assert schema.decode(data, 2) == (message, len(data))


@given(MESSAGES, st.integers(0, 2))
def test_every_version_round_trips(message: Message, version: int) -> None:
    """A message decoded in a version is encoded to the same bytes, and missing fields have their defaults."""
    schema = MessageSchema(EVERYTHING, flexible=2)
    data = schema.encode(message, version)
    read, end = schema.decode(data, version)
    assert end == len(data)
    assert schema.encode(read, version) == data
    if version < 1:
        assert all(row.since_one == -1 for row in read.rows)


@given(MESSAGES, st.data())
def test_a_truncated_message_is_malformed(message: Message, data: st.DataObject) -> None:
    """A truncated message is MalformedMessage, wherever it ends."""
    schema = MessageSchema(EVERYTHING, flexible=2)
    version = data.draw(st.integers(0, 2))
    whole = schema.encode(message, version)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MalformedMessage):
        schema.decode(whole[:cut], version)


def test_unknown_tags_are_skipped() -> None:
    """An unknown tagged field is skipped without an error."""
    newer = MessageSchema("n int32\nextra string 1+ tag 9", flexible=1)
    older = MessageSchema("n int32", flexible=1)
    data = newer.encode(Message(n=1, extra="more"), 1)
    assert older.decode(data, 1) == (Message(n=1), len(data))


def test_missing_fields_have_defaults() -> None:
    """An empty message is encoded with each field's default."""
    schema = MessageSchema(EVERYTHING, flexible=2)
    read, _ = schema.decode(schema.encode(Message(rows=[Message()]), 2), 2)
    assert (read.text, read.null, read.texts, read.numbers, read.id) == ("", None, None, [], uuid.UUID(int=0))
    assert (read.rows[0].since_one, read.leader, read.many) == (-1, None, [])


def test_a_length_beyond_the_message_is_malformed() -> None:
    """An array with more items than bytes is malformed before any item is read."""
    with pytest.raises(MalformedMessage, match="items"):
        MessageSchema("numbers []int32").decode(b"\x7f\xff\xff\xff\0\0", 0)


@given(st.integers(0, 2**63))
def test_varints(value: int) -> None:
    """A varint round-trips with its end."""
    data = write_varint(value)
    assert read_varint(data + b"\xff", 0) == (value, len(data))
