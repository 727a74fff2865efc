"""What an aggregator tells of its tasks."""

from __future__ import annotations

import httpx

from api.app import create_app
from api.state import StreamsState, streams_router


class View:
    """One task."""

    async def describe(self) -> StreamsState:
        return {"application_id": "banks", "tasks": [{"partition": 0, "stream_time_ms": None}], "compactions": []}


async def test_the_views_state_is_served() -> None:
    """As JSON, unknown values as null."""
    app = create_app(streams=streams_router(View()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = await client.get("/v1/streams")
    assert answer.json() == {
        "application_id": "banks",
        "tasks": [{"partition": 0, "stream_time_ms": None}],
        "compactions": [],
    }
