"""The demo's outcome and its printed summary."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.services.local.demo.replay import ReplayCounts
from penstock.services.local.demo.summary import DemoOutcome, longest_table


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
