"""Runs commands with subcommands: an error of Penstock is printed as one line and sets the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from penstock.services.exit_status import ExitStatus, exit_status_of
from penstock.shared.common.errors import ConfigError, PenstockError


def run_app(app: Callable[..., object], arguments: list[str], program: str) -> int:
    """Run a typer application under the name `program` and return the exit status.

    The status is 1 if the command failed with a Penstock error, 2 for wrong arguments or settings, and otherwise the
    status that the command set.
    """
    try:
        app(args=arguments, prog_name=program)
    except SystemExit as e:
        return _status_of_system_exit(e)
    except PenstockError as e:
        print(e if isinstance(e, ConfigError) else f"{program}: {type(e).__name__}: {e}", file=sys.stderr)
        return exit_status_of(e)
    return ExitStatus.OK


def _status_of_system_exit(error: SystemExit) -> int:
    """Return the exit status of a SystemExit. As in Python, a text is printed on standard error and the status is 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or ExitStatus.OK
    print(error.code, file=sys.stderr)
    return ExitStatus.FAILED
