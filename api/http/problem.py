"""Errors as HTTP responses: RFC 9457 problem details, or the formats of REST Proxy and Kafka Connect on their routes.

A table gives error classes a status and a stable `error_code`. If a retry is advised, the response has `Retry-After`.
The look-up follows the class hierarchy, so a new subclass is answered like its base:

>>> from penstock.shared.common.errors import BufferExhausted, NotEnoughReplicas
>>> kind_of(BufferExhausted()).status, kind_of(NotEnoughReplicas()).error_code, kind_of(ValueError()).status
(429, 'NOT_ENOUGH_REPLICAS', 500)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from penstock.api.http.json_response import JSON_TYPE
from penstock.api.http.status_codes import (
    BAD_GATEWAY,
    BAD_REQUEST,
    CONFLICT,
    CONTENT_TOO_LARGE,
    FORBIDDEN,
    GATEWAY_TIMEOUT,
    INTERNAL_SERVER_ERROR,
    NOT_FOUND,
    SERVICE_UNAVAILABLE,
    TOO_MANY_REQUESTS,
)
from penstock.shared.common import errors
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

PROBLEM_TYPE = "application/problem+json"
FailedOutcome = Literal["not_stored", "unknown"]
"""The outcome of a record with an error. Sending a record with an unknown outcome again can store it twice."""
ErrorMessage = Annotated[str, Field(examples=["flights: no such topic"])]


class ErrorKind(NamedTuple):
    """How an error is answered. `retry_after_s` is None if no retry is advised."""

    status: int
    error_code: str
    title: str
    retry_after_s: int | None = None


UNEXPECTED = ErrorKind(INTERNAL_SERVER_ERROR, "UNKNOWN_SERVER_ERROR", "Unexpected error")

KINDS: Mapping[type[errors.PenstockError], ErrorKind] = {
    errors.PenstockError: UNEXPECTED,
    errors.RetriableError: ErrorKind(SERVICE_UNAVAILABLE, "KAFKA_NOT_READY", "Kafka cannot do this now", 5),
    errors.FatalError: ErrorKind(
        SERVICE_UNAVAILABLE, "CLIENT_FAILED", "The connection to Kafka must be opened again", 10
    ),
    errors.SchemaMismatch: ErrorKind(
        SERVICE_UNAVAILABLE, "SCHEMA_MISMATCH", "Stored data does not match this release", 30
    ),
    errors.IllegalState: ErrorKind(
        SERVICE_UNAVAILABLE, "SHUTTING_DOWN", "The service is not ready, or is shutting down", 5
    ),
    errors.ConfigError: ErrorKind(BAD_REQUEST, "INVALID_CONFIG", "Invalid setting"),
    WrongContinuation: ErrorKind(BAD_REQUEST, "INVALID_CONTINUATION", "Invalid continuation"),
    errors.DataError: ErrorKind(BAD_REQUEST, "INVALID_RECORD", "Invalid data"),
    errors.InvalidRequest: ErrorKind(BAD_REQUEST, "KAFKA_INVALID_REQUEST", "Kafka rejects these values"),
    errors.InvalidTopic: ErrorKind(BAD_REQUEST, "INVALID_TOPIC", "Not a topic name"),
    errors.InvalidTimestamp: ErrorKind(BAD_REQUEST, "INVALID_TIMESTAMP", "Event time not accepted"),
    errors.RecordTooLarge: ErrorKind(CONTENT_TOO_LARGE, "MESSAGE_TOO_LARGE", "Record too large"),
    errors.UnknownTopicOrPartition: ErrorKind(NOT_FOUND, "UNKNOWN_TOPIC_OR_PARTITION", "No such topic or partition"),
    errors.TopicAlreadyExists: ErrorKind(CONFLICT, "TOPIC_ALREADY_EXISTS", "The topic exists"),
    errors.BufferExhausted: ErrorKind(TOO_MANY_REQUESTS, "BUFFER_EXHAUSTED", "Too many records wait for Kafka", 1),
    errors.KafkaTimeout: ErrorKind(GATEWAY_TIMEOUT, "REQUEST_TIMED_OUT", "Kafka did not answer in time", 5),
    errors.DeliveryTimeout: ErrorKind(GATEWAY_TIMEOUT, "DELIVERY_TIMEOUT", "Not acknowledged in time", 5),
    errors.BrokerNotAvailable: ErrorKind(SERVICE_UNAVAILABLE, "BROKER_NOT_AVAILABLE", "Kafka cannot be reached", 5),
    errors.NotLeaderOrFollower: ErrorKind(SERVICE_UNAVAILABLE, "NOT_LEADER_OR_FOLLOWER", "The partition is moving", 1),
    errors.NotEnoughReplicas: ErrorKind(SERVICE_UNAVAILABLE, "NOT_ENOUGH_REPLICAS", "Too few replicas are in sync", 5),
    errors.TransactionAborted: ErrorKind(SERVICE_UNAVAILABLE, "TRANSACTION_ABORTED", "The transaction was aborted", 1),
    errors.AuthenticationFailed: ErrorKind(
        SERVICE_UNAVAILABLE, "AUTHENTICATION_FAILED", "Kafka rejected the credentials", 30
    ),
    errors.AuthorizationFailed: ErrorKind(
        FORBIDDEN, "AUTHORIZATION_FAILED", "The service lacks the permission in Kafka"
    ),
    errors.RebalanceInProgress: ErrorKind(SERVICE_UNAVAILABLE, "REBALANCE_IN_PROGRESS", "The group is rebalancing", 2),
    errors.CommitFailed: ErrorKind(CONFLICT, "COMMIT_FAILED", "Offsets could not be committed"),
    errors.GroupNotEmpty: ErrorKind(CONFLICT, "NON_EMPTY_GROUP", "The group is active"),
    errors.BrokerError: ErrorKind(BAD_GATEWAY, "BROKER_ERROR", "Kafka answered with an error"),
    errors.GroupNotFound: ErrorKind(NOT_FOUND, "GROUP_ID_NOT_FOUND", "No such group"),
    errors.OffsetOutOfRange: ErrorKind(BAD_REQUEST, "OFFSET_OUT_OF_RANGE", "Offset outside of the partition"),
    errors.NoOffsetForPartition: ErrorKind(NOT_FOUND, "NO_OFFSET", "No committed offset"),
    errors.LakeUnavailable: ErrorKind(SERVICE_UNAVAILABLE, "LAKE_UNAVAILABLE", "The lake cannot be read now", 5),
    errors.NotASnapshot: ErrorKind(
        INTERNAL_SERVER_ERROR, "NOT_A_SNAPSHOT", "A table of the lake cannot be read as a snapshot"
    ),
}


def kind_of(error: BaseException) -> ErrorKind:
    """Return how an error is answered: the kind of its class, or of the nearest base in the table; else UNEXPECTED."""
    for base in type(error).__mro__:
        kind = KINDS.get(base)
        if kind is not None:
            return kind
    return UNEXPECTED


def kind_of_record_error(error: BaseException) -> ErrorKind:
    """Return how the error of one record is answered as a problem.

    The status of a PenstockError is 504 if and only if Kafka may hold the record (`maybe_written`). The status of any
    other error is 500, and it is unknown whether Kafka holds the record.

    >>> timeout = errors.DeliveryTimeout("t-0: it was not written")
    >>> timeout.maybe_written = False
    >>> kind_of_record_error(timeout).status, kind_of_record_error(errors.DeliveryTimeout()).status
    (503, 504)
    """
    kind = kind_of(error)
    if isinstance(error, errors.PenstockError):
        if error.maybe_written:
            return kind._replace(status=GATEWAY_TIMEOUT, retry_after_s=kind.retry_after_s or 5)
        if kind.status == GATEWAY_TIMEOUT:
            return kind._replace(status=SERVICE_UNAVAILABLE)
    return kind


def failed_outcome(kind: ErrorKind) -> FailedOutcome:
    """Return the outcome of a failed record or transaction. `kind` is what `kind_of_record_error` returns.

    >>> timeout = kind_of_record_error(errors.DeliveryTimeout())
    >>> [failed_outcome(kind) for kind in (timeout, UNEXPECTED, kind_of_record_error(errors.RecordTooLarge()))]
    ['unknown', 'unknown', 'not_stored']
    """
    return "unknown" if kind.status == GATEWAY_TIMEOUT or kind is UNEXPECTED else "not_stored"


UNKNOWN_TOPIC = 40401
UNKNOWN_PARTITION = 40402
UNKNOWN_TOPIC_OR_PARTITION = 40403
NON_RETRIABLE = 50002
RETRIABLE = 50003
"""Error codes of REST Proxy. v3 has one code for unknown topics and partitions. The last two are failures of Kafka:
permanent ones, and those after which the same request may succeed later."""

_REST_PROXY = ("/topics", "/brokers", "/consumers", "/v3")
"""Path prefixes of Confluent REST Proxy's interface."""
_CONNECT = ("/connectors", "/connector-plugins", "/admin/loggers")
"""Path prefixes of Kafka Connect's interface, which has the same error format; the code is the HTTP status."""

_REST_CODES: Mapping[str, int] = {
    "KAFKA_INVALID_REQUEST": 40002,
    "INVALID_TOPIC": 40002,
    "UNAUTHORIZED": 40101,
    "FORBIDDEN": 40301,
    "TOPIC_NOT_ALLOWED": 40301,
    "AUTHORIZATION_FAILED": 40301,
    "UNKNOWN_PARTITION": UNKNOWN_PARTITION,
}
"""REST Proxy's error codes (rest-utils' KafkaExceptionMapper, kafka-rest's Errors). For unknown topics see
`rest_error_code`. The code of any other error is its status, or for statuses from 500 on NON_RETRIABLE or RETRIABLE."""


def has_rest_errors(path: str) -> bool:
    """Return whether errors at a path have the error format of REST Proxy and Kafka Connect.

    >>> paths = ("/v3", "/v3/none", "/consumers/g", "/admin/loggers/root", "/v1/topics", "/topics-of-mine", "/admin")
    >>> [has_rest_errors(path) for path in paths]
    [True, True, True, True, False, False, False]
    """
    return _is_below(path, _REST_PROXY + _CONNECT)


def _is_below(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)


def rest_error_code(kind: ErrorKind, path: str) -> int:
    """Return the `error_code` of a problem in the error format of REST Proxy and Kafka Connect.

    >>> unknown = kind_of(errors.UnknownTopicOrPartition())
    >>> rest_error_code(unknown, "/topics/t"), rest_error_code(unknown, "/v3/clusters/c/topics/t")
    (40401, 40403)
    >>> rest_error_code(kind_of(errors.BrokerNotAvailable()), "/v3/clusters")
    50003
    >>> rest_error_code(UNEXPECTED, "/topics")
    50002
    >>> rest_error_code(kind_of(errors.InvalidTopic()), "/v3/clusters/c/topics/a b")
    40002
    >>> rest_error_code(kind_of(errors.BrokerNotAvailable()), "/connectors")
    503
    """
    if _is_below(path, _CONNECT):
        return kind.status
    if kind.error_code == "UNKNOWN_TOPIC_OR_PARTITION":
        return UNKNOWN_TOPIC_OR_PARTITION if path.startswith("/v3/") else UNKNOWN_TOPIC
    if kind.error_code in _REST_CODES:
        return _REST_CODES[kind.error_code]
    if kind.status < INTERNAL_SERVER_ERROR:
        return kind.status
    return NON_RETRIABLE if kind.retry_after_s is None else RETRIABLE


def retry_after_header(seconds: int | None) -> dict[str, str]:
    """Return the header Retry-After of a problem; no header for None."""
    return {} if seconds is None else {"Retry-After": str(seconds)}


class ProblemDetails(TypedDict):
    """An error (RFC 9457). Some errors have members of their own."""

    type: Annotated[str, Field(examples=["about:blank"])]
    title: Annotated[str, Field(examples=["No such topic or partition"])]
    status: Annotated[int, Field(examples=[404])]
    detail: ErrorMessage
    error_code: Annotated[str, Field(examples=["UNKNOWN_TOPIC_OR_PARTITION"])]
    message: ErrorMessage


class RestError(TypedDict):
    """The body of an error response in the format of REST Proxy and Kafka Connect."""

    error_code: Annotated[int, Field(examples=[40401])]
    message: ErrorMessage


def error_format_of(path: str) -> tuple[str, type]:
    """Return the format of problems at a path: the media type, and the type of the body."""
    return (JSON_TYPE, RestError) if has_rest_errors(path) else (PROBLEM_TYPE, ProblemDetails)


class Problem(Exception):
    """An error response. In the format of RFC 9457, its body also has the members of `extra` (section 3.2)."""

    def __init__(
        self,
        kind: ErrorKind,
        detail: str,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.extra = extra or {}
        self.headers = {**(headers or {}), **retry_after_header(kind.retry_after_s)}

    @classmethod
    def of(cls, error: errors.PenstockError) -> Problem:
        """Return the response to an error of Penstock."""
        kind = kind_of(error)
        return cls(kind, str(error) or kind.title)

    def response_for(self, path: str) -> Response:
        """Return the response at a path: a problem of RFC 9457, or `{error_code, message}` if `has_rest_errors`."""
        if not has_rest_errors(path):
            return self.response()
        kind = self.kind
        body: RestError = {"error_code": rest_error_code(kind, path), "message": self.detail}
        return Response(msgspec.json.encode(body), kind.status, self.headers, JSON_TYPE)

    def response(self) -> Response:
        """Return the problem as an HTTP response."""
        kind = self.kind
        body = {
            "type": "about:blank",
            "title": kind.title,
            "status": kind.status,
            "detail": self.detail,
            "error_code": kind.error_code,
            "message": self.detail,
            **self.extra,
        }
        return Response(msgspec.json.encode(body), kind.status, self.headers, PROBLEM_TYPE)


def install_problem_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error of the app's routes as a problem."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error.response_for(request.url.path)

    async def on_penstock_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.PenstockError)
        problem = Problem.of(error)
        if problem.kind.status >= INTERNAL_SERVER_ERROR:
            log.warning("request failed", path=request.url.path, error=type(error).__name__, reason=str(error))
        return problem.response_for(request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = ErrorKind(error.status_code, f"HTTP_{error.status_code}", str(error.detail))
        problem = Problem(kind, f"{request.method} {request.url.path}: {error.detail}")
        response = problem.response_for(request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        details = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        problem = Problem(ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request"), "; ".join(details))
        return problem.response_for(request.url.path)

    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        log.error("request failed", path=request.url.path, error=type(error).__name__, exc_info=error)
        problem = Problem(UNEXPECTED, "the request failed; the service's log has the reason")
        return problem.response_for(request.url.path)

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(errors.PenstockError, on_penstock_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_unexpected_error)
