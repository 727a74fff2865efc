"""Answers an NDJSON body while it is still arriving: `Accept: application/x-ndjson`.

The status is 207 from the start, since the outcome of later events is unknown. Each line has the outcomes that became
known since the previous line. The outcomes of all events up to `through_line` are then known:

    {"through_line":20000,"stored":19999,"errors":[{"line":7,...}]}

A line is written when the outcomes of all received events are known. Until then, new outcomes are written about once a
second while Kafka keeps up. So a client may wait for a line before it sends the next event. The last line has
`"status"` and the totals. If the connection breaks before the last line, events after the last
`through_line` may or may not be stored. A client must read while it writes: one that does not read is disconnected
after `body_timeout_ms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.http.body import (
    BodyReader,
    BodyStalled,
    ClientDisconnected,
    ServiceShuttingDown,
    body_error_status,
)
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.problem import Problem
from penstock.api.http.status_codes import MULTI_STATUS
from penstock.api.http.turns import Turn
from penstock.api.http.unread_response import disconnect_if_unread
from penstock.api.ingest.event_sender import EventSender
from penstock.api.ingest.request_events import RequestEvents
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError

NDJSON_TYPE = "application/x-ndjson"
EVERY_MS = 1_000
"""The approximate time between two lines while there are events to report."""
ERRORS_PER_LINE = 100
"""The number of unreported errors at which a line is written at once."""


class StreamedResponse(Response):
    """A response that reads the request's events while it is sent.

    `on_end` is called once at the end, with True if the response is complete.
    """

    def __init__(
        self,
        events: RequestEvents,
        sender: EventSender,
        body: BodyReader,
        clock: Clock,
        timeout_ms: int,
        on_end: Callable[[bool], None],
    ) -> None:
        super().__init__(status_code=MULTI_STATUS, media_type=NDJSON_TYPE)
        del self.raw_headers[:]
        self._events = events
        self._sender = sender
        self._body = body
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._on_end = on_end
        self._reported_ms = clock.monotonic_ms()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", NDJSON_TYPE.encode()), (b"x-accel-buffering", b"no")]
        is_complete = False
        send = disconnect_if_unread(scope, send, self._timeout_ms)
        try:
            await send({"type": "http.response.start", "status": MULTI_STATUS, "headers": headers})
            await self._send_events(send)
            await self._write_line(send, self._final_progress_row())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            is_complete = True
        except ClientDisconnected:
            await self._sender.finish()
        finally:
            self._on_end(is_complete)

    async def _send_events(self, send: Send) -> None:
        """Send events batch by batch. While it waits for the next turn, report the events whose outcomes are known."""
        events = self._events
        sender = self._sender
        upcoming: asyncio.Future[Turn | None] = asyncio.ensure_future(self._next_batch_turn())
        try:
            while (turn := await self._wait_and_report(upcoming, send)) is not None:
                with turn:
                    keep_reading = await sender.send(events.parse_batch(), turn)
                if not keep_reading:
                    sender.result.stop(events.position, sender.result.must_stop)
                    break
                upcoming = asyncio.ensure_future(self._next_batch_turn())
                await self._report_progress(send)
        except (BodyStalled, CorruptBody, ServiceShuttingDown) as e:
            sender.result.stop(events.position, str(e), body_error_status(e))
        except (Problem, PenstockError) as e:
            if isinstance(e, ClientDisconnected):
                raise
            sender.result.stop(events.position, str(e))
        finally:
            # A turn that was granted too late must still be released.
            if (
                not upcoming.cancel()
                and not upcoming.cancelled()
                and upcoming.exception() is None
                and (last := upcoming.result())
            ):
                last.release()
        await sender.finish()

    async def _next_batch_turn(self) -> Turn | None:
        """Return the turn for the next batch; None at the end of the body."""
        return await self._body.wait_for_turn(self._events.position) if await self._events.wait() else None

    async def _wait_and_report(self, upcoming: asyncio.Future[Turn | None], send: Send) -> Turn | None:
        """Wait for the turn of the next batch. Meanwhile report the events whose outcomes are known."""
        # Data that has already arrived is available after one iteration of the event loop.
        await asyncio.sleep(0)
        while not upcoming.done():
            first = self._sender.first_in_flight
            if first is None:
                await self._report_progress(send, at_once=True)
                break
            until_report_s = max(0.0, EVERY_MS - (self._clock.monotonic_ms() - self._reported_ms)) / 1000
            waiting: set[asyncio.Future[Any]] = {upcoming, first.outcomes}
            limit_s = min(until_report_s, first.remaining_s)
            await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            await self._sender.settle_completed()
            await self._report_progress(send)
        return await upcoming

    async def _report_progress(self, send: Send, *, at_once: bool = False) -> None:
        """Write a line if it is due or `at_once` is set, and there are events to report."""
        result = self._sender.result
        now_ms = self._clock.monotonic_ms()
        if not at_once and len(result.errors) < ERRORS_PER_LINE and now_ms - self._reported_ms < EVERY_MS:
            return
        self._reported_ms = now_ms
        row = self._progress_row()
        if row["stored"] or "errors" in row:
            await self._write_line(send, row)

    def _progress_row(self) -> dict[str, Any]:
        first = self._sender.first_in_flight
        # The outcome of every event before this position is known.
        settled_before = self._events.position if first is None else first.positions[0]
        return {"through_line": settled_before - 1} | self._sender.result.pop_details()

    def _final_progress_row(self) -> dict[str, Any]:
        result = self._sender.result
        return self._progress_row() | {"status": result.status, "total": result.totals()}

    async def _write_line(self, send: Send, row: dict[str, Any]) -> None:
        await send({"type": "http.response.body", "body": msgspec.json.encode(row) + b"\n", "more_body": True})
