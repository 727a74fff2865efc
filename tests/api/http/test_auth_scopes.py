"""Credentials and scopes, through an app's guard."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import structlog
from fastapi import APIRouter

from penstock.api.http.app import create_app
from penstock.api.http.auth import ADMIN_BODY_BYTES_MAX, AccessControl, scope_of
from penstock.api.settings import Credential
from penstock.shared.common.errors import ConfigError

SECRETS = {"feeder": "feeder-secret-1234", "viewer": "viewer-secret-1234", "root": "admin-secret-12345"}
CREDENTIALS = {
    "feeder": Credential(secret=SECRETS["feeder"], scopes=("ingest",)),  # type: ignore[arg-type]
    "viewer": Credential(secret=SECRETS["viewer"], scopes=("read",)),  # type: ignore[arg-type]
    "root": Credential(secret=SECRETS["root"], scopes=("admin",)),  # type: ignore[arg-type]
}
PATHS = [("POST", "/v1/topics/t/events"), ("GET", "/v1/groups"), ("DELETE", "/v1/groups/g")]


def app() -> Any:
    router = APIRouter()
    for method, path in PATHS:
        router.add_api_route(path, lambda: "data", methods=[method])
    router.add_api_route("/v1/body", echo, methods=["POST"])
    return create_app(admin=router, credentials=CREDENTIALS)


async def echo(body: dict[str, Any]) -> int:
    return len(body)


async def send_request(method: str, path: str, authorization: str, content: bytes | None = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://x") as client:
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        return await client.request(method, path, headers=headers, content=content)


def basic(name: str, secret: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{secret}".encode()).decode()


@pytest.mark.parametrize(
    ("name", "statuses"), [("feeder", [200, 403, 403]), ("viewer", [403, 200, 403]), ("root", [403, 200, 200])]
)
async def test_scopes_grant_their_requests(name: str, statuses: list[int]) -> None:
    """A scope grants its requests with bearer tokens and basic auth; admin includes read but not ingest."""
    for authorization in (f"Bearer {SECRETS[name]}", basic(name, SECRETS[name])):
        assert [(await send_request(*request_line, authorization)).status_code for request_line in PATHS] == statuses


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Basic",
        "Basic ???",
        basic("viewer", "wrong"),
        basic("root", SECRETS["viewer"]),
        basic("owner", ""),
        "Bearer",
    ],
)
async def test_invalid_credentials_are_a_401(authorization: str) -> None:
    """A wrong name, secret or header is a 401."""
    response = await send_request("GET", "/v1/groups", authorization)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer, Basic realm="penstock"'


def test_changes_need_the_admin_scope() -> None:
    """Only storing records needs the ingest scope; other and unknown changes need admin."""
    assert scope_of("POST", "/topics/t") == scope_of("POST", "/topics/t/partitions/0") == "ingest"
    assert scope_of("POST", "/v3/clusters/c/topics/t/records:batch") == scope_of("GET", "/v3/clusters") == "ingest"
    for method, path in (("PUT", "/connectors/c/pause"), ("POST", "/v1/groups/g/offsets"), ("POST", "/v1/x")):
        assert scope_of(method, path) == "admin"


def test_secrets_are_never_shown() -> None:
    """Secrets are neither in reprs nor in validation errors."""
    assert not [s for s in SECRETS.values() if s in repr(AccessControl(None, CREDENTIALS)) + repr(CREDENTIALS)]
    with pytest.raises(ConfigError) as e:
        Credential(secret="hidden-secret", scopes=("none",))  # type: ignore[arg-type]
    assert "hidden-secret" not in str(e.value)


async def test_administration_is_audited() -> None:
    """The audit log has name, method, path and status of granted and denied changes, but no reads and no secrets."""
    with structlog.testing.capture_logs() as logs:
        await send_request("DELETE", "/v1/groups/g", f"Bearer {SECRETS['root']}")
        await send_request("DELETE", "/v1/groups/g", f"Bearer {SECRETS['viewer']}")
        await send_request("GET", "/v1/groups", f"Bearer {SECRETS['viewer']}")
    audit = [(e["principal"], e["method"], e["path"], e["status"]) for e in logs if e["event"] == "audit"]
    assert audit == [("root", "DELETE", "/v1/groups/g", 200), ("viewer", "DELETE", "/v1/groups/g", 403)]
    assert not [secret for secret in SECRETS.values() if secret in str(logs)]


async def test_other_bodies_are_bounded() -> None:
    """A body over the limit of an admin request is a 413."""
    root = f"Bearer {SECRETS['root']}"
    assert (await send_request("POST", "/v1/body", root, b"{}")).status_code == 200
    assert (await send_request("POST", "/v1/body", root, b" " * (ADMIN_BODY_BYTES_MAX + 1))).status_code == 413


@pytest.mark.parametrize(("origins", "allowed"), [((), None), (("https://ops.example",), "https://ops.example")])
async def test_cors_is_off_by_default(origins: tuple[str, ...], allowed: str | None) -> None:
    """CORS is off by default, and every response has security headers."""
    served = create_app(admin=APIRouter(), cors_origins=origins)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://x") as client:
        response = await client.get("/none", headers={"Origin": "https://ops.example"})
    assert response.headers.get("access-control-allow-origin") == allowed
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
