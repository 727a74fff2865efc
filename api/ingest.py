"""`POST /v1/topics/{topic}/events`: events in, and a 2xx for what the broker acknowledged, never for anything else.

200: all are stored; 207: some are, and each of the others is named with its reason and outcome; 504: none is known to
be, and some may be; any other 4xx and 5xx: none is, so that the same request may be sent again. NDJSON is read, sent
and settled as it arrives, in constant memory; a JSON array is read whole, up to `max_body_bytes`. A bad event fails
alone. Where the rest of a body is not worth reading (Kafka is down, too many errors, the service leaves), the answer
says from which line on nothing was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry

from api.body import BodyReader, BodyStalled, ClientGone, Drain, ServiceLeaving, too_long
from api.event import EventRefused, RecordError
from api.health import CheckResult
from api.ingest_request import IngestProducer, IngestRequest
from api.ndjson import EventParser, NdjsonReader, array_elements
from api.problem import ErrorKind, Problem, json_response
from api.settings import IngestSettings
from api.tally import Tally
from shared.common import metrics
from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.errors import BrokerNotAvailable, IllegalState, KafkaTimeout
from shared.common.log import get_logger
from shared.common.topic_names import check_topic_name, is_internal

log = get_logger(__name__)

NDJSON_TYPES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})
JSON_ARRAY_TYPE = "application/json"

CLIENT_CLOSED_REQUEST = 499
"""What is logged for a client that did not wait; nobody receives it."""


class Ingest:
    """The ingest endpoint over a producer; `kafka` says whether the brokers answer, where that is known."""

    def __init__(
        self,
        producer: IngestProducer,
        settings: IngestSettings,
        registry: CollectorRegistry,
        *,
        clock: Clock = SYSTEM_CLOCK,
        kafka: Callable[[], CheckResult] | None = None,
    ) -> None:
        self._producer = producer
        self._settings = settings
        self._clock = clock
        self._kafka = kafka
        self._drain = Drain()
        self.active = 0
        """Requests that are being worked on."""
        self._requests = metrics.counter(registry, "ingest_requests", "Requests answered.", "topic", "status")
        self._stored = metrics.counter(registry, "ingest_stored_records", "Records acknowledged by Kafka.", "topic")
        self._refused = metrics.counter(
            registry, "ingest_refused_records", "Events not stored, by reason.", "topic", "error_code"
        )
        self._unknown = metrics.counter(
            registry,
            "ingest_unknown_records",
            "Events that may or may not be stored, by reason.",
            "topic",
            "error_code",
        )
        self._seconds = metrics.histogram(registry, "ingest_request_seconds", "First byte to answer.", "topic")
        self.router = self._routes()

    def __repr__(self) -> str:
        return f"Ingest(active={self.active}, {self._drain!r})"

    def drain(self, grace_ms: int) -> None:
        """Give the bodies that are still coming `grace_ms`; new requests are refused with 503."""
        self._drain.begin(grace_ms)

    def _routes(self) -> APIRouter:
        router = APIRouter(tags=["ingest"])

        @router.post(
            "/v1/topics/{topic}/events",
            summary="Store events (NDJSON, or a JSON array); answered after Kafka's acknowledgement",
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/x-ndjson": {"schema": {"type": "string"}, "example": '{"id":1}\n{"id":2}\n'},
                        "application/json": {"schema": {"type": "array", "items": {}}, "example": [{"id": 1}]},
                    },
                }
            },
            responses={
                200: {"description": "all events are stored"},
                207: {"description": "some events are stored; the errors name the others"},
                **{
                    status: {"description": text, "content": {"application/problem+json": {}}}
                    for status, text in NOTHING_STORED.items()
                },
            },
        )
        async def post_events(topic: str, request: Request, offsets: bool = False) -> Response:
            self.active += 1
            try:
                return await self._post(topic, request, offsets)
            finally:
                self.active -= 1

        return router

    async def _post(self, topic: str, request: Request, offsets: bool) -> Response:
        self._refuse_while_leaving()
        unit = _unit(request)
        await self._check_topic(topic)
        started_ms = self._clock.monotonic_ms()
        tally = Tally(unit, self._settings.max_errors, self._settings.max_offsets if offsets else 0)
        work = IngestRequest(self._producer, tally, self._settings)
        parser = EventParser(topic, self._settings)
        body = BodyReader(request.receive, self._drain, self._settings.body_timeout_ms)
        try:
            await (self._lines if unit == "line" else self._array)(request, body, parser, work)
            await work.finish()
        except ClientGone:
            work.abandon()
            log.info("client closed the connection within its body", topic=topic, stored=tally.stored_count)
            self._requests.labels(topic=topic, status=CLIENT_CLOSED_REQUEST).inc()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        self._count(topic, tally, started_ms)
        return self._answer(tally)

    async def _lines(self, request: Request, body: BodyReader, parser: EventParser, work: IngestRequest) -> None:
        reader = NdjsonReader(parser, self._settings.max_line_bytes)
        try:
            while (chunk := await body.next()) is not None:
                if not await work.take(reader.feed(chunk, self._clock.now_ms())):
                    work.tally.stop(reader.next_line, work.tally.must_stop)
                    return
            await work.take(reader.close(self._clock.now_ms()))
        except (BodyStalled, ServiceLeaving) as e:
            work.tally.stop(reader.next_line, str(e))

    async def _array(self, request: Request, body: BodyReader, parser: EventParser, work: IngestRequest) -> None:
        max_body_bytes = self._settings.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_body_bytes:
            raise too_long(max_body_bytes)
        try:
            batches = array_elements(await body.all(max_body_bytes), self._settings.max_line_bytes)
        except BodyStalled as e:
            raise Problem(ErrorKind(408, "BODY_STALLED", "Body incomplete"), str(e)) from None
        except ServiceLeaving as e:
            raise Problem.of(IllegalState(str(e))) from None
        except EventRefused as e:
            place = "" if e.column is None else f" at line {e.line}, column {e.column}"
            extra = {} if e.column is None else {"line": e.line, "column": e.column}
            raise Problem(ErrorKind(400, e.error_code, "Not a JSON array"), f"{e}{place}", extra) from None
        for first, values in batches:
            if not await work.take(parser.parse(values, first, self._clock.now_ms())):
                work.tally.stop(first + len(values), work.tally.must_stop)
                return

    def _refuse_while_leaving(self) -> None:
        if self._drain.begun:
            raise IllegalState("the service is shutting down")
        if self._kafka is not None and not (check := self._kafka()).ok:
            raise BrokerNotAvailable(f"Kafka cannot be reached: {check.detail}")

    async def _check_topic(self, topic: str) -> None:
        check_topic_name(topic)
        allowed = self._settings.for_topic(topic).allowed
        # What Penstock itself writes needs an entry of its own in the settings.
        if not allowed or (is_internal(topic) and topic not in self._settings.topics):
            raise Problem(ErrorKind(403, "TOPIC_NOT_ALLOWED", "Topic not allowed"), f"{topic}: events are not accepted")
        try:
            await self._producer.partitions_for(topic)
        except KafkaTimeout as e:  # nothing was handed over yet
            raise BrokerNotAvailable(str(e)) from None

    def _count(self, topic: str, tally: Tally, started_ms: int) -> None:
        self._requests.labels(topic=topic, status=tally.status).inc()
        self._stored.labels(topic=topic).inc(tally.stored_count)
        for error in tally.errors:
            counter = self._unknown if error.outcome == "unknown" else self._refused
            counter.labels(topic=topic, error_code=error.error_code).inc()
        self._seconds.labels(topic=topic).observe((self._clock.monotonic_ms() - started_ms) / 1000)

    def _answer(self, tally: Tally) -> Response:
        status, retry_after_s = tally.status, tally.retry_after_s
        if status in (200, 207):
            return json_response(tally.body(), status, _retry_after(retry_after_s))
        title = UNKNOWN_TITLE if tally.unknown_count else NOTHING_TITLE
        if not tally.errors:
            kind, detail = ErrorKind(status, "NOTHING_READ", title, retry_after_s), tally.stop_reason
        else:
            first = min(tally.errors, key=lambda e: (e.status != status, e.position))
            kind, detail = ErrorKind(status, first.error_code, title, retry_after_s), _about(tally, first)
        return Problem(kind, detail, tally.body()).response()


NOTHING_TITLE = "No event was stored"
UNKNOWN_TITLE = "Events may or may not be stored"

NOTHING_STORED = {
    400: "no event was good, or the body is not JSON",
    403: "the topic does not take events",
    404: "no such topic",
    408: "the body stopped coming",
    413: "the body, or every event, is too large",
    415: "neither NDJSON nor JSON",
    429: "too much is waiting for Kafka: try again after Retry-After",
    503: "Kafka cannot be reached, or the service is leaving; nothing is stored: try again after Retry-After",
    504: "Kafka did not acknowledge in time: the events whose outcome is unknown may or may not be stored, and are "
    "there twice where they are sent again and had been",
}


def _unit(request: Request) -> Literal["line", "index"]:
    encoding = request.headers.get("content-encoding", "identity").lower()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind = ErrorKind(415, "UNSUPPORTED_MEDIA_TYPE", "Unsupported body")
    if encoding != "identity":
        raise Problem(kind, f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is")
    if media_type in NDJSON_TYPES:
        return "line"
    if media_type == JSON_ARRAY_TYPE:
        return "index"
    raise Problem(kind, f"Content-Type must be application/x-ndjson or application/json, got {media_type[:60]!r}")


def _retry_after(seconds: int | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(seconds)}


def _about(tally: Tally, first: RecordError) -> str:
    count = len(tally.errors)
    where = f"{tally.unit} {first.position}" + (f", column {first.column}" if first.column is not None else "")
    return f"{where}: {first.message}" + (f" (and {count - 1} more)" if count > 1 else "")
