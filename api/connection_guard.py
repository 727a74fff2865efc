"""uvicorn's HTTP protocol with a limit on how long a request's head may take (an edge).

uvicorn waits for the rest of a head for ever. A client that sends it byte by byte would keep its connection, and with
enough of them everybody else out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_MS = 10_000
"""From a connection's first moment, or a request's first byte, to the end of its head."""

Base: Any = AutoHTTPProtocol


class GuardedHttp(Base):  # type: ignore[misc]
    """See the module; `head_timeout_ms` may be set on a subclass."""

    head_timeout_ms = HEAD_TIMEOUT_MS
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Expect a head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that is complete has its request in `cycle`."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_ms / 1000, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
