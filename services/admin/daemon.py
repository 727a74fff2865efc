"""The admin service: admin routes, the dashboard, and the health of the other services.

HTTP answers from the first moment on; while Kafka is not reached the page and `/health` say so, and the admin routes
answer 503.
"""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client import CollectorRegistry

from api.admin import admin_router
from api.app import create_app
from api.dashboard import dashboard_router
from api.health import health_router
from api.probe import Probe
from api.server import HttpServer
from services.admin.overview import Overview
from services.admin.settings import AdminServiceSettings
from services.admin.sources import HttpSource, KafkaSource
from shared.clients.admin import Admin
from shared.common.errors import BrokerNotAvailable, RetriableError
from shared.common.log import get_logger

log = get_logger(__name__)

RECONNECT_MS = 1_000
PROBE_TIMEOUT_MS = 3_000
ADMIN_TIMEOUT_MS = 15_000
"""How long one admin call may take: somebody is waiting for the page or the answer."""

REQUEST_SHARE = 0.7
"""Of `shutdown_timeout_ms`: until requests in flight are cut off."""


class AdminDaemon:
    """Settings to a running service; `server.url` is known after `startup`."""

    def __init__(self, settings: AdminServiceSettings, registry: CollectorRegistry | None = None) -> None:
        self._settings = settings
        registry = CollectorRegistry() if registry is None else registry
        self._admin = Admin(settings.kafka, timeout_ms=ADMIN_TIMEOUT_MS)
        self._connected = False
        self._probe = Probe("kafka", self._ask_kafka, timeout_ms=PROBE_TIMEOUT_MS)
        token = settings.services_auth_token
        self._http = httpx.AsyncClient(
            timeout=settings.services_timeout_ms / 1000,
            headers={} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"},
            trust_env=False,
        )
        sources = [HttpSource(name, url, self._http) for name, url in settings.services.items()]
        app = create_app(
            admin=admin_router(self._admin),
            dashboard=dashboard_router(Overview(sources, KafkaSource(self._admin))),
            health=health_router("admin", {"kafka": self._probe}, registry),
            auth_token=settings.auth_token,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock admin",
        )
        self.server = HttpServer(app, settings.http)

    def __repr__(self) -> str:
        return f"AdminDaemon({self.server!r}, {self._probe!r})"

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
        """Finish the requests in flight, then close the connections."""
        await self.server.stop(int(self._settings.shutdown_timeout_ms * REQUEST_SHARE))
        await self._http.aclose()
        await self._admin.close()

    async def _connect(self) -> None:
        """Try until a broker answers; what trying again cannot mend (credentials) ends the service."""
        while True:
            try:
                await self._admin.__aenter__()
            except RetriableError as e:
                log.warning("kafka cannot be reached, trying again", reason=str(e))
                await asyncio.sleep(RECONNECT_MS / 1000)
            else:
                self._connected = True
                await self._probe.run_once()
                return

    async def _ask_kafka(self) -> None:
        if not self._connected:
            raise BrokerNotAvailable("not connected yet")
        await self._admin.cluster(timeout_ms=PROBE_TIMEOUT_MS)
