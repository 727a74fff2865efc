"""Prometheus metrics under one naming rule."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from shared.common.metrics import LATENCY_BUCKETS_SECONDS, counter, gauge, histogram, render


@pytest.mark.parametrize("make", [counter, gauge, histogram])
def test_a_metric_is_made_once(make: object) -> None:
    """Asked for again in one registry a metric is the same one; another registry has its own."""
    registry = CollectorRegistry()
    first = make(registry, "room_things", "Things.", "topic")  # type: ignore[operator]
    assert make(registry, "room_things", "Things.", "topic") is first  # type: ignore[operator]
    assert make(CollectorRegistry(), "room_things", "Things.", "topic") is not first  # type: ignore[operator]


def test_a_name_of_another_kind_is_refused() -> None:
    """One name cannot be a counter and a gauge."""
    registry = CollectorRegistry()
    counter(registry, "room_things", "Things.")
    with pytest.raises(ValueError, match="Duplicated"):
        histogram(registry, "room_things", "Things.")


def test_names_and_rendering() -> None:
    """Names carry the product's prefix, counters the suffix of a total."""
    registry = CollectorRegistry()
    counter(registry, "room_things", "Things.", "topic").labels(topic="t").inc(2)
    gauge(registry, "room_open", "Open.").set(3)
    histogram(registry, "room_seconds", "Time.").observe(0.3)
    lines = render(registry).decode().splitlines()
    assert 'penstock_room_things_total{topic="t"} 2.0' in lines
    assert "penstock_room_open 3.0" in lines
    assert 'penstock_room_seconds_bucket{le="0.25"} 0.0' in lines
    assert 'penstock_room_seconds_bucket{le="0.5"} 1.0' in lines
    assert len([line for line in lines if "_seconds_bucket{" in line]) == len(LATENCY_BUCKETS_SECONDS) + 1
