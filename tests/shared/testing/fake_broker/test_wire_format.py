"""The fake broker's wire format: messages in every version, compared with aiokafka's."""

from __future__ import annotations

import importlib
import inspect
import uuid
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from aiokafka.protocol import types as aio
from aiokafka.protocol.admin import DescribeGroupsRequest_v3
from aiokafka.protocol.api import Request as AioRequest
from aiokafka.protocol.api import RequestStruct
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.requests import ApiVersion, Uuid
from penstock.shared.testing.fake_broker.codec import (
    MalformedMessage,
    Message,
    MessageSchema,
    read_varint,
    write_varint,
)
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, Api, decode_header, encode_response
from tests.shared.testing.fake_broker.frames import decode_response, encode_request

MODULES = ("produce", "fetch", "offset", "commit", "coordination", "group", "metadata", "transaction", "admin")


def structs() -> Iterator[Any]:
    """Every request that aiokafka or the clients' own connection can send, in the supported versions."""
    found: dict[tuple[str, int, int], Any] = {}
    for name in MODULES:
        for kind in vars(importlib.import_module(f"aiokafka.protocol.{name}")).values():
            if inspect.isclass(kind) and issubclass(kind, AioRequest) and kind is not AioRequest:
                for one in kind._CLASSES:
                    found["aiokafka", one.API_KEY, one.API_VERSION] = one
    for one in vars(requests).values():
        if isinstance(one, ApiVersion):
            found["penstock", one.key, one.version] = one.struct
    for (client, key, version), one in sorted(found.items(), key=lambda item: item[0]):
        supported = SUPPORTED_APIS.get(key)
        if (
            supported is not None
            and supported.min_version <= version <= supported.max_version
            and not is_misnumbered(one)
        ):
            yield pytest.param(one, id=f"{client}-{Api(key).name.lower()}-v{version}")


def is_misnumbered(struct: type[RequestStruct]) -> bool:
    """Whether a request has the wrong version, as aiokafka's ListGroupsRequest_v2 has 1."""
    return not struct.__name__.endswith((f"_v{struct.API_VERSION}", "Request"))


def sample(kind: Any, depth: int = 0) -> Any:
    """A value of one of aiokafka's types that is not the default."""
    if isinstance(kind, aio.Schema):
        return tuple(sample(field, depth) for field in kind.fields)
    if isinstance(kind, aio.Array | aio.CompactArray):
        return [sample(kind.array_of, depth + 1), sample(kind.array_of, depth + 1)]
    if isinstance(kind, aio.String | aio.CompactString):
        return f"text {depth}"
    samples: dict[Any, Any] = {aio.Boolean: True, aio.Bytes: b"bytes", Uuid: uuid.UUID(int=7), aio.TaggedFields: {}}
    return samples.get(kind, 100 + depth)


def same(theirs: Any, ours: Any) -> bool:
    """Whether a decoded message contains these values. Each side may have a struct where the other has its fields."""
    if isinstance(theirs, tuple):
        # The tagged fields at the end of a flexible struct are {} in theirs.
        return all(same(value, ours) for value in theirs if value != {})
    if isinstance(ours, Message):
        return any(same(theirs, own) for own in vars(ours).values())
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(theirs) == len(ours) and all(map(same, theirs, ours))
    return bool(theirs == ours)


@pytest.mark.parametrize("struct", [*structs()])
def test_requests_are_decoded(struct: Any) -> None:
    """A request of a client library is decoded completely, with every value."""
    supported = SUPPORTED_APIS[struct.API_KEY]
    values = sample(struct.SCHEMA)
    data = struct(*values).encode()
    body, end = supported.request.decode(data, struct.API_VERSION)
    assert end == len(data)
    assert same(values, body)
    assert supported.request.encode(body, struct.API_VERSION) == data


@pytest.mark.parametrize("struct", [p for p in structs() if p.values[0] is not DescribeGroupsRequest_v3])
def test_responses_are_decoded(struct: Any) -> None:
    """A response is decoded completely by the client library.

    (aiokafka would decode the response to DescribeGroups v3 with the table of v2.)
    """
    supported, schema = SUPPORTED_APIS[struct.API_KEY], struct.RESPONSE_TYPE.SCHEMA
    theirs = schema.encode(sample(schema))
    body, end = supported.response.decode(theirs, struct.API_VERSION)
    assert end == len(theirs)
    assert same(sample(schema), body)
    stream = BytesIO(supported.response.encode(body, struct.API_VERSION))
    assert schema.decode(stream) == sample(schema)
    assert stream.read() == b""


@pytest.mark.parametrize("supported", [*SUPPORTED_APIS.values()], ids=lambda supported: supported.api.name.lower())
def test_frames_round_trip(supported: Any) -> None:
    """Header and body round-trip in every version."""
    for version in range(supported.min_version, supported.max_version + 1):
        header = decode_header(frame := encode_request(supported, version, 7, "me", Message()))
        assert (header.api_key, header.version, header.correlation_id, header.client_id) == (
            supported.api,
            version,
            7,
            "me",
        )
        assert header.supported_api is supported
        assert supported.request.decode(frame, version, header.body_at)[1] == len(frame)
        response = encode_response(supported, version, 7, Message())
        assert decode_response(supported, version, response)[0::2] == (7, len(response))


def test_headers_of_unsupported_versions() -> None:
    """The header of an unsupported API or version is decoded."""
    assert decode_header(b"\x00\x63\x00\x00\x00\x00\x00\x07\xff\xff").supported_api is None
    assert decode_header(b"\x03\xe7\x00\x00\x00\x00\x00\x07\x00\x01a").client_id == "a"


def test_a_truncated_header() -> None:
    """Too few bytes for a header are malformed."""
    with pytest.raises(MalformedMessage):
        decode_header(b"\x00\x00")


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
