"""The benchmark of compaction: what it measures, and what it calls missed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench import compaction

FLAT = compaction.Line(
    factor=1,
    changelog=1_000,
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


def test_what_was_not_measured_misses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run of one part that part alone is shown and judged."""
    sizes = {"sessions": 10, "closed": 10, "state_sessions": 10, "delta": 1, "spark_start": 5.0}
    slow = FLAT._replace(restore=9.0, kept_up=99.0, load_rate=1.0)
    assert compaction.show(sizes | {"others": {"sketches": 9_000.0}}) == 0
    assert "asked for" not in capsys.readouterr().out
    assert compaction.show(sizes | {"state": [FLAT, slow]}) == 2
    shown = capsys.readouterr().out
    assert "while state grows: the worst over 1x is 16.50" in shown
    assert "history" not in shown


@pytest.mark.parametrize("text", ["", "1,", "0", "8,-1", "1;8"])
def test_numbers_of_partitions_are_comma_separated_and_positive(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Others are refused before anything is started, by the option's name."""
    with pytest.raises(SystemExit):
        compaction.parser().parse_args([f"--partitions={text}"])
    assert "--partitions" in capsys.readouterr().err
    given = compaction.parser().parse_args(["--partitions", "1,8,64", "--only", "partitions", "state"])
    assert (given.partitions, given.only) == ((1, 8, 64), ["partitions", "state"])


def test_what_was_measured_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of history and live state either or both; no chart of neither."""
    sizes, lines = {"sessions": 10, "state_sessions": 10}, [FLAT] * len(compaction.FACTORS)
    compaction.draw(sizes | {"others": {"sketches": 9_000.0}}, tmp_path / "none.png")
    compaction.draw(sizes | {"state": lines}, tmp_path / "state.png")
    compaction.draw(sizes | {"history": lines, "state": lines}, tmp_path / "both.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.png", "state.png"]
    assert capsys.readouterr().out.splitlines() == [f"chart: {tmp_path / name}" for name in ("state.png", "both.png")]


@pytest.mark.soak
def test_a_small_run_measures_everything() -> None:
    """All sizes, on a real broker and Spark; the bench asserts by itself what each compaction and restore did."""
    result = asyncio.run(compaction.run(compaction.Asked(2_000, 200, 500, 50, (1, 3), 2)))
    assert [(line.partitions, line.records, line.live) for line in result["partitions"]] == [
        (1, 2_200, 2_000),
        (3, 2_200, 2_000),
    ]
    assert [line.factor for line in result["history"]] == [line.factor for line in result["state"]] == [1, 4, 16]
    assert [line.changelog for line in result["history"]] == [2_200, 4 * 2_200, 16 * 2_200]
    assert all(line.restore > 0 and line.kept_up > line.delta > 0 for line in (*result["history"], *result["state"]))
