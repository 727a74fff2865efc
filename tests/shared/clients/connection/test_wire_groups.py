"""The requests of group members on the wire: each round-trips in its pinned version."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest

from penstock.shared.clients.connection import wire_groups
from penstock.shared.clients.connection.wire_types import Api

INSTANCES = [None, "i"]


def requests(instance: str | None) -> dict[str, tuple[Any, ...]]:
    return {
        "JOIN_GROUP": ("g", 10_000, 60_000, "m", instance, "consumer", [("range", b"\x00\x01")]),
        "SYNC_GROUP": ("g", 3, "m", instance, [("m", b"\x00")]),
        "HEARTBEAT": ("g", 3, "m", instance),
        "LEAVE_GROUP": ("g", [("m", instance)]),
    }


APIS = {name: api for name, api in vars(wire_groups).items() if isinstance(api, Api)}


def test_every_request_is_listed_here() -> None:
    """Every API has a round trip below."""
    assert requests(None).keys() == APIS.keys()


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("name", sorted(APIS))
def test_round_trip(name: str, instance: str | None) -> None:
    """An encoded message decodes to the same value, to the last byte, with and without an instance id."""
    api = APIS[name]
    struct = api(*requests(instance)[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again.encode() == struct.encode()
    assert (b"\x00\x01i" in struct.encode()) == (instance == "i")
