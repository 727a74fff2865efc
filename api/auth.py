"""Who may ask: a bearer token, or nobody but this machine.

With a token, every path but the open ones needs `Authorization: Bearer …`, compared in constant time. Without one
the address is a loopback one; then the `Host` header must name this machine too, so that a web page cannot reach the
service through a name of its own that points here (DNS rebinding).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problem import ErrorKind, Problem
from api.settings import is_loopback

OPEN_PATHS = frozenset({"/health", "/metrics", "/"})
"""Without a token: the page itself holds no data, it asks for the token to fetch any."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """ASGI middleware: authentication, the host check, and security headers on every answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        auth_token: SecretStr | None = None,
        local_hosts_only: bool = False,
        open_paths: Iterable[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._token = None if auth_token is None else auth_token.get_secret_value().encode()
        self._local_hosts_only = local_hosts_only
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        problem = self._refusal(scope["path"], Headers(scope=scope))
        if problem is None:
            await self._app(scope, receive, send_with_headers)
            return
        response = problem.response()
        if problem.kind.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send_with_headers)

    def _refusal(self, path: str, headers: Headers) -> Problem | None:
        if self._local_hosts_only and not is_loopback(_host_name(headers.get("host", ""))):
            kind = ErrorKind(421, "WRONG_HOST", "Not this host")
            return Problem(kind, "without a token only requests to localhost are answered")
        if self._token is None or path in self._open_paths:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token):
            return None
        return Problem(ErrorKind(401, "UNAUTHORIZED", "Token needed"), "send Authorization: Bearer <token>")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> _host_name("127.0.0.1:8080"), _host_name("[::1]:8080"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
