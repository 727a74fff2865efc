"""Exit statuses and errors of commands with subcommands."""

from __future__ import annotations

import pytest

from penstock.services.command_line import run_app
from penstock.shared.common.errors import ConfigError, KafkaTimeout


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
