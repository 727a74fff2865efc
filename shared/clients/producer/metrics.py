"""The producer's metrics, in a registry of the caller's or one of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from shared.common.metrics import counter, gauge, histogram


class ProducerMetrics:
    """Counters by topic, latencies, and the free buffer memory of this client."""

    def __init__(self, registry: CollectorRegistry | None, client_id: str) -> None:
        registry = registry or CollectorRegistry()
        self._sent = counter(registry, "producer_record_send", "Records acknowledged by the broker.", "topic")
        self._errors = counter(registry, "producer_record_error", "Records given up.", "topic")
        self._retries = counter(registry, "producer_batch_retry", "Batches sent again.", "topic")
        self._bytes = counter(registry, "producer_batch_bytes", "Bytes of acknowledged batches, as sent.", "topic")
        self._splits = counter(registry, "producer_batch_split", "Batches that were too large for the broker.", "topic")
        self._queued = histogram(registry, "producer_record_queue_seconds", "Batches, first record to first sent.")
        self._request = histogram(registry, "producer_request_latency_seconds", "Produce requests, sent to answered.")
        self._ack = histogram(
            registry, "producer_ack_latency_seconds", "Batches, first record handed over to acknowledged."
        )
        self.buffer_available = gauge(
            registry, "producer_buffer_available_bytes", "Free buffer memory.", "client_id"
        ).labels(client_id=client_id)
        self.in_flight = gauge(
            registry, "producer_requests_in_flight", "Produce requests sent, not answered.", "client_id"
        ).labels(client_id=client_id)
        self.totals: dict[str, float] = dict.fromkeys(
            (
                "record_send_total",
                "record_error_total",
                "batch_retry_total",
                "batch_split_total",
                "batch_total",
                "batch_bytes_total",
                "request_total",
            ),
            0.0,
        )
        self._by_topic: dict[str, tuple[Counter, Counter]] = {}

    def acknowledged(self, topic: str, records: int, size: int, latency_ms: float) -> None:
        """A batch was acknowledged."""
        known = self._by_topic.get(topic)
        if known is None:
            known = self._by_topic[topic] = self._sent.labels(topic=topic), self._bytes.labels(topic=topic)
        known[0].inc(records)
        known[1].inc(size)
        self._ack.observe(latency_ms / 1000)
        self.totals["record_send_total"] += records
        self.totals["batch_bytes_total"] += size
        self.totals["batch_total"] += 1

    def failed(self, topic: str, records: int) -> None:
        """A batch, or a record that never came into one, was given up."""
        self._errors.labels(topic=topic).inc(records)
        self.totals["record_error_total"] += records

    def retried(self, topic: str) -> None:
        """A batch goes back into its queue."""
        self._retries.labels(topic=topic).inc()
        self.totals["batch_retry_total"] += 1

    def split(self, topic: str) -> None:
        """A batch goes on in two parts."""
        self._splits.labels(topic=topic).inc()
        self.totals["batch_split_total"] += 1

    def drained(self, queued_ms: float) -> None:
        """A batch leaves its queue."""
        self._queued.observe(queued_ms / 1000)

    def requested(self, latency_ms: float) -> None:
        """A produce request was answered."""
        self._request.observe(latency_ms / 1000)
        self.totals["request_total"] += 1
