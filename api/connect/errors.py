"""The error responses of Kafka Connect's REST API: a table from errors to statuses, and their bodies."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from penstock.api.connect.forwarding import forward_request
from penstock.api.http.json_response import json_response
from penstock.api.http.status_codes import (
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


def status_of(error: BaseException) -> int:
    """Return the status for an error, by its class or the nearest base in the table; 500 for any other."""
    return next((STATUSES[base] for base in type(error).__mro__ if base in STATUSES), INTERNAL_SERVER_ERROR)


def error_response(status: int, message: str) -> Response:
    """Return an error in the form of Kafka Connect's REST."""
    return json_response({"error_code": status, "message": message}, status)


def starting_response(path: str) -> Response:
    """Return the response to a request for a path, if the worker is still starting up."""
    if path.rstrip("/") == "/health":
        return json_response({"status": "starting", "message": "Worker is still starting up."}, SERVICE_UNAVAILABLE)
    return error_response(SERVICE_UNAVAILABLE, "The worker is still starting up")


def install_error_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error of the app's routes in Kafka Connect's error format.

    For a request that raises `NotHere`, `forward_request` returns the response.
    """

    async def on_not_here(request: Request, error: Exception) -> Response:
        assert isinstance(error, herder.NotHere)
        return await forward_request(request, error, error_response)

    async def on_penstock_error(request: Request, error: Exception) -> Response:
        status = status_of(error)
        if status >= INTERNAL_SERVER_ERROR:
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
