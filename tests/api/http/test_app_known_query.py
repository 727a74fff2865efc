"""Unknown query parameters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.api.http.app import create_app
from penstock.api.http.reverse_proxy import UpstreamResponse, forward_router
from penstock.api.rest_proxy.routes import metadata_routers
from tests.api.admin.test_routes import MemoryAdmin
from tests.api.ingest.test_routes import URL, Service


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("ofsets=true", "'ofsets' here (did you mean offsets?)"),
        ("atomic=true&Atomic=true", "'Atomic' here (did you mean atomic?)"),
        ("key=ann", "'key' here; there are ack, atomic, offsets"),
        ("offsets=true&x" + "x" * 500 + "=1", "xxx' here"),
    ],
)
async def test_an_unknown_parameter_is_a_400_that_names_the_nearest(producer: Any, query: str, message: str) -> None:
    """An unknown query parameter is a 400 that names the nearest one, and nothing is stored."""
    response = await Service(producer).post(b"1\n", url=f"{URL}?{query}")
    assert (response.status_code, response.json()["error_code"]) == (400, "UNKNOWN_PARAMETER")
    assert message in response.json()["detail"]
    assert len(response.json()["detail"]) < 200
    assert producer.batches == []


async def test_known_parameters_are_accepted(producer: Any) -> None:
    """All known parameters are accepted, in any order."""
    assert (await Service(producer).post(b"1\n", url=f"{URL}?ack=all&offsets=true&atomic=false")).status_code == 200


async def test_rest_proxy_and_other_services_routes_are_left_alone() -> None:
    """REST Proxy's routes and routes of other services accept unknown parameters."""

    class Other:
        name = "aggregator"

        async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
            return UpstreamResponse(200, "text/plain", query.encode())

    admin: Any = MemoryAdmin()
    app = create_app(rest_proxy=metadata_routers(admin), more=[forward_router({"/v1/streams": Other()})])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/topics?what=1")).status_code == 200
        assert (await client.get("/v3/clusters?page_size=10")).status_code == 200
        assert (await client.get("/v1/streams?what=1")).text == "what=1"
