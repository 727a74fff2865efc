"""A client of REST Proxy's produce API over a producer and an admin in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.routes import produce_routers
from penstock.api.settings import IngestSettings
from tests.api.admin.test_administration import MemoryAdmin

SETTINGS = IngestSettings.model_validate({"topics": {"closed": {"allowed": False}}})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def ingest(producer: Any, registry: CollectorRegistry) -> Ingest:
    return Ingest(producer, SETTINGS, registry)


@pytest.fixture
async def client(producer: Any, ingest: Ingest) -> AsyncIterator[httpx.AsyncClient]:
    rest = produce_routers(RestProducer(ingest, producer, SETTINGS), MemoryAdmin())
    transport = httpx.ASGITransport(create_app(rest_proxy=rest))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
