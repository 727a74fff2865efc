"""`POST /v1/topics/{topic}/events`: stores events. An event is reported as stored only if the broker has acknowledged
it.

| status | meaning |
|---|---|
| 200 | all events are stored |
| 207 | some are stored; each other event that was read is listed with its reason and outcome |
| 500, 504 | none is known to be stored, but some may be |
| other 4xx and 5xx | none is stored, and the same request may be sent again |
| 202 | only with `?ack=none`: events were accepted, without a guarantee |

NDJSON is parsed, sent and settled as it arrives, in constant memory. Every other format is buffered, up to
`max_body_bytes`. NDJSON is buffered as well with `?atomic=true` or an `Idempotency-Key`. A streamed response (see
`streaming_response`) always has the status 207. An invalid event does not affect the others, unless `?atomic=true`. If
the rest of a body need not be read (Kafka is unreachable, there are too many errors, the service shuts down), the
response names the first event that was not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http import field_types as of
from penstock.api.http.body import (
    BodyReader,
    BodyStalled,
    ClientDisconnected,
    ServiceShuttingDown,
    body_error_status,
    next_turn,
    read_body,
    too_many_events,
)
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.health import CheckResult
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import (
    ErrorKind,
    Problem,
    failed_outcome,
    kind_of,
    kind_of_record_error,
    retry_after_header,
)
from penstock.api.http.status_codes import (
    ACCEPTED,
    BAD_REQUEST,
    CLIENT_CLOSED_REQUEST,
    MULTI_STATUS,
    OK,
)
from penstock.api.ingest.admission import Admission, client_of
from penstock.api.ingest.atomic import (
    KEY_HEADER,
    REUSED,
    IdempotencyKey,
    KeyReused,
    StoredResponse,
    Transactor,
    fingerprint_headers,
    idempotency_key,
)
from penstock.api.ingest.event import Parsed, TopicReader, topic_reader
from penstock.api.ingest.event_sender import EventSender, IngestProducer
from penstock.api.ingest.metrics import IngestMetrics
from penstock.api.ingest.request_events import RequestEvents, check_media_type, open_events
from penstock.api.ingest.responses import OPENAPI, accepted_response, problem_of
from penstock.api.ingest.result import IngestResult, Outcome
from penstock.api.ingest.streaming_response import NDJSON_TYPE, StreamedResponse
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

ERRORS_UNLIMITED = 2**31
"""`max_errors` of a streamed response, which reports errors as they occur."""

EVENTS_PREFIX = "/v1/topics/"
EVENTS_SUFFIX = "/events"
_PLAIN_QUERY_PAIRS: dict[bytes, tuple[str, Any]] = {
    b"offsets=true": ("offsets", True),
    b"offsets=false": ("offsets", False),
    b"atomic=true": ("atomic", True),
    b"atomic=false": ("atomic", False),
    b"ack=all": ("ack", "all"),
    b"ack=none": ("ack", "none"),
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The parameters of one request."""

    topic: str
    offsets: bool = False
    atomic: bool = False
    acknowledged: bool = True
    client: str = ""
    principal: str = ""


class Ingest:
    """The ingest endpoint over a producer. `kafka` checks whether the brokers answer; None for no check."""

    def __init__(
        self,
        producer: IngestProducer,
        settings: IngestSettings,
        registry: CollectorRegistry,
        *,
        clock: Clock = SYSTEM_CLOCK,
        kafka: Callable[[], CheckResult] | None = None,
        transactor: Transactor | None = None,
    ) -> None:
        """Without `transactor`, `?atomic=true` and Idempotency-Keys are rejected.

        Raises ConfigError if a JSON Schema cannot be used.
        """
        self._producer = producer
        self._settings = settings
        self._clock = clock
        self._transactor = transactor
        self._readers = {topic: topic_reader(settings, own) for topic, own in settings.topics.items()}
        self._reader = topic_reader(settings, settings.default_topic)
        self.admission = Admission(producer, settings, clock, kafka)
        self.metrics = IngestMetrics(registry)
        self.router = self._ingest_routes()

    def __repr__(self) -> str:
        return f"Ingest({self.admission!r})"

    @property
    def active(self) -> int:
        """The number of requests in progress."""
        return self.admission.active

    def drain(self, grace_ms: int) -> None:
        """Start the shutdown: incomplete bodies have `grace_ms` left, and new requests are rejected with 503."""
        self.admission.drain.begin(grace_ms)

    def _ingest_routes(self) -> APIRouter:
        router = APIRouter(tags=["ingest"])

        @router.post(
            "/v1/topics/{topic}/events",
            summary="Store events (NDJSON, a JSON array, CloudEvents); answered after Kafka's acknowledgement",
            **OPENAPI,
        )
        async def post_events(
            topic: of.Topic,
            request: Request,
            offsets: bool = False,
            atomic: bool = False,
            ack: Literal["all", "none"] = "all",
        ) -> Response:
            return await self.handle(topic, request, offsets=offsets, atomic=atomic, ack=ack)

        return router

    async def handle(
        self, topic: str, request: Request, *, offsets: bool = False, atomic: bool = False, ack: str = "all"
    ) -> Response:
        """Handle one request and return its response.

        Raises Problem or PenstockError if the request is rejected as a whole, if the client closes the connection
        within the body, or if a transaction fails. In the last two cases events may be stored.
        """
        client = client_of(request)
        principal = str(request.scope.get("principal", ""))
        options = RequestOptions(topic, offsets, atomic, ack == "all", client, principal)
        with self.tracking(topic, client):
            return await self._store_events(options, request)

    def fast_path(self, app: ASGIApp) -> FastPath:
        """Return the middleware that passes ordinary requests to `handle` before the router."""
        return FastPath(app, self)

    @contextmanager
    def tracking(self, topic: str, client: str) -> Iterator[None]:
        """Count a request as in progress within the context.

        ClientDisconnected counts as a request with the status 499, any other Problem or PenstockError as a rejected
        request. Raises Problem (429) if the client has too many requests in progress.
        """
        try:
            self.admission.enter(client)
            try:
                yield
            finally:
                self.admission.leave(client)
        except (Problem, PenstockError) as e:
            self._count_failed_request(topic, e)
            raise

    def _count_failed_request(self, topic: str, error: Problem | PenstockError) -> None:
        if isinstance(error, ClientDisconnected):
            # The request does not count as rejected, because some of its records may be stored.
            log.info("client closed the connection within its body", topic=topic)
            self.metrics.answered(topic, CLIENT_CLOSED_REQUEST)
            return
        kind = error.kind if isinstance(error, Problem) else kind_of(error)
        self.metrics.rejected_request(topic if self.admission.has_accepted(topic) else "", kind)

    async def _store_events(self, options: RequestOptions, request: Request) -> Response:
        media_type = check_media_type(request)
        # The body joins the queue before anything is awaited, so the queue has the order of arrival.
        body = self.admission.body(request)
        await self.admission.check(options.topic, options.client)
        if options.atomic or KEY_HEADER in request.headers:
            return await self._store_atomically(options, request, media_type, body)
        reader = self.reader(options.topic)
        events = await open_events(request, media_type, body, options.topic, reader, self._settings, self._clock)
        if not options.acknowledged:
            return await self._store_unacknowledged(options, events, body)
        if events.unit == "line" and NDJSON_TYPE in request.headers.get("accept", ""):
            return self._streamed_response(options, events, body)
        sender = self._new_sender(options, events.unit)
        sender.result.on_stored = partial(self._count_stored, options)
        try:
            await self._send_events(events, sender, body)
        except ClientDisconnected:
            await sender.finish()
            raise
        self._count_request(options, sender.result, body)
        return self._result_response(sender.result)

    def _new_sender(self, options: RequestOptions, unit: Literal["line", "index"], max_errors: int = 0) -> EventSender:
        settings = self._settings
        result = IngestResult(unit, max_errors or settings.max_errors, settings.max_offsets if options.offsets else 0)
        result.on_error = partial(self.metrics.failed_record, options.topic)
        return EventSender(self._producer, result, settings)

    async def _send_events(self, events: RequestEvents, sender: EventSender, body: BodyReader) -> None:
        try:
            while await events.wait():
                with await body.wait_for_turn(events.position) as turn:
                    keep_reading = await sender.send(events.parse_batch(), turn)
                if not keep_reading:
                    sender.result.stop(events.position, sender.result.must_stop)
                    break
        except (BodyStalled, CorruptBody, ServiceShuttingDown) as e:
            sender.result.stop(events.position, str(e), body_error_status(e))
        await sender.finish()

    def _streamed_response(self, options: RequestOptions, events: RequestEvents, body: BodyReader) -> Response:
        sender = self._new_sender(options, "line", ERRORS_UNLIMITED)
        sender.result.on_stored = partial(self._count_stored, options)
        tracking = ExitStack()
        tracking.enter_context(self.admission.keep_tracking(options.client))

        def on_end(is_complete: bool) -> None:
            tracking.close()
            self._count_request(options, sender.result, body, None if is_complete else CLIENT_CLOSED_REQUEST)

        return StreamedResponse(events, sender, body, self._clock, self._settings.body_timeout_ms, on_end)

    async def _store_unacknowledged(self, options: RequestOptions, events: RequestEvents, body: BodyReader) -> Response:
        sender = self._new_sender(options, events.unit)
        accepted_count = 0
        unsent = events.position
        try:
            while await events.wait():
                with await body.wait_for_turn(events.position) as turn:
                    accepted_count += await sender.send_unacknowledged(events.parse_batch(), turn)
                unsent = events.position
                if sender.result.must_stop:
                    sender.result.stop(unsent, sender.result.must_stop)
                    break
        except PenstockError as e:
            # 1. Reading ended early: the events that were read are accepted.
            # 2. The producer has no room for the last batch: the client must send it again.
            if not accepted_count and not isinstance(e, BodyStalled | CorruptBody | ServiceShuttingDown):
                raise
            sender.result.stop(unsent, str(e), body_error_status(e))
        finally:
            self.admission.charge(options.client, accepted_count)
        self.metrics.answered(options.topic, ACCEPTED if accepted_count else sender.result.status)
        return (
            accepted_response(sender.result, accepted_count) if accepted_count else self._result_response(sender.result)
        )

    async def _store_atomically(
        self, options: RequestOptions, request: Request, media_type: str, body: BodyReader
    ) -> Response:
        """Store the events in one transaction, with the Idempotency-Key if there is one."""
        if self._transactor is None or not options.acknowledged:
            reason = "ack=none promises nothing" if not options.acknowledged else "this service has no transactions"
            kind = ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request")
            raise Problem(kind, f"?atomic=true, Idempotency-Key: {reason}")
        content = await read_body(body, self._settings.max_body_bytes)
        key = self._idempotency_key(options, request, content)
        reader = self.reader(options.topic)
        buffered = BodyReader.of(content)
        events = await open_events(request, media_type, buffered, options.topic, reader, self._settings, self._clock)
        sender = self._new_sender(options, events.unit)
        parsed = await self._read_all(events, sender, body)
        if options.atomic and sender.result.errors:
            sender.result.withheld_count = len(parsed.records)
            response = self._result_response(sender.result)
        elif parsed.records:
            response = await self._store_in_transaction(self._transactor, key, parsed, sender.result)
        else:
            response = self._result_response(sender.result)
        self._count_request(options, sender.result, body, response.status_code)
        self._count_stored(options, sender.result.stored_count)
        return response

    def _idempotency_key(self, options: RequestOptions, request: Request, body: bytes) -> IdempotencyKey | None:
        name = request.headers.get(KEY_HEADER)
        if name is None:
            return None
        own = self._settings.for_topic(options.topic)
        headers = fingerprint_headers(request.headers.items(), own.key_header, own.time_header)
        return idempotency_key(name, options.topic, body, headers, atomic=options.atomic, principal=options.principal)

    async def _read_all(self, events: RequestEvents, sender: EventSender, body: BodyReader) -> Parsed:
        """Parse the events up to the first error beyond `max_errors`. Raises Problem (413) for too many events."""
        parsed = Parsed()
        keep_reading = True
        while keep_reading and await events.wait():
            with await next_turn(body, events.position):
                batch = events.parse_batch()
            keep_reading = sender.add_errors(batch)
            parsed.records += batch.records
            parsed.positions += batch.positions
            if len(parsed.records) > self._settings.max_body_events:
                raise too_many_events(self._settings.max_body_events)
        return parsed

    async def _store_in_transaction(
        self, transactor: Transactor, key: IdempotencyKey | None, parsed: Parsed, result: IngestResult
    ) -> Response:
        """Send the records in one transaction. Raises Problem if it is not known to be committed."""

        def make_stored_response(outcomes: Sequence[Outcome]) -> StoredResponse:
            # A transaction with a key is sent again after another service fenced it. Only the last outcomes count.
            result.discard_acknowledgements()
            result.add_outcomes(parsed.positions, outcomes)
            return StoredResponse(result.status, msgspec.json.encode(result.body()))

        try:
            if key is None:
                response = make_stored_response(await transactor.send_atomic(parsed.records))
                is_replayed = False
            else:
                response, is_replayed = await transactor.send_keyed(key, parsed.records, make_stored_response)
                if is_replayed:
                    result.discard_acknowledgements()
        except KeyReused as e:
            raise Problem(REUSED, str(e)) from None
        except PenstockError as e:
            result.discard_acknowledgements()
            kind = kind_of_record_error(e)
            extra = {"stored": 0, "outcome": failed_outcome(kind), "events": len(parsed.records)}
            raise Problem(kind, str(e) or kind.title, extra) from None
        headers = {"Idempotency-Replayed": "true"} if is_replayed else {}
        return Response(response.body, response.status, headers, "application/json")

    def reader(self, topic: str) -> TopicReader:
        """Return the reader of the topic's events."""
        return self._readers.get(topic, self._reader)

    def latest_ms(self) -> int:
        """Return the latest event time that is accepted now, in ms since the epoch."""
        return self._clock.now_ms() + self._settings.max_future_ms

    def _count_request(
        self, options: RequestOptions, result: IngestResult, body: BodyReader, status: int | None = None
    ) -> None:
        """Count an answered request."""
        self.metrics.answered(options.topic, status or result.status, body.since_last_byte_s)

    def _count_stored(self, options: RequestOptions, stored_count: int) -> None:
        """Count stored records, and charge the client for them."""
        self.metrics.stored(options.topic, stored_count)
        self.admission.charge(options.client, stored_count)

    def _result_response(self, result: IngestResult) -> Response:
        status = result.status
        if status in (OK, MULTI_STATUS):
            return json_response(result.body(), status, retry_after_header(result.retry_after_s))
        return problem_of(result).response()


class FastPath:
    """ASGI middleware that passes ordinary ingest requests directly to their handler.

    An ordinary request is a POST to `/v1/topics/{topic}/events` whose query `plain_query` can parse. All other requests
    go through the router, which also documents the route. The responses are the same.
    """

    def __init__(self, app: ASGIApp, ingest: Ingest) -> None:
        self._app = app
        self._ingest = ingest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.startswith(EVENTS_PREFIX) and path.endswith(EVENTS_SUFFIX):
                topic = path[len(EVENTS_PREFIX) : -len(EVENTS_SUFFIX)]
                # Routing and parameter parsing double the cost of a request with one record.
                query = plain_query(scope["query_string"])
                if topic and "/" not in topic and query is not None:
                    await self._handle_directly(topic, query, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _handle_directly(
        self, topic: str, query: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            response = await self._ingest.handle(topic, Request(scope, receive), **query)
        except Problem as e:
            response = e.response()
        except PenstockError as e:
            response = Problem.of(e).response()
        await response(scope, receive, send)


def plain_query(query: bytes) -> dict[str, Any] | None:
    """Return the parameters of a query if all its pairs are in `_PLAIN_QUERY_PAIRS`, and no name is there twice.

    Otherwise return None: the router must parse it.

    >>> plain_query(b"offsets=true&ack=none"), plain_query(b"offsets=maybe"), plain_query(b"")
    ({'offsets': True, 'ack': 'none'}, None, {})
    """
    params: dict[str, Any] = {}
    for pair in query.split(b"&") if query else ():
        if pair not in _PLAIN_QUERY_PAIRS:
            return None
        name, value = _PLAIN_QUERY_PAIRS[pair]
        if name in params:
            return None
        params[name] = value
    return params
