"""A task's metrics: rates, ratios, and sizes with their mean and limits."""

from __future__ import annotations

import pytest

from penstock.shared.connect.runtime.states import State
from penstock.shared.connect.runtime.task_metrics import RATE_WINDOW_MS, TaskMetrics


def test_rates_cover_the_last_window() -> None:
    """A rate covers the time since the start, and later the last window."""
    metrics = TaskMetrics("sink", now_ms=1_000)
    assert metrics.values(1_000)["sink_record_read_rate"] == 0.0
    metrics.add("sink_record_read_total", 50)
    assert metrics.values(6_000)["sink_record_read_rate"] == 10.0
    assert metrics.values(11_000)["sink_record_read_rate"] == 5.0
    metrics.add("sink_record_read_total", 30)
    later = 11_000 + RATE_WINDOW_MS
    assert metrics.values(later)["sink_record_read_rate"] == pytest.approx(30 / (RATE_WINDOW_MS / 1000))
    assert metrics.values(later + 10 * RATE_WINDOW_MS)["sink_record_read_rate"] == 0.0


def test_ratios_are_of_the_whole_time() -> None:
    """The running and pause ratios cover the task's whole lifetime."""
    metrics = TaskMetrics("source", now_ms=0)
    metrics.moved(State.RUNNING, 10)
    metrics.moved(State.PAUSED, 60)
    found = metrics.values(100)
    assert (found["running_ratio"], found["pause_ratio"]) == (0.5, 0.4)


def test_commit_ratios() -> None:
    """The shares of successful and failed commits; both are zero before the first."""
    metrics = TaskMetrics("sink")
    assert metrics.values(1)["offset_commit_success_percentage"] == 0.0
    metrics.add("offset_commit_success_total", 3)
    metrics.add("offset_commit_failure_total")
    found = metrics.values(1)
    assert (found["offset_commit_success_percentage"], found["offset_commit_failure_percentage"]) == (0.75, 0.25)


def test_sizes_have_a_mean_and_limits() -> None:
    """Transaction sizes and active records have averages, minima and maxima."""
    metrics = TaskMetrics("source")
    for size in (4, 2, 6):
        metrics.sized("transaction_size", size)
    metrics.active(5)
    metrics.active(0)
    found = metrics.values(1)
    assert [found[f"transaction_size_{what}"] for what in ("avg", "min", "max")] == [4.0, 2.0, 6.0]
    assert [found[f"source_record_active_count{what}"] for what in ("", "_avg", "_max")] == [0.0, 2.5, 5.0]
