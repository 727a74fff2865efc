"""Rejected records are logged at once, then once an interval, and when the task ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.shared.streams.runtime.rejection_log import LOG_INTERVAL_MS, RejectionLog
from penstock.shared.streams.task.metrics import StreamTaskMetrics, Totals


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def metrics() -> StreamTaskMetrics:
    return StreamTaskMetrics(None, 3)


def test_without_rejections_nothing_is_logged(logged: list[Any]) -> None:
    """Without a rejected record there is no line, also not at the end."""
    log = RejectionLog(3)
    log.report(Totals(), 0)
    log.report(Totals(), 0, at_once=True)
    assert logged == []


def test_a_burst_of_rejections_is_logged_in_two_lines(logged: list[Any]) -> None:
    """The first rejection is logged at once, the others after the interval, with the coordinates of the last one."""
    log, task = RejectionLog(3), metrics()
    task.skipped("null key")
    task.rejected_at["skipped"] = "in-3@0"
    log.report(task.totals(), 1_000)
    assert len(logged) == 1
    for offset in range(1, 5):
        task.late("in", 1)
        task.rejected_at["late"] = f"in-3@{offset}"
        log.report(task.totals(), 1_000 + LOG_INTERVAL_MS - offset)
    assert len(logged) == 1
    log.report(task.totals(), 1_000 + LOG_INTERVAL_MS)
    log.report(task.totals(), 1_000 + 2 * LOG_INTERVAL_MS)
    first, second = ({k: v for k, v in line.items() if k not in ("event", "log_level")} for line in logged)
    assert first == {"partition": 3, "late": 0, "dead_letters": 0, "skipped": 1, "last_skipped": "in-3@0"}
    assert second == {"partition": 3, "late": 4, "dead_letters": 0, "skipped": 0, "last_late": "in-3@4"}


def test_pending_rejections_are_logged_at_the_end(logged: list[Any]) -> None:
    """Rejections that are not logged yet are logged when the task ends."""
    log, task = RejectionLog(3), metrics()
    task.dead_letter("in", "process")
    log.report(task.totals(), 0)
    task.dead_letter("in", "process")
    log.report(task.totals(), 1, at_once=True)
    assert [line["dead_letters"] for line in logged] == [1, 1]
