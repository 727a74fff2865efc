"""`POST /v1/topics/{topic}/events`: events in, and a 2xx for what the broker acknowledged, never for anything else.

200: all are stored; 207: some are, and each of the others is named with its reason and outcome; 504: none is known to
be, and some may be; any other 4xx and 5xx: none is, so that the same request may be sent again. 202 is the answer to
`?ack=none` alone, and promises nothing. NDJSON is read, sent and settled as it arrives, in constant memory; every other
form is read whole, up to `max_body_bytes`. A bad event fails alone, unless `?atomic=true`. Where the rest of a body is
not worth reading (Kafka is down, too many errors, the service leaves), the answer says from which event on nothing was
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry

from api.atomic import KEY_HEADER, REUSED, IdempotencyKey, KeyReused, Remembered, Transactor, idempotency_key
from api.body import BodyReader, BodyStalled, ClientGone, Drain, ServiceLeaving
from api.event import Read, RecordError, event_reader
from api.events import Events, check_media_type, open_events, whole_body
from api.health import CheckResult
from api.ingest_answers import OPENAPI, accepted, problem_of, retry_after
from api.ingest_request import IngestProducer, IngestRequest
from api.ndjson import Parsed
from api.problem import ErrorKind, Problem, json_response, kind_of_record
from api.rates import Rates
from api.settings import IngestSettings
from api.streamed import NDJSON_TYPE, StreamedAnswer
from api.tally import Outcome, Tally
from shared.common import metrics
from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.errors import BrokerNotAvailable, BufferExhausted, IllegalState, KafkaTimeout, PenstockError
from shared.common.log import get_logger
from shared.common.topic_names import check_topic_name, is_internal

log = get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What is logged for a client that did not wait; nobody receives it."""

ERRORS_WITHOUT_BOUND = 2**31
RECORDS_RATE = "max_records_per_second"


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for, beside its events."""

    topic: str
    offsets: bool = False
    atomic: bool = False
    acknowledged: bool = True
    client: str = ""


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
        transactor: Transactor | None = None,
    ) -> None:
        """ConfigError where a topic's JSON Schema cannot be used; without `transactor` nothing is stored as one."""
        self._producer = producer
        self._settings = settings
        self._clock = clock
        self._kafka = kafka
        self._transactor = transactor
        self._readers = {topic: event_reader(own) for topic, own in settings.topics.items()}
        self._reader = event_reader(settings.default_topic)
        self._requests_of = Rates(settings.max_requests_per_second)
        self._records_of = Rates(settings.max_records_per_second)
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
            summary="Store events (NDJSON, a JSON array, CloudEvents); answered after Kafka's acknowledgement",
            **OPENAPI,
        )
        async def post_events(
            topic: str,
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
        """One request; raises Problem and PenstockError for what the whole of it is refused for."""
        self.active += 1
        try:
            client = request.scope.get("principal") or (request.client.host if request.client else "")
            return await self._post(Asked(topic, offsets, atomic, ack == "all", client), request)
        finally:
            self.active -= 1

    async def _post(self, asked: Asked, request: Request) -> Response:
        self.refuse_while_leaving()
        check_media_type(request)
        self.check_rate(asked.client)
        await self.check_topic(asked.topic)
        body = BodyReader(request.receive, self._drain, self._settings.body_timeout_ms)
        started_ms = self._clock.monotonic_ms()
        try:
            if asked.atomic or KEY_HEADER in request.headers:
                return await self._as_one(asked, request, body, started_ms)
            events = await open_events(
                request, body, asked.topic, self.reader(asked.topic), self._settings, self._clock
            )
            if not asked.acknowledged:
                return await self._unacknowledged(asked, events)
            if events.unit == "line" and NDJSON_TYPE in request.headers.get("accept", ""):
                return self._streamed(asked, events, started_ms)
            work = self._work(asked, events.unit)
            try:
                await self._work_through(events, work)
            except ClientGone:
                work.abandon()
                raise
        except ClientGone:
            log.info("client closed the connection within its body", topic=asked.topic)
            self._requests.labels(topic=asked.topic, status=CLIENT_CLOSED_REQUEST).inc()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        self._count(asked, work.tally, started_ms)
        return self._answer(work.tally)

    def _work(self, asked: Asked, unit: Literal["line", "index"], max_errors: int = 0) -> IngestRequest:
        settings = self._settings
        tally = Tally(unit, max_errors or settings.max_errors, settings.max_offsets if asked.offsets else 0)

        def count(error: RecordError) -> None:
            counter = self._unknown if error.outcome == "unknown" else self._refused
            counter.labels(topic=asked.topic, error_code=error.error_code).inc()

        tally.on_error = count
        return IngestRequest(self._producer, tally, settings, max_errors=max_errors)

    async def _work_through(self, events: Events, work: IngestRequest) -> None:
        try:
            while (parsed := await events.next()) is not None:
                if not await work.take(parsed):
                    work.tally.stop(events.position, work.tally.must_stop)
                    break
        except (BodyStalled, ServiceLeaving) as e:
            work.tally.stop(events.position, str(e))
        await work.finish()

    def _streamed(self, asked: Asked, events: Events, started_ms: int) -> Response:
        work = self._work(asked, "line", ERRORS_WITHOUT_BOUND)
        self.active += 1

        def done(complete: bool) -> None:
            self.active -= 1
            self._count(asked, work.tally, started_ms, None if complete else CLIENT_CLOSED_REQUEST)

        return StreamedAnswer(events, work, self._clock, self._settings.body_timeout_ms, done)

    async def _unacknowledged(self, asked: Asked, events: Events) -> Response:
        work, taken = self._work(asked, events.unit), 0
        try:
            while (parsed := await events.next()) is not None:
                taken += await work.take_unacknowledged(parsed)
                if work.tally.must_stop:
                    work.tally.stop(events.position, work.tally.must_stop)
                    break
        except (BodyStalled, ServiceLeaving, BufferExhausted) as e:
            if not taken and isinstance(e, BufferExhausted):
                raise
            work.tally.stop(events.position, str(e))
        self._records_of.pay(asked.client, taken, self._clock.monotonic_ms())
        status = 202 if taken else work.tally.status
        self._requests.labels(topic=asked.topic, status=status).inc()
        return accepted(work.tally, taken) if taken else self._answer(work.tally)

    async def _as_one(self, asked: Asked, request: Request, body: BodyReader, started_ms: int) -> Response:
        """All of the body in one transaction, with the key where there is one."""
        if self._transactor is None or not asked.acknowledged:
            why = "ack=none promises nothing" if not asked.acknowledged else "this service has no transactions"
            raise Problem(ErrorKind(400, "INVALID_REQUEST", "Wrong request"), f"?atomic=true, Idempotency-Key: {why}")
        whole = await whole_body(request, body, self._settings.max_body_bytes)
        name = request.headers.get(KEY_HEADER)
        key = None if name is None else idempotency_key(name, asked.topic, whole, atomic=asked.atomic)
        read = self.reader(asked.topic)
        events = await open_events(request, BodyReader.of(whole), asked.topic, read, self._settings, self._clock)
        work, all_of_it = self._work(asked, events.unit), Parsed()
        while (parsed := await events.next()) is not None:
            work.tally.refused(parsed.errors)
            all_of_it.records += parsed.records
            all_of_it.positions += parsed.positions
        if all_of_it.records and not (asked.atomic and work.tally.errors):
            answer = await self._transact(self._transactor, key, all_of_it, work.tally)
        else:
            answer = self._answer(work.tally)
        self._count(asked, work.tally, started_ms, answer.status_code)
        return answer

    async def _transact(
        self, transactor: Transactor, key: IdempotencyKey | None, parsed: Parsed, tally: Tally
    ) -> Response:
        def remember(outcomes: Sequence[Outcome]) -> Remembered:
            tally.stored(parsed.positions, outcomes)
            return Remembered(tally.status, msgspec.json.encode(tally.body()))

        try:
            if key is None:
                answer, known = remember(await transactor.send_atomic(parsed.records)), False
            else:
                answer, known = await transactor.send_keyed(key, parsed.records, remember)
        except KeyReused as e:
            raise Problem(REUSED, str(e)) from None
        except PenstockError as e:
            tally.uncommitted()
            kind = kind_of_record(e)
            outcome: Literal["unknown", "not_stored"] = "unknown" if kind.status == 504 else "not_stored"
            extra = {"stored": 0, "outcome": outcome, "events": len(parsed.records)}
            raise Problem(kind, str(e) or kind.title, extra) from None
        headers = {"Idempotency-Replayed": "true"} if known else {}
        return Response(answer.body, answer.status, headers, "application/json")

    def refuse_while_leaving(self) -> None:
        """IllegalState while the service is leaving, BrokerNotAvailable while Kafka does not answer."""
        if self._drain.begun:
            raise IllegalState("the service is shutting down")
        if self._kafka is not None and not (check := self._kafka()).ok:
            raise BrokerNotAvailable(f"Kafka cannot be reached: {check.detail}")

    def check_rate(self, client: str) -> None:
        """Problem (429) for a client that asks for more than it may; counts the request."""
        now_ms = self._clock.monotonic_ms()
        for rates, name in ((self._requests_of, "max_requests_per_second"), (self._records_of, RECORDS_RATE)):
            if (wait_s := rates.wait_s(client, now_ms)) > 0:
                kind = ErrorKind(429, "RATE_LIMITED", "Too much asked", wait_s)
                raise Problem(kind, f"more than {name}={getattr(self._settings, name)}")
        self._requests_of.pay(client, 1, now_ms)

    async def check_topic(self, topic: str) -> None:
        """InvalidTopic, Problem (403) for a topic that takes no events, UnknownTopicOrPartition."""
        check_topic_name(topic)
        allowed = self._settings.for_topic(topic).allowed
        # What Penstock itself writes needs an entry of its own in the settings.
        own = is_internal(topic) or topic == self._settings.idempotency_topic
        if not allowed or (own and topic not in self._settings.topics):
            raise Problem(ErrorKind(403, "TOPIC_NOT_ALLOWED", "Topic not allowed"), f"{topic}: events are not accepted")
        try:
            await self._producer.partitions_for(topic)
        except KafkaTimeout as e:  # nothing was handed over yet
            raise BrokerNotAvailable(str(e)) from None

    def reader(self, topic: str) -> Read:
        """How the topic's events are read."""
        return self._readers.get(topic, self._reader)

    def latest_ms(self) -> int:
        """The latest event time that is taken now."""
        return self._clock.now_ms() + self._settings.max_future_ms

    def count(self, topic: str, stored: int, client: str) -> None:
        """Count records that were stored by another way than this endpoint's."""
        self._stored.labels(topic=topic).inc(stored)
        self._records_of.pay(client, stored, self._clock.monotonic_ms())

    def _count(self, asked: Asked, tally: Tally, started_ms: int, status: int | None = None) -> None:
        now_ms = self._clock.monotonic_ms()
        self._requests.labels(topic=asked.topic, status=status or tally.status).inc()
        self._stored.labels(topic=asked.topic).inc(tally.stored_count)
        self._seconds.labels(topic=asked.topic).observe((now_ms - started_ms) / 1000)
        self._records_of.pay(asked.client, tally.stored_count, now_ms)

    def _answer(self, tally: Tally) -> Response:
        status = tally.status
        if status in (200, 207):
            return json_response(tally.body(), status, retry_after(tally.retry_after_s))
        return problem_of(tally).response()
