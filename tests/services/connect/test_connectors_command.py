"""The output of `penstock connectors`."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.services.connect.connectors_command import table_of


def test_foreign_text_is_printed_without_markup() -> None:
    """No name or trace is interpreted as markup or as a terminal command."""
    trace = "first\nValueError: [/b] \\[link=x]y \x1b[31m"
    status = {"connector": {"state": "FAILED", "trace": trace}, "tasks": [{"state": "RUNNING"}]}
    connectors = {"[bold]a": {"status": status}}
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(connectors))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[bold]a", "FAILED", "1/1 running", r"ValueError: [/b] \[link=x]y \x1b[31m"):
        assert text in output
    assert "\x1b" not in output
