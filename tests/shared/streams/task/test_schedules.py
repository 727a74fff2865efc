"""The schedules of one task: what is kept of those that were cancelled."""

from __future__ import annotations

from penstock.shared.streams.punctuation import SWEEP_MIN, PunctuationType, Schedule
from penstock.shared.streams.task.schedules import TaskSchedules


def add(schedules: TaskSchedules, name: str, start: int = 10**9) -> Schedule:
    at_node = {"now_ms": 0, "start": start, "name": name, "node": "n"}
    return schedules.schedule(1, PunctuationType.STREAM_TIME, lambda _: None, **at_node)  # type: ignore[arg-type]


def test_cancelled_schedules_are_forgotten() -> None:
    """However many timers came and went, also such as are due far ahead, only those that live are kept."""
    schedules = TaskSchedules()
    kept = [add(schedules, f"kept-{i}") for i in range(3)]
    for i in range(5_000):
        add(schedules, f"timer-{i}").cancel()
    assert len(schedules._named) <= SWEEP_MIN
    assert len(schedules.stream_time._heap) <= SWEEP_MIN
    assert sorted(schedules.grids_ms()) == [f"n/kept-{i} (stream_time, every 1 ms)" for i in range(3)]
    assert not any(schedule.cancelled for schedule in kept)


def test_a_clock_that_was_ahead_stops_no_wall_clock_schedule() -> None:
    """What was restored lies two days ahead: it is due on its grid within an interval. A start that is told stays."""
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


def test_many_that_live_are_all_called() -> None:
    """Looking for what was cancelled loses none of the others, and keeps their order."""
    schedules, called = TaskSchedules(), []
    for i in range(10 * SWEEP_MIN):
        made = schedules.stream_time.schedule(10**9, 1_000 - i, lambda _, i=i: called.append(i))  # type: ignore[misc]
        if i % 3:
            made.cancel()
    schedules.stream_time.may_punctuate(1_000)
    assert called == [i for i in reversed(range(10 * SWEEP_MIN)) if i % 3 == 0]
