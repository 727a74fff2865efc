"""Reading an aggregator's stores over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.api.http.app import create_app
from penstock.api.streams.routes import StreamsState, streams_router
from penstock.api.streams.stores import stores_router
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import ConfigError
from tests.api.streams.test_routes import Instances


class View:
    """Answers with the query's parameters."""

    async def describe(self) -> StreamsState:
        return {}

    async def read_store(self, store: str, **wanted: Any) -> Any:
        if store != "s":
            raise ConfigError(f"no task that runs here has a store {store!r}")
        if wanted.get("continuation") == "wrong":
            raise WrongContinuation("continuation 'wrong' is invalid")
        return {"store": store, **wanted}

    async def find_windows(self, store: str, **wanted: Any) -> Any:
        await self.read_store(store, **wanted)
        position = {0: {wanted["key"] or wanted["key_from"]: wanted["from_ms"] or 9}}
        return {"windows": [wanted["status"]], "position": position, "continuation": wanted["continuation"]}


async def get(path: str) -> httpx.Response:
    app = create_app(streams=streams_router(View(), stores_router(View())))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


async def test_query_parameters_reach_the_view() -> None:
    """Query parameters are passed to the view, and missing ones are None."""
    response = await get("/v1/streams/stores/s?key=ann&from_ms=5&rows_max=7")
    open_ = {"key_from": None, "key_to": None, "to_ms": None, "continuation": None}
    assert response.json() == {"store": "s", "key": "ann", "from_ms": 5, "rows_max": 7, **open_}
    assert (await get("/v1/streams/stores/s?continuation=abc")).json()["continuation"] == "abc"
    assert (await get("/v1/streams")).json() == {}


async def test_keys_may_be_bytes() -> None:
    """`key_base64` is a key of bytes, and answers contain bytes as base64; invalid or duplicate keys are a 400."""
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
    app = create_app(streams=streams_router(View(), stores_router(View(), Instances())))
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
