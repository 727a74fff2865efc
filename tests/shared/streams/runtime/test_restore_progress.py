"""The progress of a restore: estimates, metrics and log lines."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.streams.runtime.restore_progress import LOG_INTERVAL_MS, RestoreProgress
from penstock.shared.streams.task.metrics import RestoreMetrics


def test_remaining_records_rate_and_time_are_estimated() -> None:
    """It has the remaining records, the rate since the beginning and the remaining time.

    These are unknown before the first record.
    """
    progress = RestoreProgress(3)
    assert progress.describe() == {"remaining_records": None, "records_per_second": None, "eta_ms": None}
    progress.moved(100, 1_100, now_ms=50)
    assert progress.describe() == {"remaining_records": 1_000, "records_per_second": None, "eta_ms": None}
    progress.moved(350, 1_100, now_ms=550)
    assert progress.describe() == {"remaining_records": 750, "records_per_second": 500, "eta_ms": 1_500}
    progress.moved(1_100, 1_100, now_ms=1_050)
    assert progress.describe() == {"remaining_records": 0, "records_per_second": 1_000, "eta_ms": 0}


def test_an_empty_log() -> None:
    """An empty log is done at once."""
    progress = RestoreProgress(0)
    progress.moved(7, 7, now_ms=1)
    assert (progress.remaining_records, progress.eta_ms) == (0, 0)


def test_gauges_while_it_runs() -> None:
    """The metrics have the partition's remaining records after every step."""
    registry = CollectorRegistry()
    progress = RestoreProgress(3, RestoreMetrics(registry))

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"penstock_streams_restore_{name}", {"partition": "3"})

    progress.moved(0, 1_000, now_ms=0)
    assert (shown("remaining_records"), shown("eta_seconds")) == (1_000, None)
    progress.moved(250, 1_000, now_ms=500)
    assert (shown("remaining_records"), shown("records_per_second"), shown("eta_seconds")) == (750, 500, 1.5)


def test_a_long_restore_logs_once_an_interval() -> None:
    """A long restore logs its progress once an interval. A short restore and the end of a restore log nothing."""
    progress = RestoreProgress(3)
    with capture_logs() as lines:
        for now_ms in range(0, 2 * LOG_INTERVAL_MS + 1, 1_000):
            progress.moved(now_ms, 4 * LOG_INTERVAL_MS, now_ms=now_ms)
        progress.moved(4 * LOG_INTERVAL_MS, 4 * LOG_INTERVAL_MS, now_ms=4 * LOG_INTERVAL_MS)
    assert [(line["event"], line["partition"], line["remaining_records"], line["eta_ms"]) for line in lines] == [
        ("state is being restored", 3, 3 * LOG_INTERVAL_MS, 3 * LOG_INTERVAL_MS),
        ("state is being restored", 3, 2 * LOG_INTERVAL_MS, 2 * LOG_INTERVAL_MS),
    ]
