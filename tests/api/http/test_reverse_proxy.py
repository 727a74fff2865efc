"""Routes of other services at the gateway's address."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Response
from pydantic import SecretStr

from penstock.api.connect import forwarding
from penstock.api.http.app import create_app
from penstock.api.http.reverse_proxy import HttpUpstream, UpstreamResponse, forward_router
from penstock.api.settings import Credential
from penstock.shared.common.errors import AuthorizationFailed


class Echo:
    """Answers with the request's parts."""

    name = "connect"

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
        text = f"{method} {path}?{query} {media_type} {body.decode()}".encode()
        return UpstreamResponse(201, "text/plain", text, location="/connectors/new" if method == "POST" else "")


async def send_request(method: str, path: str, **options: Any) -> httpx.Response:
    app = create_app(more=[forward_router({"/connectors": Echo(), "/v1/streams": None})])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.request(method, path, **options)


async def test_requests_and_responses_are_forwarded() -> None:
    """The request keeps method, raw path, query, body and type, and the response status, type, body and location."""
    response = await send_request("PUT", "/connectors/a%20b/config?x=1", json={"a": 1})
    assert (response.status_code, response.headers["content-type"]) == (201, "text/plain")
    assert response.text == 'PUT /connectors/a%20b/config?x=1 application/json {"a":1}'
    assert "location" not in response.headers
    assert (await send_request("POST", "/connectors")).headers["location"] == "http://x/connectors/new"


async def test_a_content_type_is_forwarded_unchanged() -> None:
    """The bytes of a Content-Type need not be ASCII."""
    content_type = b"application/json; charset=\xe9"

    class Worker(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, content=dict(request.headers.raw)[b"Content-Type"])

    async with httpx.AsyncClient(transport=Worker()) as client:
        upstream = HttpUpstream("connect", "http://worker", client)
        response = await upstream.forward("PUT", "/connectors/a/config", "", b"{}", content_type.decode("latin-1"))
    assert response.body == content_type


@pytest.mark.parametrize("worker", ["http://worker1:8083", "http://worker2:8083"])
async def test_a_created_resource_is_at_this_service(worker: str) -> None:
    """Location is an address of this service, also if the worker forwarded the request to another worker."""
    app = FastAPI()

    @app.post("/connectors")
    async def create() -> Response:
        return Response(status_code=201, headers={"Location": f"{worker}/connectors/a%2Fb"})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        gateway = create_app(more=[forward_router({"/connectors": HttpUpstream("c", "http://worker1:8083", client)})])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://x") as outside:
            response = await outside.post("/connectors")
    assert (response.status_code, response.headers["location"]) == (201, "http://x/connectors/a%2Fb")


async def test_a_request_may_take_as_long_as_connect_allows() -> None:
    """A worker that forwards a request to another worker answers before the time limit of this service."""

    class Worker(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=request.extensions["timeout"])

    async with httpx.AsyncClient(transport=Worker()) as client:
        response = await HttpUpstream("connect", "http://worker", client).forward("POST", "/connectors", "", b"", "")
    assert json.loads(response.body)["read"] > forwarding.TIMEOUT_MS / 1000


@pytest.mark.parametrize(("sent", "status"), [("unknown", 502), ("feeder", 502), ("viewer", 403)])
async def test_rejected_credentials_of_this_service_are_not_those_of_its_client(sent: str, status: int) -> None:
    """A 401 of the other service, or a 403 for a missing scope, is a 502 here, and names the setting. Any other 403 is
    returned."""
    secret = "0123456789abcdef"
    credentials = {
        "feeder": Credential(secret=SecretStr(f"feeder-{secret}"), scopes=("ingest",)),
        "viewer": Credential(secret=SecretStr(f"viewer-{secret}"), scopes=("read",)),
    }
    router = APIRouter()

    @router.get("/v1/streams")
    async def denied() -> None:
        raise AuthorizationFailed("t: denied")

    app = create_app(more=[router], credentials=credentials)
    headers = {"Authorization": f"Bearer {sent}-{secret}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), headers=headers) as client:
        gateway = create_app(more=[forward_router({"/v1/streams": HttpUpstream("aggregator", "http://a", client)})])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://x") as outside:
            response = await outside.get("/v1/streams")
    assert response.status_code == status
    assert ("services_auth_token" in response.text) == (status == 502)


async def test_a_redirect_keeps_its_query() -> None:
    """A forwarded redirect leads to this service, with the query."""
    app = FastAPI()

    @app.get("/v1/streams/tasks")
    async def tasks() -> dict[str, str]:
        return {}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        upstream = HttpUpstream("c", "http://worker1:8083", client)
        gateway = create_app(more=[forward_router({"/v1/streams": upstream})])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://x") as outside:
            response = await outside.get("/v1/streams/tasks/?local=true")
    assert (response.status_code, response.headers["location"]) == (307, "http://x/v1/streams/tasks?local=true")


@pytest.mark.parametrize(("path", "status"), [("/v1/streams", 404), ("/connectors/%2e%2e/admin", 400)])
async def test_unconfigured_services_and_unsafe_paths_are_not_forwarded(path: str, status: int) -> None:
    """A request for an unconfigured service is a 404, and a path that leaves its prefix is a 400."""
    assert (await send_request("GET", path)).status_code == status
