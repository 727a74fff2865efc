"""A request's body, chunk by chunk, with a limit on every pause (an edge).

A client that stalls is answered after `body_timeout_ms`; when the service leaves, a body that is still coming has
until the drain's deadline and is then answered for what was read so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.types import Receive

from api.problem import ErrorKind, Problem
from shared.common.errors import PenstockError


class BodyStalled(PenstockError):
    """No byte of the body came within `body_timeout_ms`."""


class ServiceLeaving(PenstockError):
    """The service is shutting down, and the body did not end in time."""


class ClientGone(PenstockError):
    """The client closed the connection before its body was complete."""


class Drain:
    """Tells the bodies that are being read by when they have to be done."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        self._waiting: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"Drain(deadline={self.deadline}, waiting={len(self._waiting)})"

    @property
    def begun(self) -> bool:
        """Whether the service is leaving."""
        return self.deadline != float("inf")

    def begin(self, grace_ms: int) -> None:
        """Give all bodies `grace_ms` from now."""
        self.deadline = asyncio.get_running_loop().time() + grace_ms / 1000
        for timeout in self._waiting:
            when = timeout.when()
            if when is None or when > self.deadline:
                timeout.reschedule(self.deadline)

    async def receive(self, receive: Receive, timeout_ms: int) -> Mapping[str, object]:
        """The next ASGI message; BodyStalled or ServiceLeaving where none comes in time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + timeout_ms / 1000, self.deadline)) as timeout:
                self._waiting.add(timeout)
                try:
                    return await receive()
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            if loop.time() >= self.deadline:
                raise ServiceLeaving("the service is shutting down") from None
            raise BodyStalled(f"no byte of the body came within body_timeout_ms={timeout_ms}") from None


class BodyReader:
    """The chunks of one request's body."""

    def __init__(self, receive: Receive, drain: Drain, timeout_ms: int) -> None:
        self._receive = receive
        self._drain = drain
        self._timeout_ms = timeout_ms
        self._more = True

    @classmethod
    def of(cls, body: bytes) -> BodyReader:
        """A body that was read already."""

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body}

        return cls(receive, Drain(), timeout_ms=1_000)

    async def next(self) -> bytes | None:
        """The next chunk (it may be empty), or None at the end. Raises BodyStalled, ServiceLeaving, ClientGone."""
        if not self._more:
            return None
        message = await self._drain.receive(self._receive, self._timeout_ms)
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection")
        self._more = bool(message.get("more_body", False))
        chunk = message.get("body", b"")
        assert isinstance(chunk, bytes)
        return chunk

    async def all(self, max_body_bytes: int) -> bytes:
        """The whole body; a Problem (413) where it is longer than `max_body_bytes`."""
        body = bytearray()
        while (chunk := await self.next()) is not None:
            body += chunk
            if len(body) > max_body_bytes:
                raise too_long(max_body_bytes)
        return bytes(body)


def too_long(max_body_bytes: int) -> Problem:
    """The answer to a body over its limit."""
    kind = ErrorKind(413, "BODY_TOO_LARGE", "Body too large")
    return Problem(kind, f"the body is longer than max_body_bytes={max_body_bytes}; NDJSON has no such limit")
