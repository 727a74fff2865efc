"""Settings of the producer service."""

from __future__ import annotations

from api.settings import GuardedSettings, IngestSettings
from shared.clients.producer import ProducerSettings
from shared.common.settings import KafkaSettings

DEFAULT_KAFKA = KafkaSettings(request_timeout_ms=10_000)
DEFAULT_PRODUCER = ProducerSettings(max_block_ms=5_000, delivery_timeout_ms=25_000)
"""Shorter than Kafka's own: a client of HTTP waits for the outcome, and can try again itself."""


class ProducerServiceSettings(GuardedSettings):
    """The producer service: events over HTTP into Kafka topics."""

    kafka: KafkaSettings = DEFAULT_KAFKA
    producer: ProducerSettings = DEFAULT_PRODUCER
    ingest: IngestSettings = IngestSettings()
