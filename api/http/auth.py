"""The guard in front of every route: credentials, limits on bodies, security headers, and the audit log.

Without credentials the service listens on a loopback address. The `Host` header must then name this machine too.
Otherwise a web page could reach the service by a name that its owner points here (DNS rebinding). With or without
credentials, a request that changes anything is rejected if a web page of another origin made the browser send it
(`penstock.api.http.cross_site`). The audit log has each request that needs the scope admin: the client, the request and
its status, never a secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.http.access import READING, Access, Principal, scope_of
from penstock.api.http.cross_site import foreign_page
from penstock.api.http.problem import UNEXPECTED, ErrorKind, Problem
from penstock.api.settings import Credential, is_loopback
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics", "/"})
"""Paths that need no credentials. The page itself holds no data; it sends the token when it fetches any."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

ADMIN_BODY_BYTES_MAX = 1_048_576
"""The longest body of a request that stores no events. Ingest has its own limits."""
ADMIN_BODY_MS = 30_000
"""The longest time that such a body may take to arrive."""

NOBODY = Principal("", frozenset({"ingest", "read", "admin"}))


class Guard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        auth_token: SecretStr | None = None,
        credentials: Mapping[str, Credential] | None = None,
        local_hosts_only: bool = False,
        open_paths: Iterable[str] = OPEN_PATHS,
        cors_origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._cors_origins = frozenset(cors_origins)
        self._access = Access(auth_token, credentials or {})
        self._local_hosts_only = local_hosts_only
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        needed = scope_of(method, path)
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        asks, problem = self._admit(method, path, headers)
        try:
            if problem is None:
                if asks.name:
                    scope["principal"] = asks.name
                body = receive if needed == "ingest" else _Bounded(receive)
                await self._app(scope, body, send_with_headers)
            else:
                response = problem.response_for(path)
                if problem.kind.status == 401:
                    response.headers["WWW-Authenticate"] = self._challenge(headers)
                await response(scope, receive, send_with_headers)
        except Exception as e:
            if status:  # the answer has begun: only a broken connection can report the error
                raise
            log.error("request failed", path=path, error=type(e).__name__, exc_info=e)
            failed = Problem(UNEXPECTED, "the request failed; the service's log has the reason")
            await failed.response_for(path)(scope, receive, send_with_headers)
        finally:
            if needed == "admin":
                client = scope["client"][0] if scope.get("client") else ""
                log.info("audit", principal=asks.name, client=client, method=method, path=path, status=status)

    def _admit(self, method: str, path: str, headers: Headers) -> tuple[Principal, Problem | None]:
        if self._local_hosts_only and not is_loopback(_host_name(headers.get("host", ""))):
            kind = ErrorKind(421, "WRONG_HOST", "Not this host")
            return NOBODY, Problem(kind, "without a token only requests to localhost are answered")
        if method not in READING and (page := foreign_page(headers, self._cors_origins)):
            kind = ErrorKind(403, "CROSS_SITE_REQUEST", "Request of another web page")
            return NOBODY, Problem(kind, f"a web page of {page} sent the request; cors_origins lists the allowed pages")
        if self._access.is_open or path in self._open_paths:
            return NOBODY, None
        found = self._access.principal(headers.get("authorization", ""))
        if found is None:
            said = "send Authorization: Bearer <token>" + (" or basic auth" if self._access.has_names else "")
            return NOBODY, Problem(ErrorKind(401, "UNAUTHORIZED", "Token needed"), said)
        needed = scope_of(method, path)
        if not found.may(needed):
            return found, Problem(ErrorKind(403, "FORBIDDEN", "Not allowed"), f"{found.name} lacks the scope {needed}")
        return found, None

    def _challenge(self, headers: Headers) -> str:
        """Return the challenge. A page's script gets no Basic, or the browser would show its own password dialog."""
        script = headers.get("sec-fetch-dest", "") == "empty"
        return 'Bearer, Basic realm="penstock"' if self._access.has_names and not script else "Bearer"


class _Bounded:
    """The body of a request that stores no events: 413 if it is too long, 408 if it arrives too slowly."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
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
            raise HTTPException(408, f"the body did not come within {ADMIN_BODY_MS} ms") from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > ADMIN_BODY_BYTES_MAX:
            raise HTTPException(413, f"the body is longer than {ADMIN_BODY_BYTES_MAX} bytes")
        return message


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> _host_name("127.0.0.1:8080"), _host_name("[::1]:8080"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
