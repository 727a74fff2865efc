"""The routers of the admin service that are not about the cluster: dead letters, and routes of other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.http.app import APIRouter, create_app
from penstock.api.http.openapi import Document, forwarded_paths
from penstock.api.http.reverse_proxy import CONNECT_PATHS, STREAMS_PATHS, HttpUpstream, Upstream, forward_router
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import stores_router
from penstock.services.admin.kafka_dead_letters import KafkaDeadLetters
from penstock.shared.clients.admin import Admin
from penstock.shared.common.settings import KafkaSettings

CONNECT = "connect"
"""The Connect worker's name in `services`."""
STREAMS = "aggregator"
"""The aggregator's name in `services`."""


def forwarded_documents() -> list[Document]:
    """Return the OpenAPI documents of the forwarded routes, built from those services' own routers."""
    # The import takes half a second, and only the OpenAPI document needs it.
    from penstock.api.connect.routes import create_connect_app

    # The routes are described but never called, so they need no services.
    unused: Any = None
    connect = create_connect_app(unused).openapi()
    streams = create_app(streams=streams_router(unused, stores_router(unused))).openapi()
    return [forwarded_paths(connect, *CONNECT_PATHS), forwarded_paths(streams, *STREAMS_PATHS)]


def more_routers(
    kafka: KafkaSettings, admin: Admin, services: Mapping[str, str], client: httpx.AsyncClient
) -> list[APIRouter]:
    """Return the routers of dead letters, and of the forwarded routes of the services named CONNECT and STREAMS."""
    upstreams = {name: HttpUpstream(name, url, client) for name, url in services.items()}
    return [
        dead_letters_router(KafkaDeadLetters(kafka, admin)),
        forward_router(_upstreams_by_prefix(upstreams)),
    ]


def _upstreams_by_prefix(services: Mapping[str, Upstream]) -> dict[str, Upstream | None]:
    """Return the service behind each prefix of the forwarded routes: the Connect worker or the aggregator, by name."""
    upstreams: dict[str, Upstream | None] = {path: services.get(CONNECT) for path in CONNECT_PATHS}
    return upstreams | {path: services.get(STREAMS) for path in STREAMS_PATHS}
