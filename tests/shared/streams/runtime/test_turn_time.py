"""Each task gets a share of a turn's time."""

from __future__ import annotations

from penstock.shared.streams.runtime.turn_time import PROCESSING_MS_MAX, TurnTime
from penstock.shared.testing.manual_clock import ManualClock


def test_equal_shares() -> None:
    """Each task gets an equal share of the turn. The unused rest of one goes to the tasks after it."""
    clock = ManualClock()
    turn = TurnTime(clock)
    turn.begin(4)
    assert turn.share().ms == PROCESSING_MS_MAX // 4
    clock.advance(10)
    assert turn.share().ms == (PROCESSING_MS_MAX - 10) // 3


def test_a_slow_task_does_not_reduce_the_next_share() -> None:
    """A task that exceeds its share does not reduce the share of the next task."""
    clock = ManualClock()
    turn = TurnTime(clock)
    turn.begin(2)
    slow = turn.share()
    clock.advance(10 * PROCESSING_MS_MAX)
    assert (slow.is_left(), slow.used_ms()) == (False, 10 * PROCESSING_MS_MAX)
    assert turn.share().ms == PROCESSING_MS_MAX // 2


def test_each_share_is_at_least_1_ms() -> None:
    """With very many tasks each share is at least 1 ms. A turn without tasks can begin."""
    turn = TurnTime(ManualClock())
    turn.begin(10 * PROCESSING_MS_MAX)
    assert turn.share().ms == 1
    turn.begin(0)
    assert turn.share().ms == PROCESSING_MS_MAX
