"""A request's body, chunk by chunk, with a limit on every pause, and on how long a part of it may take (an edge).

A client that stalls is answered after `body_timeout_ms`, and so is one that sends a byte now and then: a line or an
object has as long to come to its end, a body that is read whole `whole_body_timeout_ms`. When the service leaves, a
body that is still coming has until the drain's deadline and is then answered for what was read so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from starlette.types import Receive

from api.problem import ErrorKind, Problem
from shared.common.errors import PenstockError

PART_BYTES = 65_536
"""A body that was read already is given out in parts of so many bytes, as it would have come."""


class BodyStalled(PenstockError):
    """No byte of the body came within `body_timeout_ms`, or the end of a line, an object or the whole came too late."""


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

    async def receive(self, receive: Receive, until: float, late: Callable[[], str]) -> Mapping[str, object]:
        """The next ASGI message; BodyStalled where none comes `until` then, with what is `late`.

        ServiceLeaving where the service leaves before.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, self.deadline)) as timeout:
                self._waiting.add(timeout)
                try:
                    return await receive()
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            if loop.time() >= self.deadline:
                raise ServiceLeaving("the service is shutting down") from None
            raise BodyStalled(late()) from None


class BodyReader:
    """The chunks of one request's body."""

    def __init__(self, receive: Receive, drain: Drain, timeout_ms: int, whole_timeout_ms: int = 2**31) -> None:
        self._receive = receive
        self._drain = drain
        self._timeout_ms = timeout_ms
        self._whole_timeout_ms = whole_timeout_ms
        self._more = True
        self._part_since: float | None = None
        self._whole_until = float("inf")
        self._last_byte_at = asyncio.get_running_loop().time()

    @classmethod
    def of(cls, body: bytes) -> BodyReader:
        """A body that was read already."""
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
        """Seconds since something of the body came, or since it was first looked for."""
        return asyncio.get_running_loop().time() - self._last_byte_at

    async def next(self) -> bytes | None:
        """The next chunk (it may be empty), or None at the end. Raises BodyStalled, ServiceLeaving, ClientGone."""
        if not self._more:
            return None
        message = await self._drain.receive(self._receive, self._until(), self._late)
        self._last_byte_at = asyncio.get_running_loop().time()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection")
        self._more = bool(message.get("more_body", False))
        chunk = message.get("body", b"")
        assert isinstance(chunk, bytes)
        return chunk

    def _until(self) -> float:
        """When something has to have come, by the loop's clock."""
        since = asyncio.get_running_loop().time() if self._part_since is None else self._part_since
        return min(since + self._timeout_ms / 1000, self._whole_until)

    def _late(self) -> str:
        """What did not come in time."""
        if asyncio.get_running_loop().time() >= self._whole_until:
            return f"the body did not end within whole_body_timeout_ms={self._whole_timeout_ms}"
        what = "the body did not go on" if self._part_since is None else "a line or an object did not end"
        return f"{what} within body_timeout_ms={self._timeout_ms}"

    def seen(self, *, ended: int, unfinished: bool) -> None:
        """Say what the last chunk held: how many lines or objects ended in it, and whether one is still open."""
        if not unfinished:
            self._part_since = None
        elif ended or self._part_since is None:
            self._part_since = self._last_byte_at

    async def all(self, max_body_bytes: int) -> bytes:
        """The whole body; Problem (413) where it is longer than `max_body_bytes`, BodyStalled where it is too slow."""
        body = bytearray()
        self._whole_until = asyncio.get_running_loop().time() + self._whole_timeout_ms / 1000
        while (chunk := await self.next()) is not None:
            body += chunk
            if len(body) > max_body_bytes:
                raise too_long(max_body_bytes)
        return bytes(body)


def too_long(max_body_bytes: int) -> Problem:
    """The answer to a body over its limit."""
    kind = ErrorKind(413, "BODY_TOO_LARGE", "Body too large")
    return Problem(kind, f"the body is longer than max_body_bytes={max_body_bytes}; NDJSON has no such limit")
