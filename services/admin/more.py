"""What the admin's address serves beside Kafka's own: letters, and the routes of the other services."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from api.forwarded import forward_router, upstreams_of
from api.letters import letters_router
from api.rest_proxy import APIRouter
from services.admin.letters import KafkaLetters
from services.admin.sources import HttpUpstream
from shared.clients.admin import Admin
from shared.common.settings import KafkaSettings

CONNECT, STREAMS = "connect", "aggregator"
"""The names under which `services` has the addresses of a Connect worker and of an aggregator."""


def more_routers(
    kafka: KafkaSettings, admin: Admin, services: Mapping[str, str], client: httpx.AsyncClient
) -> list[APIRouter]:
    """Letters; and `/connectors`, `/v1/streams` and `/v1/compactions` of the services with those names."""
    upstreams = {name: HttpUpstream(name, url, client) for name, url in services.items()}
    return [letters_router(KafkaLetters(kafka, admin)), forward_router(upstreams_of(upstreams, CONNECT, STREAMS))]
