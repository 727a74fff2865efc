"""Bulk requests are served first come, first served (an edge).

Otherwise many large requests would all advance together and all end late. So a bulk request needs a turn for each batch
of events that it parses and hands to the producer, under these rules:

1. A request is bulk once its body is longer than BULK_BYTES or has more than BULK_EVENTS events. A small request needs
   no turn: it never waits behind a bulk one.
2. `at_once` turns exist. A free one goes to the request that came first, among those that have a batch at hand.
3. No turn is granted while `in_flight_max` records of bulk requests are not acknowledged. They would only fill the
   producer's buffer, and the records of small requests would have to wait behind them.
4. A request that waits for its client has no batch at hand and no turn, but keeps its place in the order. A request
   that waits for Kafka for HELD_MS loses its turn, and its records count no longer: a partition without a leader must
   not hold up all others.
5. After each ROTATE_BYTES a request goes to the end of the order, so an endless body does not hold up others either.

Most batches are handed over without waiting, so a turn is nearly always free when it is requested. It is therefore
granted only some turns of the event loop later. Meanwhile requests that came earlier can request it too: the one that
had the last turn first needs its client's next bytes.
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
ROTATE_BYTES = 16 * 1_048_576
HELD_MS = 1_000

GRANTED_AFTER = 3
"""Turns of the event loop: the socket is read, the request sees its bytes, it requests a turn."""


class _Once:
    """Calls a function once: when the object is called, or after HELD_MS."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._timer = asyncio.get_running_loop().call_later(HELD_MS / 1000, self)

    def __call__(self, *_: object) -> None:
        self._timer.cancel()
        function, self._function = self._function, _nothing
        function()


def _nothing() -> None:
    pass


class Turn:
    """The right to hand over a batch, until `release` or HELD_MS; a context manager that releases."""

    def __init__(self, turns: Turns | None) -> None:
        self._turns = turns
        self.release: Callable[[], None] = _nothing if turns is None else _Once(turns.released)
        """Release the turn. Further calls have no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def handed(self, records: int, outcomes: asyncio.Future[Any]) -> None:
        """Count `records` as in flight until the outcomes are there, or HELD_MS."""
        if self._turns is not None:
            self._turns.handed(records)
            outcomes.add_done_callback(_Once(partial(self._turns.handed, -records)))


FREE = Turn(None)
"""The turn of a small request, which is always available."""


class Turns:
    """The turns of one ingest."""

    def __init__(self, at_once: int, in_flight_max: int) -> None:
        self._free = at_once
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._ranks = count()
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._granting = False

    def __repr__(self) -> str:
        return f"Turns(free={self._free}, waiting={len(self._waiting)}, in_flight={self._in_flight})"

    def place(self) -> Place:
        """Return a place behind all requests in the order."""
        return Place(self, self.next_rank())

    def next_rank(self) -> int:
        """Return the rank behind all earlier ranks."""
        return next(self._ranks)

    async def wait(self, rank: int) -> Turn:
        """Wait for a turn. Lower ranks come first."""
        granted = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._order), granted))
        self._grant_soon()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted at the same time
                self.released()
            raise
        return Turn(self)

    def released(self) -> None:
        """Make a turn free again."""
        self._free += 1
        self._grant_soon()

    def handed(self, records: int) -> None:
        """Add to the records in flight; negative when they are settled."""
        self._in_flight += records
        self._grant_soon()

    @property
    def _may_grant(self) -> bool:
        return bool(self._free and self._waiting) and self._in_flight < self._in_flight_max

    def _grant_soon(self) -> None:
        if self._may_grant and not self._granting:
            self._granting = True
            self._grant(GRANTED_AFTER)

    def _grant(self, after: int) -> None:
        if after:
            asyncio.get_running_loop().call_soon(self._grant, after - 1)
            return
        self._granting = False
        while self._may_grant:
            granted = heappop(self._waiting)[-1]
            if not granted.cancelled():
                self._free -= 1
                granted.set_result(None)


class Place:
    """One request's place in the order."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self._rank = rank
        self._ranked_at = 0

    def __repr__(self) -> str:
        return f"Place(rank={self._rank})"

    async def turn(self, body_bytes: int) -> Turn:
        """Wait for a turn. `body_bytes` is how much of the request's body was read."""
        if body_bytes - self._ranked_at > ROTATE_BYTES:
            self._rank, self._ranked_at = self._turns.next_rank(), body_bytes
        return await self._turns.wait(self._rank)
