"""Prometheus metrics: one registry a process, one naming rule.

Every metric is named `penstock_<package>_<name>`, and ends with its unit if it has one. Units are Prometheus' base
units: seconds, bytes and ratios. Labels are few and bounded (topic, partition, group, store), never a record's key.
Functions take the registry as an argument, so that a test reads its own:

>>> from prometheus_client import CollectorRegistry
>>> registry = CollectorRegistry()
>>> late = counter(registry, "streams_late_records", "Records that came after their window was closed.", "topic")
>>> late.labels(topic="flights").inc()
>>> registry.get_sample_value("penstock_streams_late_records_total", {"topic": "flights"})
1.0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

M = TypeVar("M", Counter, Gauge, Histogram)

CONTENT_TYPE = CONTENT_TYPE_LATEST

NOT_BASE_UNITS = {
    *("s", "sec", "ms", "us", "ns", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days"),
    *("b", "kb", "mb", "gb", "bits", "kilobytes", "megabytes", "kibibytes", "mebibytes", "percent", "percentage"),
}
"""Words that a metric's name must not contain, since Prometheus' base units are seconds, bytes and ratios."""

LATENCY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _drop_created_series(collected: Iterable[Metric]) -> Iterable[Metric]:
    """The metrics without their `_created` series, which hold the start time of each series.

    The client library can switch off `_created` series only for the whole process. A program that embeds Penstock may
    want the series of its own metrics, so they are removed here from Penstock's metrics only.
    """
    for metric in collected:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        yield metric


class _Counter(Counter):
    def collect(self) -> Iterable[Metric]:
        return _drop_created_series(super().collect())


class _Histogram(Histogram):
    def collect(self) -> Iterable[Metric]:
        return _drop_created_series(super().collect())


def counter(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Counter:
    """A counter `penstock_<name>_total`; the existing one if the registry already has it."""
    return _register_once(registry, _Counter, name, documentation, labels)


def gauge(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Gauge:
    """A gauge `penstock_<name>`; the existing one if the registry already has it."""
    return _register_once(registry, Gauge, name, documentation, labels)


def histogram(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Histogram:
    """A histogram `penstock_<name>` in seconds; the existing one if the registry already has it."""
    return _register_once(registry, _Histogram, name, documentation, labels, buckets=LATENCY_BUCKETS_SECONDS)


def render(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)


def _register_once(
    registry: CollectorRegistry, kind: type[M], name: str, documentation: str, labels: tuple[str, ...], **options: Any
) -> M:
    if wrong := NOT_BASE_UNITS.intersection(name.split("_")):
        raise ValueError(
            f"metric {name!r}: {sorted(wrong)} is not a base unit of Prometheus: use seconds, bytes or a ratio"
        )
    full = f"penstock_{name}"
    known = registry._names_to_collectors.get(full) or registry._names_to_collectors.get(f"{full}_total")
    if isinstance(known, kind):
        return known
    return kind(full, documentation, labels, registry=registry, **options)
