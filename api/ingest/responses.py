"""The responses of ingest: their types for the OpenAPI document, and the responses if not all events are stored."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, Required

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.body import body_error_code
from penstock.api.http.content_encoding import STREAMS
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, FailedOutcome, Problem
from penstock.api.http.status_codes import ACCEPTED
from penstock.api.ingest.cloudevents import BATCH_TYPE, STRUCTURED_TYPE
from penstock.api.ingest.event import RecordError
from penstock.api.ingest.result import IngestResult

NOTHING_TITLE = "No event was stored"
UNKNOWN_TITLE = "Events may or may not be stored"
NO_PROMISE = "nothing was acknowledged: accepted events may still be lost without a notice"

NOTHING_STORED = {
    400: "no event is valid (with atomic=true: one is invalid), or the body is not JSON, or cannot be decompressed",
    403: "the topic does not accept events",
    404: "no such topic",
    408: "the body did not arrive in time",
    413: "the body, or every event, is too large",
    415: "not NDJSON, JSON or a CloudEvent, or a Content-Encoding that is not in the response's Accept-Encoding",
    422: "the Idempotency-Key was used for another request",
    429: "too many records wait for Kafka, or the client exceeds a limit: try again after Retry-After",
    503: "Kafka cannot be reached, or the service is shutting down; nothing is stored: try again after Retry-After",
    504: "Kafka did not acknowledge in time: events whose outcome is unknown may or may not be stored; "
    "if a stored one is sent again, it is stored twice",
}
CLOUD_EVENT = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order", "data": {"id": 1}}

ONLY_ACKNOWLEDGED = frozenset({"stored", "last_offsets", "not_stored", "unknown"})
"""Members of a response that require acknowledgements."""

ErrorCode = Annotated[str, Field(examples=["MALFORMED_JSON"])]
Position = Annotated[int, Field(examples=[2])]


class EventError(TypedDict, total=False):
    """Why an event is not known to be stored. It has the event's `line` in NDJSON, else its `index`."""

    line: Position
    index: Position
    column: Position
    error_code: Required[ErrorCode]
    message: Required[Annotated[str, Field(examples=["not JSON: the value ends too early"])]]
    outcome: Required[FailedOutcome]


class EventOffset(TypedDict, total=False):
    """The partition and the offset of a stored event."""

    line: Position
    index: Position
    partition: Required[of.Partition]
    offset: Required[of.Offset]


class Stopped(TypedDict, total=False):
    """The first event that was not read, if reading stopped before the body's end."""

    stopped_at_line: Position
    stopped_at_index: Position
    stop_reason: Annotated[str, Field(examples=["the service is shutting down"])]


class AllStored(Stopped):
    """All events are stored. `offsets` is present if the request that stored them had `?offsets=true`."""

    stored: of.Count
    last_offsets: Annotated[dict[str, int], Field(examples=[{"0": 17}])]
    offsets: NotRequired[list[EventOffset]]
    offsets_omitted: NotRequired[of.Count]


class SomeStored(AllStored):
    """Some events are stored. The errors name every other event that was read, also one that may be stored.

    If an event is invalid with `?atomic=true`, none is stored, and the errors name only the invalid events.
    """

    not_stored: of.Count
    unknown: of.Count
    errors: list[EventError]


class Accepted(Stopped):
    """Events were accepted without a guarantee."""

    accepted: of.Count
    promise: Annotated[str, Field(examples=[NO_PROMISE])]
    errors: NotRequired[list[EventError]]


OPENAPI: dict[str, Any] = {
    "openapi_extra": {
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "schema": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 255,
                    "examples": ["order-7"],
                },
                "description": "the same request with the same key is stored once and gets the same response",
            },
        ],
        "requestBody": {
            "required": True,
            "description": f"uncompressed, or compressed with a Content-Encoding of {' or '.join(STREAMS)}",
            "content": {
                "application/x-ndjson": {"schema": {"type": "string", "examples": ['{"id":1}\n{"id":2}\n']}},
                "application/json": {
                    "schema": {
                        "oneOf": [{"type": "object"}, {"type": "array", "items": {}}],
                        "examples": [[{"id": 1}]],
                    },
                },
                STRUCTURED_TYPE: {"schema": {"type": "object", "examples": [CLOUD_EVENT]}},
                BATCH_TYPE: {"schema": {"type": "array", "items": {"type": "object"}, "examples": [[CLOUD_EVENT]]}},
            },
        },
    },
    "responses": {
        200: {"description": "all events are stored", "model": AllStored},
        202: {"description": "ack=none: accepted without a guarantee", "model": Accepted},
        207: {
            "description": "some events are stored; the errors name the others. With Accept: application/x-ndjson the "
            "response to an NDJSON body, line by line as the events are settled",
            "model": SomeStored,
            "content": {"application/x-ndjson": {}},
        },
        **{status: {"description": text} for status, text in NOTHING_STORED.items()},
    },
}


def problem_of(result: IngestResult) -> Problem:
    """Return the response if no event is known to be stored."""
    status = result.status
    title = UNKNOWN_TITLE if result.unknown_count else NOTHING_TITLE
    if result.errors:
        first = min(result.errors, key=lambda e: (e.status != status, e.position))
        error_code = first.error_code
        detail = _describe_first_event_error(result, first)
    else:
        error_code = body_error_code(status)
        detail = result.stop_reason
    return Problem(ErrorKind(status, error_code, title, result.retry_after_s), detail, result.body())


def accepted_response(result: IngestResult, accepted_count: int) -> Response:
    """Return the response 202: the events were accepted without waiting for an acknowledgement."""
    body = {name: value for name, value in result.body().items() if name not in ONLY_ACKNOWLEDGED}
    return json_response({"accepted": accepted_count, "promise": NO_PROMISE} | body, ACCEPTED)


def _describe_first_event_error(result: IngestResult, first: RecordError) -> str:
    """Return the `detail` of ingest's response: the error `first`, with the number of the other errors."""
    count = len(result.errors)
    coordinates = f"{result.unit} {first.position}" + (f", column {first.column}" if first.column is not None else "")
    return f"{coordinates}: {first.message}" + (f" (and {count - 1} more)" if count > 1 else "")
