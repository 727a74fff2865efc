"""Makes the console that prints tables to a terminal, a file or a pipe, and text that is safe to print there."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

# With fewer characters a line, texts would wrap into many short lines.
WIDTH_MIN = 100
_UNLIMITED = 10_000


def console_for(*tables: Table) -> Console:
    """A console as wide as the terminal, but at least WIDTH_MIN, and wide enough for columns that must not be wrapped.

    In all other columns of the tables, words that are wider than their column continue on the next line.

    >>> table = Table()
    >>> for name in ("a", "b"):
    ...     table.add_column(name, no_wrap=True)
    >>> table.add_row("x" * 80, "y" * 80)
    >>> console_for(table).width
    167
    """
    for table in tables:
        for column in table.columns:
            # By default, the end of such a word is cut off.
            column.overflow = "fold"
    terminal = Console()
    paper = Console(width=_UNLIMITED)
    needed = max([WIDTH_MIN, *(paper.measure(table).minimum for table in tables)])
    return terminal if terminal.width >= needed else Console(width=needed)


def plain(text: str, *, lines: bool = False) -> Text:
    r"""An untrusted text as plain text: brackets are no markup, and characters that are not printable are escaped.

    With `lines`, line breaks are kept.

    >>> plain("a\\[/b]").plain, plain("\x1b[31mred").plain, plain("one\ntwo", lines=True).plain
    ('a\\[/b]', '\\x1b[31mred', 'one\ntwo')
    """
    shown = (c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)
    return Text("".join(shown))
