"""Benches that compare contestants: the choice of the best round, and the ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench._side_by_side import best_of, report

CONTESTANT = """
import json, pathlib, sys
assert sys.argv[1] == "--one" and sys.argv[3] == "--records", sys.argv
seen = pathlib.Path(sys.argv[4])
turn = len(seen.read_text().splitlines()) if seen.exists() else 0
seen.write_text((seen.read_text() if turn else "") + sys.argv[2] + "\\n")
print("something else")
print(json.dumps({"records_per_second": [5, 6, 9, 4][turn], "cpu_us_per_record": turn}))
"""


async def test_the_best_round_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants alternate, and the round with the highest rate is kept with all its figures."""
    (tmp_path / "contestant.py").write_text(CONTESTANT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = tmp_path / "seen"
    best = await best_of("contestant", ("ours", "theirs"), ["--records", str(seen)], rounds=2)
    assert seen.read_text(encoding="utf-8").split() == ["ours", "theirs", "ours", "theirs"]
    assert best == {
        "ours": {"records_per_second": 9, "cpu_us_per_record": 2},
        "theirs": {"records_per_second": 6, "cpu_us_per_record": 1},
    }


@pytest.mark.parametrize(("least", "status"), [(2.0, 0), (2.5, 1)])
def test_a_ratio_that_is_missed_is_status_one(least: float, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of rates below its limit gives status 1. With JSON, figures and ratios are the last line."""
    figures = {
        "ours": {"records_per_second": 200.0, "cpu_us_per_record": 1.5},
        "theirs": {"records_per_second": 100.0, "cpu_us_per_record": 3.0, "p99_ms": 7.0},
    }
    assert report("title", figures, [("ours", "theirs", least)], as_json=True) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "title"
    assert "p99     7.0 ms" in lines[2]
    assert lines[3] == f"  ours / theirs: 2.00 (target: {least})"
    assert json.loads(lines[-1]) == {"figures": figures, "ratios": {"ours / theirs": 2.0}}


@pytest.mark.parametrize(("least", "status"), [(200.0, 0), (200.1, 1)])
def test_a_rate_that_is_missed_is_status_one(least: float, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate below its own limit gives status 1."""
    figures = {"ours": {"records_per_second": 200.0, "cpu_us_per_record": 1.5}}
    assert report("title", figures, (), rates={"ours": least}, as_json=False) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith("  ours: 200 records/s (target:")


def test_figures_that_were_not_measured_are_reported_and_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio or rate of a missing peer is reported as not measured, and the status is 0."""
    figures = {"ours": {"records_per_second": 200.0, "cpu_us_per_record": 1.5}}
    assert report("title", figures, [("ours", "theirs", 9.0)], rates={"others": 1.0}, as_json=True) == 0
    *_, ratio, rate, as_json = capsys.readouterr().out.splitlines()
    assert ratio == "  ours / theirs: not measured: theirs (target: 9.0)"
    assert rate == "  others: not measured (target: 1 records/s)"
    assert json.loads(as_json)["ratios"] == {}
