"""The fake broker's tables of the wire format, compared with aiokafka's."""

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

from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.requests import ApiVersion, Uuid
from penstock.shared.testing.fake_broker.codec import MalformedMessage, Message
from penstock.shared.testing.fake_broker.protocol import (
    SUPPORTED_APIS,
    Api,
    decode_header,
    encode_response,
)
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
def test_answers_are_decoded(struct: Any) -> None:
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
        answer = encode_response(supported, version, 7, Message())
        assert decode_response(supported, version, answer)[0::2] == (7, len(answer))


def test_headers_of_unsupported_versions() -> None:
    """The header of an unsupported API or version is decoded."""
    assert decode_header(b"\x00\x63\x00\x00\x00\x00\x00\x07\xff\xff").supported_api is None
    assert decode_header(b"\x03\xe7\x00\x00\x00\x00\x00\x07\x00\x01a").client_id == "a"


def test_a_truncated_header() -> None:
    """Too few bytes for a header are malformed."""
    with pytest.raises(MalformedMessage):
        decode_header(b"\x00\x00")
