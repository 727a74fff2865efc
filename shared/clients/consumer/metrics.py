"""The consumer's metrics, in a registry of the caller or its own."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry

from penstock.shared.common.metrics import counter, gauge, histogram
from penstock.shared.common.records import TopicPartition


class ConsumerMetrics:
    """Records, lag, fetches, commits and rebalances of one consumer."""

    def __init__(self, registry: CollectorRegistry | None, group: str) -> None:
        registry = registry or CollectorRegistry()
        self._group = group
        self._consumed = counter(registry, "consumer_records_consumed", "Records returned by poll.", "group", "topic")
        self._lag = gauge(
            registry, "consumer_lag_records", "Records that are not read yet.", "group", "topic", "partition"
        )
        fetches = counter(registry, "consumer_fetches", "Fetch requests that ended.", "group", "result")
        self._fetches_ok = fetches.labels(group=group, result="ok")
        self._fetches_failed = fetches.labels(group=group, result="failed")
        self._fetched_bytes = counter(registry, "consumer_fetched_bytes", "Bytes of records fetched.", "group").labels(
            group=group
        )
        self._fetch_latency = histogram(
            registry,
            "consumer_fetch_latency_seconds",
            "Duration of a fetch request, with the time that the broker waits for data.",
        )
        self._buffered = gauge(
            registry, "consumer_buffered_bytes", "Bytes fetched and not yet returned by poll.", "group"
        ).labels(group=group)
        commits = counter(registry, "consumer_commits", "Offset commits that ended.", "group", "result")
        self._ok = commits.labels(group=group, result="ok")
        self._failed = commits.labels(group=group, result="failed")
        self._resets = counter(
            registry,
            "consumer_position_resets",
            "Positions that were reset because the log did not hold them.",
            "group",
            "topic",
        )
        self._skipped = counter(
            registry, "consumer_offsets_skipped", "Offsets skipped by position resets.", "group", "topic"
        )
        self._latency = histogram(
            registry, "consumer_commit_latency_seconds", "Duration of a successful offset commit."
        )
        self._rebalances = counter(registry, "consumer_rebalances", "Assignments received.", "group").labels(
            group=group
        )
        self._rebalance_length = histogram(
            registry, "consumer_rebalance_seconds", "Duration of a rebalance, with the calls of the rebalance listener."
        )

    def consumed(self, topic: str, records: int) -> None:
        self._consumed.labels(group=self._group, topic=topic).inc(records)

    def lag(self, tp: TopicPartition, lag: int) -> None:
        self._lag.labels(group=self._group, topic=tp.topic, partition=tp.partition).set(lag)

    def no_lag(self, partitions: frozenset[TopicPartition]) -> None:
        """Remove the lag of partitions that are no longer read here."""
        for tp in partitions:
            with contextlib.suppress(KeyError):
                self._lag.remove(self._group, tp.topic, str(tp.partition))

    def fetched(self, latency_ms: float, size: int) -> None:
        """Count an answered fetch with `size` bytes of records."""
        self._fetches_ok.inc()
        self._fetched_bytes.inc(size)
        self._fetch_latency.observe(latency_ms / 1000)

    def fetch_failed(self) -> None:
        self._fetches_failed.inc()

    def position_reset(self, topic: str, by: int) -> None:
        """Count a reset of a position. The new position is `by` offsets further, or lower if `by` is negative."""
        self._resets.labels(group=self._group, topic=topic).inc()
        self._skipped.labels(group=self._group, topic=topic).inc(max(0, by))

    def buffered(self, size: int) -> None:
        self._buffered.set(size)

    def committed(self, latency_ms: float) -> None:
        self._ok.inc()
        self._latency.observe(latency_ms / 1000)

    def commit_failed(self) -> None:
        self._failed.inc()

    def rebalanced(self, length_ms: float) -> None:
        """Record a rebalance, after the listener was called."""
        self._rebalances.inc()
        self._rebalance_length.observe(length_ms / 1000)
