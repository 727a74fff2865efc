"""Queries of an application's state over HTTP: tasks, windows and stores, of this instance or of all."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.api.http.app import create_app
from penstock.api.http.problem import Problem
from penstock.api.streams.query_params import encode_query_params, requested_keys
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import stores_router
from penstock.api.streams.task_views import OpenWindows, StreamsState, WindowRow
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import ConfigError

STATE: StreamsState = {
    "application_id": "banks",
    "instance": "a",
    "processing_guarantee": "exactly_once",
    "topology": "Source: in (topic: in) --> none",
    "tasks": [{"partition": 0, "state": "running", "instance": "a", "stream_time_ms": None}],
    "standbys": [],
    "compactions": [],
}
"""The state of an instance with one task."""


class View:
    """A view of one task."""

    async def describe(self) -> StreamsState:
        return STATE

    def stores(self) -> list[dict[str, Any]]:
        return [{"store": "sessions", "rows": {"0": 2}, "total": 2}]

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> OpenWindows:
        if continuation == "wrong":
            raise WrongContinuation("continuation 'wrong' is invalid")
        row = WindowRow(store="sessions", partition=0, key="ann", start_ms=1, end_ms=2, results={"n": 3})
        found = [row][:limit] if key in "ann" and store in (None, "sessions") else []
        return {"windows": found, "continuation": continuation, "unseen": 0}

    def compact(self) -> str:
        return "one is running"


async def test_the_views_state_is_served() -> None:
    """The view's state is served as JSON, with unknown values as null."""
    app = create_app(streams=streams_router(View()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        response = await client.get("/v1/streams")
        topology = await client.get("/v1/streams/topology")
    assert response.json() == STATE
    described = ("application_id", "topology", "processing_guarantee")
    assert topology.json() == {name: response.json()[name] for name in described}


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
        return {**STATE, "application_id": "all", "missing": list(self.missing)}  # type: ignore[typeddict-item]

    async def stores(self) -> dict[str, Any]:
        return {"stores": [], "missing": self.missing}

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        return {"windows": [store, key, limit], "continuation": continuation, "unseen": 0, "missing": self.missing}

    async def read_store(self, store: str, *, partial: bool, **wanted: Any) -> dict[str, Any]:
        return {"store": store, "partial": partial}

    async def compact(self) -> str:
        return ""


async def test_responses_cover_all_instances_unless_local() -> None:
    """Responses cover all instances and list missing partitions; `local=true` covers this instance only."""
    app = create_app(streams=streams_router(View(), instances=Instances()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

        async def get(path: str) -> Any:
            return (await client.get(path)).json()

        assert (await get("/v1/streams"))["application_id"] == "all"
        assert (await get("/v1/streams?local=true"))["application_id"] == "banks"
        assert await get("/v1/streams/tasks") == {"tasks": STATE["tasks"], "missing": list(Instances.missing)}
        assert "missing" not in await get("/v1/streams/tasks?local=true")
        assert (await get("/v1/streams/stores"))["missing"] == list(Instances.missing)
        assert (await get("/v1/streams/stores?local=true"))["stores"][0]["total"] == 2
        assert (await get("/v1/streams/windows?store=s&limit=3"))["windows"] == ["s", "", 3]
        assert (await get("/v1/streams/windows?local=true"))["windows"][0]["key"] == "ann"
        assert (await client.post("/v1/compactions")).json() == {"started": True}
        assert (await client.post("/v1/compactions?local=true")).status_code == 409


class StoreView:
    """Answers with the query's parameters."""

    async def describe(self) -> StreamsState:
        return STATE

    async def read_store(self, store: str, **wanted: Any) -> Any:
        if store != "s":
            raise ConfigError(f"the topology has no store {store!r}")
        if wanted.get("continuation") == "wrong":
            raise WrongContinuation("continuation 'wrong' is invalid")
        return {"store": store, **wanted}

    async def find_windows(self, store: str, **wanted: Any) -> Any:
        await self.read_store(store, **wanted)
        position = {0: {wanted["key"] or wanted["key_from"]: wanted["from_ms"] or 9}}
        return {"windows": [wanted["status"]], "position": position, "continuation": wanted["continuation"]}


@cache
def stores_app() -> FastAPI:
    """An app over views without state: making the schemas of its routes takes longer than a request."""
    return create_app(streams=streams_router(StoreView(), stores_router(StoreView())))


async def get(path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(stores_app()), base_url="http://x") as client:
        return await client.get(path)


async def test_query_parameters_reach_the_view() -> None:
    """Query parameters are passed to the view, and missing ones are None."""
    response = await get("/v1/streams/stores/s?key=ann&from_ms=5&rows_max=7")
    open_ = {"key_from": None, "key_to": None, "to_ms": None, "continuation": None}
    assert response.json() == {"store": "s", "key": "ann", "from_ms": 5, "rows_max": 7, **open_}
    assert (await get("/v1/streams/stores/s?continuation=abc")).json()["continuation"] == "abc"
    assert (await get("/v1/streams")).json() == STATE


async def test_keys_may_be_bytes() -> None:
    """`key_base64` is a key of bytes, and responses contain bytes as base64; invalid or duplicate keys are a 400."""
    response = await get("/v1/streams/stores/s?key_base64=_wE=&key_to_base64=YQ%3D%3D")
    assert (response.json()["key"], response.json()["key_to"]) == ("/wE=", "YQ==")
    for wrong in ("key_base64=%25", "key=a&key_base64=YQ==", "key_from_base64=YQ"):
        rejected = await get(f"/v1/streams/stores/s?{wrong}")
        assert (rejected.status_code, rejected.json()["error_code"]) == (400, "INVALID_KEY")


async def test_unknown_stores_and_invalid_bounds_are_errors() -> None:
    """An unknown store is a 404 with the reason, and invalid bounds are a 400 with the parameter."""
    response = await get("/v1/streams/stores/x")
    assert (response.status_code, response.json()["error_code"]) == (404, "STORE_NOT_READABLE")
    assert "store 'x'" in response.json()["detail"]
    for wrong in ("from_ms=soon", f"from_ms={-(2**63) - 1}", f"to_ms={2**63}", "rows_max=0", "rows_max=10001"):
        for path in ("s", "s/windows"):
            rejected = await get(f"/v1/streams/stores/{path}?{wrong}")
            assert rejected.status_code == 400
            assert wrong.partition("=")[0] in rejected.text
    assert (await get(f"/v1/streams/stores/s?from_ms={-(2**63)}&to_ms={2**63 - 1}")).status_code == 200


async def test_all_instances_are_queried_unless_local() -> None:
    """All instances are queried unless `local=true`; `partial` accepts incomplete results."""
    app = create_app(streams=streams_router(StoreView(), stores_router(StoreView(), Instances())))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/v1/streams/stores/s")).json() == {"store": "s", "partial": False}
        assert (await client.get("/v1/streams/stores/s?partial=true")).json() == {"store": "s", "partial": True}
        assert (await client.get("/v1/streams/stores/s?local=true")).json()["rows_max"] == 1_000


async def test_an_invalid_continuation_is_a_400() -> None:
    """An invalid continuation is a 400 that names it, on both routes."""
    for path in ("s", "s/windows"):
        rejected = await get(f"/v1/streams/stores/{path}?key=k&continuation=wrong")
        assert (rejected.status_code, rejected.json()["error_code"]) == (400, "INVALID_CONTINUATION")
        assert "'wrong'" in rejected.json()["detail"]


async def test_windows_open_and_closed() -> None:
    """Windows are served by status with position and continuation; an unknown store is a 404."""
    whole = (await get("/v1/streams/stores/s/windows?key=k&from_ms=3")).json()
    assert whole == {
        "store": "s",
        "windows": ["all"],
        "position": {"0": {"k": 3}},
        "continuation": None,
        "is_cut": False,
    }
    cut = (await get("/v1/streams/stores/s/windows?key_from=a&status=open&continuation=abc")).json()
    assert (cut["windows"], cut["position"], cut["continuation"], cut["is_cut"]) == (
        ["open"],
        {"0": {"a": 9}},
        "abc",
        True,
    )
    assert (await get("/v1/streams/stores/x/windows?key=k")).status_code == 404
    assert (await get("/v1/streams/stores/s/windows?key=k&status=late")).status_code == 400


def test_keys_round_trip_as_query_parameters() -> None:
    """Text keys stay text and bytes become base64, so another instance reads the same keys."""
    keys = requested_keys(
        key=None, key_from="ä", key_to_base64="/wE=", key_base64=None, key_from_base64=None, key_to=None
    )
    assert keys == {"key": None, "key_from": "ä", "key_to": b"\xff\x01"}
    params = encode_query_params({**keys, "rows_max": 3})
    assert params == {"key_from": "ä", "key_to_base64": "/wE=", "rows_max": 3}


def test_a_key_in_two_forms_is_a_problem() -> None:
    """A key given both as text and as base64 is a Problem."""
    with pytest.raises(Problem, match="cannot be combined"):
        requested_keys(key="a", key_base64="YQ==")
