"""An ingest app with a client, and what its requests have in common."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.http.content_encoding import zstd
from penstock.api.ingest.routes import Ingest
from penstock.api.settings import IngestSettings
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}
URL = "/v1/topics/t/events"
COMPRESS: dict[str, Any] = {"gzip": gzip.compress, "zstd": zstd.compress}


class Service:
    """An ingest app with a client for it."""

    def __init__(self, producer: Any, kafka: Any = None, clock: Clock = SYSTEM_CLOCK, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        taken = IngestSettings.model_validate(settings)
        self.ingest = Ingest(producer, taken, self.registry, kafka=kafka, clock=clock)
        transport = httpx.ASGITransport(create_app(ingest=self.ingest.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, content: Any, headers: dict[str, str] = NDJSON, url: str = URL) -> httpx.Response:
        return await self.client.post(url, content=content, headers=headers)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_ingest_{name}_total", {"topic": "t", **labels})
