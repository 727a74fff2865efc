"""The guard in front of every route: credentials, limits on bodies, security headers, and the audit log.

Without credentials the service listens only on a loopback address, unless `insecure_no_auth` is set or the service is a
Connect worker. With `local_hosts_only` (a loopback address without credentials), the `Host` header of each request must
name this machine. Otherwise a web page could reach the service by a domain name that resolves to this machine (DNS
rebinding). With or without credentials, a request that changes anything is rejected if a web page of another origin
made the browser send it, unless `cors_origins` lists that origin (`penstock.api.http.csrf`). The audit log has each
request that needs the scope admin: the client, the request and its status, never a secret.

A credential is a name and a secret. A client sends the secret as a bearer token, or name and secret as basic auth. A
request's secret is compared with every configured secret in constant time, so the response time reveals no secret.

| scope | what it allows |
|---|---|
| ingest | storing events and records, by any of the interfaces |
| read | `GET`, `HEAD` and `OPTIONS` requests |
| admin | all other requests, and those of `read` |

`GET /v3/clusters` is allowed to every client with credentials: clients of REST Proxy v3 request the cluster's id before
they store or read anything.

>>> scope_of("POST", "/v1/topics/t/events"), scope_of("GET", "/v1/groups"), scope_of("DELETE", "/v1/groups/g")
('ingest', 'read', 'admin')
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from penstock.api.http.csrf import foreign_page
from penstock.api.http.problem import UNEXPECTED, ErrorKind, Problem
from penstock.api.http.status_codes import (
    CONTENT_TOO_LARGE,
    FORBIDDEN,
    MISDIRECTED_REQUEST,
    REQUEST_TIMEOUT,
    UNAUTHORIZED,
)
from penstock.api.settings import Credential, Scope, is_loopback
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics", "/"})
"""Paths that need no credentials, with or without a trailing slash. The page itself holds no data; it sends the token
when it fetches any."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

ADMIN_BODY_BYTES_MAX = 1_048_576
"""The default for the longest body of a request that stores no events. Ingest has its own limits."""
ADMIN_BODY_MS = 30_000
"""The longest time that such a body may take to arrive."""


_INGEST_PATHS = re.compile(
    r"/v1/topics/[^/]+/events|/topics/[^/]+(/partitions/[^/]+)?|/v3/clusters/[^/]+/topics/[^/]+/records(:batch)?"
)
READING = frozenset({"GET", "HEAD", "OPTIONS"})
OWNER = "owner"
"""The name of a client with `auth_token`, which has all scopes."""

INSUFFICIENT_SCOPE = 'Bearer error="insufficient_scope"'
"""The header WWW-Authenticate of a response to a client that lacks the scope (RFC 6750, section 3.1)."""


class Principal(NamedTuple):
    """A client and its scopes."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope | None) -> bool:
        """Return whether the client may send a request that needs the scope, see `scope_of`.

        The scope admin includes read.
        """
        return scope is None or scope in self.scopes or (scope == "read" and "admin" in self.scopes)


ALL: frozenset[Scope] = frozenset({"ingest", "read", "admin"})
ANONYMOUS = Principal("", ALL)


class AccessControl:
    """The credentials of a service. Without credentials every client is anonymous and has all scopes."""

    def __init__(self, auth_token: SecretStr | None, credentials: Mapping[str, Credential]) -> None:
        self._known: list[tuple[Principal, bytes]] = [
            (Principal(name, frozenset(credential.scopes)), credential.secret.get_secret_value().encode())
            for name, credential in credentials.items()
        ]
        self._owner = Principal(OWNER, ALL)
        if auth_token is not None:
            self._known.append((self._owner, auth_token.get_secret_value().encode()))

    def __repr__(self) -> str:
        return f"AccessControl({[principal.name for principal, _ in self._known]})"

    @property
    def is_open(self) -> bool:
        """Whether no request needs credentials."""
        return not self._known

    @property
    def has_names(self) -> bool:
        """Whether basic auth is possible: at least one credential has a name."""
        return any(principal is not self._owner for principal, _ in self._known)

    def principal(self, authorization: str) -> Principal | None:
        """Return the client that an Authorization header belongs to; None if the credentials are unknown."""
        scheme, _, value = authorization.partition(" ")
        client = None
        # No early exit: the time must not depend on which secret matches.
        if scheme.lower() == "bearer":
            token = value.strip().encode()
            for principal, secret in self._known:
                if hmac.compare_digest(token, secret):
                    client = principal
        elif scheme.lower() == "basic" and (user_and_password := _basic_credentials(value)) is not None:
            user, password = user_and_password
            for principal, secret in self._known:
                matches = hmac.compare_digest(password, secret) & hmac.compare_digest(user, principal.name.encode())
                if matches and principal is not self._owner:
                    client = principal
        return client


def scope_of(method: str, path: str) -> Scope | None:
    """Return the scope that a request needs; None if it needs only credentials."""
    if method in READING:
        return None if path == "/v3/clusters" else "read"
    return "ingest" if method == "POST" and _INGEST_PATHS.fullmatch(path) else "admin"


def _basic_credentials(value: str) -> tuple[bytes, bytes] | None:
    """Return the user and the password of basic auth (RFC 7617); None if the value is malformed."""
    try:
        name, colon, secret = base64.b64decode(value.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (name, secret) if colon else None


class Guard:
    """ASGI middleware that rejects requests with a wrong Host, from foreign web pages, or without needed credentials.

    It also limits the bodies of requests that store no events, adds security headers, and writes the audit log.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        auth_token: SecretStr | None = None,
        credentials: Mapping[str, Credential] | None = None,
        local_hosts_only: bool = False,
        cors_origins: Iterable[str] = (),
        admin_body_bytes_max: int = ADMIN_BODY_BYTES_MAX,
    ) -> None:
        self._app = app
        self._admin_body_bytes_max = admin_body_bytes_max
        self._cors_origins = frozenset(cors_origins)
        self._access = AccessControl(auth_token, credentials or {})
        self._local_hosts_only = local_hosts_only

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        path = scope["path"]
        headers = Headers(scope=scope)
        needed_scope = scope_of(method, path)
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        principal, rejection = self._admit_request(method, path, headers, needed_scope)
        try:
            if rejection is None:
                if principal.name:
                    scope["principal"] = principal.name
                body = receive if needed_scope == "ingest" else _BoundedBody(receive, self._admin_body_bytes_max)
                await self._app(scope, body, send_with_headers)
            else:
                response = rejection.response_for(path)
                if rejection.kind.status == UNAUTHORIZED:
                    response.headers["WWW-Authenticate"] = self._auth_challenge(headers)
                await response(scope, receive, send_with_headers)
        except Exception as e:
            if status:
                # The response has begun, so only a broken connection can report the error.
                raise
            log.error("request failed", path=path, error=type(e).__name__, exc_info=e)
            problem = Problem(UNEXPECTED, "the request failed; the service's log has the reason")
            await problem.response_for(path)(scope, receive, send_with_headers)
        finally:
            if needed_scope == "admin":
                client = scope["client"][0] if scope.get("client") else ""
                log.info("audit", principal=principal.name, client=client, method=method, path=path, status=status)

    def _admit_request(
        self, method: str, path: str, headers: Headers, needed_scope: Scope | None
    ) -> tuple[Principal, Problem | None]:
        """Return the client of a request, and a Problem if the request is rejected.

        The client is ANONYMOUS if the request needs no credentials, if its credentials are missing or unknown, or if it
        is rejected before they are checked.
        """
        # 1. The Host header is `localhost` or a loopback address, if `local_hosts_only` is set.
        if self._local_hosts_only and not is_loopback(_host_name(headers.get("host", ""))):
            kind = ErrorKind(MISDIRECTED_REQUEST, "WRONG_HOST", "Not this host")
            return ANONYMOUS, Problem(kind, "without a token only requests to localhost are answered")
        # 2. A request that changes anything was not sent by a foreign web page.
        if method not in READING and (page := foreign_page(headers, self._cors_origins)):
            kind = ErrorKind(FORBIDDEN, "CROSS_SITE_REQUEST", "Request of another web page")
            # A Connect worker lacks that setting.
            detail = f"a web page of {page} sent the request; the setting cors_origins, if any, lists the allowed pages"
            return ANONYMOUS, Problem(kind, detail)
        # 3. The credentials are known, unless the service or the path is open.
        if self._access.is_open or (path.rstrip("/") or "/") in OPEN_PATHS:
            return ANONYMOUS, None
        principal = self._access.principal(headers.get("authorization", ""))
        if principal is None:
            detail = "send Authorization: Bearer <token>" + (" or basic auth" if self._access.has_names else "")
            return ANONYMOUS, Problem(ErrorKind(UNAUTHORIZED, "UNAUTHORIZED", "Token needed"), detail)
        # 4. The client has the scope that the request needs.
        if not principal.may(needed_scope):
            kind = ErrorKind(FORBIDDEN, "FORBIDDEN", "Not allowed")
            detail = f"{principal.name} lacks the scope {needed_scope}"
            return principal, Problem(kind, detail, headers={"WWW-Authenticate": INSUFFICIENT_SCOPE})
        return principal, None

    def _auth_challenge(self, headers: Headers) -> str:
        """Return the header WWW-Authenticate of a 401 response: Bearer, and Basic if a credential has a name.

        The response to a page's script never has Basic: the browser would show a password dialog.
        """
        is_script = headers.get("sec-fetch-dest", "") == "empty"
        return 'Bearer, Basic realm="penstock"' if self._access.has_names and not is_script else "Bearer"


class _BoundedBody:
    """The body of a request that stores no events: 413 if it is too long, 408 if it arrives too slowly."""

    def __init__(self, receive: Receive, bytes_max: int) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self._bytes = 0
        self._deadline: float | None = None

    async def __call__(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + ADMIN_BODY_MS / 1000
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(REQUEST_TIMEOUT, f"the body did not arrive within {ADMIN_BODY_MS} ms") from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._bytes_max:
            raise HTTPException(CONTENT_TOO_LARGE, f"the body is longer than {self._bytes_max} bytes")
        return message


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> _host_name("127.0.0.1:8080"), _host_name("[::1]:8080"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
