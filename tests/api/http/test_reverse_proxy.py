"""Other services' routes at one address."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.api.http.app import create_app
from penstock.api.http.reverse_proxy import Answer, forward_router, upstreams_of


class Echo:
    """Answers with what it was asked."""

    name = "connect"

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> Answer:
        said = f"{method} {path}?{query} {media_type} {body.decode()}".encode()
        return Answer(201, "text/plain", said, location="/connectors/new" if method == "POST" else "")


async def ask(method: str, path: str, **options: Any) -> httpx.Response:
    app = create_app(more=[forward_router(upstreams_of({"connect": Echo()}, "connect", "aggregator"))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.request(method, path, **options)


async def test_a_request_is_handed_on_and_its_answer_back() -> None:
    """Method, path as it was written, query, body and type; status, type and body."""
    answer = await ask("PUT", "/connectors/a%20b/config?x=1", json={"a": 1})
    assert (answer.status_code, answer.headers["content-type"]) == (201, "text/plain")
    assert answer.text == 'PUT /connectors/a%20b/config?x=1 application/json {"a":1}'
    assert "location" not in answer.headers
    assert (await ask("POST", "/connectors")).headers["location"] == "http://x/connectors/new"


@pytest.mark.parametrize(("path", "status"), [("/v1/streams", 404), ("/connectors/%2e%2e/admin", 400)])
async def test_what_is_not_there_is_not_asked(path: str, status: int) -> None:
    """A service that is not configured, and a path that would leave its prefix."""
    assert (await ask("GET", path)).status_code == status
