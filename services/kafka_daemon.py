"""The base of services that serve HTTP in front of Kafka: the producer, the admin and the local gateway.

The HTTP server starts first, so that `/health` can report that Kafka is not reached. The service connects to Kafka in
the background, and retries while no broker answers. An error that a retry cannot fix (credentials, a certificate's
path) ends the service.
"""

from __future__ import annotations

import asyncio

from penstock.api.http.kafka_liveness import PROBE_TIMEOUT_MS, KafkaProbe
from penstock.api.http.server import HttpServer
from penstock.services.first_connection import first_connection
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import RetriableError
from penstock.shared.common.settings import KafkaSettings

ADMIN_TIMEOUT_MS = 15_000
"""The time limit of one admin call: a person or an HTTP client waits for the response."""


class KafkaHttpDaemon:
    """The lifecycle of a service in front of Kafka. A subclass sets `server`.

    `penstock.services.service_lifecycle` describes the lifecycle.
    """

    server: HttpServer

    def __init__(self, kafka: KafkaSettings) -> None:
        self._admin = Admin(kafka, timeout_ms=ADMIN_TIMEOUT_MS)
        self._probe = KafkaProbe(self._request_cluster, self._admin.silent_ms, kafka.request_timeout_ms)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r}, {self._probe!r})"

    async def startup(self) -> None:
        """Listen for HTTP requests. Raises ConfigError as `HttpServer.start` does."""
        await self.server.start()

    async def main_loop(self) -> None:
        """Connect to Kafka, then probe it, while the server runs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.wait())
            await first_connection(self._try_to_connect)
            await self._probe.run_once()
            tasks.create_task(self._probe.run())

    async def connect(self) -> None:
        """Open every client of the service. Called again after each RetriableError."""
        await self._admin.__aenter__()

    async def _try_to_connect(self) -> None:
        try:
            await self.connect()
        except RetriableError as e:
            self._probe.connection_failed(str(e))
            await self._admin.close()
            raise

    async def _request_cluster(self) -> None:
        await self._admin.cluster(timeout_ms=PROBE_TIMEOUT_MS)
