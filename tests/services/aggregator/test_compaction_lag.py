"""The number of changelog records that the lake does not cover, as in the metrics."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from penstock.services.aggregator.compaction_lag import CompactionLagWatch, uncovered_records
from penstock.services.aggregator.settings import AggregatorSettings


def test_uncovered_records() -> None:
    """A partition counts from its covered offset, or from its first record if that offset is unknown or deleted."""
    assert uncovered_records({0: 10, 1: 10, 2: 10, 3: 0}, {0: 2, 1: 8, 2: 0, 3: 0}, {0: 4, 1: 4}) == 6 + 2 + 10
    assert uncovered_records({0: 3}, {0: 0}, {0: 5}) == 0


def test_an_unmeasured_value_is_nan() -> None:
    """An unmeasured value is NaN, because 0 would mean that everything is covered."""
    registry = CollectorRegistry()
    watch = CompactionLagWatch(AggregatorSettings.load(["--topology=a:b"], environ={}), registry, lambda: False)
    for name in ("changelog_records", "snapshot_age_seconds"):
        value = registry.get_sample_value(f"penstock_compaction_{name}")
        assert value is not None
        assert math.isnan(value)
    assert watch.newest_sign_ms() is None
