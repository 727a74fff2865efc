"""Decides whether a request that stores records is accepted: by the service's state, the client's rates and the topic.

All interfaces that store records share one `Admission`, so a client's limits hold for all of them together. A request
is rejected before its body is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import Request

from penstock.api.http.body import BodyDrain, BodyReader
from penstock.api.http.content_encoding import inflater_of
from penstock.api.http.health import CheckResult
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import FORBIDDEN, TOO_MANY_REQUESTS
from penstock.api.http.turns import Turns
from penstock.api.ingest.event_sender import IngestProducer
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import BrokerNotAvailable, IllegalState, KafkaTimeout
from penstock.shared.common.topic_names import check_topic_name, is_internal

REQUESTS_RATE = "max_requests_per_second"
RECORDS_RATE = "max_records_per_second"
CLIENTS_MAX = 10_000
"""The most clients with a balance. Beyond it the client that was charged longest ago gets a full balance again."""


class Admission:
    """Admits requests and counts those in progress. `kafka` checks whether the brokers answer; None for no check."""

    def __init__(
        self,
        producer: IngestProducer,
        settings: IngestSettings,
        clock: Clock,
        kafka: Callable[[], CheckResult] | None = None,
    ) -> None:
        self._producer = producer
        self._settings = settings
        self._clock = clock
        self._kafka = kafka
        self._requests_of = Rates(settings.max_requests_per_second)
        self._records_of = Rates(settings.max_records_per_second)
        self._in_progress: Counter[str] = Counter()
        self._accepted_topics: set[str] = set()
        self._turns = Turns(settings.bulk_requests_at_once, settings.max_in_flight_records)
        self.drain = BodyDrain()

    def __repr__(self) -> str:
        return f"Admission(active={self.active}, {self.drain!r})"

    @property
    def active(self) -> int:
        """The number of requests in progress."""
        return self._in_progress.total()

    def enter(self, client: str) -> None:
        """Count a request as in progress until `leave`. Raises Problem (429) if the client has too many."""
        if self._in_progress[client] >= self._settings.max_concurrent_requests:
            kind = ErrorKind(TOO_MANY_REQUESTS, "RATE_LIMITED", "Rate limit exceeded", 1)
            raise Problem(kind, f"more than max_concurrent_requests={self._settings.max_concurrent_requests} at a time")
        self._in_progress[client] += 1

    def leave(self, client: str) -> None:
        """Count a request as completed."""
        self._in_progress[client] -= 1
        if not self._in_progress[client]:
            del self._in_progress[client]

    @contextmanager
    def keep_tracking(self, client: str) -> Iterator[None]:
        """Count a request as in progress after `leave`, for example while its response streams."""
        self._in_progress[client] += 1
        try:
            yield
        finally:
            self.leave(client)

    async def check(self, topic: str, client: str) -> None:
        """Accept a request of `client` for `topic`, or raise.

        Raises Problem (429) if the client exceeds a rate, and Problem (403) if the topic does not accept events. Raises
        BrokerNotAvailable if Kafka does not answer, IllegalState if the service is shutting down, and another
        PenstockError (for example UnknownTopicOrPartition) if the topic's name or partitions cannot be used.
        """
        if self.drain.begun:
            raise IllegalState("the service is shutting down")
        if self._kafka is not None and not (check := self._kafka()).ok:
            raise BrokerNotAvailable(f"Kafka cannot be reached: {check.detail}")
        # A request within the rates counts towards `max_requests_per_second`, even if its topic is rejected.
        self._check_rates(client)
        await self._check_topic(topic)

    def body(self, request: Request) -> BodyReader:
        """Return a reader of the request's body, with the settings' time limits.

        Raises Problem (415) for an unsupported Content-Encoding.
        """
        settings = self._settings
        declared = request.headers.get("content-length", "")
        return BodyReader(
            request.receive,
            self.drain,
            settings.body_timeout_ms,
            settings.whole_body_timeout_ms,
            declared_bytes=int(declared) if declared.isascii() and declared.isdigit() else 0,
            inflater=inflater_of(request.headers),
            turns=self._turns,
        )

    def has_accepted(self, topic: str) -> bool:
        """Return whether a request for the topic was accepted before. Only accepted topics are labels of metrics."""
        return topic in self._accepted_topics

    def charge(self, client: str, records: int) -> None:
        """Charge the client for `records` records; see `max_records_per_second`."""
        self._records_of.charge(client, records, self._clock.monotonic_ms())

    def _check_rates(self, client: str) -> None:
        now_ms = self._clock.monotonic_ms()
        for rates, name in ((self._requests_of, REQUESTS_RATE), (self._records_of, RECORDS_RATE)):
            if (wait_s := rates.wait_s(client, now_ms)) > 0:
                kind = ErrorKind(TOO_MANY_REQUESTS, "RATE_LIMITED", "Rate limit exceeded", wait_s)
                raise Problem(kind, f"more than {name}={getattr(self._settings, name)}")
        self._requests_of.charge(client, 1, now_ms)

    async def _check_topic(self, topic: str) -> None:
        check_topic_name(topic)
        allowed = self._settings.for_topic(topic).allowed
        # Topics that Penstock itself writes accept events only with an entry in the settings.
        is_own = is_internal(topic) or topic == self._settings.idempotency_topic
        if not allowed or (is_own and topic not in self._settings.topics):
            raise Problem(
                ErrorKind(FORBIDDEN, "TOPIC_NOT_ALLOWED", "Topic not allowed"), f"{topic}: events are not accepted"
            )
        try:
            await self._producer.partitions_for(topic)
        except KafkaTimeout as e:
            # KafkaTimeout would mean that records may be stored, but no record has been sent yet.
            raise BrokerNotAvailable(str(e)) from None
        self._accepted_topics.add(topic)


def client_of(request: Request) -> str:
    """Return the client that `Admission` checks for a request: the name of its credential, or its address if none."""
    return str(request.scope.get("principal") or (request.client.host if request.client else ""))


class Rates:
    """Rate limits of clients: one token bucket for each client, with a burst of one second.

    A charge may make a balance negative, so a single large request passes. While a client's balance is not positive,
    the client must wait. If `per_second` is None there is no limit.

    >>> rates = Rates(per_second=100)
    >>> rates.wait_s("ann", 0), rates.charge("ann", 300, 0), rates.wait_s("ann", 0), rates.wait_s("ann", 2_100)
    (0, None, 2, 0)
    """

    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._clients: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Rates(per_second={self._per_second}, clients={len(self._clients)})"

    def wait_s(self, client: str, now_ms: int) -> int:
        """Return the whole seconds until the client may send again; 0 if it may now."""
        if self._per_second is None:
            return 0
        balance = self._rate_balance(client, now_ms)
        return 0 if balance > 0 else max(1, int(-balance / self._per_second + 0.999))

    def charge(self, client: str, count: int, now_ms: int) -> None:
        """Charge the client for `count` units."""
        if self._per_second is None:
            return
        self._clients[client] = (self._rate_balance(client, now_ms) - count, now_ms)
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)

    def _rate_balance(self, client: str, now_ms: int) -> float:
        assert self._per_second is not None
        balance, at_ms = self._clients.get(client, (float(self._per_second), now_ms))
        return min(float(self._per_second), balance + (now_ms - at_ms) * self._per_second / 1_000)
