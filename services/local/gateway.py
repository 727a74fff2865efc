"""Ingest, admin and dashboard at one address: what `penstock up` and `penstock demo` show their user."""

from __future__ import annotations

import asyncio
import sys

import httpx
from pydantic import Field

from api.admin import admin_router
from api.app import create_app
from api.dashboard import dashboard_router
from api.health import health_router
from api.server import HttpServer
from services.admin.overview import Overview
from services.admin.sources import HttpSource, KafkaSource, LocalSource
from services.producer.daemon import ProducerDaemon
from services.producer.settings import ProducerServiceSettings
from shared.common import daemon, log
from shared.common.settings import PositiveMs, load_or_exit

PROGRAM = "penstock gateway"


class GatewaySettings(ProducerServiceSettings):
    """The one address of a local set-up."""

    services: dict[str, str] = Field({}, description="addresses of the other services by name, for the dashboard")
    services_timeout_ms: PositiveMs = Field(2_000, description="how long a service may take to tell its health")


class GatewayDaemon(ProducerDaemon):
    """The producer service, with the admin's routes and page beside its own."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._http = httpx.AsyncClient(timeout=settings.services_timeout_ms / 1000, trust_env=False)
        self._services = settings.services
        super().__init__(settings)

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._http.aclose()

    def _create_server(self) -> HttpServer:
        checks = {"kafka": self._probe}
        own = LocalSource("producer", checks, self._registry)
        others = [HttpSource(name, url, self._http) for name, url in self._services.items()]
        app = create_app(
            ingest=self.ingest.router,
            admin=admin_router(self._admin),
            dashboard=dashboard_router(Overview([own, *others], KafkaSource(self._admin))),
            health=health_router("gateway", checks, self._registry),
            auth_token=self._settings.auth_token,
            local_hosts_only=self._settings.local_hosts_only,
        )
        return HttpServer(app, self._settings.http)


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; the exit status."""
    settings = load_or_exit(GatewaySettings, arguments, PROGRAM)
    log.configure(settings.log, "gateway")

    async def run() -> int:
        return await daemon.run(GatewayDaemon(settings), settings.shutdown_timeout_ms)

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
