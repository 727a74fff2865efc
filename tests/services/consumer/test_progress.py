"""When the runner counts as stuck."""

from __future__ import annotations

from services.consumer.progress import ProgressWatch


def test_lag_without_progress_is_stuck_after_the_limit() -> None:
    """Only the whole limit without one record finished counts."""
    watch = ProgressWatch(stuck_after_ms=100, now_ms=0)
    watch.observe(0, lag=5, finished=0)
    watch.observe(90, lag=5, finished=0)
    assert (watch.stuck(100), watch.stuck(101)) == (False, True)
    assert watch.without_progress_ms(101) == 101


def test_one_finished_record_starts_the_limit_anew() -> None:
    """Slow is not stuck, even while lag grows."""
    watch = ProgressWatch(stuck_after_ms=100, now_ms=0)
    watch.observe(0, lag=5, finished=0)
    watch.observe(99, lag=500, finished=1)
    assert not watch.stuck(199)
    assert watch.stuck(200)


def test_lag_that_begins_late_starts_the_limit_anew() -> None:
    """A topic that was idle for long is not stuck at its first new record."""
    watch = ProgressWatch(stuck_after_ms=100, now_ms=0)
    watch.observe(0, lag=0, finished=0)
    watch.observe(5_000, lag=3, finished=0)
    assert not watch.stuck(5_100)
