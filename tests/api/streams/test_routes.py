"""The HTTP API of an aggregator's tasks."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.api.http.app import create_app
from penstock.api.streams.routes import LiveWindows, StreamsState, WindowRow, streams_router
from penstock.shared.common.continuation_codec import WrongContinuation


class View:
    """A view of one task."""

    async def describe(self) -> StreamsState:
        return {"application_id": "banks", "tasks": [{"partition": 0, "stream_time_ms": None}], "compactions": []}

    def stores(self) -> list[dict[str, Any]]:
        return [{"store": "sessions", "rows": {"0": 2}, "total": 2}]

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> LiveWindows:
        if continuation == "wrong":
            raise WrongContinuation("continuation 'wrong' is invalid")
        row = WindowRow(store="sessions", partition=0, key="ann", start_ms=1, end_ms=2, states=[3])
        found = [row][:limit] if key in "ann" and store in (None, "sessions") else []
        return {"windows": found, "continuation": continuation, "unseen": 0}

    def compact(self) -> str:
        return "one is running"


async def test_the_views_state_is_served() -> None:
    """The view's state is served as JSON, with unknown values as null."""
    app = create_app(streams=streams_router(View()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        response = await client.get("/v1/streams")
    assert response.json() == {
        "application_id": "banks",
        "tasks": [{"partition": 0, "stream_time_ms": None}],
        "compactions": [],
    }


async def test_windows_stores_and_compactions_have_routes() -> None:
    """Stores and windows are served, invalid limits and continuations are 400s, and a rejected
    compaction is a 409 with the reason.
    """
    app = create_app(streams=streams_router(View()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/v1/streams/stores")).json()["stores"][0]["total"] == 2
        assert (await client.get("/v1/streams/windows?key=an")).json()["windows"][0]["key"] == "ann"
        assert (await client.get("/v1/streams/windows?key=bob")).json()["windows"] == []
        cut = (await client.get("/v1/streams/windows?continuation=abc")).json()
        assert (cut["continuation"], cut["is_cut"], cut["unseen"]) == ("abc", True, 0)
        wrong = await client.get("/v1/streams/windows?continuation=wrong")
        assert (wrong.status_code, wrong.json()["error_code"]) == (400, "INVALID_CONTINUATION")
        assert "'wrong'" in wrong.json()["detail"]
        assert (await client.get("/v1/streams/windows?limit=0")).status_code == 400
        assert (await client.get("/v1/compactions")).json() == {"compactions": [], "last": None}
        response = await client.post("/v1/compactions")
    assert (response.status_code, response.json()["detail"]) == (409, "one is running")


class Instances:
    """All instances: one task, and a missing partition."""

    missing = ({"partition": 1, "reason": "no instance has it"},)

    async def describe(self) -> StreamsState:
        return {"application_id": "all", "tasks": [{"partition": 0}], "missing": list(self.missing)}  # type: ignore[typeddict-item]

    async def stores(self) -> dict[str, Any]:
        return {"stores": [], "missing": self.missing}

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        return {"windows": [store, key, limit], "continuation": continuation, "unseen": 0, "missing": self.missing}

    async def read_store(self, store: str, *, partial: bool, **wanted: Any) -> dict[str, Any]:
        return {"store": store, "partial": partial}

    async def compact(self) -> str:
        return ""


async def test_answers_cover_all_instances_unless_local() -> None:
    """Answers cover all instances and list missing partitions; `local=true` covers this instance only."""
    app = create_app(streams=streams_router(View(), instances=Instances()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

        async def get(path: str) -> Any:
            return (await client.get(path)).json()

        assert (await get("/v1/streams"))["application_id"] == "all"
        assert (await get("/v1/streams?local=true"))["application_id"] == "banks"
        assert await get("/v1/streams/tasks") == {"tasks": [{"partition": 0}], "missing": list(Instances.missing)}
        assert "missing" not in await get("/v1/streams/tasks?local=true")
        assert (await get("/v1/streams/stores"))["missing"] == list(Instances.missing)
        assert (await get("/v1/streams/stores?local=true"))["stores"][0]["total"] == 2
        assert (await get("/v1/streams/windows?store=s&limit=3"))["windows"] == ["s", "", 3]
        assert (await get("/v1/streams/windows?local=true"))["windows"][0]["key"] == "ann"
        assert (await client.post("/v1/compactions")).json() == {"started": True}
        assert (await client.post("/v1/compactions?local=true")).status_code == 409
