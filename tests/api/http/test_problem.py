"""Errors as HTTP problems."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter

from penstock.api.http.app import create_app
from penstock.api.http.problem import KINDS, Problem, kind_of
from penstock.shared.common import errors

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
def test_every_error_has_an_answer(leaf: type[errors.PenstockError]) -> None:
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
