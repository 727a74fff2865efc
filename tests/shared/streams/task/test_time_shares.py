"""Runs grow while they are cheap."""

from __future__ import annotations

from penstock.shared.streams.task.time_shares import RUN_RECORDS_FIRST, RUN_RECORDS_MAX, RUN_RECORDS_MIN, RunLength


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
