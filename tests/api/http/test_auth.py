"""Authentication, local host names, and requests from other sites."""

from __future__ import annotations

import httpx
import pytest
import structlog
from fastapi import APIRouter
from pydantic import SecretStr

from penstock.api.http.app import create_app

TOKEN = "a-token-of-enough-length"


async def send_request(path: str, headers: dict[str, str] | None = None, **options: object) -> httpx.Response:
    router = APIRouter()
    for known in ("/", "/health", "/metrics", "/v1/topics"):
        router.add_api_route(known, lambda: "data")
    app = create_app(admin=router, **options)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kafka.example") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"]
)
async def test_without_the_token_requests_are_a_401(authorization: str | None) -> None:
    """A missing or wrong token is a 401 that names the scheme and never contains the token."""
    headers = {} if authorization is None else {b"Authorization": authorization.encode()}
    response = await send_request("/v1/topics", headers, auth_token=SecretStr(TOKEN))  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error_code"] == "UNAUTHORIZED"
    assert TOKEN not in response.text


async def test_kafka_connects_errors_have_the_status_as_code() -> None:
    """On Kafka Connect's routes the code of a 401 is 401, as of all errors there."""
    response = await send_request("/connectors", {}, auth_token=SecretStr(TOKEN))
    assert (response.status_code, response.json()["error_code"]) == (401, 401)


async def test_the_token_is_accepted() -> None:
    """The token is accepted with the scheme in any case."""
    for scheme in ("Bearer", "bearer"):
        response = await send_request("/v1/topics", {"Authorization": f"{scheme} {TOKEN}"}, auth_token=SecretStr(TOKEN))
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
async def test_open_paths_need_no_token(path: str) -> None:
    """`/health`, `/metrics` and the page need no token."""
    assert (await send_request(path, auth_token=SecretStr(TOKEN))).status_code == 200


async def test_unknown_paths_need_the_token_too() -> None:
    """An unknown path without the token is also a 401."""
    assert (await send_request("/v1/nothing", auth_token=SecretStr(TOKEN))).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
async def test_a_local_service_answers_to_local_names_only(host: str, status: int) -> None:
    """A local service answers only requests with a local Host, to prevent DNS rebinding."""
    assert (await send_request("/v1/topics", {"Host": host}, local_hosts_only=True)).status_code == status


async def test_every_answer_has_security_headers() -> None:
    """Every answer has security headers, also errors."""
    for path in ("/v1/topics", "/nowhere"):
        response = await send_request(path)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in response.headers


async def write(headers: dict[str, str], **options: object) -> httpx.Response:
    router = APIRouter()
    router.add_api_route("/v1/compactions", lambda: "started", methods=["POST"])
    app = create_app(admin=router, **options)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post("/v1/compactions", headers=headers)


@pytest.mark.parametrize("secret", [None, SecretStr(TOKEN)])
async def test_cross_site_changes_are_a_403(secret: SecretStr | None) -> None:
    """A change from another site's page is a 403 that names the page, with and without credentials."""
    own = {} if secret is None else {"Authorization": f"Bearer {TOKEN}"}
    response = await write(own | {"Origin": "https://evil.example", "Content-Type": "text/plain"}, auth_token=secret)
    assert (response.status_code, response.json()["error_code"]) == (403, "CROSS_SITE_REQUEST")
    assert "https://evil.example" in response.json()["detail"]
    assert (await write(own, auth_token=secret)).status_code == 200
    assert (await write(own | {"Origin": "http://localhost"}, auth_token=secret)).status_code == 200


async def test_cors_origins_may_make_changes() -> None:
    """Pages of `cors_origins` may make changes, and preflights allow all methods and headers."""
    page = "https://shop.example"
    assert (await write({"Origin": page}, cors_origins=[page])).status_code == 200
    app = create_app(cors_origins=[page])
    preflight = {
        "Origin": page,
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "ce-id, x-customer",
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.options("/connectors/a/config", headers=preflight)
    assert response.status_code == 200
    assert "PUT" in response.headers["access-control-allow-methods"]
    assert "ce-id" in response.headers["access-control-allow-headers"]


async def test_an_internal_error_is_guarded_and_audited() -> None:
    """An internal error is a 500 with security headers, and is in the audit log."""
    router = APIRouter()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    router.add_api_route("/v1/groups/g", fail, methods=["DELETE"])
    app = create_app(admin=router)
    with structlog.testing.capture_logs() as logs:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            response = await client.delete("/v1/groups/g")
    assert (response.status_code, response.json()["error_code"]) == (500, "UNKNOWN_SERVER_ERROR")
    assert response.headers["x-content-type-options"] == "nosniff"
    (audit,) = [line for line in logs if line["event"] == "audit"]
    assert (audit["method"], audit["path"], audit["status"]) == ("DELETE", "/v1/groups/g", 500)
