"""What commands with subcommands have in common: an error of ours is one line and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from penstock.shared.common.errors import ConfigError, PenstockError

REFUSED, WRONG_SETTING = 1, 2


def run_app(app: Callable[..., object], arguments: list[str], program: str) -> int:
    """Run a typer application under its name; the exit status: 1 where it was refused, 2 for wrong arguments or
    settings, else what it asked for.
    """
    try:
        app(args=arguments, prog_name=program)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    except ConfigError as e:
        print(e, file=sys.stderr)
        return WRONG_SETTING
    except PenstockError as e:
        print(f"{program}: {type(e).__name__}: {e}", file=sys.stderr)
        return REFUSED
    return 0
