"""One ingest request: parsed events are sent in batches, and each batch is settled by its acknowledgement.

Batches are in flight while the body is still being read, at most `max_in_flight_records` records of them. Beyond that
the request waits for its oldest batch, which slows the client through its connection. A batch that is not acknowledged
within `ack_timeout_ms` is given up. Records that the producer accepted may still be stored, the others are not. The
answer states the outcome of each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import NamedTuple, Protocol

from penstock.api.ingest.ndjson import Parsed
from penstock.api.ingest.result import IngestResult, Outcome
from penstock.api.ingest.turns import Turn
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import BufferExhausted, KafkaTimeout, PenstockError
from penstock.shared.common.records import ProducerRecord

MAYBE = "it may still be stored"
SURELY_NOT = "it was not stored"


class IngestProducer(Protocol):
    """What ingest needs of a Producer."""

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Outcome]]:
        """Send the records. Awaiting the result returns each record's metadata or error, in order."""
        ...

    async def partitions_for(self, topic: str) -> Sequence[int]:
        """Return the partitions of a topic. Raises UnknownTopicOrPartition if it does not exist."""
        ...

    def has_room(self) -> bool:
        """Return whether a record would be accepted now without waiting for memory."""
        ...


class Flight(NamedTuple):
    """A batch in flight: its events' positions, its pending outcomes, and its deadline by the loop's clock."""

    positions: list[int]
    outcomes: asyncio.Future[Sequence[Outcome]]
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds until the batch is given up."""
        return self.deadline - asyncio.get_running_loop().time()


class IngestRequest:
    """Sends the parsed events of one request and keeps the result."""

    def __init__(
        self, producer: IngestProducer, result: IngestResult, settings: IngestSettings, max_errors: int = 0
    ) -> None:
        self.result = result
        self._max_errors = max_errors or settings.max_errors
        self._producer = producer
        self._settings = settings
        self._flights: deque[Flight] = deque()
        self._in_flight = 0
        self._next_position = 1

    def __repr__(self) -> str:
        return f"IngestRequest(in_flight={self._in_flight}, {self.result!r})"

    async def take(self, parsed: Parsed, turn: Turn) -> bool:
        """Send the records of one batch. Returns False if reading the rest of the request is pointless."""
        keep = self.refuse(parsed)
        if parsed.records:
            self._next_position = parsed.positions[-1] + 1
            await self._send(parsed.records, parsed.positions, turn)
        while self._in_flight > self._most_in_flight:
            await self._settle(self._flights.popleft())
        await self.settle_what_is_done()
        return keep and not self.result.must_stop

    async def settle_what_is_done(self) -> None:
        """Count the batches that are acknowledged or past their deadline, without waiting."""
        while (first := self.first_in_flight) and (first.outcomes.done() or first.left_s <= 0):
            await self._settle(self._flights.popleft())

    @property
    def first_in_flight(self) -> Flight | None:
        """The oldest batch in flight; None if nothing is in flight."""
        return self._flights[0] if self._flights else None

    async def finish(self) -> None:
        """Wait for every batch in flight."""
        while self._flights:
            await self._settle(self._flights.popleft())

    @property
    def settled_before(self) -> int:
        """The position before which the fate of every event is known."""
        return self._flights[0].positions[0] if self._flights else self._next_position

    async def take_unacknowledged(self, parsed: Parsed, turn: Turn) -> int:
        """Send the records without waiting for acknowledgements, and return their number.

        Raises BufferExhausted if the producer has no room.
        """
        self.refuse(parsed)
        if not parsed.records:
            return 0
        if not self._producer.has_room():
            raise BufferExhausted("too many records wait for Kafka")
        deliveries = await self._producer.send_many(parsed.records)
        waiting = asyncio.ensure_future(outcomes_of(deliveries))
        turn.handed(len(parsed.records), waiting)
        UNWATCHED.add(waiting)
        waiting.add_done_callback(_retrieve)
        return len(parsed.records)

    def abandon(self) -> None:
        """Stop waiting for batches in flight. Their delivery continues without this request."""
        for flight in self._flights:
            flight.outcomes.add_done_callback(_retrieve)
        self._flights.clear()

    @property
    def _most_in_flight(self) -> int:
        return self._settings.max_in_flight_records

    def refuse(self, parsed: Parsed) -> bool:
        """Count a batch's errors. Returns False if the request has too many.

        The batch is then cut before the first error beyond the limit, so errors stay bounded and none is hidden.
        """
        keep = self._within_errors(parsed)
        self.result.refused(parsed.errors)
        return keep

    def _within_errors(self, parsed: Parsed) -> bool:
        room = self._max_errors - len(self.result.errors)
        if len(parsed.errors) <= room:
            return True
        cut = parsed.errors[room].position
        self.result.stop(cut, f"more than max_errors={self._max_errors} events were rejected")
        keep = sum(position < cut for position in parsed.positions)
        del parsed.errors[room:], parsed.records[keep:], parsed.positions[keep:]
        return False

    async def _send(self, records: list[ProducerRecord], positions: list[int], turn: Turn) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.ack_timeout_ms / 1000
        coming = iter(records)
        try:
            async with asyncio.timeout_at(deadline):
                deliveries = await self._producer.send_many(coming)
        except TimeoutError:
            self._break_off(positions, coming, KafkaTimeout(self._late))
            return
        except PenstockError as e:
            self._break_off(positions, coming, e)
            return
        flight = Flight(positions, asyncio.ensure_future(outcomes_of(deliveries)), deadline)
        turn.handed(len(positions), flight.outcomes)
        self._flights.append(flight)
        self._in_flight += len(positions)

    async def _settle(self, flight: Flight) -> None:
        self._in_flight -= len(flight.positions)
        try:
            async with asyncio.timeout_at(flight.deadline):
                outcomes = await flight.outcomes
        except TimeoutError:
            self.result.stored(flight.positions, [KafkaTimeout(f"{self._late}; {MAYBE}")] * len(flight.positions))
        except PenstockError as e:
            self.result.stored(flight.positions, [_fated(e, maybe_written=True)] * len(flight.positions))
        else:
            self.result.stored(flight.positions, outcomes)

    @property
    def _late(self) -> str:
        return f"not acknowledged within ack_timeout_ms={self._settings.ack_timeout_ms}"

    def _break_off(self, positions: list[int], coming: Iterator[ProducerRecord], error: PenstockError) -> None:
        """Record the outcomes after sending failed midway. The producer took the records drawn from the iterator."""
        taken = len(positions) - length_hint(coming)
        maybe, surely_not = _fated(error, maybe_written=True), _fated(error, maybe_written=False)
        self.result.stored(positions, [maybe] * taken + [surely_not] * (len(positions) - taken))


async def outcomes_of(deliveries: Awaitable[Sequence[Outcome]]) -> Sequence[Outcome]:
    """Await the deliveries in a coroutine, which a task needs."""
    return await deliveries


def _fated(error: PenstockError, *, maybe_written: bool) -> PenstockError:
    fated = type(error)(f"{error}; {MAYBE if maybe_written else SURELY_NOT}")
    fated.maybe_written = maybe_written
    return fated


UNWATCHED: set[asyncio.Future[Sequence[Outcome]]] = set()
"""Batches that no request waits for. The event loop keeps only weak references to tasks."""


def _retrieve(outcomes: asyncio.Future[Sequence[Outcome]]) -> None:
    UNWATCHED.discard(outcomes)
    if not outcomes.cancelled():
        outcomes.exception()
