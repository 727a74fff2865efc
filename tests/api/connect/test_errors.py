"""HTTP statuses of errors, and the responses to them."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Response

from penstock.api.connect.errors import install_error_handlers, status_of
from penstock.api.connect.request_parsing import ConnectPaths, Name
from penstock.api.http.json_response import json_response
from penstock.shared.common import errors
from penstock.shared.connect.errors import BadRequest, ConnectorNotFound
from penstock.shared.connect.herder import errors as herder

UNDECODABLE = "The path has a percent-encoding that is malformed, is not UTF-8, or is of the character 0"


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
    """An error has the status of its class, or of its nearest base class in the table."""
    assert status_of(error) == status


def app(*, is_ready: bool = True) -> FastAPI:
    made = FastAPI(redirect_slashes=False)
    install_error_handlers(made)
    made.add_middleware(ConnectPaths, is_ready=lambda: is_ready)

    @made.get("/connectors/{name}")
    async def show(name: Name) -> Response:
        if name == "broken":
            raise RuntimeError("secret detail")
        if name == "exits":
            raise SystemExit(5)
        if name == "elsewhere":
            raise herder.NotHere("not here", None)
        return json_response({"name": name})

    return made


async def send_request(path: str, method: str = "GET", *, is_ready: bool = True) -> httpx.Response:
    transport = httpx.ASGITransport(app(is_ready=is_ready), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.request(method, path)


async def test_names_may_have_slashes() -> None:
    """A connector's name may contain a slash, written as %2F."""
    assert (await send_request("/connectors/a%2Fb/")).json() == {"name": "a/b"}


async def test_every_error_has_the_same_body() -> None:
    """Every error's body has `error_code` and `message`, and internal details stay in the log."""
    for path, method, status, message in (
        ("/nowhere", "GET", 404, "HTTP 404 Not Found"),
        ("/connectors/a", "PUT", 405, "HTTP 405 Method Not Allowed"),
        ("/connectors/broken", "GET", 500, "RuntimeError: the request failed; the worker's log has the reason"),
        ("/connectors/exits", "GET", 500, "ConnectError: the request failed; the worker's log has the reason"),
        ("/connectors/a%00b", "GET", 400, UNDECODABLE),
        ("/connectors/%FF", "GET", 400, UNDECODABLE),
    ):
        response = await send_request(path, method)
        assert (response.status_code, response.json()) == (status, {"error_code": status, "message": message})


async def test_a_request_without_a_known_owner_is_a_conflict() -> None:
    """If no worker is known that can answer, the status is 409."""
    response = await send_request("/connectors/elsewhere")
    assert (response.status_code, response.json()["error_code"]) == (409, 409)


async def test_a_worker_that_is_starting_answers_503() -> None:
    """Until a worker is ready, every request except `/` and `/metrics` is a 503. `/health` has its own body."""
    response = await send_request("/connectors/a", is_ready=False)
    assert (response.status_code, response.json()["error_code"]) == (503, 503)
    health = await send_request("/health", is_ready=False)
    assert (health.status_code, health.json()["status"]) == (503, "starting")
    # The app has no such route: the request passed.
    assert (await send_request("/metrics", is_ready=False)).status_code == 404
