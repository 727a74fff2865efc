"""The audit's report for people and machines."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from services.compactor.audit import CheckResult, Report
from services.compactor.audit_part import Edges
from services.compactor.audit_report import as_object, print_report


def report(differences: int) -> Report:
    shown = [{"partition": 0, "key": "[red]", "at_ms": 5, "detail": "0..9: lost"}] * min(differences, 1)
    checks = [CheckResult("windows", "no session is split", differences, shown), CheckResult("twice", "none", 0, [])]
    return Report(9, 5 - differences, 1, 1, 1, 1, 3, 1, 3, 1, checks, ["means: why"], 2.5)


@pytest.mark.parametrize("differences", [0, 3])
def test_the_last_line_is_json(differences: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers and differences are in one JSON object, and differences are listed with keys shown as they are."""
    text = io.StringIO()
    print_report(report(differences), as_json=True, console=Console(file=text, width=120))
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["audit_ok"] is (differences == 0)
    assert told["differences"] == {"windows": differences, "twice": 0}
    assert (told["records"], told["in_sessions"], told["sessions_closed"]) == (9, 5 - differences, 3)
    assert (told["skipped"], told["not_compared"]) == (1, ["means: why"])
    assert ("[red]" in text.getvalue()) is (differences > 0)
    assert "means: why" in text.getvalue()


def test_the_equation_stands_in_the_report() -> None:
    """Every place that a record can be in is shown with its number, and whether they add up."""
    text = io.StringIO()
    for differences in (0, 3):
        print_report(report(differences), as_json=False, console=Console(file=text, width=200))
    rest = "1 late + 1 dead letters + 1 skipped (without a key) + 1 not processed"
    assert f"9 records = 5 in sessions + {rest}" in text.getvalue()
    assert f"9 records ≠ 2 in sessions + {rest}" in text.getvalue()


def test_a_part_says_what_its_edges_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """What was left out is a place of its own in the equation, and both sides' windows are counted."""
    text = io.StringIO()
    more = {"left_out": 2, "late_left_out": 1, "start_ms": 100, "edges": Edges(batch=3, stream=4)}
    part = msgspec.structs.replace(report(2), **more)
    assert part.unaccounted == 0
    print_report(part, as_json=True, console=Console(file=text, width=250))
    assert "1 not processed + 2 left out" in text.getvalue()
    said = "from 100 ms to the end. Left out at its edges: 4 sessions of the stream, 3 of Spark's, and 1 late records"
    assert said in text.getvalue()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["start_ms"], told["end_ms"], told["edge_sessions"], told["edge_batch_sessions"]) == (100, None, 4, 3)
    assert "start_ms" not in as_object(report(0))
