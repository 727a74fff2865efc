"""The output of `penstock connectors`."""

from __future__ import annotations

import io
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from penstock.services.connect.connectors_command import _decode_response_body, main, table_of


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


@pytest.mark.parametrize("data", [b"{", b'"\xff"', b"[" * 100_000])
def test_offsets_that_are_not_json_are_an_error(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of offsets that is not JSON, or nested too deeply, is an error with its name, before any request."""
    (tmp_path / "offsets.json").write_bytes(data)
    assert main(["offsets", "set", "c", str(tmp_path / "offsets.json")]) == 2
    assert "offsets.json: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--include-tasks", "--only-failed"])
def test_a_restart_of_one_task_rejects_the_options_of_a_connector(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--task` with an option that has no effect on one task is an error with their names, before any request."""
    assert main(["restart", "orders", "--task", "0", option]) == 2
    output = capsys.readouterr().err
    assert "--task" in output
    assert option in output


@pytest.mark.parametrize("content", [b"", b"<html>", b'"\xff"', b"[" * 100_000])
def test_a_response_that_is_not_json_has_no_body(content: bytes) -> None:
    """A response that is not JSON, or nested too deeply, is as one without a body."""
    assert _decode_response_body(httpx.Response(502, content=content)) is None
