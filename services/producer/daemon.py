"""The producer service: serves ingest over one Producer.

HTTP answers from the first moment on, so that `/health` can say what is missing; until Kafka is reached, and whenever
it is not, ingest answers 503. The end comes in this order: no new requests, those in flight finish and are answered,
the producer sends what it holds, the connections close.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from api.app import create_app
from api.health import health_router
from api.ingest import Ingest
from api.probe import Probe
from api.server import HttpServer
from services.producer.looked_up import LookedUpProducer
from services.producer.settings import ProducerServiceSettings
from shared.clients.admin import Admin
from shared.clients.producer import Producer
from shared.common.errors import BrokerNotAvailable, RetriableError
from shared.common.log import get_logger

log = get_logger(__name__)

RECONNECT_MS = 1_000
PROBE_TIMEOUT_MS = 3_000

BODY_SHARE, REQUEST_SHARE, FLUSH_SHARE = 0.25, 0.6, 0.3
"""Of `shutdown_timeout_ms`: until bodies that still come are answered as they are, until requests are cut off, and for
the producer's last flush."""


class ProducerDaemon:
    """Settings to a running service; `server.url` is known after `startup`."""

    def __init__(self, settings: ProducerServiceSettings, registry: CollectorRegistry | None = None) -> None:
        self._settings = settings
        self._registry = CollectorRegistry() if registry is None else registry
        self._producer = Producer(settings.kafka, settings.producer, registry=self._registry)
        self._admin = Admin(settings.kafka)
        self._connected = False
        self._probe = Probe("kafka", self._ask_kafka, timeout_ms=PROBE_TIMEOUT_MS)
        looked_up = LookedUpProducer(self._producer, self._admin)
        self.ingest = Ingest(looked_up, settings.ingest, self._registry, kafka=self._probe)
        self.server = self._create_server()

    def __repr__(self) -> str:
        return f"ProducerDaemon({self.server!r}, {self._probe!r})"

    def _create_server(self) -> HttpServer:
        """The server with the routes of this service."""
        settings = self._settings
        app = create_app(
            ingest=self.ingest.router,
            health=health_router("producer", {"kafka": self._probe}, self._registry),
            auth_token=settings.auth_token,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock producer",
        )
        return HttpServer(app, settings.http)

    async def startup(self) -> None:
        """Listen; ConfigError where the address cannot be had."""
        await self.server.start()

    async def main_loop(self) -> None:
        """Reach Kafka, then watch it, while the server works."""
        await self._connect()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probe.run())
            tasks.create_task(self.server.wait())

    async def shutdown(self) -> None:
        """Finish what is in flight, each step within its share of the limit."""
        limit_ms = self._settings.shutdown_timeout_ms
        self.ingest.drain(int(limit_ms * BODY_SHARE))
        await self.server.stop(int(limit_ms * REQUEST_SHARE))
        await self._producer.close(int(limit_ms * FLUSH_SHARE))
        await self._admin.close()

    async def _connect(self) -> None:
        """Try until a broker answers; what trying again cannot mend (credentials) ends the service."""
        while True:
            try:
                await self._admin.__aenter__()
                await self._producer.start()
            except RetriableError as e:
                log.warning("kafka cannot be reached, trying again", reason=str(e))
                await self._admin.close()
                await asyncio.sleep(RECONNECT_MS / 1000)
            else:
                self._connected = True
                await self._probe.run_once()
                return

    async def _ask_kafka(self) -> None:
        if not self._connected:
            raise BrokerNotAvailable("not connected yet")
        await self._admin.cluster(timeout_ms=PROBE_TIMEOUT_MS)
