"""Each task gets a share of a turn's time, and runs grow while they are cheap."""

from __future__ import annotations

from penstock.shared.streams.task.time_slices import (
    PROCESSING_MS_MAX,
    RUN_RECORDS_FIRST,
    RUN_RECORDS_MAX,
    RUN_RECORDS_MIN,
    RunLength,
    TurnTime,
)
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


def test_runs_grow_while_they_are_cheap_and_shrink_when_they_are_not() -> None:
    """A full slice that was fast makes the next one larger. A slow one makes it smaller, down to a limit."""
    length = RunLength()
    length.adapt(RUN_RECORDS_FIRST - 1, 0, 100)
    assert length.records_max == RUN_RECORDS_FIRST, "it was no full run"
    length.adapt(RUN_RECORDS_FIRST, 25, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST
    length.adapt(4 * RUN_RECORDS_FIRST, 100, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST
    length.adapt(4 * RUN_RECORDS_FIRST, 1_000, 100)
    assert length.records_max == 4 * RUN_RECORDS_FIRST // 10
    for _ in range(4):
        length.adapt(RUN_RECORDS_MAX, 0, 100)
    assert length.records_max == RUN_RECORDS_MAX
    length.adapt(1, 60_000, 100)
    assert length.records_max == RUN_RECORDS_MIN
