"""The schedules of one task, and the removal of cancelled ones."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.punctuation import SWEEP_MIN, PunctuationType, Schedule, Start, TaskSchedules


def add(schedules: TaskSchedules, name: str, start: int = 10**9) -> Schedule:
    at_node = {"now_ms": 0, "start": start, "name": name, "node": "n"}
    return schedules.schedule(1, PunctuationType.STREAM_TIME, lambda _: None, **at_node)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [3, 100, 300])
def test_cancelled_schedules_are_forgotten(count: int) -> None:
    """However many schedules are made and cancelled, also far ahead, only active ones are kept."""
    schedules = TaskSchedules()
    kept = [add(schedules, f"kept-{i:03}") for i in range(count)]
    for i in range(5_000):
        add(schedules, f"timer-{i}").cancel()
        assert len(schedules._named) <= max(SWEEP_MIN, 2 * count)
        assert len(schedules.stream_time._heap) <= max(SWEEP_MIN, 2 * count)
    assert sorted(schedules.grids_ms()) == [f"n/kept-{i:03} (stream_time, every 1 ms)" for i in range(count)]
    assert not any(schedule.cancelled for schedule in kept)


def test_a_clock_that_was_ahead_stops_no_wall_clock_schedule() -> None:
    """A restored time two days ahead is due on its grid within an interval. A given start stays."""
    now, interval, day = 1_800_000_000_000, 300_000, 86_400_000
    wall = {"node": None, "callback": lambda _: None, "type_": PunctuationType.WALL_CLOCK_TIME}

    def due(schedules: TaskSchedules, now_ms: int, start: int | None) -> Schedule:
        return schedules.schedule(interval, now_ms=now_ms, start=start, name="compaction", **wall)  # type: ignore[arg-type]

    ahead, schedules = TaskSchedules(), TaskSchedules()
    was = due(ahead, now + 2 * day + 7, None).due_ms
    schedules.restored = ahead.grids_ms()
    now_due = due(schedules, now, None).due_ms
    assert now < now_due <= now + interval
    assert (was - now_due) % interval == 0
    planned = TaskSchedules()
    planned.restored = ahead.grids_ms()
    assert due(planned, now, was).due_ms == was


MINE = "mine (wall_clock_time, every 300 ms)"


def wall(schedules: TaskSchedules, now_ms: int = 1_000, start: Start = None, name: str | None = "mine") -> int:
    of = PunctuationType.WALL_CLOCK_TIME
    return schedules.schedule(300, of, lambda _: None, now_ms=now_ms, start=start, name=name, node=None).due_ms


@pytest.mark.parametrize(
    ("restored", "start", "due"),
    [
        (1_300, None, 1_300),
        (1_301, None, 1_001),
        (1_600, None, 1_300),
        (1_601, None, 1_001),
        (500, None, 500),
        (0, None, 0),
        (2_000, 2_000, 2_000),
        (2_001, 2_000, 1_701),
        (2_300, 2_000, 2_000),
        (1_700, 1_100, 1_100),
        (1_300, 1_299, 1_300),
    ],
)
def test_a_restored_wall_clock_grid_is_due_within_an_interval(restored: int, start: int | None, due: int) -> None:
    """It stays on its grid: at most one interval ahead, or at its start, and in the past if it was missed."""
    schedules = TaskSchedules()
    schedules.restored = {MINE: restored, "mine (stream_time, every 7 ms)": 5, "mine2 (stream_time, every 7 ms)": 6}
    assert wall(schedules, start=start) == due
    assert schedules.restored == {"mine2 (stream_time, every 7 ms)": 6}
    assert schedules.grids_ms() == {MINE: due, "mine2 (stream_time, every 7 ms)": 6}


def test_a_new_grid_is_to_be_committed() -> None:
    """Only a named schedule without a restored grid is a new grid to commit."""
    schedules = TaskSchedules()
    schedules.restored = {MINE: 1_100}
    wall(schedules, name=None)
    wall(schedules)
    assert not schedules.has_new_grid
    wall(schedules, name="other")
    assert schedules.has_new_grid
    schedules.restored = {"third (wall_clock_time, every 300 ms)": 1_100}
    wall(schedules, name="third")
    assert schedules.has_new_grid
    with pytest.raises(ConfigError, match="'mine'"):
        wall(schedules)


def test_a_stream_time_grid_is_restored_as_it_was() -> None:
    """A stream-time grid is restored unchanged, however far ahead it is."""
    schedules = TaskSchedules()
    schedules.restored = {"n/mine (stream_time, every 1 ms)": 10**12}
    assert add(schedules, "mine").due_ms == 10**12
    assert not schedules.has_new_grid


@pytest.mark.parametrize("start", [0, 0.0, timedelta(0), datetime(1970, 1, 1, tzinfo=UTC)])
def test_a_start_may_be_the_epoch(start: Any) -> None:
    """A start at the epoch is in the past, so the schedule is due at once."""
    assert wall(TaskSchedules(), start=start) == 0


@pytest.mark.parametrize(
    "start", [-1, True, 5.5, math.inf, math.nan, "5", timedelta(microseconds=1_500), timedelta(milliseconds=-1)]
)
def test_a_start_that_is_no_whole_ms(start: Any) -> None:
    """The error has the value and the valid ones."""
    with pytest.raises(ConfigError, match="start must"):
        wall(TaskSchedules(), start=start)


def test_a_name_is_text() -> None:
    """An empty one would be no name."""
    for name in ("", 3):
        with pytest.raises(ConfigError, match="name must be text"):
            wall(TaskSchedules(), name=name)  # type: ignore[arg-type]


def test_many_that_live_are_all_called() -> None:
    """Removing cancelled schedules keeps all others, in their order."""
    schedules, called = TaskSchedules(), []
    for i in range(10 * SWEEP_MIN):
        made = schedules.stream_time.schedule(10**9, 1_000 - i, lambda _, i=i: called.append(i))  # type: ignore[misc]
        if i % 3:
            made.cancel()
    schedules.stream_time.may_punctuate(1_000)
    assert called == [i for i in reversed(range(10 * SWEEP_MIN)) if i % 3 == 0]
