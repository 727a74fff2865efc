"""What an aggregator tells of its tasks."""

from __future__ import annotations

from typing import Any

import httpx

from api.app import create_app
from api.state import StreamsState, WindowRow, streams_router


class View:
    """One task."""

    async def describe(self) -> StreamsState:
        return {"application_id": "banks", "tasks": [{"partition": 0, "stream_time_ms": None}], "compactions": []}

    def stores(self) -> list[dict[str, Any]]:
        return [{"store": "sessions", "rows": {"0": 2}, "total": 2}]

    def windows(self, store: str | None, key: str, limit: int) -> list[WindowRow]:
        row = WindowRow(store="sessions", partition=0, key="ann", start_ms=1, end_ms=2, states=[3])
        return [row][:limit] if key in "ann" and store in (None, "sessions") else []

    def compact(self) -> str:
        return "one is running"


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


async def test_windows_stores_and_compactions_have_routes() -> None:
    """Windows are found by key, a limit out of bounds is refused, and a compaction that did not start says why."""
    app = create_app(streams=streams_router(View()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/v1/streams/stores")).json()["stores"][0]["total"] == 2
        assert (await client.get("/v1/streams/windows?key=an")).json()["windows"][0]["key"] == "ann"
        assert (await client.get("/v1/streams/windows?key=bob")).json() == {"windows": []}
        assert (await client.get("/v1/streams/windows?limit=0")).status_code == 400
        assert (await client.get("/v1/compactions")).json() == {"compactions": [], "last": None}
        refused = await client.post("/v1/compactions")
    assert (refused.status_code, refused.json()["detail"]) == (409, "one is running")
