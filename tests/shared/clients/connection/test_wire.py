"""Requests and responses on the wire: each struct round-trips in its pinned version."""

from __future__ import annotations

import uuid
from io import BytesIO
from typing import Any

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from penstock.shared.clients.connection import wire
from penstock.shared.clients.connection.wire_types import NO_UUID, Api, Uuid, decode_assignment
from penstock.shared.common.errors import UnsupportedVersion
from penstock.shared.common.records import TopicPartition

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
}
APIS = {name: api for name, api in vars(wire).items() if isinstance(api, Api)}


def test_every_request_is_listed_here() -> None:
    """Every API has a round trip below."""
    assert REQUESTS.keys() == APIS.keys()


@pytest.mark.parametrize("name", sorted(APIS))
def test_round_trip(name: str) -> None:
    """An encoded message decodes to equal fields and is consumed to the last byte."""
    api = APIS[name]
    struct = api(*REQUESTS[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again == struct


def test_a_broker_that_is_too_old() -> None:
    """A version that the broker does not support is rejected with the versions that it supports."""
    request = wire.END_TXN("tx", 7, 0, True)
    with pytest.raises(UnsupportedVersion, match=r"EndTxn v2.*v0.*v1"):
        request.prepare({26: (0, 1)})
    with pytest.raises(UnsupportedVersion):
        request.prepare({})


def test_uuid() -> None:
    """A UUID is encoded as its sixteen bytes."""
    value = uuid.uuid4()
    assert Uuid.decode(BytesIO(Uuid.encode(value))) == value


def test_assignment() -> None:
    """A member's assignment decodes to partitions. A member without an assignment has none."""
    data = ConsumerProtocolMemberAssignment(0, [("t", [0, 2])], b"").encode()
    assert decode_assignment(data) == {TopicPartition("t", 0), TopicPartition("t", 2)}
    assert decode_assignment(b"") == decode_assignment(None) == frozenset()
