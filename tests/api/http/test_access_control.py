"""Who may send which request: tokens, credentials with scopes, local host names, and pages of other sites."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import structlog
from fastapi import APIRouter
from pydantic import SecretStr

from penstock.api.http.app import create_app
from penstock.api.http.auth import ADMIN_BODY_BYTES_MAX, AccessControl, scope_of
from penstock.api.http.csrf import foreign_page
from penstock.api.settings import Credential
from penstock.shared.common.errors import ConfigError

TOKEN = "a-token-of-enough-length"


async def get(path: str, headers: dict[str, str] | None = None, **options: object) -> httpx.Response:
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
    response = await get("/v1/topics", headers, auth_token=SecretStr(TOKEN))  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error_code"] == "UNAUTHORIZED"
    assert TOKEN not in response.text


async def test_kafka_connects_errors_have_the_status_as_code() -> None:
    """On Kafka Connect's routes the code of a 401 is 401, as of all errors there."""
    response = await get("/connectors", {}, auth_token=SecretStr(TOKEN))
    assert (response.status_code, response.json()["error_code"]) == (401, 401)


async def test_the_token_is_accepted() -> None:
    """The token is accepted with the scheme in any case."""
    for scheme in ("Bearer", "bearer"):
        response = await get("/v1/topics", {"Authorization": f"{scheme} {TOKEN}"}, auth_token=SecretStr(TOKEN))
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
async def test_open_paths_need_no_token(path: str) -> None:
    """`/health`, `/metrics` and the page need no token."""
    assert (await get(path, auth_token=SecretStr(TOKEN))).status_code == 200


async def test_unknown_paths_need_the_token_too() -> None:
    """An unknown path without the token is also a 401."""
    assert (await get("/v1/nothing", auth_token=SecretStr(TOKEN))).status_code == 401


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
    assert (await get("/v1/topics", {"Host": host}, local_hosts_only=True)).status_code == status


async def test_every_response_has_security_headers() -> None:
    """Every response has security headers, also errors."""
    for path in ("/v1/topics", "/nowhere"):
        response = await get(path)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in response.headers


async def change(headers: dict[str, str], **options: object) -> httpx.Response:
    router = APIRouter()
    router.add_api_route("/v1/compactions", lambda: "started", methods=["POST"])
    app = create_app(admin=router, **options)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post("/v1/compactions", headers=headers)


@pytest.mark.parametrize("secret", [None, SecretStr(TOKEN)])
async def test_cross_site_changes_are_a_403(secret: SecretStr | None) -> None:
    """A change from another site's page is a 403 that names the page, with and without credentials."""
    own = {} if secret is None else {"Authorization": f"Bearer {TOKEN}"}
    response = await change(own | {"Origin": "https://evil.example", "Content-Type": "text/plain"}, auth_token=secret)
    assert (response.status_code, response.json()["error_code"]) == (403, "CROSS_SITE_REQUEST")
    assert "https://evil.example" in response.json()["detail"]
    assert (await change(own, auth_token=secret)).status_code == 200
    assert (await change(own | {"Origin": "http://localhost"}, auth_token=secret)).status_code == 200


async def test_cors_origins_may_make_changes() -> None:
    """Pages of `cors_origins` may make changes, and preflights allow all methods and headers."""
    page = "https://shop.example"
    assert (await change({"Origin": page}, cors_origins=[page])).status_code == 200
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


SECRETS = {"feeder": "feeder-secret-1234", "viewer": "viewer-secret-1234", "root": "admin-secret-12345"}
CREDENTIALS = {
    "feeder": Credential(secret=SECRETS["feeder"], scopes=("ingest",)),  # type: ignore[arg-type]
    "viewer": Credential(secret=SECRETS["viewer"], scopes=("read",)),  # type: ignore[arg-type]
    "root": Credential(secret=SECRETS["root"], scopes=("admin",)),  # type: ignore[arg-type]
}
PATHS = [("POST", "/v1/topics/t/events"), ("GET", "/v1/groups"), ("DELETE", "/v1/groups/g")]


def app() -> Any:
    router = APIRouter()
    for method, path in [*PATHS, ("GET", "/v3/clusters")]:
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


@pytest.mark.parametrize("name", ["feeder", "viewer", "root"])
async def test_every_client_may_read_the_clusters(name: str) -> None:
    """Clients of REST Proxy v3 request the cluster's id first, whether they then store records or read."""
    assert (await send_request("GET", "/v3/clusters", f"Bearer {SECRETS[name]}")).status_code == 200
    assert (await send_request("GET", "/v3/clusters", "")).status_code == 401


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


def test_a_credential_may_have_the_name_owner() -> None:
    """The client of `auth_token` is called owner as well, but it alone has no basic auth."""
    named = {"owner": Credential(secret="named-secret-12345", scopes=("read",))}  # type: ignore[arg-type]
    access = AccessControl(SecretStr("token-secret-12345"), named)
    client = access.principal(basic("owner", "named-secret-12345"))
    assert client is not None
    assert client.scopes == {"read"}
    assert access.principal(basic("owner", "token-secret-12345")) is None
    assert AccessControl(None, named).has_names


def test_changes_need_the_admin_scope() -> None:
    """Only storing records needs the ingest scope; other and unknown changes need admin."""
    assert scope_of("POST", "/topics/t") == scope_of("POST", "/topics/t/partitions/0") == "ingest"
    assert scope_of("POST", "/v3/clusters/c/topics/t/records:batch") == "ingest"
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


HOST = {"host": "localhost:8080"}


@pytest.mark.parametrize(
    ("headers", "page"),
    [
        ({}, ""),
        ({"origin": "http://localhost:8080"}, ""),
        ({"origin": "HTTP://LOCALHOST:8080"}, ""),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, ""),
        ({"sec-fetch-site": "none"}, ""),
        ({"origin": "https://evil.example"}, "https://evil.example"),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, "http://localhost:3000"),
        ({"origin": "http://localhost:8080", "sec-fetch-site": "cross-site"}, "http://localhost:8080"),
        ({"origin": "null"}, "null"),
        ({"sec-fetch-site": "cross-site"}, "another origin (cross-site)"),
        ({"origin": "http://localhost:8080.evil.example"}, "http://localhost:8080.evil.example"),
    ],
)
def test_only_same_origin_pages_and_other_clients_pass(headers: dict[str, str], page: str) -> None:
    """Requests of the same origin and of clients without browser headers pass; others return their page."""
    assert foreign_page(HOST | headers, ()) == page


def test_configured_origins_pass() -> None:
    """Configured origins pass, or all with a star."""
    cross = HOST | {"origin": "https://shop.example", "sec-fetch-site": "cross-site"}
    assert foreign_page(cross, ["https://shop.example"]) == ""
    assert foreign_page(cross, ["https://other.example"]) == "https://shop.example"
    assert foreign_page(cross, ["*"]) == ""
