"""The producer's metrics, in the caller's registry or its own, and as a table under the Java producer's names.

The registry has the metrics that an operator needs first. Prometheus computes rates and averages from its counters
(`..._total`, `..._sum` over `..._count`). The table has Java's rates, averages and maxima over a time window.
"""

from __future__ import annotations

import weakref
from collections import Counter as Counts
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.sampled_stat import SampledStat
from penstock.shared.common.metrics import counter, gauge, histogram

TOTALS = (
    "record_send_total",
    "record_error_total",
    "record_retry_total",
    "batch_retry_total",
    "batch_split_total",
    "batch_total",
    "batch_bytes_total",
    "request_total",
    "buffer_exhausted_total",
)

_CLIENTS: weakref.WeakKeyDictionary[CollectorRegistry, Counts[str]] = weakref.WeakKeyDictionary()
"""The number of producers of each client id in a registry."""


class ProducerMetrics:
    """Counters by topic, latencies, and this client's windowed figures; `now_ms` is a monotonic clock."""

    def __init__(
        self,
        registry: CollectorRegistry | None,
        client_id: str,
        now_ms: Callable[[], int],
        memory: BufferPool,
        *,
        window_ms: int = 30_000,
        windows: int = 2,
    ) -> None:
        registry = registry or CollectorRegistry()
        self._now_ms = now_ms
        self._sent = counter(registry, "producer_record_send", "Records acknowledged by the broker.", "topic")
        self._errors = counter(registry, "producer_record_error", "Records that were not sent.", "topic")
        self._exhausted = counter(
            registry, "producer_buffer_exhausted", "Records that were not taken because the buffer stayed full."
        )
        self._record_retries = counter(registry, "producer_record_retry", "Records sent again.", "topic")
        self._retries = counter(registry, "producer_batch_retry", "Batches sent again.", "topic")
        self._bytes = counter(
            registry, "producer_batch_bytes", "Bytes of acknowledged batches, after compression.", "topic"
        )
        self._batches = counter(registry, "producer_batch", "Batches acknowledged by the broker.", "topic")
        self._splits = counter(
            registry,
            "producer_batch_split",
            "Batches that were split because they were too large for the broker.",
            "topic",
        )
        self._queued = histogram(
            registry, "producer_record_queue_seconds", "From the first record of a batch to its first request."
        )
        self._request = histogram(
            registry, "producer_request_latency_seconds", "From a produce request to its response."
        )
        self._ack = histogram(
            registry, "producer_ack_latency_seconds", "From the first record of a batch to its acknowledgement."
        )

        self._client_id = client_id
        self._own = list[Gauge]()
        self._clients = _client_counts_of(registry)
        self._clients[client_id] += 1

        def register_client_gauge(name: str, what: str) -> Gauge:
            family = gauge(registry, f"producer_{name}", what, "client_id")
            self._own.append(family)
            return family.labels(client_id=client_id)

        # A registry outlives its clients: without weak references it would keep a producer's memory after its end.
        free = register_client_gauge("buffer_available_bytes", "Free buffer memory.")
        free.set_function(partial(_free_buffer_bytes, weakref.ref(memory)))
        self.in_flight = register_client_gauge("requests_in_flight", "Produce requests that are not answered yet.")
        self.totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        self._by_topic: dict[str, tuple[Counter, Counter, Counter]] = {}

        def make_stat() -> SampledStat:
            return SampledStat(window_ms, windows)

        self._sends = make_stat()
        self._failures = make_stat()
        self._again = make_stat()
        self._sizes = make_stat()
        self._latencies = make_stat()
        self._queue_times = make_stat()
        self._throttles = make_stat()
        self._exhaustions = make_stat()
        me = weakref.ref(self)
        for name, what in (
            (
                "record_send_rate",
                "Records acknowledged per second over metrics_sample_window_ms.",
            ),
            ("record_error_rate", "Records not sent per second over metrics_sample_window_ms."),
            (
                "record_retry_rate",
                "Records sent again per second over metrics_sample_window_ms.",
            ),
        ):
            register_client_gauge(name, what).set_function(partial(_producer_metric, me, name))
        size = register_client_gauge(
            "batch_size_avg_bytes",
            "Bytes of a batch after compression over metrics_sample_window_ms.",
        )
        size.set_function(partial(_producer_metric, me, "batch_size_avg"))

    def close(self) -> None:
        """Remove this client's metrics from the registry, unless another producer has its client id. May be called
        again.

        The counters by topic stay.
        """
        if not self._own:
            return
        self._clients[self._client_id] -= 1
        if not self._clients[self._client_id]:
            del self._clients[self._client_id]
            for family in self._own:
                family.remove(self._client_id)
        self._own = []

    def figures(self) -> dict[str, float]:
        """Return totals since the start; rates (per second), averages and maxima (ms, bytes) over the window."""
        now_ms = self._now_ms()
        return {
            **self.totals,
            "record_send_rate": self._sends.per_second(now_ms),
            "record_error_rate": self._failures.per_second(now_ms),
            "record_retry_rate": self._again.per_second(now_ms),
            "buffer_exhausted_rate": self._exhaustions.per_second(now_ms),
            "batch_size_avg": self._sizes.average(now_ms),
            "batch_size_max": self._sizes.highest(now_ms),
            "request_latency_avg": self._latencies.average(now_ms),
            "request_latency_max": self._latencies.highest(now_ms),
            "record_queue_time_avg": self._queue_times.average(now_ms),
            "record_queue_time_max": self._queue_times.highest(now_ms),
            "produce_throttle_time_avg": self._throttles.average(now_ms),
            "produce_throttle_time_max": self._throttles.highest(now_ms),
        }

    def acknowledged(self, topic: str, records: int, size: int, latency_ms: float) -> None:
        """Count an acknowledged batch."""
        known = self._by_topic.get(topic)
        if known is None:
            labelled = (of.labels(topic=topic) for of in (self._sent, self._bytes, self._batches))
            known = next(labelled), next(labelled), next(labelled)
            self._by_topic[topic] = known
        known[0].inc(records)
        known[1].inc(size)
        known[2].inc()
        self._ack.observe(latency_ms / 1000)
        self.totals["record_send_total"] += records
        self.totals["batch_bytes_total"] += size
        self.totals["batch_total"] += 1
        now_ms = self._now_ms()
        self._sends.record(records, now_ms)
        self._sizes.record(size, now_ms)

    def failed(self, topic: str, records: int) -> None:
        """Count the records of a failed batch, or a record that failed before it had a batch."""
        self._errors.labels(topic=topic).inc(records)
        self.totals["record_error_total"] += records
        self._failures.record(records, self._now_ms())

    def buffer_exhausted(self, records: int) -> None:
        """Count records rejected because the buffer stayed full for `max_block_ms`; `failed` counts them as well."""
        self._exhausted.inc(records)
        self.totals["buffer_exhausted_total"] += records
        self._exhaustions.record(records, self._now_ms())

    def retried(self, topic: str, records: int) -> None:
        """Count a batch that is put back into its queue."""
        self._retries.labels(topic=topic).inc()
        self._record_retries.labels(topic=topic).inc(records)
        self.totals["batch_retry_total"] += 1
        self.totals["record_retry_total"] += records
        self._again.record(records, self._now_ms())

    def split(self, topic: str) -> None:
        """Count a batch that is split in two."""
        self._splits.labels(topic=topic).inc()
        self.totals["batch_split_total"] += 1

    def drained(self, queued_ms: float) -> None:
        """Record the time a batch has spent in its queue."""
        self._queued.observe(queued_ms / 1000)
        self._queue_times.record(queued_ms, self._now_ms())

    def requested(self, latency_ms: float) -> None:
        """Record the latency of a produce request."""
        self._request.observe(latency_ms / 1000)
        self.totals["request_total"] += 1
        self._latencies.record(latency_ms, self._now_ms())

    def throttled(self, wait_ms: float) -> None:
        """Record a broker's throttle time (0 if it does not throttle)."""
        self._throttles.record(wait_ms, self._now_ms())


def _client_counts_of(registry: CollectorRegistry) -> Counts[str]:
    return _CLIENTS.setdefault(registry, Counts())


def _free_buffer_bytes(of: weakref.ref[BufferPool]) -> float:
    memory = of()
    return 0.0 if memory is None else float(memory.available)


def _producer_metric(of: weakref.ref[ProducerMetrics], name: str) -> float:
    metrics = of()
    return 0.0 if metrics is None else metrics.figures()[name]
