"""Statuses of errors, and the paths that are taken."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Response

from penstock.api.connect.errors import install, normalized, status_of
from penstock.api.connect.forwarding import Forwarding
from penstock.api.connect.request_parsing import Name
from penstock.api.http.problem import json_response
from penstock.shared.common import errors
from penstock.shared.connect.errors import BadRequest, ConnectorNotFound
from penstock.shared.connect.herder import errors as herder


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConnectorNotFound("x"), 404),
        (BadRequest("x"), 400),
        (errors.ConfigError("x"), 400),
        (herder.AlreadyExists("x"), 409),
        (herder.RebalanceNeeded("x"), 409),
        (herder.NotHere("x", None), 409),
        (herder.Forbidden("x"), 403),
        (herder.RequestTimedOut("x"), 500),
        (errors.IllegalState("x"), 503),
        (errors.KafkaTimeout("x"), 504),
        (errors.RecordTooLarge("x"), 500),
    ],
)
def test_each_error_has_its_status(error: errors.PenstockError, status: int) -> None:
    """By its class, or the nearest base in the table."""
    assert status_of(error) == status


def test_paths_lose_trailing_slashes_and_keep_those_in_names() -> None:
    """`/connectors/` is `/connectors`; %2F does not divide."""
    assert normalized(b"/", "/") == "/"
    assert normalized(b"/connectors//", "/connectors//") == "/connectors"
    assert normalized(b"/connectors/a%2fb", "/connectors/a/b") == "/connectors/a\x00b"


def app(*, is_ready: bool = True) -> FastAPI:
    made = FastAPI(redirect_slashes=False)
    install(made, Forwarding(), lambda: is_ready)

    @made.get("/connectors/{name}")
    async def show(name: Name) -> Response:
        if name == "broken":
            raise RuntimeError("secret detail")
        if name == "elsewhere":
            raise herder.NotHere("not here", None)
        return json_response({"name": name})

    return made


async def ask(path: str, method: str = "GET", *, is_ready: bool = True) -> httpx.Response:
    transport = httpx.ASGITransport(app(is_ready=is_ready), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.request(method, path)


async def test_names_may_have_slashes() -> None:
    """A connector whose name has one is named with %2F."""
    assert (await ask("/connectors/a%2Fb/")).json() == {"name": "a/b"}


async def test_every_error_has_the_same_body() -> None:
    """`error_code` and `message`, also of what the framework says no to; a failure's inside stays in the log."""
    for path, method, status, message in (
        ("/nowhere", "GET", 404, "HTTP 404 Not Found"),
        ("/connectors/a", "PUT", 405, "HTTP 405 Method Not Allowed"),
        ("/connectors/broken", "GET", 500, "RuntimeError: the request failed; the worker's log has the reason"),
    ):
        answer = await ask(path, method)
        assert (answer.status_code, answer.json()) == (status, {"error_code": status, "message": message})


async def test_nobody_to_ask_is_a_conflict() -> None:
    """Where no other worker is known that could answer, the group is on the move."""
    answer = await ask("/connectors/elsewhere")
    assert (answer.status_code, answer.json()["error_code"]) == (409, 409)


async def test_a_worker_that_starts_up_says_so() -> None:
    """Until its topics are read, everything but its health is 503."""
    answer = await ask("/connectors/a", is_ready=False)
    assert (answer.status_code, answer.json()["error_code"]) == (503, 503)
    assert (
        await ask("/health", is_ready=False)
    ).status_code == 404  # which has no route in this app: it was let through
