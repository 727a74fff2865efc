"""Settings of the producer service."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from penstock.api.settings import GuardedSettings, IngestSettings
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.settings import HttpSettings, KafkaSettings

DEFAULT_KAFKA = KafkaSettings(request_timeout_ms=10_000)
DEFAULT_PRODUCER = ProducerSettings(max_block_ms=5_000, delivery_timeout_ms=25_000)
"""Its time limits are shorter than Kafka's defaults: an HTTP client waits for the outcome, and can retry itself."""


class ProducerServiceSettings(GuardedSettings):
    """The producer service: events over HTTP into Kafka topics."""

    kafka: KafkaSettings = DEFAULT_KAFKA
    http: HttpSettings = HttpSettings(port=8081)
    producer: ProducerSettings = DEFAULT_PRODUCER
    ingest: IngestSettings = IngestSettings()

    @model_validator(mode="after")
    def _can_report_events_as_stored(self) -> Self:
        if self.producer.acks == 0:
            raise ValueError("producer.acks: cannot be 0, since an event is stored only after Kafka's acknowledgement")
        if self.producer.transactional_id is not None:
            raise ValueError("producer.transactional_id: cannot be set: only ingest's own transactions have such ids")
        return self
