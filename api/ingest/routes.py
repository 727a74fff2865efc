"""`POST /v1/topics/{topic}/events`: stores events. A 2xx answer reports only what the broker has acknowledged.

| status | meaning |
|---|---|
| 200 | all events are stored |
| 207 | some are stored; each of the others is listed with its reason and outcome |
| 504 | none is known to be stored, but some may be |
| other 4xx and 5xx | none is stored, and the same request may be sent again |
| 202 | the answer to `?ack=none` alone, without a guarantee |

NDJSON is read, sent and settled as it arrives, in constant memory. Every other format is read whole, up to
`max_body_bytes`. An invalid event fails alone, unless `?atomic=true`. If reading the rest of a body is pointless (Kafka
is down, too many errors, the service shuts down), the answer names the first event that was not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry

from penstock.api.http import field_types as of
from penstock.api.http.body import BodyReader, BodyStalled, ClientGone, ServiceLeaving
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.health import CheckResult
from penstock.api.http.problem import ErrorKind, Problem, json_response, kind_of, kind_of_record
from penstock.api.ingest.admission import Admission, client_of
from penstock.api.ingest.atomic import (
    KEY_HEADER,
    REUSED,
    IdempotencyKey,
    KeyReused,
    StoredResponse,
    Transactor,
    idempotency_key,
    told_by_headers,
)
from penstock.api.ingest.batches import IngestProducer, IngestRequest
from penstock.api.ingest.bodies import Events, check_media_type, next_turn, open_events, stop_status, whole_body
from penstock.api.ingest.event import TopicReader, topic_reader
from penstock.api.ingest.metrics import IngestMetrics
from penstock.api.ingest.ndjson import Parsed, TooManyEvents
from penstock.api.ingest.responses import OPENAPI, accepted, problem_of, retry_after
from penstock.api.ingest.result import IngestResult, Outcome
from penstock.api.ingest.streaming_response import NDJSON_TYPE, StreamedAnswer
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import BufferExhausted, PenstockError
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status in metrics of a client that did not wait. No client receives it."""

ERRORS_WITHOUT_BOUND = 2**31


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one request, without its events."""

    topic: str
    offsets: bool = False
    atomic: bool = False
    acknowledged: bool = True
    client: str = ""
    principal: str = ""


class Ingest:
    """The ingest endpoint over a producer. `kafka` checks whether the brokers answer; None if nothing checks it."""

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
        """Without `transactor` atomic requests are rejected. Raises ConfigError if a JSON Schema cannot be used."""
        self._producer = producer
        self._settings = settings
        self._clock = clock
        self._transactor = transactor
        self._readers = {topic: topic_reader(settings, own) for topic, own in settings.topics.items()}
        self._reader = topic_reader(settings, settings.default_topic)
        self.admission = Admission(producer, settings, clock, kafka)
        self.metrics = IngestMetrics(registry)
        self.router = self._routes()

    def __repr__(self) -> str:
        return f"Ingest({self.admission!r})"

    @property
    def active(self) -> int:
        """The number of requests in progress."""
        return self.admission.active

    def drain(self, grace_ms: int) -> None:
        """Start the shutdown: incomplete bodies have `grace_ms` left, and new requests are rejected with 503."""
        self.admission.drain.begin(grace_ms)

    def _routes(self) -> APIRouter:
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
        """Handle one request. Raises Problem or PenstockError if the request is rejected as a whole."""
        client, principal = client_of(request), str(request.scope.get("principal", ""))
        asked = Asked(topic, offsets, atomic, ack == "all", client, principal)
        try:
            self.admission.enter(client)
            try:
                return await self._post(asked, request)
            finally:
                self.admission.leave(client)
        except (Problem, PenstockError) as e:
            self._refused(topic, e)
            raise

    @contextmanager
    def working_for(self, topic: str, client: str) -> Iterator[None]:
        """Count a request of another interface as in progress. A Problem or PenstockError counts as its rejection."""
        try:
            self.admission.enter(client)
            try:
                yield
            finally:
                self.admission.leave(client)
        except (Problem, PenstockError) as e:
            self._refused(topic, e)
            raise

    def _refused(self, topic: str, error: Problem | PenstockError) -> None:
        kind = error.kind if isinstance(error, Problem) else kind_of(error)
        self.metrics.refused_request(topic if self.admission.has_seen(topic) else "", kind)

    async def _post(self, asked: Asked, request: Request) -> Response:
        media_type = check_media_type(request)
        body = self.admission.body(request)  # first: arrival decides its place in the order
        await self.admission.check(asked.topic, asked.client)
        try:
            if asked.atomic or KEY_HEADER in request.headers:
                return await self._as_one(asked, request, media_type, body)
            reader = self.reader(asked.topic)
            events = await open_events(request, media_type, body, asked.topic, reader, self._settings, self._clock)
            if not asked.acknowledged:
                return await self._unacknowledged(asked, events, body)
            if events.unit == "line" and NDJSON_TYPE in request.headers.get("accept", ""):
                return self._streamed(asked, events, body)
            work = self._work(asked, events.unit)
            try:
                await self._work_through(events, work, body)
            except ClientGone:
                work.abandon()
                raise
        except ClientGone:
            log.info("client closed the connection within its body", topic=asked.topic)
            self.metrics.answered(asked.topic, CLIENT_CLOSED_REQUEST)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        self._count(asked, work.result, body)
        return self._answer(work.result)

    def _work(self, asked: Asked, unit: Literal["line", "index"], max_errors: int = 0) -> IngestRequest:
        settings = self._settings
        result = IngestResult(unit, max_errors or settings.max_errors, settings.max_offsets if asked.offsets else 0)

        result.on_error = partial(self.metrics.failed_record, asked.topic)
        return IngestRequest(self._producer, result, settings, max_errors=max_errors)

    async def _work_through(self, events: Events, work: IngestRequest, body: BodyReader) -> None:
        try:
            while await events.wait():
                with await body.turn(events.position) as turn:
                    going_on = await work.take(events.take(), turn)
                if not going_on:
                    work.result.stop(events.position, work.result.must_stop)
                    break
        except (BodyStalled, CorruptBody, ServiceLeaving) as e:
            work.result.stop(events.position, str(e), stop_status(e))
        await work.finish()

    def _streamed(self, asked: Asked, events: Events, body: BodyReader) -> Response:
        work, working = self._work(asked, "line", ERRORS_WITHOUT_BOUND), ExitStack()
        working.enter_context(self.admission.still_working_for(asked.client))

        def done(complete: bool) -> None:
            working.close()
            self._count(asked, work.result, body, None if complete else CLIENT_CLOSED_REQUEST)

        return StreamedAnswer(events, work, body, self._clock, self._settings.body_timeout_ms, done)

    async def _unacknowledged(self, asked: Asked, events: Events, body: BodyReader) -> Response:
        work, taken = self._work(asked, events.unit), 0
        try:
            while await events.wait():
                with await body.turn(events.position) as turn:
                    taken += await work.take_unacknowledged(events.take(), turn)
                if work.result.must_stop:
                    work.result.stop(events.position, work.result.must_stop)
                    break
        except (BodyStalled, CorruptBody, ServiceLeaving, BufferExhausted) as e:
            if not taken and isinstance(e, BufferExhausted):
                raise
            work.result.stop(events.position, str(e), stop_status(e))
        self.admission.pay(asked.client, taken)
        self.metrics.answered(asked.topic, 202 if taken else work.result.status)
        return accepted(work.result, taken) if taken else self._answer(work.result)

    async def _as_one(self, asked: Asked, request: Request, media_type: str, body: BodyReader) -> Response:
        """Store the body in one transaction, with its key if there is one."""
        if self._transactor is None or not asked.acknowledged:
            why = "ack=none promises nothing" if not asked.acknowledged else "this service has no transactions"
            raise Problem(ErrorKind(400, "INVALID_REQUEST", "Wrong request"), f"?atomic=true, Idempotency-Key: {why}")
        whole = await whole_body(body, self._settings.max_body_bytes)
        key = self._key_of(asked, request, whole)
        reader = self.reader(asked.topic)
        again = BodyReader.of(whole)
        events = await open_events(request, media_type, again, asked.topic, reader, self._settings, self._clock)
        work = self._work(asked, events.unit)
        all_of_it = await self._read_all(events, work, body)
        if all_of_it.records and not (asked.atomic and work.result.errors):
            answer = await self._transact(self._transactor, key, all_of_it, work.result)
        else:
            answer = self._answer(work.result)
        self._count(asked, work.result, body, answer.status_code)
        return answer

    def _key_of(self, asked: Asked, request: Request, body: bytes) -> IdempotencyKey | None:
        name = request.headers.get(KEY_HEADER)
        if name is None:
            return None
        own = self._settings.for_topic(asked.topic)
        telling = told_by_headers(request.headers.items(), own.key_header, own.time_header)
        return idempotency_key(name, asked.topic, body, telling, atomic=asked.atomic, principal=asked.principal)

    async def _read_all(self, events: Events, work: IngestRequest, body: BodyReader) -> Parsed:
        """Read every event, up to the first error beyond the limit. Raises Problem (413) for too many events."""
        all_of_it, going_on = Parsed(), True
        while going_on and await events.wait():
            with await next_turn(body, events.position):
                parsed = events.take()
            going_on = work.refuse(parsed)
            all_of_it.records += parsed.records
            all_of_it.positions += parsed.positions
            if len(all_of_it.records) > self._settings.max_body_events:
                too_many = TooManyEvents(self._settings.max_body_events)
                raise Problem(ErrorKind(413, too_many.error_code, "Too many events"), str(too_many))
        return all_of_it

    async def _transact(
        self, transactor: Transactor, key: IdempotencyKey | None, parsed: Parsed, result: IngestResult
    ) -> Response:
        def remember(outcomes: Sequence[Outcome]) -> StoredResponse:
            result.stored(parsed.positions, outcomes)
            return StoredResponse(result.status, msgspec.json.encode(result.body()))

        try:
            if key is None:
                answer, known = remember(await transactor.send_atomic(parsed.records)), False
            else:
                answer, known = await transactor.send_keyed(key, parsed.records, remember)
        except KeyReused as e:
            raise Problem(REUSED, str(e)) from None
        except PenstockError as e:
            result.uncommitted()
            kind = kind_of_record(e)
            outcome: Literal["unknown", "not_stored"] = "unknown" if kind.status == 504 else "not_stored"
            extra = {"stored": 0, "outcome": outcome, "events": len(parsed.records)}
            raise Problem(kind, str(e) or kind.title, extra) from None
        headers = {"Idempotency-Replayed": "true"} if known else {}
        return Response(answer.body, answer.status, headers, "application/json")

    def reader(self, topic: str) -> TopicReader:
        """Return the reader of the topic's events."""
        return self._readers.get(topic, self._reader)

    def latest_ms(self) -> int:
        """Return the latest event time that is accepted now, in ms since the epoch."""
        return self._clock.now_ms() + self._settings.max_future_ms

    def _count(self, asked: Asked, result: IngestResult, body: BodyReader, status: int | None = None) -> None:
        self.metrics.answered(asked.topic, status or result.status, body.since_last_byte_s)
        self.metrics.stored(asked.topic, result.stored_count)
        self.admission.pay(asked.client, result.stored_count)

    def _answer(self, result: IngestResult) -> Response:
        status = result.status
        if status in (200, 207):
            return json_response(result.body(), status, retry_after(result.retry_after_s))
        return problem_of(result).response()
