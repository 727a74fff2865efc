"""Tables on a terminal, or in a file or a pipe, which are as wide as they need."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH_MIN = 100  # narrower than this, texts would wrap into towers
_UNLIMITED = 10_000


def console_for(*tables: Table) -> Console:
    """The terminal, or a wider one where that has too few columns for what the tables must not cut or break.

    >>> table = Table()
    >>> for name in ("a", "b"):
    ...     table.add_column(name, no_wrap=True)
    >>> table.add_row("x" * 80, "y" * 80)
    >>> console_for(table).width
    167
    """
    terminal, paper = Console(), Console(width=_UNLIMITED)
    needed = max([WIDTH_MIN, *(paper.measure(table).minimum for table in tables)])
    return terminal if terminal.width >= needed else Console(width=needed)
