"""The demo's output: steps as lines, and a live panel of the pipeline below them.

On a terminal the panel is redrawn in place. Elsewhere (a log, CI) only the steps are printed, with a line of figures
every few seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_INTERVAL_S = 5.0


@dataclass(slots=True)
class Figures:
    """The pipeline's state at one moment; None if unknown."""

    acknowledged: int = 0
    processed: int = 0
    open: int | None = None
    closed: int = 0
    late: int = 0
    dead_letters: int = 0
    stream_time_ms: int | None = None
    notable: int = 0
    compactions: int = 0
    compacting: bool = False

    def line(self) -> str:
        """Return the figures as text in one line, for output that is not a terminal; some are left out."""
        parts = [
            f"acknowledged {self.acknowledged:,}",
            f"processed {self.processed:,}",
            f"closed {self.closed:,}",
            f"open {'-' if self.open is None else f'{self.open:,}'}",
            f"late {self.late:,}",
            f"dead letters {self.dead_letters:,}",
            f"stream time {day_time(self.stream_time_ms)}",
        ]
        return ", ".join(parts)


class Display:
    """Steps and figures on a console. Use it as a context manager."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._started = time.monotonic()
        self._plain_at = 0.0
        self.figures = Figures()
        columns = (TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._sent: TaskID = self._progress.add_task("acknowledged", total=total)
        self._processed: TaskID = self._progress.add_task("processed", total=total)
        self._live = Live(console=console, get_renderable=self._render_figures, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the panel and restore the terminal's cursor."""
        if self._console.is_terminal:
            self._live.stop()

    def step(self, text: str) -> None:
        """Print the current step."""
        seconds = time.monotonic() - self._started
        self._console.print(f"[dim]{seconds:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Show the current figures in the panel. Elsewhere than on a terminal, print them at most every
        PLAIN_INTERVAL_S, and nothing before the first record is acknowledged."""
        self._progress.update(self._sent, completed=self.figures.acknowledged)
        self._progress.update(self._processed, completed=self.figures.processed)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._plain_at >= PLAIN_INTERVAL_S and self.figures.acknowledged:
            self._plain_at = now
            self.step(f"[dim]{self.figures.line()}[/dim]")

    def _render_figures(self) -> Group:
        figures = self.figures
        table = Table.grid(padding=(0, 3))
        cells = {
            "stream time": day_time(figures.stream_time_ms),
            "sessions closed": f"{figures.closed:,}",
            "open": "-" if figures.open is None else f"{figures.open:,}",
            "late": f"{figures.late:,}",
            "dead letters": f"{figures.dead_letters:,}",
            "notable": f"{figures.notable:,}",
            "compactions": f"{figures.compactions}{' (one running)' if figures.compacting else ''}",
        }
        for _ in cells:
            table.add_column(justify="right")
        table.add_row(*(f"[bold]{value}[/bold]" for value in cells.values()))
        table.add_row(*(f"[dim]{name}[/dim]" for name in cells))
        return Group(self._progress, table)


def day_time(ms: int | None) -> str:
    """Return a time, in ms since the epoch, as the demo displays it: as a minute in UTC, or `-` if it is unknown.

    >>> day_time(1357035300000), day_time(None), day_time(-1)
    ('2013-01-01 10:15', '-', '-')
    """
    if ms is None or ms < 0:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as the demo displays it.

    >>> counted(1, "record"), counted(0, "record"), counted(2_500, "dead letter")
    ('1 record', '0 records', '2,500 dead letters')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
