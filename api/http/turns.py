"""Serves bulk requests in the order of their arrival.

Without an order, many large requests would advance together and all end late. So a bulk request needs a turn for each
batch of events that it parses and sends. The rules:

1. A request is bulk once its body is longer than BULK_BYTES or has more than BULK_EVENTS events. A small request needs
   no turn.
2. There are `at_once` turns. A free turn goes to the first request in the queue that has received data to parse.
3. No turn is granted while `in_flight_max` records of bulk requests are not acknowledged. More records would only fill
   the producer's buffer and delay the records of small requests.
4. A request that waits for its client has no turn, but stays in the queue. A request that waits for Kafka for
   TURN_TIMEOUT_MS loses its turn, and its records no longer count as in flight: a partition without a leader must not
   delay all others.
5. After each REQUEUE_BYTES a request moves to the end of the queue, so an endless body does not delay others.

Most batches are sent without waiting, so a turn is nearly always free when a request needs it. If every turn were
granted at once, the order of the queue would have no effect. So a turn is granted GRANT_DELAY_ITERATIONS of the event
loop later. In the meantime a request with a lower rank can join the queue. The request that had the last turn needs
this time to read its client's next bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self

BULK_BYTES = 65_536
BULK_EVENTS = 1_000
"""The longest body (bytes) and the most events of a small request."""
REQUEUE_BYTES = 16 * 1_048_576
"""The bytes of its body after which a request moves to the end of the queue."""
TURN_TIMEOUT_MS = 1_000
"""The time after which a turn is released, and records no longer count as in flight."""

GRANT_DELAY_ITERATIONS = 3
"""Iterations of the event loop: the socket is read, the request receives the bytes, it requests a turn."""


class _Once:
    """Calls a function once: when the object is called, or after TURN_TIMEOUT_MS."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._timer = asyncio.get_running_loop().call_later(TURN_TIMEOUT_MS / 1000, self)

    def __call__(self, *_: object) -> None:
        self._timer.cancel()
        function = self._function
        self._function = _release_nothing
        function()


def _release_nothing() -> None:
    pass


class Turn:
    """The right to send a batch, until `release` or TURN_TIMEOUT_MS. A context manager that releases it."""

    def __init__(self, turns: Turns | None) -> None:
        self._turns = turns
        self.release: Callable[[], None] = _release_nothing if turns is None else _Once(turns.release_one)
        """Release the turn. Later calls have no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def count_in_flight(self, records: int, outcomes: asyncio.Future[Any]) -> None:
        """Count a bulk request's `records` as in flight until `outcomes` is done, or for TURN_TIMEOUT_MS."""
        if self._turns is not None:
            self._turns.add_in_flight(records)
            outcomes.add_done_callback(_Once(partial(self._turns.add_in_flight, -records)))


FREE = Turn(None)
"""The turn of a small request, which is always available."""


class Turns:
    """The turns of all bulk requests, and their queue."""

    def __init__(self, at_once: int, in_flight_max: int) -> None:
        self._free = at_once
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._ranks = count()
        self._arrivals = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._granting = False

    def __repr__(self) -> str:
        return f"Turns(free={self._free}, waiting={len(self._waiting)}, in_flight={self._in_flight})"

    def enqueue(self) -> QueueEntry:
        """Return a new entry at the end of the queue."""
        return QueueEntry(self, self.next_rank())

    def next_rank(self) -> int:
        """Return the rank of the end of the queue."""
        return next(self._ranks)

    async def wait(self, rank: int) -> Turn:
        """Wait for a turn. A free turn goes to the waiting request with the lowest rank."""
        granted = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._arrivals), granted))
        self._grant_soon()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                # The turn was granted before the cancellation.
                self.release_one()
            raise
        return Turn(self)

    def release_one(self) -> None:
        """Free one turn."""
        self._free += 1
        self._grant_soon()

    def add_in_flight(self, records: int) -> None:
        """Add to the number of records in flight; `records` is negative when they are settled."""
        self._in_flight += records
        self._grant_soon()

    @property
    def _may_grant(self) -> bool:
        return bool(self._free and self._waiting) and self._in_flight < self._in_flight_max

    def _grant_soon(self) -> None:
        if self._may_grant and not self._granting:
            self._granting = True
            self._grant_turns(GRANT_DELAY_ITERATIONS)

    def _grant_turns(self, delay_iterations: int) -> None:
        """Grant the free turns after this many iterations of the event loop."""
        if delay_iterations:
            asyncio.get_running_loop().call_soon(self._grant_turns, delay_iterations - 1)
            return
        self._granting = False
        while self._may_grant:
            granted = heappop(self._waiting)[-1]
            if not granted.cancelled():
                self._free -= 1
                granted.set_result(None)


class QueueEntry:
    """One request in the queue. `rank` is its position: lower ranks are served first."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self._rank = rank
        self._ranked_at_bytes = 0

    def __repr__(self) -> str:
        return f"QueueEntry(rank={self._rank})"

    async def turn(self, body_bytes: int) -> Turn:
        """Wait for a turn. `body_bytes` is the number of bytes of the body that were read."""
        if body_bytes - self._ranked_at_bytes > REQUEUE_BYTES:
            self._rank = self._turns.next_rank()
            self._ranked_at_bytes = body_bytes
        return await self._turns.wait(self._rank)
