"""The metrics of the handler runner."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.shared.common.metrics import counter, gauge, histogram


class RunnerMetrics:
    """The metrics of one group. The child for a topic is created on first use."""

    def __init__(self, registry: CollectorRegistry, group: str) -> None:
        def per_topic(make: Any, name: str, documentation: str) -> Any:
            metric = make(registry, f"consumer_{name}", documentation, "group", "topic")
            return cache(lambda topic: metric.labels(group=group, topic=topic))

        self.handled = per_topic(counter, "handled_records", "Records that the handler has finished.")
        self.latency = per_topic(histogram, "handler_latency_seconds", "Duration of a handler call.")
        self.failures = per_topic(counter, "handler_failures", "Handler calls that raised an error or were cancelled.")
        self.timeouts = per_topic(counter, "handler_timeouts", "Handler calls cancelled after handler_timeout_ms.")
        self.retries = per_topic(counter, "retries", "Records queued for another handler call.")
        self.dead_letters = per_topic(counter, "dead_letters", "Records that became dead letters.")
        self.dead_letter_failures = per_topic(
            counter, "dead_letter_failures", "Failed writes to the dead-letter topic, which are retried."
        )
        self.produced = per_topic(
            counter, "produced_records", "Records returned by handlers and acknowledged by Kafka."
        )
        self.produce_failures = per_topic(
            counter, "produce_failures", "Records returned by handlers that could not be written."
        )
        self.skipped = per_topic(
            counter, "skipped_records", "Records that an earlier owner of the partition had finished."
        )
        self.ignored = per_topic(counter, "ignored_results", "Handler results that came after the partition was lost.")
        self.commit_failures = counter(
            registry, "consumer_runner_commit_failures", "Failed commits, which are retried.", "group"
        ).labels(group=group)
        transactions = counter(registry, "consumer_transactions", "Transactions that ended.", "group", "result")
        self.transactions = {each: transactions.labels(group=group, result=each) for each in ("ok", "failed")}
        self.in_flight = gauge(
            registry, "consumer_handlers_in_flight", "Handler calls that are running.", "group"
        ).labels(group=group)
        self._lag = gauge(
            registry,
            "consumer_unfinished_lag",
            "Records that are not finished, fetched or not.",
            "group",
            "topic",
            "partition",
        )
        self._paused = gauge(
            registry, "consumer_paused", "1 while the partition is paused, else 0.", "group", "topic", "partition"
        )
        self._group = group

    def lag(self, topic: str, partition: int, records: int) -> None:
        self._lag.labels(group=self._group, topic=topic, partition=partition).set(records)

    def paused(self, topic: str, partition: int, paused: bool) -> None:
        self._paused.labels(group=self._group, topic=topic, partition=partition).set(paused)

    def forget(self, topic: str, partition: int) -> None:
        """Remove the gauges of a partition that this member no longer owns."""
        for metric in (self._lag, self._paused):
            metric.remove_by_labels({"group": self._group, "topic": topic, "partition": str(partition)})
