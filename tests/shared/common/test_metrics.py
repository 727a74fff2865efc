"""Prometheus metrics and their naming rules."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from penstock.shared.common.metrics import LATENCY_BUCKETS_SECONDS, counter, gauge, histogram, render


@pytest.mark.parametrize("make", [counter, gauge, histogram])
def test_a_metric_is_created_once(make: object) -> None:
    """A metric is created once in a registry, and separately in each registry."""
    registry = CollectorRegistry()
    first = make(registry, "room_things", "Things.", "topic")  # type: ignore[operator]
    assert make(registry, "room_things", "Things.", "topic") is first  # type: ignore[operator]
    assert make(CollectorRegistry(), "room_things", "Things.", "topic") is not first  # type: ignore[operator]


def test_a_name_of_another_kind_is_an_error() -> None:
    """One name cannot be both a counter and a histogram."""
    registry = CollectorRegistry()
    counter(registry, "room_things", "Things.")
    with pytest.raises(ValueError, match="Duplicated"):
        histogram(registry, "room_things", "Things.")


def test_names_and_rendering() -> None:
    """Names have the product's prefix, and counters the suffix `_total`."""
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


@pytest.mark.parametrize("make", [counter, gauge, histogram])
@pytest.mark.parametrize(
    "name", ["room_wait_ms", "room_milliseconds_of_waiting", "room_heap_mb", "room_full_percentage"]
)
def test_other_units_than_base_units_are_an_error(make: object, name: str) -> None:
    """A metric in another unit than Prometheus's base units is an error with its name."""
    with pytest.raises(ValueError, match=name):
        make(CollectorRegistry(), name, "Things.")  # type: ignore[operator]


def test_series_of_creation_times_are_left_out() -> None:
    """In a user's registry our metrics have no `_created` series, and the user's own metrics keep theirs."""
    registry = CollectorRegistry()
    counter(registry, "room_things", "Things.", "topic").labels(topic="t").inc(2)
    histogram(registry, "room_seconds", "Time.").observe(0.3)
    Counter("mine", "A metric of the process that embeds Penstock.", registry=registry).inc()
    names = {line.split("{")[0].split(" ")[0] for line in generate_latest(registry).decode().splitlines()} - {"#"}
    assert [name for name in names if name.endswith("_created")] == ["mine_created"]
    assert {"penstock_room_things_total", "penstock_room_seconds_count", "mine_total"} <= names
