"""Requests and responses: each struct round-trips in its pinned version."""

from __future__ import annotations

import uuid
from io import BytesIO
from typing import Any

import pytest

from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.requests import NO_UUID, ApiVersion, Uuid
from penstock.shared.common.errors import UnsupportedVersion

REQUESTS: dict[str, tuple[Any, ...]] = {
    "METADATA": ([(NO_UUID, "t", {})], False, False, False),
    "CREATE_TOPICS": ([("t", 1, -1, [], [("retention.ms", "-1")])], 1_000, False),
    "DELETE_TOPICS": (["t"], 1_000),
    "DESCRIBE_CONFIGS": ([(2, "t", None)], False),
    "INCREMENTAL_ALTER_CONFIGS": ([(2, "t", [("retention.ms", 0, "5"), ("cleanup.policy", 1, None)])], False),
    "LIST_OFFSETS": (-1, 0, [("t", [(0, -1, -2)])]),
    "DELETE_RECORDS": ([("t", [(0, 5)])], 1_000),
    "LIST_GROUPS": ([],),
    "DESCRIBE_GROUPS": (["g"], False),
    "DELETE_GROUPS": (["g"],),
    "OFFSET_DELETE": ("g", [("t", [0, 1])]),
    "OFFSET_COMMIT": ("g", 1, "m", None, [("t", [(0, 5, -1, "")])]),
    "OFFSET_FETCH": ("g", [("t", [0, 1], {})], True),
    "INIT_PRODUCER_ID": (None, 1_000, -1, -1),
    "ADD_PARTITIONS_TO_TXN": ("tx", 7, 0, [("t", [0])]),
    "ADD_OFFSETS_TO_TXN": ("tx", 7, 0, "g"),
    "END_TXN": ("tx", 7, 0, True),
    "TXN_OFFSET_COMMIT": ("tx", "g", 7, 0, 1, "m", None, [("t", [(0, 5, -1, "", {})], {})]),
    "DESCRIBE_LOG_DIRS": ([("t", [0, 1])],),
    "CONSUMER_GROUP_DESCRIBE": (["g"], False),
}


def group_requests(instance: str | None) -> dict[str, tuple[Any, ...]]:
    return {
        "JOIN_GROUP": ("g", 10_000, 60_000, "m", instance, "consumer", [("range", b"\x00\x01")]),
        "SYNC_GROUP": ("g", 3, "m", instance, [("m", b"\x00")]),
        "HEARTBEAT": ("g", 3, "m", instance),
        "LEAVE_GROUP": ("g", [("m", instance)]),
    }


APIS = {name: api for name, api in vars(requests).items() if isinstance(api, ApiVersion)}


def test_every_request_is_listed_here() -> None:
    """Every API has a round trip below."""
    assert REQUESTS.keys() | group_requests(None).keys() == APIS.keys()


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_round_trip(name: str) -> None:
    """An encoded message decodes to equal fields and is consumed to the last byte."""
    api = APIS[name]
    struct = api(*REQUESTS[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again == struct


@pytest.mark.parametrize("instance", [None, "i"])
@pytest.mark.parametrize("name", sorted(group_requests(None)))
def test_group_round_trip(name: str, instance: str | None) -> None:
    """A request of a group's member decodes to the same fields, with and without an instance id."""
    api = APIS[name]
    struct = api(*group_requests(instance)[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again.encode() == struct.encode()
    assert (b"\x00\x01i" in struct.encode()) == (instance == "i")


def test_a_broker_that_is_too_old() -> None:
    """A version that the broker does not support is rejected with the versions that it supports."""
    request = requests.END_TXN("tx", 7, 0, True)
    with pytest.raises(UnsupportedVersion, match=r"EndTxn v2.*v0.*v1"):
        request.prepare({26: (0, 1)})
    with pytest.raises(UnsupportedVersion):
        request.prepare({})


def test_uuid() -> None:
    """A UUID is encoded as its sixteen bytes."""
    value = uuid.uuid4()
    assert Uuid.decode(BytesIO(Uuid.encode(value))) == value


def test_rows_have_named_fields() -> None:
    """A struct in an array decodes to a named tuple."""
    request = requests.LEAVE_GROUP("g", [("m", "i")]).prepare({13: (0, 99)})
    (member,) = type(request).decode(BytesIO(request.encode())).members
    assert (member.member_id, member.group_instance_id) == ("m", "i")
