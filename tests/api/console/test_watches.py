"""Values of the overview that depend on earlier samples."""

from __future__ import annotations

import pytest

from penstock.api.console.samples import ServiceSample
from penstock.api.console.watches import GroupWatch, Latency, restore_estimate_s


def group(lag: int, **other: object) -> dict[str, object]:
    return {"group": "banks", "state": "Stable", "members": 1, "lag": lag, **other}


def test_a_group_that_falls_behind_has_no_time_to_catch_up() -> None:
    """A group whose lag grows has no catch-up time, and a group without lag has zero."""
    watch = GroupWatch()
    watch.observe([group(10)], now_ms=0, monotonic_ms=0)
    (row,) = watch.observe([group(30)], now_ms=1_000, monotonic_ms=1_000)
    assert (row["lag_per_second"], row["catch_up_s"]) == (20.0, None)
    assert watch.observe([group(0)], now_ms=2_000, monotonic_ms=2_000)[0]["catch_up_s"] == 0.0


def test_rebalances_are_events_newest_first() -> None:
    """A change of a group's state or members is an event; a new group is none."""
    watch = GroupWatch()
    watch.observe([group(0)], now_ms=1, monotonic_ms=1)
    watch.observe([group(0, state="PreparingRebalance")], now_ms=2, monotonic_ms=2)
    watch.observe([group(0, members=3)], now_ms=3, monotonic_ms=3)
    assert [e["at_ms"] for e in watch.events] == [3, 2]
    assert watch.events[0]["what"] == "state PreparingRebalance to Stable, members 1 to 3"


def sample(counts: dict[float, float]) -> list[ServiceSample]:
    metrics = {f"penstock_ingest_request_seconds_bucket|{bound}": n for bound, n in counts.items()}
    return [ServiceSample("producer", "", "ok", metrics=metrics)]


def test_latency_is_that_of_the_last_seconds() -> None:
    """Latency covers the last seconds, and a restarted service's counters are ignored."""
    latency = Latency()
    latency.observe(sample({0.01: 100, 1.0: 100}), 0)
    assert latency.observe(sample({0.01: 100, 1.0: 200}), 1_000)["p50_ms"] == pytest.approx(505.0)
    latency.observe(sample({0.01: 100, 1.0: 200}), 30_000)
    assert latency.observe(sample({0.01: 110, 1.0: 210}), 31_000)["p99_ms"] == pytest.approx(9.9)
    assert latency.observe(sample({0.01: 0, 1.0: 0}), 32_000) == {"p50_ms": None, "p99_ms": None}


def test_restore_estimates_use_the_last_restores_rate() -> None:
    """The estimate uses the last restores' rate for open windows and changelog records, and is
    None without a restore.
    """
    large = {"restore_ms": 100, "restored_windows": 9_000, "restored_changelog_records": 1_000, "open_sessions": 20_000}
    small = {"restore_ms": 30, "restored_windows": 0, "restored_changelog_records": 2, "open_sessions": 10_000}
    aggregator = ServiceSample("aggregator", "", "ok", checks={"compaction": {"changelog_records": 20_000}})
    assert restore_estimate_s([large, small], [aggregator]) == 0.5
    assert restore_estimate_s([], [aggregator]) is None
    assert restore_estimate_s([{"open_sessions": 5}], [aggregator]) is None


def test_small_restores_do_not_determine_the_rate() -> None:
    """A restore of a few records mostly measures connecting, so it does not determine the rate."""
    first = {"restore_ms": 30, "restored_windows": 0, "restored_changelog_records": 2, "open_sessions": 50_000}
    aggregator = ServiceSample("aggregator", "", "ok", checks={"compaction": {"changelog_records": 50_000}})
    assert restore_estimate_s([first, {**first, "restore_ms": 40, "open_sessions": 0}], [aggregator]) == 1.03
