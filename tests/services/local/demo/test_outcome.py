"""The demo's outcome: its last Spark jobs without Spark, its output and its summary."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.services.local.demo import final_jobs
from penstock.services.local.demo.csv_events import CsvEvents
from penstock.services.local.demo.display import Display, Figures
from penstock.services.local.demo.final_jobs import last_object
from penstock.services.local.demo.replay import ReplayCounts
from penstock.services.local.demo.summary import DemoOutcome, longest_table, print_summary
from penstock.services.spark.audit.report import AuditCheck, AuditReport
from penstock.services.spark.main import AUDIT_DIFFERENCES, AUDIT_FAILED


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_result() -> None:
    """The table has key, start, length, and a column for each result."""
    console = Console(file=io.StringIO(), width=200)
    session = {
        "key": "UA-EWR",
        "start": 1_357_035_300_000,
        "end": 1_357_042_500_000,
        "flights": 1234,
        "mean_delay": 4.25,
    }
    console.print(longest_table([session], "banks"))
    shown = text_of(console)
    for part in ("Longest banks", "UA-EWR", "2013-01-01 10:15", "2.0", "1,234", "4.2", "mean delay"):
        assert part in shown


@pytest.mark.parametrize("key", ["a[/b]", "sensor[a]", "x:100:y"])
def test_the_table_shows_a_key_as_it_is(key: str) -> None:
    """Brackets and colons in a key are neither markup nor an emoji."""
    console = Console(file=io.StringIO(), width=200)
    console.print(longest_table([{"key": key, "start": 0, "end": 1, "events": 3}], "sessions"))
    assert key in text_of(console)


def test_the_summary_shows_the_folder_as_it_is(tmp_path: Path) -> None:
    """Brackets and colons in the data folder's path are neither markup nor an emoji."""
    audit = {"windows_closed": 1, "windows_open": 0, "late": 0, "dead_letters": 0, "skipped": 0}
    outcome = DemoOutcome(ReplayCounts(), audit=audit, notable=1, batch={"batch_rows": 1, "batch_differences": 0})
    console = Console(file=io.StringIO(), width=200)
    folder = Path("[old]/x:100:y")
    (tmp_path / "events.csv").write_text("user,at\nann,2024-05-01T10:00:00Z\n")
    print_summary(console, CsvEvents(tmp_path / "events.csv", "user", "at"), outcome, folder)
    for name in ("notable.jsonl", "lake", "logs/final-jobs.log"):
        assert f"{folder}/{name}" in text_of(console)


def test_without_sessions_there_is_a_line_instead_of_a_table() -> None:
    """If no session has closed, a line says so instead of an empty table."""
    console = Console(file=io.StringIO(), width=200)
    console.print(longest_table([], "banks"))
    assert text_of(console) == "Longest banks: none, since none has closed yet\n"


@pytest.mark.parametrize(
    ("audit_ok", "dead_letters", "unfit", "rejected", "ok"),
    [
        (True, 17, 17, 0, True),
        (True, 0, 0, 0, True),
        (False, 17, 17, 0, False),
        (True, 18, 17, 0, False),
        (True, 16, 17, 0, False),
        (True, 16, 17, 1, True),
        (True, 15, 17, 1, False),
        (True, 18, 17, 1, False),
    ],
)
def test_dead_letters_must_equal_the_invalid_events(
    audit_ok: bool, dead_letters: int, unfit: int, rejected: int, ok: bool
) -> None:
    """A valid event among the dead letters fails the demo although the audit passes, as does a missing invalid one."""
    outcome = DemoOutcome(ReplayCounts(rejected=rejected), unfit=unfit, audit_ok=audit_ok)
    outcome.audit, outcome.batch = {"dead_letters": dead_letters}, {"batch_rows": 1, "batch_differences": 0}
    assert outcome.ok is ok


@pytest.mark.parametrize(
    ("batch", "ok"),
    [
        ({"batch_rows": 9, "batch_differences": 0}, True),
        ({"batch_rows": 9, "batch_differences": 1}, False),
        ({"batch_rows": 0, "batch_differences": 0}, False),
        ({}, False),
    ],
)
def test_the_batch_must_have_the_same_results(batch: dict[str, int], ok: bool) -> None:
    """A row that differs fails the demo, as does a batch without rows."""
    outcome = DemoOutcome(ReplayCounts(), unfit=0, audit_ok=True, audit={"dead_letters": 0}, batch=batch)
    assert outcome.ok is ok


def test_the_results_are_printed_after_the_differences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the audit's tables are, the last lines have its result and that of the comparison."""
    shown = [{"partition": 0, "key": f"k{n}", "at_ms": n, "detail": "lost"} for n in range(500)]
    report = AuditReport(9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, [AuditCheck("windows", "all", 500, shown)], [], [], 2.5, "s")
    monkeypatch.setattr(final_jobs, "run", lambda jobs: (report, final_jobs.Comparison(7, 0)))
    arguments = final_jobs.FinalJobs("a", "lake", "store", "m:f", {}, 9, {}).arguments()
    assert final_jobs.main(arguments) == AUDIT_DIFFERENCES
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last_object(last, "audit_ok")["differences"] == {"windows": 500}
    assert last_object(last, "batch_differences") == {"batch_rows": 7, "batch_differences": 0}


def test_no_audit_after_a_failed_compaction(capsys: pytest.CaptureFixture[str]) -> None:
    """After a failed compaction the audit does not run, and only the compaction's error is reported."""
    assert (
        final_jobs.main(final_jobs.FinalJobs("no/name", "lake", "store", "m:f", {}, 1, {}).arguments()) == AUDIT_FAILED
    )
    output = capsys.readouterr().err
    assert "penstock compact" in output
    assert "penstock audit" not in output


def test_the_last_object_counts() -> None:
    """The last JSON object with the field is the result; other lines are ignored, and without one it is empty."""
    lines = ['{"a":1}', '{"a":2}', '{"event":"bye"}', "[3]", "{broken", '{"a":' * 100_000, "done"]
    assert last_object(lines, "a") == {"a": 2}
    assert last_object(["nothing"], "a") == {}


def test_without_a_terminal_output_is_lines() -> None:
    """Without a terminal each step is a line, and the figures are one line."""
    console = Console(file=io.StringIO(), width=200)
    with Display(console, total=10) as display:
        display.step("sending")
        display.figures.acknowledged = 4
        display.update()
    assert "sending" in text_of(console)
    assert "acknowledged 4, processed 0" in text_of(console)


def test_a_terminal_shows_the_panel() -> None:
    """On a terminal the figures are in a panel with bars."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Display(console, total=10) as display:
        display.figures = Figures(acknowledged=4, late=2, stream_time_ms=1_357_035_300_000)
        display.update()
    shown = text_of(console)
    assert "4/10" in shown
    assert "2013-01-01 10:15" in shown
