"""Sends the events of one ingest request in batches. A batch is settled when its acknowledgement arrives.

If more than `max_in_flight_records` records are in flight, the request stops reading and waits for its oldest batch, so
TCP flow control slows the client. A batch that is not acknowledged within `ack_timeout_ms` fails, and its records may
still be stored. If the producer rejects a batch, its error says whether records of the batch may be stored. The
response states the outcome of each record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.api.http.turns import Turn
from penstock.api.ingest.event import Parsed
from penstock.api.ingest.result import IngestResult, Outcome
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import BufferExhausted, KafkaTimeout, PenstockError
from penstock.shared.common.records import ProducerRecord

MAYBE_STORED = "it may still be stored"
NOT_STORED = "it was not stored"
UNWATCHED: set[asyncio.Future[Sequence[Outcome]]] = set()
"""Batches that no request waits for. The event loop itself has only weak references to tasks."""


class IngestProducer(Protocol):
    """The methods of a Producer that ingest uses."""

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Outcome]]:
        """Send the records. Awaiting the result returns each record's metadata or error, in order.

        If this call raises a PenstockError, `maybe_written` is whether some of the records may be stored.
        """
        ...

    async def partitions_for(self, topic: str) -> Sequence[int]:
        """Return the partitions of a topic. Raises UnknownTopicOrPartition if it does not exist."""
        ...

    def has_room(self) -> bool:
        """Return whether a batch would be accepted now without waiting for memory."""
        ...


class BatchInFlight(NamedTuple):
    """A batch in flight: the positions of its events, their outcomes, and its deadline by the loop's clock."""

    positions: list[int]
    outcomes: asyncio.Future[Sequence[Outcome]]
    deadline: float

    @property
    def remaining_s(self) -> float:
        """Seconds until the batch fails."""
        return self.deadline - asyncio.get_running_loop().time()


class EventSender:
    """Sends the parsed events of one request, and collects their outcomes in `result`."""

    def __init__(self, producer: IngestProducer, result: IngestResult, settings: IngestSettings) -> None:
        self.result = result
        self._producer = producer
        self._settings = settings
        self._flights: deque[BatchInFlight] = deque()
        self._in_flight = 0

    def __repr__(self) -> str:
        return f"EventSender(in_flight={self._in_flight}, {self.result!r})"

    async def send(self, parsed: Parsed, turn: Turn) -> bool:
        """Send the records of one batch to Kafka.

        Returns False after too many errors or a lasting failure: the rest of the request need not be read.
        """
        may_continue = self.add_errors(parsed)
        if parsed.records:
            await self._send_records(parsed.records, parsed.positions, turn)
        while self._in_flight > self._settings.max_in_flight_records:
            await self._settle_flight(self._flights.popleft())
        await self.settle_completed()
        return may_continue and not self.result.must_stop

    async def settle_completed(self) -> None:
        """Count the oldest batches that are done or past their deadline, without waiting.

        Stops at the first other batch.
        """
        while (first := self.first_in_flight) and (first.outcomes.done() or first.remaining_s <= 0):
            await self._settle_flight(self._flights.popleft())

    @property
    def first_in_flight(self) -> BatchInFlight | None:
        """The oldest batch in flight; None if nothing is in flight."""
        return self._flights[0] if self._flights else None

    async def finish(self) -> None:
        """Wait for every batch in flight."""
        while self._flights:
            await self._settle_flight(self._flights.popleft())

    async def send_unacknowledged(self, parsed: Parsed, turn: Turn) -> int:
        """Send the records without waiting for acknowledgements, and return the number of accepted ones.

        If `send_many` fails, the number is 0, and its error is the outcome of every record.

        Raises BufferExhausted if the producer has no room. Then no record of the batch is sent, and no error is added.
        """
        if parsed.records and not self._producer.has_room():
            raise BufferExhausted("too many records wait for Kafka")
        self.add_errors(parsed)
        if not parsed.records:
            return 0
        try:
            deliveries = await self._producer.send_many(parsed.records)
        except PenstockError as e:
            self._add_failure(parsed.positions, _event_error_with_outcome(e))
            return 0
        outcomes = asyncio.ensure_future(deliveries)
        turn.count_in_flight(len(parsed.records), outcomes)
        UNWATCHED.add(outcomes)
        outcomes.add_done_callback(_retrieve_unwatched_exception)
        return len(parsed.records)

    def add_errors(self, parsed: Parsed) -> bool:
        """Add the errors of a parsed batch to the result. Returns False if the request now has more than the result's
        `max_errors`.

        In that case the result is stopped before the first error beyond the limit. Errors and records from that
        position on are removed from `parsed`.
        """
        is_within_limit = self._cut_to_max_errors(parsed)
        self.result.add_errors(parsed.errors)
        return is_within_limit

    def _cut_to_max_errors(self, parsed: Parsed) -> bool:
        """Cut the batch before its first error beyond `max_errors`. Returns True if nothing is cut."""
        room = self.result.max_errors - len(self.result.errors)
        if len(parsed.errors) <= room:
            return True
        cut = parsed.errors[room].position
        self.result.stop(cut, f"more than max_errors={self.result.max_errors} events were rejected")
        remaining = sum(position < cut for position in parsed.positions)
        del parsed.errors[room:]
        del parsed.records[remaining:]
        del parsed.positions[remaining:]
        return False

    async def _send_records(self, records: list[ProducerRecord], positions: list[int], turn: Turn) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.ack_timeout_ms / 1000
        try:
            async with asyncio.timeout_at(deadline):
                deliveries = await self._producer.send_many(records)
        except TimeoutError:
            self._add_timeout(positions)
            return
        except PenstockError as e:
            self._add_failure(positions, _event_error_with_outcome(e))
            return
        flight = BatchInFlight(positions, asyncio.ensure_future(deliveries), deadline)
        turn.count_in_flight(len(positions), flight.outcomes)
        self._flights.append(flight)
        self._in_flight += len(positions)

    async def _settle_flight(self, flight: BatchInFlight) -> None:
        self._in_flight -= len(flight.positions)
        try:
            async with asyncio.timeout_at(flight.deadline):
                outcomes = await flight.outcomes
        except TimeoutError:
            self._add_timeout(flight.positions)
        else:
            self.result.add_outcomes(flight.positions, outcomes)

    def _add_timeout(self, positions: list[int]) -> None:
        """Add KafkaTimeout to the result for each event of a batch that was not acknowledged in time."""
        message = f"not acknowledged within ack_timeout_ms={self._settings.ack_timeout_ms}; {MAYBE_STORED}"
        self._add_failure(positions, KafkaTimeout(message))

    def _add_failure(self, positions: list[int], error: PenstockError) -> None:
        """Add the same error as the outcome of every event of a batch."""
        self.result.add_outcomes(positions, [error] * len(positions))


def _event_error_with_outcome(error: PenstockError) -> PenstockError:
    """Return the error of `send_many` as that of an event's record, with the record's outcome in its message."""
    copy = type(error)(f"{error}; {MAYBE_STORED if error.maybe_written else NOT_STORED}")
    copy.maybe_written = error.maybe_written
    return copy


def _retrieve_unwatched_exception(outcomes: asyncio.Future[Sequence[Outcome]]) -> None:
    """Retrieve the exception of a batch of events that no request waits for; asyncio would log it otherwise."""
    UNWATCHED.discard(outcomes)
    if not outcomes.cancelled():
        outcomes.exception()
