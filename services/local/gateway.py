"""Ingest, admin and dashboard at one address, for `penstock up` and `penstock demo`.

Its `/health` covers the whole set-up: Kafka, and each service by its name.
"""

from __future__ import annotations

import sys

from penstock.api.admin.routes import admin_router
from penstock.api.console.dashboard import dashboard_router
from penstock.api.http.app import create_app
from penstock.api.http.health import Check, health_router
from penstock.api.http.server import HttpServer
from penstock.services import service_lifecycle
from penstock.services.admin.cached_overview import CachedOverview, OverviewDaemon
from penstock.services.admin.overview_sources import HttpSource, KafkaSource, LocalSource, services_client
from penstock.services.admin.routers import forwarded_documents, more_routers
from penstock.services.local.settings import GatewaySettings
from penstock.services.producer.daemon import ProducerDaemon

PROGRAM = "penstock gateway"


class GatewayDaemon(OverviewDaemon, ProducerDaemon):
    """The producer service, with the admin's routes and dashboard beside its own."""

    def __init__(self, settings: GatewaySettings) -> None:
        tokens = settings.tokens_by_scope()
        # If no credential has the scope admin, no client may change anything, so the scope read is enough.
        token = tokens.get("admin", tokens.get("read"))
        self._http = services_client(settings.services_timeout_ms, token)
        self._services = settings.gateway_services
        super().__init__(settings)

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._http.aclose()

    def _create_server(self) -> HttpServer:
        checks: dict[str, Check] = {"kafka": self._probe}
        own = LocalSource("producer", checks, self._registry)
        others = [HttpSource(name, url, self._http) for name, url in self._services.items()]
        self._overview = CachedOverview([own, *others], KafkaSource(self._admin))
        app = create_app(
            ingest=self.ingest.router,
            fast_path=self.ingest.fast_path,
            rest_proxy=self.rest_proxy(),
            admin=admin_router(self._admin),
            more=more_routers(self._settings.kafka, self._admin, self._services, self._http),
            forwarded_documents=forwarded_documents,
            dashboard=dashboard_router(self._overview),
            health=health_router("gateway", checks | {other.name: other.check for other in others}, self._registry),
            auth_token=self._settings.auth_token,
            credentials=self._settings.credentials,
            cors_origins=self._settings.cors_origins,
            local_hosts_only=self._settings.local_hosts_only,
        )
        return HttpServer(app, self._settings.http)


def main(arguments: list[str]) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit status."""
    return service_lifecycle.serve(PROGRAM, GatewaySettings, GatewayDaemon, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
