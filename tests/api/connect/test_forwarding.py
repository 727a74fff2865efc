"""Forwarding of requests to another worker."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from penstock.api.connect.errors import install_error_handlers
from penstock.api.connect.forwarding import CONFLICT_MESSAGE
from penstock.api.http.json_response import json_response
from penstock.api.http.server import HttpServer
from penstock.shared.common.settings import HttpSettings
from penstock.shared.connect.herder.errors import NotHere

CONTENT_TYPE = "application/json; charset=é"


def worker(url: str | None) -> FastAPI:
    """A worker that answers no request itself, and names another one."""
    app = FastAPI()
    install_error_handlers(app)

    @app.api_route("/{path:path}", methods=["GET", "PUT"])
    async def any_path(request: Request) -> Response:
        raise NotHere("not here", url)

    return app


@contextlib.asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    server = HttpServer(app, HttpSettings(port=0))
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop(100)


def owner() -> FastAPI:
    """A worker that answers with the request's parts."""
    app = FastAPI()

    @app.put("/{path:path}")
    async def any_path(request: Request) -> Response:
        raw = request.scope["raw_path"].decode()
        body = (await request.body()).decode()
        shown = {"path": raw, "query": str(request.query_params), "body": body}
        shown["type"] = request.headers["content-type"]
        return json_response(shown, 201, {"Location": "http://owner/connectors/a"})

    return app


async def put(app: FastAPI, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.put(path, content=b"{}", headers={b"Content-Type": CONTENT_TYPE.encode("latin-1")})


async def test_the_other_workers_response_is_returned() -> None:
    """The response has the other worker's status, body and location; the request keeps its raw
    path, query and content type and is marked as forwarded.
    """
    async with listening(owner()) as url:
        response = await put(worker(url), "/connectors/a%2Fb/config?x=1")
    assert response.status_code == 201
    assert response.headers["location"] == "http://owner/connectors/a"
    parts = {"path": "/connectors/a%2Fb/config", "query": "x=1&forward=true", "body": "{}", "type": CONTENT_TYPE}
    assert response.json() == parts


async def test_a_worker_reads_the_ca_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests that a worker forwards have one TLS context."""
    async with listening(owner()) as url:
        app = worker(url)
        await put(app, "/connectors/a")
        monkeypatch.setattr(ssl, "create_default_context", None)
        assert (await put(app, "/connectors/a")).status_code == 201


async def test_a_request_is_forwarded_at_most_twice() -> None:
    """A request marked `forward=false` that reaches the wrong worker is a 409."""
    async with listening(worker("http://127.0.0.1:1/")) as url:
        marked = await put(worker(url), "/connectors/a?forward=true")
        rejected = await put(worker(url), "/connectors/a?forward=false")
    assert (marked.status_code, marked.json()["message"]) == (409, CONFLICT_MESSAGE)
    assert (rejected.status_code, rejected.json()["message"]) == (409, CONFLICT_MESSAGE)


async def test_an_unreachable_worker_is_a_500() -> None:
    """If the other worker is unreachable, the status is 500, as in Kafka Connect."""
    closed = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()
    response = await put(worker(f"http://127.0.0.1:{port}/"), "/connectors/a")
    assert response.status_code == 500
    assert "forward" in response.json()["message"]
