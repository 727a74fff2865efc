"""The benchmark of compaction: what it measures, and what it calls missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench import compaction

FLAT = compaction.Line(
    factor=1,
    records=1_000,
    first=10.0,
    delta=5.0,
    kept_up=6.0,
    copied=0.0,
    rewritten=0.1,
    optimize=10.0,
    optimize_closed=10.0,
    restore=1.0,
    load_rate=400_000.0,
    replay=10.0,
)


def found(history: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What a run finds whose second sizes differ from the first ones."""
    sizes = {"sessions": 10, "closed": 10, "state_sessions": 10, "delta": 1, "spark_start": 5.0}
    lines = {"history": [FLAT, FLAT._replace(**history)], "state": [FLAT, FLAT._replace(**state)]}
    return {**sizes, **lines, "others": {"sketches": 9_000.0}}


@pytest.mark.parametrize(
    ("history", "state", "missed"),
    [
        ({}, {}, 0),
        ({"restore": 1.4, "kept_up": 11.9}, {"kept_up": 11.9, "restore": 9.0}, 0),
        ({"restore": 1.6}, {}, 1),
        ({"kept_up": 12.1}, {"kept_up": 12.1}, 2),
        ({"load_rate": 299_000.0}, {}, 1),
        ({}, {"load_rate": 299_000.0}, 1),
    ],
)
def test_what_is_asked_for_is_held_against_the_worst(
    history: dict[str, Any], state: dict[str, Any], missed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restores are compared while history grows alone: more state takes longer. A delta counts with its OPTIMIZE."""
    assert compaction.show(found(history, state)) == missed
    assert "sketches: 9,000 sessions/s" in capsys.readouterr().out


@pytest.mark.soak
def test_a_small_run_measures_everything() -> None:
    """All sizes, on a real broker and Spark; the bench asserts by itself what each compaction and restore did."""
    result = asyncio.run(compaction.run(2_000, 200, 500, 50))
    assert [line.factor for line in result["history"]] == [line.factor for line in result["state"]] == [1, 4, 16]
    assert all(line.restore > 0 and line.kept_up > line.delta > 0 for line in (*result["history"], *result["state"]))
