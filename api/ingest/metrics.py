"""The metrics of ingest: requests and records, of every interface that stores events."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.api.http.problem import ErrorKind
from penstock.api.ingest.event import RecordError
from penstock.shared.common import metrics


class IngestMetrics:
    """Counts the requests and records of all interfaces in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = metrics.counter(registry, "ingest_requests", "Ingest requests answered.", "topic", "status")
        self._rejected_requests = metrics.counter(
            registry, "ingest_rejected_requests", "Ingest requests rejected as a whole.", "error_code"
        )
        self._stored = metrics.counter(registry, "ingest_stored_records", "Records acknowledged by Kafka.", "topic")
        self._rejected_records = metrics.counter(
            registry, "ingest_rejected_records", "Events that were not stored.", "topic", "error_code"
        )
        self._unknown = metrics.counter(
            registry,
            "ingest_unknown_records",
            "Events that may or may not be stored.",
            "topic",
            "error_code",
        )
        self._seconds = metrics.histogram(
            registry, "ingest_request_seconds", "Time from the last byte of a request to its response.", "topic"
        )
        # Looking up a label costs several times as much as counting.
        self._answered: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._stored_in: dict[str, Counter] = {}

    def answered(self, topic: str, status: int, seconds: float | None = None) -> None:
        """Count an answered request; `seconds` is the time since the request's last byte, None if unknown."""
        metrics_of = self._answered.get((topic, status))
        if metrics_of is None:
            metrics_of = (self._requests.labels(topic, status), self._seconds.labels(topic))
            self._answered[topic, status] = metrics_of
        requests, histogram = metrics_of
        requests.inc()
        if seconds is not None:
            histogram.observe(seconds)

    def stored(self, topic: str, records: int) -> None:
        """Count records that Kafka acknowledged."""
        counter = self._stored_in.get(topic)
        if counter is None:
            counter = self._stored.labels(topic)
            self._stored_in[topic] = counter
        counter.inc(records)

    def rejected_request(self, topic: str, kind: ErrorKind) -> None:
        """Count a request that was rejected as a whole. `topic` is empty if no request for it was accepted yet."""
        self._requests.labels(topic, kind.status).inc()
        self._rejected_requests.labels(kind.error_code).inc()

    def failed_record(self, topic: str, error: RecordError) -> None:
        """Count an event that was not stored, or may not have been."""
        counter = self._unknown if error.outcome == "unknown" else self._rejected_records
        counter.labels(topic, error.error_code).inc()
