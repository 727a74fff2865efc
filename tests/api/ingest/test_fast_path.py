"""The fast path has the same answers as the router."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.ingest.routes import Ingest, plain_query
from penstock.api.settings import IngestSettings
from tests.api.conftest import MemoryProducer

NDJSON, TEXT = {"Content-Type": "application/x-ndjson"}, {"Content-Type": "text/plain"}


@pytest.mark.parametrize("query", ["", "?offsets=true", "?atomic=true", "?ack=none", "?offsets=maybe", "?ack=x"])
@pytest.mark.parametrize("topic", ["t", "none", "a%20b", "app-changelog"])
@pytest.mark.parametrize(("content", "headers"), [(b"1\noops\n", NDJSON), (b"oops", NDJSON), (b"1", TEXT)])
async def test_both_paths_have_the_same_answer(query: str, topic: str, content: bytes, headers: dict[str, str]) -> None:
    """Both paths return the same status, headers and body, for accepted and rejected requests."""
    responses: list[Any] = []
    for fast_path in (True, False):
        ingest = Ingest(MemoryProducer(), IngestSettings(), CollectorRegistry())
        app = create_app(ingest=ingest.router, fast_path=ingest.fast_path if fast_path else None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            response = await client.post(f"/v1/topics/{topic}/events{query}", content=content, headers=headers)
            responses.append((response.status_code, dict(response.headers), response.json()))
    assert responses[0] == responses[1]


def test_only_plain_queries_take_the_fast_path() -> None:
    """The router handles repeated parameters, and values that must be parsed."""
    assert plain_query(b"offsets=true&offsets=true") is None
    assert plain_query(b"offsets=1") is None
    assert plain_query(b"offsets=true&ack=all") == {"offsets": True, "ack": "all"}
