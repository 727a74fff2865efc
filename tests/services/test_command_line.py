"""The `penstock` command: its subcommands, their exit statuses and their errors."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from penstock.services.cli import COMMANDS, app
from penstock.services.command_line import run_app
from penstock.shared.common.errors import ConfigError, KafkaTimeout

runner = CliRunner()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_target_exists(name: str) -> None:
    """Each command names a function of an importable module."""
    module, _, function = COMMANDS[name][1].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_help_lists_all_commands() -> None:
    """--help names every command with its text, as does a call without arguments."""
    for arguments in (["--help"], []):
        shown = " ".join(runner.invoke(app, arguments, env={"COLUMNS": "200"}).output.split())
        for name, (_, _, text, _) in COMMANDS.items():
            assert f" {name} " in shown
            assert text in shown


def test_version() -> None:
    """--version prints the distribution's version."""
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"penstock {version('penstock')}\n")


def test_an_unknown_command() -> None:
    """An unknown command is named, with exit status 2."""
    result = runner.invoke(app, ["agregator"])
    assert result.exit_code == 2
    assert "agregator" in result.output


def test_flags_are_passed_on() -> None:
    """A command receives its arguments unchanged, and its exit status is the process's."""
    result = runner.invoke(app, ["aggregator", "--http.port=nonsense"])
    assert result.exit_code == 2
    assert "http.port" in result.output


def test_a_services_help_is_its_own() -> None:
    """`penstock SERVICE --help` shows the service's settings."""
    result = runner.invoke(app, ["aggregator", "--help"])
    assert result.exit_code == 0
    assert "--streams.application-id" in result.output


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (None, 0, ""),
        (SystemExit(2), 2, ""),
        (SystemExit(), 0, ""),
        (SystemExit("stopped by hand"), 1, "stopped by hand\n"),
        (ConfigError("topics: empty"), 2, "topics: empty\n"),
        (KafkaTimeout("no response"), 1, "penstock dlq: KafkaTimeout: no response\n"),
    ],
    ids=repr,
)
def test_an_error_is_a_line_and_a_status(
    raised: BaseException | None, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the application is one line on standard error with the program's name, and an exit status."""
    called: list[tuple[list[str], str]] = []

    def app(args: list[str], prog_name: str) -> None:
        called.append((args, prog_name))
        if raised is not None:
            raise raised

    assert run_app(app, ["list", "clicks"], "penstock dlq") == status
    assert called == [(["list", "clicks"], "penstock dlq")]
    assert capsys.readouterr().err == line


def test_an_unknown_error_is_not_swallowed() -> None:
    """An unexpected exception is raised unchanged."""

    def app(args: list[str], prog_name: str) -> None:
        raise KeyError("no such field")

    with pytest.raises(KeyError):
        run_app(app, [], "penstock")
