"""Whether a request that stores anything is taken at all: the service, the client and the topic (an edge).

One for all ways of storing events, so that a client has the same limits whichever it takes. What is refused here is
refused before the body is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import Request

from penstock.api.http.body import BodyReader, Drain
from penstock.api.http.content_encoding import inflater_of
from penstock.api.http.health import CheckResult
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.ingest.batches import IngestProducer
from penstock.api.ingest.rate_limit import Rates
from penstock.api.ingest.turns import Turns
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import BrokerNotAvailable, IllegalState, KafkaTimeout
from penstock.shared.common.topic_names import check_topic_name, is_internal

REQUESTS_RATE, RECORDS_RATE = "max_requests_per_second", "max_records_per_second"


class Admission:
    """See the module; `kafka` says whether the brokers answer, where that is known."""

    def __init__(
        self,
        producer: IngestProducer,
        settings: IngestSettings,
        clock: Clock,
        kafka: Callable[[], CheckResult] | None = None,
    ) -> None:
        self._producer, self._settings, self._clock, self._kafka = producer, settings, clock, kafka
        self._requests_of = Rates(settings.max_requests_per_second)
        self._records_of = Rates(settings.max_records_per_second)
        self._at_work: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._turns = Turns(settings.bulk_requests_at_once, settings.max_in_flight_records)
        self.drain = Drain()

    def __repr__(self) -> str:
        return f"Admission(active={self.active}, {self.drain!r})"

    @property
    def active(self) -> int:
        """Requests that are being worked on."""
        return self._at_work.total()

    def enter(self, client: str) -> None:
        """A request is worked on until `leave`; Problem (429) where the client has too many already."""
        if self._at_work[client] >= self._settings.max_concurrent_requests:
            kind = ErrorKind(429, "RATE_LIMITED", "Too much asked", 1)
            raise Problem(kind, f"more than max_concurrent_requests={self._settings.max_concurrent_requests} at a time")
        self._at_work[client] += 1

    def leave(self, client: str) -> None:
        """A request is done."""
        self._at_work[client] -= 1
        if not self._at_work[client]:
            del self._at_work[client]

    @contextmanager
    def still_working_for(self, client: str) -> Iterator[None]:
        """Count what a request that was let in goes on with, such as an answer that streams."""
        self._at_work[client] += 1
        try:
            yield
        finally:
            self.leave(client)

    async def check(self, topic: str, client: str) -> None:
        """Let a request in, and count it; what is raised refuses it.

        IllegalState, BrokerNotAvailable, Problem (403 a topic that takes no events, 429 a client that asks for more
        than it may), InvalidTopic, UnknownTopicOrPartition.
        """
        if self.drain.begun:
            raise IllegalState("the service is shutting down")
        if self._kafka is not None and not (check := self._kafka()).ok:
            raise BrokerNotAvailable(f"Kafka cannot be reached: {check.detail}")
        self._check_rates(client)
        await self._check_topic(topic)

    def body(self, request: Request) -> BodyReader:
        """The request's body within its limits, behind those that came before; Problem (415) for its encoding."""
        settings, declared = self._settings, request.headers.get("content-length", "")
        return BodyReader(
            request.receive,
            self.drain,
            settings.body_timeout_ms,
            settings.whole_body_timeout_ms,
            declared_bytes=int(declared) if declared.isascii() and declared.isdigit() else 0,
            inflater=inflater_of(request.headers),
            turns=self._turns,
        )

    def has_seen(self, topic: str) -> bool:
        """Whether a request was let in for the topic: a name that anybody may make up is no label of a metric."""
        return topic in self._seen

    def pay(self, client: str, records: int) -> None:
        """The client stored so many records."""
        self._records_of.pay(client, records, self._clock.monotonic_ms())

    def _check_rates(self, client: str) -> None:
        now_ms = self._clock.monotonic_ms()
        for rates, name in ((self._requests_of, REQUESTS_RATE), (self._records_of, RECORDS_RATE)):
            if (wait_s := rates.wait_s(client, now_ms)) > 0:
                kind = ErrorKind(429, "RATE_LIMITED", "Too much asked", wait_s)
                raise Problem(kind, f"more than {name}={getattr(self._settings, name)}")
        self._requests_of.pay(client, 1, now_ms)

    async def _check_topic(self, topic: str) -> None:
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
        self._seen.add(topic)


def client_of(request: Request) -> str:
    """Who asks: the credential's name, or the address where nobody is asked."""
    return str(request.scope.get("principal") or (request.client.host if request.client else ""))
