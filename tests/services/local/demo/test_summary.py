"""The demo's printed summary."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.services.local.demo.summary import longest_table


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
