"""When upkeep is due."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.spark.upkeep import is_optimize_due, is_vacuum_due

RUN = {"operation": "WRITE", "kind": "compaction"}
REWRITE = {"operation": "WRITE", "kind": "rewrite"}
STARTED, ENDED, OPTIMIZED = ({"operation": name} for name in ("VACUUM START", "VACUUM END", "OPTIMIZE"))


@pytest.mark.parametrize(
    ("history", "due"),
    [
        ([RUN] * 19, False),
        ([RUN] * 20, True),
        ([RUN] * 21, True),  # one that was missed is not put off
        ([*[RUN] * 10, OPTIMIZED, REWRITE, *[RUN] * 9, ENDED, *[RUN] * 9], False),
        ([*[RUN] * 5, STARTED, *[RUN] * 15, ENDED], True),  # one that did not end
        ([ENDED, *[RUN] * 60], False),
        ([], False),
    ],
)
def test_a_vacuum_is_due_so_many_runs_after_the_last(history: list[dict[str, Any]], due: bool) -> None:
    """Rewrites and upkeep do not count, nor does a VACUUM that did not end."""
    assert is_vacuum_due(history, 20) is due


@pytest.mark.parametrize(
    ("history", "due"),
    [([RUN] * 3, True), ([RUN] * 2, False), ([RUN, RUN, OPTIMIZED, RUN], False), ([], False), ([STARTED], False)],
)
def test_an_optimize_is_due_after_so_many_appends(history: list[dict[str, Any]], due: bool) -> None:
    """Appends before the last OPTIMIZE do not count."""
    assert is_optimize_due(history, 2) is due
