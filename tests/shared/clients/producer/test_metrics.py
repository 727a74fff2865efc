"""Metrics: by topic in the registry, and as totals."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.clients.producer.metrics import ProducerMetrics


def test_by_topic_and_in_total() -> None:
    """Each event counts for its topic, and once in the totals."""
    registry = CollectorRegistry()
    metrics = ProducerMetrics(registry, "me")
    metrics.acknowledged("a", 3, 100, 250.0)
    metrics.acknowledged("a", 2, 50, 10.0)
    metrics.acknowledged("b", 1, 10, 10.0)
    metrics.failed("a", 4)
    metrics.retried("a")
    metrics.split("b")
    metrics.drained(5.0)
    metrics.requested(7.0)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_producer_{name}", labels)

    assert sample("record_send_total", topic="a") == 5
    assert sample("batch_bytes_total", topic="b") == 10
    assert sample("record_error_total", topic="a") == 4
    assert sample("batch_retry_total", topic="a") == 1
    assert sample("batch_split_total", topic="b") == 1
    assert sample("record_queue_seconds_sum") == 0.005
    assert sample("request_latency_seconds_sum") == 0.007
    assert sample("ack_latency_seconds_count") == 3
    assert metrics.totals == {
        "record_send_total": 6,
        "record_error_total": 4,
        "batch_retry_total": 1,
        "batch_split_total": 1,
        "batch_total": 3,
        "batch_bytes_total": 160,
        "request_total": 1,
    }


def test_two_clients_share_a_registry() -> None:
    """What is a client's own is told apart by its id."""
    registry = CollectorRegistry()
    for name, free in (("a", 5), ("b", 7)):
        metrics = ProducerMetrics(registry, name)
        metrics.buffer_available.set(free)
        metrics.in_flight.inc()
    for name, free in (("a", 5), ("b", 7)):
        labels = {"client_id": name}
        assert registry.get_sample_value("penstock_producer_buffer_available_bytes", labels) == free
        assert registry.get_sample_value("penstock_producer_requests_in_flight", labels) == 1
    assert ProducerMetrics(None, "alone").totals["batch_total"] == 0
