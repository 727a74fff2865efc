"""Answers of ingest if not everything is stored, and their descriptions in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from penstock.api.http.content_encoding import STREAMS
from penstock.api.http.problem import ErrorKind, Problem, json_response
from penstock.api.ingest.bodies import stop_code
from penstock.api.ingest.cloudevents import BATCH_TYPE, STRUCTURED_TYPE
from penstock.api.ingest.event import RecordError
from penstock.api.ingest.result import IngestResult

NOTHING_TITLE = "No event was stored"
UNKNOWN_TITLE = "Events may or may not be stored"
NO_PROMISE = "nothing was acknowledged: accepted events may still be lost without a notice"

NOTHING_STORED = {
    400: "no event is valid (with atomic=true: one is invalid), or the body is not JSON, or cannot be decompressed",
    403: "the topic does not take events",
    404: "no such topic",
    408: "the body stopped coming",
    413: "the body, or every event, is too large",
    415: "neither NDJSON nor JSON nor a CloudEvent, or a Content-Encoding that is not in the answer's Accept-Encoding",
    422: "the Idempotency-Key was used for another request",
    429: "too many records wait for Kafka, or the client exceeds a limit: try again after Retry-After",
    503: "Kafka cannot be reached, or the service is shutting down; nothing is stored: try again after Retry-After",
    504: "Kafka did not acknowledge in time: events whose outcome is unknown may or may not be stored; "
    "if a stored one is sent again, it is stored twice",
}
CLOUD_EVENT = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order", "data": {"id": 1}}
STORED = {"stored": 2, "last_offsets": {"0": 17}}
MIXED = STORED | {
    "not_stored": 1,
    "unknown": 0,
    "errors": [{"line": 2, "column": 6, "error_code": "MALFORMED_JSON", "message": "…", "outcome": "not_stored"}],
}

OPENAPI: dict[str, Any] = {
    "openapi_extra": {
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[A-Za-z0-9_-]+$"},
                "description": "the same request with the same key is stored once and gets the same answer",
            },
        ],
        "requestBody": {
            "required": True,
            "description": f"as it is, or compressed with a Content-Encoding of {' or '.join(STREAMS)}",
            "content": {
                "application/x-ndjson": {"schema": {"type": "string"}, "example": '{"id":1}\n{"id":2}\n'},
                "application/json": {
                    "schema": {"oneOf": [{"type": "object"}, {"type": "array", "items": {}}]},
                    "example": [{"id": 1}],
                },
                STRUCTURED_TYPE: {"schema": {"type": "object"}, "example": CLOUD_EVENT},
                BATCH_TYPE: {"schema": {"type": "array", "items": {"type": "object"}}, "example": [CLOUD_EVENT]},
            },
        },
    },
    "responses": {
        200: {"description": "all events are stored", "content": {"application/json": {"example": STORED}}},
        202: {"description": "ack=none: accepted without a guarantee"},
        207: {
            "description": "some events are stored; the errors name the others. With Accept: application/x-ndjson the "
            "answer to an NDJSON body, line by line as the events are settled",
            "content": {"application/json": {"example": MIXED}, "application/x-ndjson": {}},
        },
        **{
            status: {"description": text, "content": {"application/problem+json": {}}}
            for status, text in NOTHING_STORED.items()
        },
    },
}


def problem_of(result: IngestResult) -> Problem:
    """Return the answer if no event is known to be stored."""
    status, retry_after_s = result.status, result.retry_after_s
    title = UNKNOWN_TITLE if result.unknown_count else NOTHING_TITLE
    if not result.errors:
        kind, detail = ErrorKind(status, stop_code(status), title, retry_after_s), result.stop_reason
    else:
        first = min(result.errors, key=lambda e: (e.status != status, e.position))
        kind, detail = ErrorKind(status, first.error_code, title, retry_after_s), _about(result, first)
    return Problem(kind, detail, result.body())


def accepted(result: IngestResult, taken: int) -> Response:
    """Return 202: the events were accepted without waiting for an acknowledgement."""
    body = {key: value for key, value in result.body().items() if key not in ("stored", "last_offsets", "unknown")}
    body.pop("not_stored", None)
    return json_response({"accepted": taken, "promise": NO_PROMISE} | body, 202)


def retry_after(seconds: int | None) -> dict[str, str]:
    """Return the header with the seconds after which to try again."""
    return {} if seconds is None else {"Retry-After": str(seconds)}


def _about(result: IngestResult, first: RecordError) -> str:
    count = len(result.errors)
    where = f"{result.unit} {first.position}" + (f", column {first.column}" if first.column is not None else "")
    return f"{where}: {first.message}" + (f" (and {count - 1} more)" if count > 1 else "")
