"""The admin service: admin routes, the dashboard, and the health of the other services.

While Kafka cannot be reached, the page and `/health` report it, and the admin routes answer 503.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.api.admin.routes import admin_router
from penstock.api.console.dashboard import dashboard_router
from penstock.api.http.app import create_app
from penstock.api.http.health import health_router
from penstock.api.http.server import HttpServer
from penstock.api.rest_proxy.routes import metadata_routers
from penstock.services.admin.cached_overview import CachedOverview, OverviewDaemon
from penstock.services.admin.overview_sources import HttpSource, KafkaSource, services_client
from penstock.services.admin.routers import forwarded_documents, more_routers
from penstock.services.admin.settings import AdminServiceSettings

REQUEST_SHARE = 0.7
"""The share of `shutdown_timeout_ms` after which requests in flight are cut off."""


class AdminDaemon(OverviewDaemon):
    """Runs the service with the given settings. `server.url` is known after `startup`."""

    def __init__(self, settings: AdminServiceSettings) -> None:
        super().__init__(settings.kafka)
        self._settings = settings
        registry = CollectorRegistry()
        token = settings.services_auth_token
        self._http = services_client(settings.services_timeout_ms, None if token is None else token.get_secret_value())
        sources = [HttpSource(name, url, self._http) for name, url in settings.services.items()]
        self._overview = CachedOverview(sources, KafkaSource(self._admin))
        app = create_app(
            admin=admin_router(self._admin),
            more=more_routers(settings.kafka, self._admin, settings.services, self._http),
            rest_proxy=metadata_routers(self._admin),
            forwarded_documents=forwarded_documents,
            dashboard=dashboard_router(self._overview),
            health=health_router("admin", {"kafka": self._probe}, registry),
            auth_token=settings.auth_token,
            credentials=settings.credentials,
            cors_origins=settings.cors_origins,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock admin",
        )
        self.server = HttpServer(app, settings.http)

    async def shutdown(self) -> None:
        """Wait for the requests in flight within REQUEST_SHARE of `shutdown_timeout_ms`, then close the connections."""
        await self.server.stop(int(self._settings.shutdown_timeout_ms * REQUEST_SHARE))
        await self._http.aclose()
        await self._admin.close()
