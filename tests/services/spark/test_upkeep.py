"""When upkeep is due."""

from __future__ import annotations

import pytest

from penstock.services.spark.upkeep import is_vacuum_due

RUNS = [("MERGE", run) for run in range(60, 0, -1)]


@pytest.mark.parametrize(
    ("versions", "due"),
    [
        (RUNS[-19:], False),
        (RUNS[-20:], True),
        (RUNS[-21:], True),  # one that was missed at run 20 is not put off to run 40
        ([*RUNS[20:25], ("OPTIMIZE", None), *RUNS[25:39], ("VACUUM END", None), *RUNS[39:]], False),
        ([*RUNS[20:25], ("VACUUM START", None), *RUNS[25:40], ("VACUUM END", None), *RUNS[40:]], True),
        ([("VACUUM END", None), *RUNS], False),
        ([], False),
    ],
)
def test_a_vacuum_is_due_so_many_runs_after_the_last(versions: list[tuple[str, int | None]], due: bool) -> None:
    """Twenty runs since a VACUUM ended, or since the table is there, make one due, whatever their numbers are."""
    assert is_vacuum_due(versions, 20) is due


def test_without_a_vacuum_in_sight_the_number_of_the_run_decides() -> None:
    """Of a policy wider than the versions that are looked at."""
    assert is_vacuum_due(RUNS, 30)
    assert not is_vacuum_due(RUNS[1:], 100)
    assert is_vacuum_due([("MERGE", 200), ("MERGE", 199)], 100)
