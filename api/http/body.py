"""A request's body, chunk by chunk, with limits on the time that it takes (an edge).

A client that stalls gets its answer after `body_timeout_ms`. So does a client that sends single bytes slowly: a line or
an object must end within `body_timeout_ms`, and a body that is read whole within `whole_body_timeout_ms`. Only time
spent waiting for the client counts. When the service shuts down, an incomplete body has until the drain's deadline.
It is then answered for the events read so far. A compressed body is inflated in steps, and all limits apply to the
inflated data. The steps end when the client has closed the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.api.http.content_encoding import Inflater
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.ingest.turns import BULK_BYTES, BULK_EVENTS, FREE, Turn, Turns
from penstock.shared.common.errors import PenstockError

T = TypeVar("T")

PART_BYTES = 65_536
"""The chunk size of a body that was already read."""


class BodyStalled(PenstockError):
    """No byte of the body came within `body_timeout_ms`, or the end of a line, an object or the whole came too late."""


class ServiceLeaving(PenstockError):
    """The service is shutting down, and the body did not end before the drain's deadline."""


class ClientGone(PenstockError):
    """The client closed the connection before its body was complete."""


class Drain:
    """Sets the deadline for the bodies that are being read when the service shuts down."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        self._waiting: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"Drain(deadline={self.deadline}, waiting={len(self._waiting)})"

    @property
    def begun(self) -> bool:
        """Whether the service is shutting down."""
        return self.deadline != float("inf")

    def begin(self, grace_ms: int) -> None:
        """Give all bodies `grace_ms` from now."""
        self.deadline = asyncio.get_running_loop().time() + grace_ms / 1000
        for timeout in self._waiting:
            when = timeout.when()
            if when is None or when > self.deadline:
                timeout.reschedule(self.deadline)

    async def wait(self, wait: Callable[[], Awaitable[T]], until: float, late: Callable[[], str]) -> T:
        """Return the result of `wait`. Raises BodyStalled with the text of `late` at the loop's time `until`.

        Raises ServiceLeaving if the drain's deadline passes first.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, self.deadline)) as timeout:
                self._waiting.add(timeout)
                try:
                    return await wait()
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            if loop.time() >= self.deadline:
                raise ServiceLeaving("the service is shutting down") from None
            raise BodyStalled(late()) from None


class BodyReader:
    """The chunks of one request's body."""

    def __init__(
        self,
        receive: Receive,
        drain: Drain,
        timeout_ms: int,
        whole_timeout_ms: int = 2**31,
        *,
        declared_bytes: int = 0,
        inflater: Inflater | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`declared_bytes` is the request's Content-Length; `turns` orders bulk requests, None if nothing does."""
        self._receive = receive
        self._drain = drain
        self._timeout_ms = timeout_ms
        self._whole_timeout_ms = whole_timeout_ms
        self._declared_bytes = declared_bytes
        self._inflater = inflater
        self._place = None if turns is None else turns.place()
        self._bytes = 0
        self._ahead: asyncio.Future[MutableMapping[str, Any]] | None = None
        """The next message, received while a chunk is inflated, so that a closed connection is noticed."""
        self._more = True
        self._in_part = False
        self._part_s = 0.0  # seconds spent waiting for the client since the part began
        self._whole_until = float("inf")
        self._last_byte_at = asyncio.get_running_loop().time()

    @classmethod
    def of(cls, body: bytes) -> BodyReader:
        """Return a reader of a body that was already read."""
        parts = iter(range(0, max(1, len(body)), PART_BYTES))

        async def receive() -> MutableMapping[str, Any]:
            at = next(parts)
            return {
                "body": body[at : at + PART_BYTES],
                "type": "http.request",
                "more_body": at + PART_BYTES < len(body),
            }

        return cls(receive, Drain(), timeout_ms=1_000)

    @property
    def since_last_byte_s(self) -> float:
        """Seconds since the last byte of the body, or since the reader was made."""
        return asyncio.get_running_loop().time() - self._last_byte_at

    @property
    def declared_bytes(self) -> int:
        """The Content-Length; 0 if there is none, or if it is not the length of the inflated data."""
        return 0 if self._inflater is not None else self._declared_bytes

    async def turn(self, events: int) -> Turn:
        """Return the right to parse and hand over the next batch, after `events` events. Raises ServiceLeaving."""
        place, is_bulk = self._place, max(self._declared_bytes, self._bytes) > BULK_BYTES or events > BULK_EVENTS
        if place is None or not is_bulk:
            return FREE
        return await self._drain.wait(lambda: place.turn(self._bytes), float("inf"), str)

    async def next(self) -> bytes | None:
        """Return the next chunk, which may be empty, or None at the end.

        Raises BodyStalled, ServiceLeaving, ClientGone, CorruptBody.
        """
        inflater = self._inflater
        while True:
            if inflater is not None and inflater.pending:
                chunk = inflater.step()
                if self._ahead is None:
                    self._ahead = asyncio.ensure_future(self._receive())
                await asyncio.sleep(0)
                self._check_client()
                if not chunk:
                    continue
            elif not self._more:
                if inflater is not None:
                    inflater.close()
                if self._ahead is not None:
                    self._ahead.cancel()
                return None
            else:
                chunk = await self._next()
                if inflater is not None:
                    inflater.feed(chunk)
                    continue
            self._bytes += len(chunk)
            return chunk

    async def _next(self) -> bytes:
        """Return the next chunk as it arrives."""
        clock = asyncio.get_running_loop().time
        since = clock()
        ahead, self._ahead = self._ahead, None
        message = await self._drain.wait(self._receive if ahead is None else lambda: ahead, self._until(), self._late)
        self._last_byte_at = clock()
        if self._in_part:
            self._part_s += self._last_byte_at - since
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection")
        self._more = bool(message.get("more_body", False))
        chunk = message.get("body", b"")
        assert isinstance(chunk, bytes)
        return chunk

    def _check_client(self) -> None:
        """Raise ClientGone if the client closed the connection while a chunk is inflated."""
        ahead = self._ahead
        if ahead is not None and ahead.done() and ahead.result()["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection")

    def _until(self) -> float:
        """The deadline of the next message, by the loop's clock."""
        left_s = self._timeout_ms / 1000 - self._part_s
        return min(asyncio.get_running_loop().time() + left_s, self._whole_until)

    def _late(self) -> str:
        """Return the error text for a body that is too slow."""
        if asyncio.get_running_loop().time() >= self._whole_until:
            return f"the body did not end within whole_body_timeout_ms={self._whole_timeout_ms}"
        what = "a line or an object did not end" if self._in_part else "no data of the body arrived"
        return f"{what} within body_timeout_ms={self._timeout_ms}"

    def seen(self, *, ended: int, unfinished: bool) -> None:
        """Report the last chunk: `ended` lines or objects ended in it; `unfinished` if one is still open."""
        if ended or not (unfinished and self._in_part):
            self._part_s = 0.0
        self._in_part = unfinished

    async def all(self, max_body_bytes: int) -> bytes:
        """Return the whole body. Raises Problem (413) if it is longer than `max_body_bytes`.

        Raises also what `next` raises.
        """
        body = bytearray()
        self._whole_until = asyncio.get_running_loop().time() + self._whole_timeout_ms / 1000
        while (chunk := await self.next()) is not None:
            body += chunk
            if len(body) > max_body_bytes:
                raise too_long(max_body_bytes)
        return bytes(body)


def too_long(max_body_bytes: int) -> Problem:
    """Return the answer to a body over its limit."""
    kind = ErrorKind(413, "BODY_TOO_LARGE", "Body too large")
    return Problem(kind, f"the body is longer than max_body_bytes={max_body_bytes}; NDJSON has no such limit")
