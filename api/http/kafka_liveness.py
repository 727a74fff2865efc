"""Whether Kafka still answers the client that does a service's work, as a health check (an edge).

A member of a group hears from its brokers several times a second, by fetches, and every few seconds, by heartbeats.
Only while it waits for a rebalance may nothing come for a minute; so after a part of the limit without any answer one
is asked for. Silence beyond the limit then means that the brokers hang or cannot be reached, however quietly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.api.http.health import CheckResult
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

ASK_SHARE = 0.25
"""Of the limit: how often is looked, and after how much silence an answer is asked for."""


class Talking(Protocol):
    """A client of Kafka that knows when it was last answered."""

    def silent_ms(self) -> float | None:
        """How long no broker has answered; None while it is not connected."""
        ...

    def ask_for_answer(self) -> None:
        """Send what any broker answers at once; does not wait."""
        ...


class Contact:
    """A check of the client that `client` gives, which may be another one from time to time."""

    def __init__(self, client: Callable[[], Talking | None], silence_max_ms: int) -> None:
        self._client, self._silence_max_ms = client, silence_max_ms
        self._was_ok = True

    def __repr__(self) -> str:
        return f"Contact({self()})"

    def __call__(self) -> CheckResult:
        """Whether the last answer came within the limit."""
        client = self._client()
        silent_ms = None if client is None else client.silent_ms()
        if silent_ms is None:
            return CheckResult(False, "not connected to Kafka yet")
        if silent_ms <= self._silence_max_ms:
            return CheckResult(True)
        return CheckResult(
            False, f"no answer from any broker for {silent_ms:.0f} ms (kafka_silence_max_ms={self._silence_max_ms})"
        )

    def look(self) -> None:
        """Ask for an answer where none came for a while, and log a change."""
        client = self._client()
        silent_ms = None if client is None else client.silent_ms()
        if client is None or silent_ms is None:
            return
        if silent_ms >= self._silence_max_ms * ASK_SHARE:
            client.ask_for_answer()
        result = self()
        if result.ok != self._was_ok:
            (log.info if result.ok else log.error)("check changed", check="kafka", ok=result.ok, detail=result.detail)
        self._was_ok = result.ok

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._silence_max_ms * ASK_SHARE / 1000)
