"""Kafka Connect's REST routes, over a fake herder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import httpx
import pytest

from penstock.api.connect.routes import create_connect_app


class CreatingHerder:
    """A herder that creates every connector."""

    is_ready = True

    async def put_connector(
        self, name: str, config: Mapping[str, str], target: object = None, *, replace: bool
    ) -> tuple[bool, dict[str, Any]]:
        return True, {"name": name, "config": dict(config), "tasks": [], "type": "source"}


@pytest.mark.parametrize(
    ("name", "written"), [("orders", "orders"), ("Aufträge €", "Auftr%C3%A4ge%20%E2%82%AC"), ("a/b", "a%2Fb")]
)
async def test_a_new_connectors_location_can_be_followed(name: str, written: str) -> None:
    """The Location header of a new connector is percent-encoded, also for names with slashes
    or non-ASCII characters.
    """
    transport = httpx.ASGITransport(create_connect_app(cast(Any, CreatingHerder())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://me:8083") as client:
        for response in (
            await client.post("/connectors", json={"name": name, "config": {"connector.class": "X"}}),
            await client.put(f"/connectors/{written}/config", json={"connector.class": "X"}),
        ):
            assert (response.status_code, response.json()["name"]) == (201, name)
            assert response.headers["location"] == f"http://me:8083/connectors/{written}"
