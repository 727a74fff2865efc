"""The base of services that serve HTTP in front of Kafka: the producer, the admin and the local gateway.

The HTTP server starts first, so `/health` can report what is missing. The service connects to Kafka in the background.
It retries while no broker answers. An error that a retry cannot fix (credentials, a certificate's path) ends the
service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.api.http.health import CheckResult
from penstock.api.http.server import HttpServer
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import BrokerNotAvailable, RetriableError
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

RECONNECT_MS = 1_000
PROBE_INTERVAL_MS = 2_000
PROBE_TIMEOUT_MS = 3_000


class Probe:
    """A check that runs on a schedule, so reading its result costs nothing and never waits.

    A service probes whether Kafka answers. `/health` shows the result, and ingest answers 503 at once while the brokers
    are known to be unreachable. Otherwise every client would wait for a timeout. The result is not ok until the first
    answer.
    """

    def __init__(
        self,
        name: str,
        request: Callable[[], Awaitable[Any]],
        *,
        interval_ms: int = PROBE_INTERVAL_MS,
        timeout_ms: int = PROBE_TIMEOUT_MS,
    ) -> None:
        self._name = name
        self._request = request
        self._interval_ms = interval_ms
        self._timeout_ms = timeout_ms
        self._result = CheckResult(False, "not probed yet")

    def __repr__(self) -> str:
        return f"Probe({self._name}, {self._result})"

    def __call__(self) -> CheckResult:
        """Return the latest result."""
        return self._result

    async def run_once(self) -> CheckResult:
        """Send the request and store the result. An error, or no answer in time, is a failed result."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._request()
            result = CheckResult(True)
        except TimeoutError:
            result = CheckResult(False, f"{self._name} did not answer within {self._timeout_ms} ms")
        except Exception as e:
            result = CheckResult(False, str(e) or type(e).__name__)
        if result.ok != self._result.ok:
            log.info("check changed", check=self._name, ok=result.ok, detail=result.detail)
        self._result = result
        return result

    async def run(self) -> None:
        """Repeat at intervals until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(self._interval_ms / 1000)


class KafkaHttpDaemon:
    """The lifecycle of a service in front of Kafka; see `penstock.services.daemon`. A subclass sets `server`."""

    server: HttpServer

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._connected = False
        self._probe = Probe("kafka", self._request_cluster)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r}, {self._probe!r})"

    async def startup(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        await self.server.start()

    async def main_loop(self) -> None:
        """Connect to Kafka, then probe it, while the server runs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.wait())
            await self._connect_with_retries()
            tasks.create_task(self._probe.run())

    async def connect(self) -> None:
        """Open every client of the service. Called again after a RetriableError."""
        await self._admin.__aenter__()

    async def _connect_with_retries(self) -> None:
        """Connect to Kafka. A RetriableError is logged once and retried after RECONNECT_MS."""
        logged_reason = ""
        while True:
            try:
                await self.connect()
            except RetriableError as e:
                if str(e) != logged_reason:
                    log.warning("kafka cannot be reached, retrying", reason=str(e))
                logged_reason = str(e)
                await self._admin.close()
                await asyncio.sleep(RECONNECT_MS / 1000)
            else:
                self._connected = True
                await self._probe.run_once()
                return

    async def _request_cluster(self) -> None:
        if not self._connected:
            raise BrokerNotAvailable("not connected yet")
        await self._admin.cluster(timeout_ms=PROBE_TIMEOUT_MS)
