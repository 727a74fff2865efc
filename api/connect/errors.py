"""The error responses of Kafka Connect's REST API: a table from errors to statuses, and their bodies.

The app's outermost middleware is here as well. It removes trailing slashes, distinguishes slashes within names from
separators, and answers 503 while the worker is starting up.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.connect.forwarding import Forwarding
from penstock.api.connect.request_parsing import SLASH
from penstock.api.http.problem import json_response
from penstock.api.http.status import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    GATEWAY_TIMEOUT,
    INTERNAL_SERVER_ERROR,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    SERVICE_UNAVAILABLE,
)
from penstock.shared.common import errors
from penstock.shared.common.log import get_logger
from penstock.shared.connect import errors as connect
from penstock.shared.connect.herder import errors as herder

log = get_logger(__name__)

STATUSES: dict[type[errors.PenstockError], int] = {
    connect.ConnectorNotFound: NOT_FOUND,
    errors.ConfigError: BAD_REQUEST,
    connect.BadRequest: BAD_REQUEST,
    herder.AlreadyExists: CONFLICT,
    herder.RebalanceNeeded: CONFLICT,
    herder.StaleConfig: CONFLICT,
    herder.NotHere: CONFLICT,
    herder.Forbidden: FORBIDDEN,
    herder.RequestTimedOut: INTERNAL_SERVER_ERROR,
    errors.IllegalState: SERVICE_UNAVAILABLE,
    errors.BrokerNotAvailable: SERVICE_UNAVAILABLE,
    errors.KafkaTimeout: GATEWAY_TIMEOUT,
}
REASONS = {NOT_FOUND: "Not Found", METHOD_NOT_ALLOWED: "Method Not Allowed"}
"""The texts of Kafka Connect's own error responses."""
WHILE_STARTING = frozenset({"/", "/health", "/metrics"})


def status_of(error: BaseException) -> int:
    """Returns the status for an error, by its class or the nearest base in the table; 500 for any other."""
    return next((STATUSES[base] for base in type(error).__mro__ if base in STATUSES), INTERNAL_SERVER_ERROR)


def error_response(status: int, message: str) -> Response:
    """Returns an error in the form of Kafka Connect's REST."""
    return json_response({"error_code": status, "message": message}, status)


def install(app: FastAPI, forwarding: Forwarding, is_ready: Callable[[], bool]) -> None:
    """Adds the error responses and the middleware to an app. Forwards requests that only another worker can answer."""

    async def on_not_here(request: Request, error: Exception) -> Response:
        assert isinstance(error, herder.NotHere)
        return await forwarding.forward(request, error, error_response)

    async def on_penstock_error(request: Request, error: Exception) -> Response:
        status = status_of(error)
        if status >= 500:
            log.warning("request failed", path=request.url.path, error=type(error).__name__, reason=str(error))
        return error_response(status, str(error) or type(error).__name__)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = REASONS.get(error.status_code, error.detail)
        response = error_response(error.status_code, f"HTTP {error.status_code} {reason}")
        response.headers.update(error.headers or {})
        return response

    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        log.error("request failed", path=request.url.path, error=type(error).__name__, exc_info=error)
        return error_response(
            INTERNAL_SERVER_ERROR, f"{type(error).__name__}: the request failed; the worker's log has the reason"
        )

    app.add_exception_handler(herder.NotHere, on_not_here)
    app.add_exception_handler(errors.PenstockError, on_penstock_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected_error)
    app.add_middleware(ConnectPaths, is_ready=is_ready)


class ConnectPaths:
    """The outermost middleware. It normalizes paths as Kafka Connect does."""

    def __init__(self, app: ASGIApp, is_ready: Callable[[], bool]) -> None:
        self._app = app
        self._is_ready = is_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = str(scope.get("root_path", ""))
        path = normalized(scope.get("raw_path", b""), str(scope["path"]))
        if path.removeprefix(root) not in WHILE_STARTING and not self._is_ready():
            await error_response(SERVICE_UNAVAILABLE, "The worker is still starting up")(scope, receive, send)
            return
        await self._app({**scope, "path": path}, receive, send)


def normalized(raw_path: bytes, path: str) -> str:
    """Returns the path without trailing slashes, with SLASH in place of each %2F.

    >>> normalized(b"/connectors/", "/connectors/")
    '/connectors'
    >>> normalized(b"/connectors/a%2Fb/status", "/connectors/a/b/status") == f"/connectors/a{SLASH}b/status"
    True
    """
    if b"%2f" in raw_path.lower():
        raw = raw_path.partition(b"?")[0].decode("latin-1")
        path = "/".join(unquote(segment).replace("/", SLASH) for segment in raw.split("/"))
    return path.rstrip("/") or "/"
