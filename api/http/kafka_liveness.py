"""Health checks: whether Kafka answers a service.

`KafkaProbe` is the check of services that serve HTTP in front of Kafka: it sends a request at intervals.

`KafkaLiveness` is the check of group members. A member normally receives responses to fetches several times a second,
and responses to heartbeats every few seconds. During a rebalance a minute may pass without a response. So if no
response has arrived for a share of the limit, the check sends a request of its own. If no response arrives within the
limit, the brokers hang or cannot be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.api.http.health import CheckResult
from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

PING_SHARE = 0.25
"""The share of the limit between two runs of the check, and the share of silence after which it sends a request."""

PROBE_INTERVAL_MS = 2_000
PROBE_TIMEOUT_MS = 3_000
"""How long a probe repeats its request after errors, such as a rejected connection."""


class LivenessClient(Protocol):
    """A client of Kafka that knows when it last received a response."""

    def silent_ms(self) -> float | None:
        """Return the milliseconds since the last response of any broker; None while the client is not open."""
        ...

    def ping(self) -> None:
        """Send a request that any broker answers at once. Does not wait."""
        ...


class KafkaLiveness:
    """The check of group members. It fails if no broker has answered the client for `silence_max_ms`.

    It also fails until the client is connected. `client` returns the current client; None if there is none yet.
    """

    def __init__(self, client: Callable[[], LivenessClient | None], silence_max_ms: int) -> None:
        self._client = client
        self._silence_max_ms = silence_max_ms
        self._was_ok = True

    def __repr__(self) -> str:
        return f"KafkaLiveness({self()})"

    def __call__(self) -> CheckResult:
        """Return whether the last response arrived within the limit."""
        client = self._client()
        silent_ms = None if client is None else client.silent_ms()
        if silent_ms is None:
            return CheckResult(False, "not connected to Kafka yet")
        if silent_ms <= self._silence_max_ms:
            return CheckResult(True)
        return CheckResult(
            False, f"no response from any broker for {silent_ms:.0f} ms (kafka_silence_max_ms={self._silence_max_ms})"
        )

    def run_once(self) -> None:
        """Send a request after PING_SHARE of the limit without a response, and log a change of the result."""
        client = self._client()
        silent_ms = None if client is None else client.silent_ms()
        if client is None or silent_ms is None:
            return
        if silent_ms >= self._silence_max_ms * PING_SHARE:
            client.ping()
        result = self()
        if result.ok != self._was_ok:
            (log.info if result.ok else log.error)("check changed", check="kafka", ok=result.ok, detail=result.detail)
        self._was_ok = result.ok

    async def run(self) -> None:
        """Run the check at intervals until cancelled."""
        while True:
            self.run_once()
            await asyncio.sleep(self._silence_max_ms * PING_SHARE / 1000)


class KafkaProbe:
    """Checks at intervals whether Kafka answers a request. Calling the probe returns the latest result without waiting.

    `/health` shows the result. While the result is not ok, ingest answers 503 at once. Before the first response the
    result is not ok.

    `request` raises KafkaTimeout without a cause if no response came in time. Kafka may then answer slowly, so the
    probe fails only if no response has arrived for `silence_max_ms`. `silent_ms` is that of LivenessClient.
    """

    def __init__(
        self,
        request: Callable[[], Awaitable[Any]],
        silent_ms: Callable[[], float | None],
        silence_max_ms: int,
        *,
        interval_ms: int = PROBE_INTERVAL_MS,
    ) -> None:
        self._request = request
        self._silent_ms = silent_ms
        self._silence_max_ms = silence_max_ms
        self._interval_ms = interval_ms
        self._result = CheckResult(False, "not connected to Kafka yet")

    def __repr__(self) -> str:
        return f"KafkaProbe({self._result})"

    def __call__(self) -> CheckResult:
        """Return the latest result."""
        return self._result

    def connection_failed(self, reason: str) -> None:
        """Store the reason why the service is not connected to Kafka yet."""
        self._result = CheckResult(False, f"not connected to Kafka yet: {reason}")

    async def run_once(self) -> CheckResult:
        """Send the request to Kafka and store the result. An error, or a long silence, is a failed result."""
        result = CheckResult(True)
        try:
            await self._request()
        except Exception as e:
            result = CheckResult(False, str(e) or type(e).__name__)
            if isinstance(e, KafkaTimeout) and e.__cause__ is None and (silent_ms := self._silent_ms()) is not None:
                is_slow = silent_ms <= self._silence_max_ms
                result = CheckResult(is_slow, "" if is_slow else f"no response from any broker for {silent_ms:.0f} ms")
        if result.ok != self._result.ok:
            log.info("check changed", check="kafka", ok=result.ok, detail=result.detail)
        self._result = result
        return result

    async def run(self) -> None:
        """Probe Kafka at intervals until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(self._interval_ms / 1000)
