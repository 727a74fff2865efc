"""The output of `penstock connectors`."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.services.connect.connectors import table_of


def test_texts_of_others_are_shown_as_they_are() -> None:
    """Nothing in a name or a trace is interpreted as markup or as a terminal command."""
    trace = "first\nValueError: [/b] \\[link=x]y \x1b[31m"
    found = {"[bold]a": {"status": {"connector": {"state": "FAILED", "trace": trace}, "tasks": [{"state": "RUNNING"}]}}}
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(found))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[bold]a", "FAILED", "1/1 running", r"ValueError: [/b] \[link=x]y \x1b[31m"):
        assert text in said
    assert "\x1b" not in said
