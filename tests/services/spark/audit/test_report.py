"""The audit's report, for people and for machines."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.audit.report import AuditCheck, AuditReport, print_report, report_as_json
from penstock.services.spark.main import AUDIT_DIFFERENCES, AUDIT_FAILED, audit_exit_status


def report(differences: int) -> AuditReport:
    shown = [{"partition": 0, "key": "[red]" + "é" * 100, "at_ms": 5, "detail": "0..9: lost"}] * min(differences, 1)
    checks = [AuditCheck("windows", "no session is split", differences, shown), AuditCheck("twice", "none", 0, [])]
    return AuditReport(
        9, 5 - differences, 1, 1, 1, 1, 0, 3, 1, 3, 1, checks, ["means: why"], ["grace: taken"], 2.5, "s"
    )


@pytest.mark.parametrize("differences", [0, 3])
def test_the_last_line_is_json(differences: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object has the numbers and differences. Differences are listed with unchanged, whole keys."""
    text = io.StringIO()
    print_report(report(differences), as_json=True, console=Console(file=text, width=120))
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert output["audit_ok"] is (differences == 0)
    assert output["differences"] == {"windows": differences, "twice": 0}
    assert (output["records"], output["in_windows"], output["windows_closed"]) == (9, 5 - differences, 3)
    assert (output["skipped"], output["not_compared"]) == (1, ["means: why"])
    assert ("[red]" in text.getvalue()) is (differences > 0)
    assert text.getvalue().count("é") == (100 if differences else 0)
    assert "not compared: means: why" in text.getvalue()
    assert "assumed: grace: taken" in text.getvalue()


def test_the_equation_stands_in_the_report() -> None:
    """The report shows the number of records in each group, and whether the numbers add up."""
    text = io.StringIO()
    for differences in (0, 3):
        print_report(report(differences), as_json=False, console=Console(file=text, width=200))
    rest = "1 late + 1 dead letters + 1 skipped + 1 not covered yet"
    assert f"9 records = 5 in windows + {rest}" in text.getvalue()
    assert f"9 records ≠ 2 in windows + {rest}" in text.getvalue()


def test_records_beside_those_that_are_gone_are_left_out() -> None:
    """If there are such records, they are a separate group in the equation."""
    text = io.StringIO()
    part = msgspec.structs.replace(report(2), left_out=2)
    assert part.unaccounted == 0
    print_report(part, as_json=False, console=Console(file=text, width=250))
    assert "+ 2 left out" in text.getvalue()
    assert report_as_json(part)["left_out"] == 2


def test_nothing_compared_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """If neither side has a window, the report states it, unless something else differs."""
    none = {"windows_closed": 0, "windows_open": 0, "spark_windows": 0, "split_sessions": 0}
    empty = msgspec.structs.replace(report(0), **none)
    assert (empty.is_empty, empty.differs, empty.ok) == (True, False, False)
    assert [audit_exit_status(one) for one in (report(0), report(1), empty)] == [
        ExitStatus.OK,
        AUDIT_DIFFERENCES,
        AUDIT_FAILED,
    ]
    text = io.StringIO()
    print_report(empty, as_json=True, console=Console(file=text, width=120))
    assert text.getvalue().count("nothing was compared") == 2
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (output["audit_ok"], output["nothing_compared"]) == (False, True)
    for name in ("windows_closed", "windows_open", "spark_windows"):
        assert msgspec.structs.replace(empty, **{name: 1}).ok
    assert not msgspec.structs.replace(report(2), **none).is_empty


def test_keys_are_shown_as_they_are() -> None:
    """Nothing in a key or a difference is interpreted as markup or as a terminal command."""
    keys = ("[bold]a", "a\\[/b]", "b\\", "x\\[link=http://example.org]y", "\x1b[31mred", "\ud800")
    shown = [{"partition": 0, "key": key, "at_ms": 5, "detail": f"lost {key}"} for key in keys]
    text = io.StringIO()
    found = msgspec.structs.replace(report(1), checks=[AuditCheck("windows", "none", 5, shown)])
    print_report(found, as_json=False, console=Console(file=text, width=200))
    for key in (*keys[:4], "\\x1b[31mred", "\\ud800"):
        assert text.getvalue().count(key) >= 2
    assert "\x1b" not in text.getvalue()
