"""When the runner counts as stuck."""

from __future__ import annotations

from penstock.services.consumer.progress_watch import ProgressWatch

A, B = "t-0", "t-1"


def test_lag_without_progress_is_stuck_after_the_limit() -> None:
    """A partition is stuck only if no record was finished for the whole limit."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 5}, {})
    watch.observe(90, {A: 5}, {})
    assert watch.trouble(100) == ""
    assert watch.trouble(101) == "t-0: 5 records behind, none finished for 101 ms"


def test_one_finished_record_restarts_the_limit() -> None:
    """One finished record restarts the limit, so a slow partition is not stuck even while its lag grows."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 5}, {})
    watch.observe(99, {A: 500}, {A: 1})
    assert watch.trouble(199) == ""
    assert watch.trouble(200) == "t-0: 500 records behind, none finished for 101 ms"


def test_lag_after_an_idle_time_restarts_the_limit() -> None:
    """A topic that was idle for a long time is not stuck at its first new record."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 0}, {})
    watch.observe(5_000, {A: 3}, {})
    assert watch.trouble(5_100) == ""


def test_progress_of_one_partition_does_not_hide_a_stuck_one() -> None:
    """A stuck partition is named although others make progress, until another member owns it."""
    watch = ProgressWatch(stuck_after_ms=100)
    for now_ms in (0, 60, 120):
        watch.observe(now_ms, {A: 5, B: 5}, {B: now_ms})
    assert watch.trouble(121) == "t-0: 5 records behind, none finished for 121 ms"
    assert watch.lag == 10
    watch.observe(130, {B: 5}, {B: 130})
    assert watch.trouble(131) == ""


def test_a_transaction_that_is_not_committed_is_stuck() -> None:
    """Finished records whose transaction is not committed are named as such, and count as lag, also when partitions are
    revoked."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe_uncommitted(0, 5, 7)
    watch.observe(90, {A: 0}, {A: 5})
    watch.observe_uncommitted(90, 5, 7)
    assert watch.trouble(101) == "5 finished records are not committed, and none was finished for 101 ms"
    assert watch.lag == 5
    watch.observe_uncommitted(110, 0, 7)
    assert watch.trouble(999) == ""


def test_a_member_outside_of_the_group_is_stuck() -> None:
    """A member outside of the group is stuck after the same limit, although it has no lag."""
    watch = ProgressWatch(stuck_after_ms=100)
    assert watch.trouble(500, rebalance_ms=100) == ""
    assert "rebalance takes 101 ms" in watch.trouble(500, rebalance_ms=101)
