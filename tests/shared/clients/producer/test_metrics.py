"""Producer metrics, by topic and in total, and the rates, averages and maxima of recent values."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.metrics import ELAPSED_MS_MIN, TOTALS, ProducerMetrics, SampledStat
from penstock.shared.testing.manual_clock import ManualClock


def test_by_topic_and_in_total() -> None:
    """Each event counts once for its topic and once in the totals."""
    registry = CollectorRegistry()
    metrics = ProducerMetrics(registry, "me", ManualClock().monotonic_ms, BufferPool(10))
    metrics.acknowledged("a", 3, 100, 250.0)
    metrics.acknowledged("a", 2, 50, 10.0)
    metrics.acknowledged("b", 1, 10, 10.0)
    metrics.failed("a", 4)
    metrics.buffer_exhausted(1)
    metrics.retried("a", 7)
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
    assert sample("buffer_exhausted_total") == 1
    assert sample("record_queue_seconds_sum") == 0.005
    assert sample("request_latency_seconds_sum") == 0.007
    assert sample("ack_latency_seconds_count") == 3
    assert sample("record_retry_total", topic="a") == 7
    assert sample("batch_total", topic="a") == 2
    assert tuple(metrics.totals) == TOTALS
    assert metrics.totals == {
        "record_send_total": 6,
        "record_error_total": 4,
        "record_retry_total": 7,
        "batch_retry_total": 1,
        "batch_split_total": 1,
        "batch_total": 3,
        "batch_bytes_total": 160,
        "request_total": 1,
        "buffer_exhausted_total": 1,
    }


def test_a_closed_client_leaves_no_series() -> None:
    """Series of a client id are removed with its last client. Series by topic stay."""
    registry = CollectorRegistry()

    def made(name: str) -> ProducerMetrics:
        return ProducerMetrics(registry, name, ManualClock().monotonic_ms, BufferPool(10))

    def clients() -> set[str]:
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {sample.labels["client_id"] for sample in samples if "client_id" in sample.labels}

    one, again, other = made("a"), made("a"), made("b")
    one.failed("t", 1)
    for metrics, left in ((one, {"a", "b"}), (one, {"a", "b"}), (other, {"a"}), (again, set())):
        metrics.close()
        assert clients() == left
    again.in_flight.dec()
    assert registry.get_sample_value("penstock_producer_record_error_total", {"topic": "t"}) == 1
    recreated = made("a")
    assert clients() == {"a"}
    recreated.close()


def test_two_clients_share_a_registry() -> None:
    """Series of clients are distinguished by their id."""
    registry = CollectorRegistry()
    memories = {"a": BufferPool(10), "b": BufferPool(20)}
    for name, memory in memories.items():
        ProducerMetrics(registry, name, ManualClock().monotonic_ms, memory).in_flight.inc()
        assert memory.try_acquire(3)
    for name, free in (("a", 7), ("b", 17)):
        labels = {"client_id": name}
        assert registry.get_sample_value("penstock_producer_buffer_available_bytes", labels) == free
        memories[name].release(2)
        assert registry.get_sample_value("penstock_producer_buffer_available_bytes", labels) == free + 2
        assert registry.get_sample_value("penstock_producer_requests_in_flight", labels) == 1
    assert ProducerMetrics(None, "alone", ManualClock().monotonic_ms, memories["a"]).totals["batch_total"] == 0


def test_java_metrics_have_their_names() -> None:
    """Every producer metric of Java is in the table."""
    clock = ManualClock()
    metrics = ProducerMetrics(None, "me", clock.monotonic_ms, BufferPool(10), window_ms=10_000, windows=2)
    for size in (100, 300):
        metrics.acknowledged("a", 20, size, 5.0)
    metrics.failed("a", 4)
    metrics.retried("a", 8)
    metrics.buffer_exhausted(1)
    for ms in (2.0, 6.0):
        metrics.requested(ms)
        metrics.drained(10 * ms)
    metrics.throttled(0)
    metrics.throttled(30)
    clock.advance(4_000)
    expected = {
        "record_send_rate": 10,
        "record_error_rate": 1,
        "record_retry_rate": 2,
        "buffer_exhausted_rate": 0.25,
        "batch_size_avg": 200,
        "batch_size_max": 300,
        "request_latency_avg": 4,
        "request_latency_max": 6,
        "record_queue_time_avg": 40,
        "record_queue_time_max": 60,
        "produce_throttle_time_avg": 15,
        "produce_throttle_time_max": 30,
    }
    assert metrics.figures() == {**metrics.totals, **expected}
    clock.advance(20_000)
    assert metrics.figures() == {**metrics.totals, **dict.fromkeys(expected, 0)}


def test_a_registry_keeps_no_client_alive() -> None:
    """The gauge of a garbage-collected client's buffer is 0."""
    registry, memory = CollectorRegistry(), BufferPool(10)
    metrics = ProducerMetrics(registry, "me", ManualClock().monotonic_ms, memory)

    def available() -> float | None:
        return registry.get_sample_value("penstock_producer_buffer_available_bytes", {"client_id": "me"})

    assert available() == 10
    del metrics, memory
    gc.collect()
    assert available() == 0


def test_nothing_recorded() -> None:
    """All figures are 0, and stay so."""
    samples = SampledStat(1_000, 2)
    assert (samples.average(5), samples.highest(5), samples.per_second(5)) == (0, 0, 0)
    assert repr(samples) == "<SampledStat 0 values>"


def test_a_rate_needs_some_time() -> None:
    """Ten records in the first ms are not ten thousand a second."""
    samples = SampledStat(30_000, 2)
    samples.record(10, 1)
    assert samples.per_second(2) == 10 * 1_000 / ELAPSED_MS_MIN
    assert samples.per_second(5_001) == 2


def test_old_windows_are_forgotten_whole() -> None:
    """Average and maximum leave out values of expired windows."""
    samples = SampledStat(100, 2)
    samples.record(9, 0)
    samples.record(1, 150)
    assert (samples.average(199), samples.highest(199)) == (5, 9)
    assert (samples.average(200), samples.highest(200)) == (1, 1)
    assert samples.average(350) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1_000)), max_size=200), st.integers(1, 4))
def test_figures_are_those_of_recent_values(steps: list[tuple[int, int]], windows: int) -> None:
    """Figures include all values of the last `windows - 1` windows, and no value older than `windows` windows."""
    samples, now_ms, seen = SampledStat(100, windows), 0, list[tuple[int, int]]()
    for after_ms, value in steps:
        now_ms += after_ms
        samples.record(value, now_ms)
        seen.append((now_ms, value))
        recent = [v for at, v in seen if now_ms - at < 100 * (windows - 1)]
        possible = [v for at, v in seen if now_ms - at < 100 * windows]
        assert max(recent, default=0) <= samples.highest(now_ms) <= max(possible)
        total = samples.per_second(now_ms) * max(now_ms - samples._windows[0].start_ms, ELAPSED_MS_MIN) / 1_000
        assert sum(recent) - 1e-6 <= total <= sum(possible) + 1e-6
