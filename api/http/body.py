"""A request's body, chunk by chunk, with limits on the time that it takes.

Reading ends if the client sends nothing for `body_timeout_ms`. Single bytes that arrive slowly do not extend the time:
a line or an object must end within `body_timeout_ms`, of which only time spent waiting for the client counts. A
buffered body must end within `whole_body_timeout_ms`. Every body is buffered, except NDJSON that is not stored
atomically, and v3 record streams without Content-Length. When the service shuts down, a deadline applies to all
incomplete bodies. A request whose buffered body is too slow is answered with 408, or with 503 after the deadline. Any
other request is answered for the events read so far, with the reason why reading ended. A compressed body is inflated
in steps, and all limits on sizes apply to the inflated data. Inflating stops when the client has closed the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.api.http.content_encoding import CorruptBody, Inflater
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import (
    BAD_REQUEST,
    CLIENT_CLOSED_REQUEST,
    CONTENT_TOO_LARGE,
    REQUEST_TIMEOUT,
    SERVICE_UNAVAILABLE,
)
from penstock.api.http.turns import BULK_BYTES, BULK_EVENTS, FREE, Turn, Turns
from penstock.shared.common.errors import IllegalState, PenstockError

T = TypeVar("T")

CHUNK_BYTES = 65_536
"""The size of a chunk of a body that was already read."""


class BodyStalled(PenstockError):
    """The body, or a line or an object in it, did not arrive in time."""


class ServiceShuttingDown(PenstockError):
    """The service is shutting down, and its deadline for incomplete bodies has passed."""


class ClientDisconnected(Problem):
    """The connection ends: the client has closed it, does not read the response, or has sent a body that is not HTTP.

    No client receives this problem as a response.
    """

    def __init__(self) -> None:
        kind = ErrorKind(CLIENT_CLOSED_REQUEST, "CLIENT_CLOSED_REQUEST", "Client closed the connection")
        super().__init__(kind, "the client closed the connection")


class BodyDrain:
    """Sets the deadline for the bodies that are being read when the service shuts down."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        self._waiting: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"BodyDrain(deadline={self.deadline}, waiting={len(self._waiting)})"

    @property
    def begun(self) -> bool:
        """Whether the service is shutting down, so that bodies have a deadline."""
        return self.deadline != float("inf")

    def begin(self, grace_ms: int) -> None:
        """Set the drain's deadline to `grace_ms` from now.

        A body that is waiting with an earlier deadline of its own (see `wait`) keeps that one.
        """
        self.deadline = asyncio.get_running_loop().time() + grace_ms / 1000
        for timeout in self._waiting:
            when = timeout.when()
            if when is None or when > self.deadline:
                timeout.reschedule(self.deadline)

    async def wait(self, wait: Callable[[], Awaitable[T]], deadline: float, timeout_message: Callable[[], str]) -> T:
        """Await `wait()` and return its result, or raise an error at the earlier of two deadlines.

        Raises BodyStalled with `timeout_message()` at `deadline` (the loop's time), and ServiceShuttingDown at the
        deadline that `begin` has set.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, self.deadline)) as timeout:
                self._waiting.add(timeout)
                try:
                    return await wait()
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            if loop.time() >= self.deadline:
                raise ServiceShuttingDown("the service is shutting down") from None
            raise BodyStalled(timeout_message()) from None


class BodyReader:
    """The chunks of one request's body."""

    def __init__(
        self,
        receive: Receive,
        drain: BodyDrain,
        timeout_ms: int,
        whole_timeout_ms: int = 2**31,
        *,
        declared_bytes: int = 0,
        inflater: Inflater | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`declared_bytes` is the request's Content-Length; `turns` orders bulk requests, None for no order."""
        self._receive = receive
        self._drain = drain
        self._timeout_ms = timeout_ms
        self._whole_timeout_ms = whole_timeout_ms
        self._declared_bytes = declared_bytes
        self._inflater = inflater
        self._queue_entry = None if turns is None else turns.enqueue()
        self._bytes = 0
        self._ahead: asyncio.Future[MutableMapping[str, Any]] | None = None
        """The next message, received while a chunk is inflated, so that a closed connection is noticed."""
        self._has_more = True
        self._in_event = False
        # This is the time spent waiting for the client since the current line or object began.
        self._event_wait_s = 0.0
        self._whole_deadline = float("inf")
        self._last_byte_at = asyncio.get_running_loop().time()

    @classmethod
    def of(cls, body: bytes) -> BodyReader:
        """Return a reader of a body that was already read."""
        starts = iter(range(0, max(1, len(body)), CHUNK_BYTES))

        async def receive_chunk() -> MutableMapping[str, Any]:
            start = next(starts)
            return {
                "body": body[start : start + CHUNK_BYTES],
                "type": "http.request",
                "more_body": start + CHUNK_BYTES < len(body),
            }

        return cls(receive_chunk, BodyDrain(), timeout_ms=1_000)

    @property
    def since_last_byte_s(self) -> float:
        """Seconds since the last byte of the body, or since the reader was made."""
        return asyncio.get_running_loop().time() - self._last_byte_at

    @property
    def declared_bytes(self) -> int:
        """The Content-Length; 0 if there is none, or if it is not the length of the inflated data."""
        return 0 if self._inflater is not None else self._declared_bytes

    async def wait_for_turn(self, events: int) -> Turn:
        """Return the turn in which this request may parse and send its next batch.

        Only a bulk request waits: more than BULK_BYTES declared or read, or more than BULK_EVENTS `events`. `events` is
        the number of events known so far. Raises ServiceShuttingDown at the deadline of a shutdown.
        """
        entry = self._queue_entry
        is_bulk = max(self._declared_bytes, self._bytes) > BULK_BYTES or events > BULK_EVENTS
        if entry is None or not is_bulk:
            return FREE
        return await self._drain.wait(lambda: entry.turn(self._bytes), float("inf"), str)

    async def next(self) -> bytes | None:
        """Return the next chunk of the body, inflated, or None at the end. A chunk may be empty.

        Raises BodyStalled, ServiceShuttingDown, ClientDisconnected, or CorruptBody if the compressed data is invalid or
        incomplete.
        """
        inflater = self._inflater
        while True:
            if inflater is not None and inflater.pending:
                # 1. Received data is not completely inflated: inflate one step. Meanwhile the next message is received,
                # to notice a disconnect.
                chunk = inflater.step()
                if self._ahead is None:
                    self._ahead = asyncio.ensure_future(self._receive())
                await asyncio.sleep(0)
                self._check_client()
                if not chunk:
                    continue
            elif not self._has_more:
                if inflater is not None:
                    # 2. The body has ended. `close` raises CorruptBody if the compressed data is incomplete.
                    inflater.close()
                if self._ahead is not None:
                    self._ahead.cancel()
                return None
            else:
                # 3. Receive the next message.
                chunk = await self._receive_chunk()
                if inflater is not None:
                    inflater.feed(chunk)
                    continue
            self._bytes += len(chunk)
            return chunk

    async def _receive_chunk(self) -> bytes:
        """Return the body of the next message."""
        clock = asyncio.get_running_loop().time
        started_at = clock()
        ahead = self._ahead
        self._ahead = None
        receive = self._receive if ahead is None else lambda: ahead
        message = await self._drain.wait(receive, self._message_deadline(), self._timeout_message)
        self._last_byte_at = clock()
        if self._in_event:
            self._event_wait_s += self._last_byte_at - started_at
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self._has_more = bool(message.get("more_body", False))
        chunk = message.get("body", b"")
        assert isinstance(chunk, bytes)
        return chunk

    def _check_client(self) -> None:
        """Raise ClientDisconnected if the client has closed the connection while a chunk is inflated."""
        ahead = self._ahead
        if ahead is not None and ahead.done() and ahead.result()["type"] == "http.disconnect":
            raise ClientDisconnected

    def _message_deadline(self) -> float:
        """Return the deadline of the next message, by the loop's clock."""
        remaining_s = self._timeout_ms / 1000 - self._event_wait_s
        return min(asyncio.get_running_loop().time() + remaining_s, self._whole_deadline)

    def _timeout_message(self) -> str:
        """Return the error text for a body that is too slow."""
        if asyncio.get_running_loop().time() >= self._whole_deadline:
            return f"the body did not end within whole_body_timeout_ms={self._whole_timeout_ms}"
        reason = "a line or an object did not end" if self._in_event else "no data of the body arrived"
        return f"{reason} within body_timeout_ms={self._timeout_ms}"

    def chunk_split(self, *, ended: int, unfinished: bool) -> None:
        """Report that the last chunk is split into lines or objects.

        `ended` is the number of lines or objects that ended in it. `unfinished` is whether one has begun and not ended.
        The time limit of a line or an object starts again whenever one ends.
        """
        if ended or not (unfinished and self._in_event):
            self._event_wait_s = 0.0
        self._in_event = unfinished

    async def read_all(self, max_body_bytes: int) -> bytes:
        """Return the complete body. Raises Problem (413) if it is longer than `max_body_bytes`.

        Raises also what `next` raises.
        """
        body = bytearray()
        self._whole_deadline = asyncio.get_running_loop().time() + self._whole_timeout_ms / 1000
        while (chunk := await self.next()) is not None:
            body += chunk
            if len(body) > max_body_bytes:
                raise body_too_long(max_body_bytes)
        return bytes(body)


_UNLIMITED = "NDJSON that is not stored atomically has no such limit"


def body_too_long(max_body_bytes: int) -> Problem:
    """Return the response to a body over its limit."""
    kind = ErrorKind(CONTENT_TOO_LARGE, "BODY_TOO_LARGE", "Body too large")
    return Problem(kind, f"the body is longer than max_body_bytes={max_body_bytes}; {_UNLIMITED}")


def too_many_events(max_body_events: int) -> Problem:
    """Return the response to a buffered body with more events than its limit."""
    kind = ErrorKind(CONTENT_TOO_LARGE, "TOO_MANY_EVENTS", "Too many events")
    return Problem(kind, f"the body has more than max_body_events={max_body_events} events; {_UNLIMITED}")


async def read_body(body: BodyReader, max_body_bytes: int) -> bytes:
    """Return a request's complete body, up to `max_body_bytes`.

    Raises Problem: 413 if it is longer, 408 if it stalls, 400 if it cannot be inflated, and 503 at the deadline of a
    shutdown. Raises ClientDisconnected if the client closes the connection.
    """
    if body.declared_bytes > max_body_bytes:
        raise body_too_long(max_body_bytes)
    try:
        return await body.read_all(max_body_bytes)
    except (BodyStalled, CorruptBody) as e:
        status = body_error_status(e)
        raise Problem(ErrorKind(status, body_error_code(status), "Body incomplete"), str(e)) from None
    except ServiceShuttingDown as e:
        raise Problem.of(IllegalState(str(e))) from None


async def next_turn(body: BodyReader, events: int) -> Turn:
    """Wait for the turn to parse and send the next batch, like `BodyReader.wait_for_turn`.

    Raises Problem (503) at the deadline of a shutdown. Then no event of this batch is stored.
    """
    try:
        return await body.wait_for_turn(events)
    except ServiceShuttingDown as e:
        raise Problem.of(IllegalState(str(e))) from None


def body_error_status(error: Exception) -> int:
    """Return the status for an error that ended the reading of a body.

    It is 408 for BodyStalled, 400 for CorruptBody, and 503 for any other error.
    """
    if isinstance(error, BodyStalled):
        return REQUEST_TIMEOUT
    return BAD_REQUEST if isinstance(error, CorruptBody) else SERVICE_UNAVAILABLE


def body_error_code(status: int) -> str:
    """Return the error code of a response whose status is from `body_error_status`.

    >>> body_error_code(408), body_error_code(400), body_error_code(503)
    ('BODY_STALLED', 'CORRUPT_BODY', 'NOTHING_READ')
    """
    return {REQUEST_TIMEOUT: "BODY_STALLED", BAD_REQUEST: "CORRUPT_BODY"}.get(status, "NOTHING_READ")
