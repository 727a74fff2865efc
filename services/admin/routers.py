"""Routers of the admin's address beside Kafka's own: dead letters, and the routes of the other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.http.app import create_app
from penstock.api.http.openapi import Document, handed_on_paths
from penstock.api.http.reverse_proxy import CONNECT_PATHS, STREAMS_PATHS, forward_router, upstreams_of
from penstock.api.rest_proxy.routes import APIRouter
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import stores_router
from penstock.services.admin.dead_letters import KafkaDeadLetters
from penstock.services.admin.sources import HttpUpstream
from penstock.shared.clients.admin import Admin
from penstock.shared.common.settings import KafkaSettings

CONNECT, STREAMS = "connect", "aggregator"
"""The names in `services` of the Connect worker and of the aggregator."""


def handed_on() -> list[Document]:
    """Return the OpenAPI documents of the forwarded routes, built from those services' own routers."""
    from penstock.api.connect.routes import (
        create_connect_app,  # takes half a second, and only the OpenAPI document needs it
    )

    nobody: Any = None
    connect = create_connect_app(nobody).openapi()
    streams = create_app(streams=streams_router(nobody, stores_router(nobody))).openapi()
    return [handed_on_paths(connect, *CONNECT_PATHS), handed_on_paths(streams, *STREAMS_PATHS)]


def more_routers(
    kafka: KafkaSettings, admin: Admin, services: Mapping[str, str], client: httpx.AsyncClient
) -> list[APIRouter]:
    """Return the routers of dead letters, and of the forwarded routes of the services named CONNECT and STREAMS."""
    upstreams = {name: HttpUpstream(name, url, client) for name, url in services.items()}
    return [
        dead_letters_router(KafkaDeadLetters(kafka, admin)),
        forward_router(upstreams_of(upstreams, CONNECT, STREAMS)),
    ]
