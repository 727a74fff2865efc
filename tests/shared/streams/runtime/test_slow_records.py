"""Which steps are blamed for the loss of partitions, and when a record has had its attempts."""

from __future__ import annotations

import sys

import pytest

from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.streams.runtime.slow_records import PUNCTUATION, SlowSteps, Step
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN


def slow_steps(attempts_max: int = 2) -> SlowSteps:
    return SlowSteps(session_timeout_ms=6_000, heartbeat_interval_ms=1_000, attempts_max=attempts_max)


def lose(slow: SlowSteps, *steps: Step, partition: int = 0) -> None:
    for step in steps:
        slow.took(partition, step)
    slow.lost()


def test_the_longest_step_is_blamed() -> None:
    """Of all that is not committed; a shorter one has done nothing."""
    slow = slow_steps(1)
    lose(slow, Step("in", 3, 100), Step("in", 4, 5_000), Step("in", 5, 80))
    suspect = slow.refused(0)
    assert suspect is not None
    assert suspect.step == Step("in", 4, 5_000)
    assert not slow.suspects(1)


def test_a_loss_without_a_slow_step_blames_none() -> None:
    """Partitions are lost for other reasons, too: a broker that went, a step short of the session's length."""
    slow = slow_steps(1)
    for _ in range(5):
        lose(slow, Step("in", 4, 4_999))
    slow.lost()
    assert not slow.suspects(0)


def test_steps_of_one_turn_add_up() -> None:
    """Each partition takes one in a turn: two of half a session's length hold the heartbeats up as one does."""
    slow = slow_steps(1)
    slow.took(0, Step("in", 4, 2_500))
    slow.took(1, Step("in", 9, 2_500))
    slow.lost()
    assert (slow.suspects(0), slow.suspects(1)) == (True, True)


def test_only_losses_in_a_row_count() -> None:
    """Another record's loss begins anew; a commit past the record ends it, one before it does not."""
    slow = slow_steps(2)
    lose(slow, Step("in", 4, 9_000))
    lose(slow, Step("in", 5, 9_000))
    assert slow.refused(0) is None
    slow.committed(0, {"in": 5})
    lose(slow, Step("in", 5, 9_000))
    assert slow.refused(0) is not None
    slow.committed(0, {"in": 6})
    assert not slow.suspects(0)


def test_a_step_that_was_committed_is_not_blamed() -> None:
    """Whatever the group says later; but a commit that was under way before it tells nothing of it."""
    slow = slow_steps(1)
    slow.took(0, Step("in", 4, 9_000))
    slow.committed(0, {"in": 5})
    slow.lost()
    assert not slow.suspects(0)
    slow.took(0, Step("in", 7, 9_000))
    slow.committed(0, {"in": 7})
    slow.lost()
    assert slow.suspects(0)


def test_records_go_one_by_one_only_while_one_is_looked_for() -> None:
    """Of a batch taken as columns nobody could say which record is slow; once it is done they are columns again."""
    slow = slow_steps()
    assert slow.columns_min(0) == COLUMNS_MIN
    lose(slow, Step("in", 4, 9_000))
    assert (slow.columns_min(0), slow.columns_min(1)) == (sys.maxsize, COLUMNS_MIN)
    slow.committed(0, {"in": 5})
    assert slow.columns_min(0) == COLUMNS_MIN


def test_a_batch_counts_against_no_record() -> None:
    """The record that it ended with is not refused for it, even where one attempt is all there is."""
    slow = slow_steps(1)
    lose(slow, Step("in", 9, 9_000, is_batch=True))
    assert slow.refused(0) is None
    assert slow.columns_min(0) == sys.maxsize
    assert repr(slow) == "SlowSteps(longest {}, [Suspect(a batch up to in-0@9 took 9000 ms, 0 losses)])"
    lose(slow, Step("in", 4, 9_000))
    assert repr(slow.refused(0)) == "Suspect(in-0@4 took 9000 ms, 1 loss)"


def test_a_punctuation_has_no_record_to_refuse() -> None:
    """It ends the worker, with the partition and the limits by name."""
    slow = slow_steps(1)
    lose(slow, Step(PUNCTUATION, 0, 9_000), partition=3)
    says = r"punctuation of partition 3 took 9000 ms .*session_timeout_ms=6000.*slow_record_attempts_max=1"
    with pytest.raises(ProcessingFailed, match=says):
        slow.refused(3)
