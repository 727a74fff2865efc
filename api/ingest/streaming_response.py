"""Answers to a long NDJSON body while it is still arriving: `Accept: application/x-ndjson`.

The status is 207 from the start, since the fate of later events is unknown. Each line covers the events since the line
before, and is written only when their fate is known:

    {"through_line":20000,"stored":19999,"errors":[{"line":7,...}]}

A line is written when everything received is settled and no more data is there, and at least every second while the
body continues. So a client may wait for a line before it sends the next event. The last line has `"status"` and the
totals. If it is missing (the connection broke), events that no line covers may or may not be stored. A client must read
while it writes. A client that does not read is disconnected after `body_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.http.body import BodyReader, BodyStalled, ClientGone, ServiceLeaving
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.problem import Problem
from penstock.api.ingest.batches import IngestRequest
from penstock.api.ingest.bodies import Events, stop_status
from penstock.api.ingest.turns import Turn
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError

NDJSON_TYPE = "application/x-ndjson"
EVERY_MS = 1_000
"""The longest time between two lines while there is something to report."""
ERRORS_A_LINE = 100
"""The number of waiting errors at which a line is written at once."""


class StreamedAnswer(Response):
    """Reads events while it answers. `done` is called once at the end; True if the answer is complete."""

    def __init__(
        self,
        events: Events,
        work: IngestRequest,
        body: BodyReader,
        clock: Clock,
        timeout_ms: int,
        done: Callable[[bool], None],
    ) -> None:
        super().__init__(status_code=207, media_type=NDJSON_TYPE)
        del self.raw_headers[:]
        self._events = events
        self._work = work
        self._body = body
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._done = done
        self._told_ms = clock.monotonic_ms()
        self._told_stored = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", NDJSON_TYPE.encode()), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 207, "headers": headers})
        complete = False
        try:
            await self._work_through(send)
            await self._write(send, self._last())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            complete = True
        except (ClientGone, TimeoutError):
            self._work.abandon()
        finally:
            self._done(complete)

    async def _work_through(self, send: Send) -> None:
        events, work = self._events, self._work
        coming: asyncio.Future[Turn | None] = asyncio.ensure_future(self._turn())
        try:
            while (turn := await self._next(coming, send)) is not None:
                with turn:
                    going_on = await work.take(events.take(), turn)
                if not going_on:
                    work.result.stop(events.position, work.result.must_stop)
                    break
                coming = asyncio.ensure_future(self._turn())
                await self._tell(send)
        except (BodyStalled, CorruptBody, ServiceLeaving) as e:
            work.result.stop(events.position, str(e), stop_status(e))
        except (Problem, PenstockError) as e:
            if isinstance(e, ClientGone):
                raise
            work.result.stop(events.position, str(e))
        finally:
            # A turn that was granted too late must still be released.
            if (
                not coming.cancel()
                and not coming.cancelled()
                and coming.exception() is None
                and (last := coming.result())
            ):
                last.release()
        await work.finish()

    async def _turn(self) -> Turn | None:
        """Return the turn to take the next events; None at the end."""
        return await self._body.turn(self._events.position) if await self._events.wait() else None

    async def _next(self, coming: asyncio.Future[Turn | None], send: Send) -> Turn | None:
        """Wait for the next events' turn. Meanwhile write the events that are settled."""
        await asyncio.sleep(0)  # data that has arrived is available after one turn
        while not coming.done():
            first = self._work.first_in_flight
            if first is None:
                await self._tell(send, at_once=True)
                break
            told_s = max(0.0, EVERY_MS - (self._clock.monotonic_ms() - self._told_ms)) / 1000
            waiting: set[asyncio.Future[Any]] = {coming, first.outcomes}
            await asyncio.wait(
                waiting, timeout=min(told_s or math.inf, first.left_s), return_when=asyncio.FIRST_COMPLETED
            )
            await self._work.settle_what_is_done()
            await self._tell(send)
        return await coming

    async def _tell(self, send: Send, *, at_once: bool = False) -> None:
        result, now_ms = self._work.result, self._clock.monotonic_ms()
        if not at_once and len(result.errors) < ERRORS_A_LINE and now_ms - self._told_ms < EVERY_MS:
            return
        self._told_ms = now_ms
        row = self._row()
        if row["stored"] or "errors" in row:
            await self._write(send, row)

    def _row(self) -> dict[str, Any]:
        result = self._work.result
        row: dict[str, Any] = {"through_line": self._work.settled_before - 1}
        row["stored"], self._told_stored = result.stored_count - self._told_stored, result.stored_count
        row |= result.taken()
        return row

    def _last(self) -> dict[str, Any]:
        result = self._work.result
        row = self._row() | {"through_line": self._events.position - 1}
        return row | {"status": result.status, "total": result.totals()}

    async def _write(self, send: Send, row: dict[str, Any]) -> None:
        body = msgspec.json.encode(row) + b"\n"
        async with asyncio.timeout(self._timeout_ms / 1000):
            await send({"type": "http.response.body", "body": body, "more_body": True})
