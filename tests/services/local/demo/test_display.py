"""The demo's output for a terminal and for a log."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.services.local.demo.display import Display, Figures


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_output_is_lines() -> None:
    """Without a terminal each step is a line, and the figures are one line."""
    console = Console(file=io.StringIO(), width=200)
    with Display(console, total=10) as display:
        display.step("sending")
        display.figures.acknowledged = 4
        display.update()
    assert "sending" in text_of(console)
    assert "acknowledged 4, processed 0" in text_of(console)


def test_a_terminal_shows_the_panel() -> None:
    """On a terminal the figures are in a panel with bars."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Display(console, total=10) as display:
        display.figures = Figures(acknowledged=4, late=2, stream_time_ms=1_357_035_300_000)
        display.update()
    shown = text_of(console)
    assert "4/10" in shown
    assert "2013-01-01 10:15" in shown
