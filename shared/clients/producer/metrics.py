"""The producer's metrics, in the caller's registry or its own, and as a table under the Java producer's names.

The registry has the metrics that an operator needs first. Prometheus computes rates and averages from its counters
(`..._total`, `..._sum` over `..._count`). The table has Java's rates, averages and maxima over a time window
(`SampledStat`).
"""

from __future__ import annotations

import weakref
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.shared.clients.producer.buffer_pool import BufferPool
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

ELAPSED_MS_MIN = 1_000
"""The shortest time that a rate is computed over. Over less it would be mostly chance."""

_CLIENTS: weakref.WeakKeyDictionary[CollectorRegistry, Counts[str]] = weakref.WeakKeyDictionary()
"""The number of producers of each client id in a registry."""


class _Window:
    __slots__ = ("count", "highest", "start_ms", "total")

    def __init__(self, start_ms: float) -> None:
        self.start_ms = start_ms
        self.count = 0
        self.total = 0.0
        self.highest = 0.0


class SampledStat:
    """Recent values of a metric: their rate, average and maximum (Java: `SampledStat`).

    Time is divided into windows of `window_ms`. The newest `windows` of them are kept; an older one is dropped as a
    whole. With two windows of 30 s the results cover the last 30 to 60 s:

    >>> sizes = SampledStat(window_ms=30_000, windows=2)
    >>> for now_ms, size in ((0, 100), (20_000, 300), (40_000, 500)):
    ...     sizes.record(size, now_ms)
    >>> sizes.average(50_000), sizes.highest(50_000), sizes.per_second(50_000)
    (300.0, 500.0, 18.0)
    >>> sizes.average(61_000), sizes.highest(200_000)
    (500.0, 0.0)
    """

    def __init__(self, window_ms: float, windows: int) -> None:
        self._window_ms = window_ms
        self._count = windows
        self._windows: deque[_Window] = deque()

    def __repr__(self) -> str:
        return f"<SampledStat {sum(window.count for window in self._windows)} values>"

    def record(self, value: float, now_ms: float) -> None:
        """Record a value in the newest window."""
        windows = self._windows
        if not windows or now_ms >= windows[-1].start_ms + self._window_ms:
            self._drop_expired_windows(now_ms)
            windows.append(_Window(now_ms))
        window = windows[-1]
        window.count += 1
        window.total += value
        window.highest = max(window.highest, float(value))

    def average(self, now_ms: float) -> float:
        """The average of the recent values; 0 if there are none."""
        self._drop_expired_windows(now_ms)
        count = sum(window.count for window in self._windows)
        return self._sum_of_windows() / count if count else 0.0

    def highest(self, now_ms: float) -> float:
        """The maximum of the recent values; 0 if there are none."""
        self._drop_expired_windows(now_ms)
        return max((window.highest for window in self._windows), default=0.0)

    def per_second(self, now_ms: float) -> float:
        """The sum of the recent values, divided by the seconds since the first of them (at least ELAPSED_MS_MIN)."""
        self._drop_expired_windows(now_ms)
        if not self._windows:
            return 0.0
        return self._sum_of_windows() * 1_000 / max(now_ms - self._windows[0].start_ms, ELAPSED_MS_MIN)

    def _sum_of_windows(self) -> float:
        return sum(window.total for window in self._windows)

    def _drop_expired_windows(self, now_ms: float) -> None:
        while self._windows and now_ms - self._windows[0].start_ms >= self._window_ms * self._count:
            self._windows.popleft()


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
        self._errors = counter(registry, "producer_record_error", "Records that ended in an error.", "topic")
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
            "Batches that were split: too large for the broker, or with some invalid records.",
            "topic",
        )
        self._queued = histogram(
            registry, "producer_record_queue_seconds", "From the first record of a batch to its first request."
        )
        self._request = histogram(
            registry, "producer_request_latency_seconds", "From a produce request to its response or its failure."
        )
        self._ack = histogram(
            registry, "producer_ack_latency_seconds", "From the first record of a batch to its acknowledgement."
        )

        self._client_id = client_id
        self._own = list[Gauge]()
        self._clients = _CLIENTS.setdefault(registry, Counts())
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

    def close(self) -> None:
        """Remove this client's gauges from the registry, unless another producer has its client id. May be called
        again.

        Counters and histograms stay: they have no client id.
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
        """Count the records of a failed batch, or records that failed before they had a batch."""
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
        """Count a batch that is split."""
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


def _free_buffer_bytes(of: weakref.ref[BufferPool]) -> float:
    memory = of()
    return 0.0 if memory is None else float(memory.available)
