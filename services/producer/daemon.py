"""The producer service: serves ingest over one Producer.

While Kafka cannot be reached, ingest answers 503. A shutdown has this order: new requests are rejected, requests in
flight finish, the producer sends its buffered records while the transactions in progress end, the connections close.
Requests that still wait for Kafka are answered with the outcomes that the closed producer gives their records.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from penstock.api.http.app import APIRouter, create_app
from penstock.api.http.health import health_router
from penstock.api.http.server import HttpServer
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.routes import metadata_routers, produce_routers
from penstock.services.kafka_daemon import KafkaHttpDaemon
from penstock.services.producer.ingest_transactions import KafkaTransactor
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.services.producer.topic_checks import TopicCheckingProducer
from penstock.shared.clients.producer import Producer

BODY_SHARE = 0.25
"""The share of `shutdown_timeout_ms` after which incomplete bodies are answered for the events read so far."""
ACK_SHARE = 0.4
"""The share of `shutdown_timeout_ms` in which requests in flight may wait for their acknowledgements."""
REQUEST_SHARE = 0.8
"""The share of `shutdown_timeout_ms` after which requests in flight are cut off: after the last flush has ended."""
FLUSH_SHARE = 0.3
"""The share of `shutdown_timeout_ms` for the producer's last flush, and for the transactions in progress."""


class ProducerDaemon(KafkaHttpDaemon):
    """Runs the service with the given settings. `server.url` is known after `startup`."""

    def __init__(self, settings: ProducerServiceSettings) -> None:
        super().__init__(settings.kafka)
        self._settings = settings
        self._registry = CollectorRegistry()
        self._producer = Producer(settings.kafka, settings.producer, registry=self._registry)
        producer = TopicCheckingProducer(self._producer, self._admin)
        self._transactor = KafkaTransactor(settings.kafka, settings.producer, settings.ingest, self._admin)
        self.ingest = Ingest(producer, settings.ingest, self._registry, kafka=self._probe, transactor=self._transactor)
        self._rest = RestProducer(self.ingest, producer, settings.ingest)
        self.server = self._create_server()

    def rest_proxy(self) -> list[APIRouter]:
        """Return the routers of Confluent REST Proxy's interfaces."""
        return [*produce_routers(self._rest, self._admin), *metadata_routers(self._admin)]

    def _create_server(self) -> HttpServer:
        """Return the server with the routes of this service."""
        settings = self._settings
        app = create_app(
            ingest=self.ingest.router,
            fast_path=self.ingest.fast_path,
            rest_proxy=self.rest_proxy(),
            health=health_router("producer", {"kafka": self._probe}, self._registry),
            auth_token=settings.auth_token,
            credentials=settings.credentials,
            cors_origins=settings.cors_origins,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock producer",
        )
        return HttpServer(app, settings.http)

    async def connect(self) -> None:
        await super().connect()
        await self._producer.start()

    async def shutdown(self) -> None:
        """Finish the work in flight. The requests have a share of `shutdown_timeout_ms`.

        Then the producer's last flush and the transactions in progress run at the same time, since each may hang. They
        have one other share. A transaction that does not end in time is cancelled (see `KafkaTransactor.close`).

        Requests still wait for Kafka meanwhile. So their responses have the outcomes of all records, and no record is
        stored after them.
        """
        limit_ms = self._settings.shutdown_timeout_ms
        self.ingest.drain(int(limit_ms * BODY_SHARE))
        stopping = asyncio.ensure_future(self.server.stop(int(limit_ms * REQUEST_SHARE)))
        await asyncio.wait({stopping}, timeout=limit_ms * ACK_SHARE / 1000)
        flush_ms = int(limit_ms * FLUSH_SHARE)
        await asyncio.gather(self._producer.close(flush_ms), self._transactor.close(flush_ms))
        await stopping
        await self._admin.close()
