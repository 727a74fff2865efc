"""Errors as HTTP problems: of exceptions, unknown paths and unknown query parameters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from penstock.api.http.app import create_app
from penstock.api.http.problem import KINDS, Problem, kind_of
from penstock.api.http.reverse_proxy import UpstreamResponse, forward_router
from penstock.api.rest_proxy.routes import metadata_routers
from penstock.shared.common import errors
from tests.api.admin.test_administration import MemoryAdmin
from tests.api.ingest.service import URL, Service

LEAVES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.PenstockError)]


async def send_request(error: Exception, path: str = "/fails", method: str = "GET") -> httpx.Response:
    router = APIRouter()

    @router.get("/fails")
    async def fails() -> None:
        raise error

    transport = httpx.ASGITransport(create_app(admin=router), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.request(method, path)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda c: c.__name__)
def test_every_error_has_a_response(leaf: type[errors.PenstockError]) -> None:
    """Every PenstockError has an error status, and a retriable one has Retry-After."""
    kind = kind_of(leaf("why"))
    assert kind.status >= 400
    if issubclass(leaf, errors.RetriableError) and kind.status in (429, 503, 504):
        assert kind.retry_after_s is not None


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (errors.NotASnapshot("it has no column live"), 500, "NOT_A_SNAPSHOT", None),
        (errors.LakeUnavailable("the storage does not answer"), 503, "LAKE_UNAVAILABLE", "5"),
    ],
)
async def test_an_error_of_the_lake_is_not_one_of_kafka(
    error: errors.PenstockError, status: int, code: str, retry_after: str | None
) -> None:
    """The title of an error of the lake names the lake."""
    response = await send_request(error)
    assert (response.status_code, response.headers.get("Retry-After")) == (status, retry_after)
    assert (response.json()["error_code"], response.json()["detail"]) == (code, str(error))
    assert "lake" in response.json()["title"]


def test_codes_are_unique() -> None:
    """The error codes are unique."""
    codes = [kind.error_code for kind in KINDS.values()]
    assert len(codes) == len(set(codes))


async def test_a_penstock_error_is_a_problem() -> None:
    """A PenstockError is a problem with RFC 9457's members, error_code and message."""
    response = await send_request(errors.GroupNotEmpty("group g has 1 members: m-1"))
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json() == {
        "type": "about:blank",
        "title": "The group is active",
        "status": 409,
        "detail": "group g has 1 members: m-1",
        "error_code": "NON_EMPTY_GROUP",
        "message": "group g has 1 members: m-1",
    }


async def test_an_unexpected_error_hides_its_message() -> None:
    """An unexpected error is a 500 without its message."""
    response = await send_request(ZeroDivisionError("secret"))
    assert (response.status_code, response.json()["error_code"]) == (500, "UNKNOWN_SERVER_ERROR")
    assert "secret" not in response.text


async def test_unknown_paths_and_methods_are_problems_too() -> None:
    """404 and 405 are problems, and 405 has the Allow header."""
    assert (await send_request(Problem.of(errors.IllegalState()), "/nowhere")).json()["error_code"] == "HTTP_404"
    response = await send_request(errors.IllegalState(), method="POST")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")


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
