"""The command line of `penstock demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.services.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--key", "who"), "--key: only with --input FILE"),
        (("--time-format", "epoch", "--gap", "5m"), "--time-format and --gap: only with --input FILE"),
        (("--input", "latin.csv", "--key", "who", "--time", "at"), "latin.csv, line 1: byte 2 (0xe9) is not UTF-8"),
        (
            ("--input", "ok.csv", "--key", "who", "--time", "when"),
            "--time: ok.csv has no column 'when'; it has who, at",
        ),
        (("--input", "ok.csv", "--key", "who", "--time", "at", "--gap", "bogus"), "--gap: 'bogus' is not a duration"),
        (("--input", "ok.csv", "--key", "who", "--time", "at"), "ok.csv, row 1 (line 2), column 'at': '17' is no"),
        (
            ("--input", "seconds.csv", "--key", "who", "--time", "at", "--time-format", "epoch_ms"),
            "seconds.csv, row 1 (line 2), column 'at': '1714557600' is a time in 1970 by --time-format epoch_ms; "
            "--time-format epoch reads it",
        ),
        (("--input", "nowhere.csv"), "--input also needs --key COLUMN and --time COLUMN"),
        (("--input", "nowhere.csv", "--key", "a", "--time", "b"), "nowhere.csv: No such file"),
        (("--data-dir", "."), "is not empty and was not created by a demo"),
    ],
)
def test_invalid_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """An invalid argument exits with status 2 and one line that names it, before a service starts."""
    (tmp_path / "latin.csv").write_bytes(b"n\xe9,at\n")
    (tmp_path / "ok.csv").write_bytes(b"who,at\nann,17\n")
    (tmp_path / "seconds.csv").write_bytes(b"who,at\nann,1714557600\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    run = CliRunner().invoke(app, ["demo", *arguments])
    assert run.exit_code == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_help_names_the_command() -> None:
    """The usage line names the command as the user types it."""
    run = CliRunner().invoke(app, ["demo", "--help"])
    assert run.exit_code == 0
    assert "Usage: penstock demo [OPTIONS]" in run.stdout
