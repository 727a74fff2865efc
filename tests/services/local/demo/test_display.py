"""What a person sees of the demo."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.services.local.demo.display import Display, Figures, longest_table


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_steps_and_figures_as_lines() -> None:
    """Without a terminal nothing is redrawn: each step is a line, and the figures are one."""
    console = Console(file=io.StringIO(), width=200)
    with Display(console, total=10) as display:
        display.step("sending")
        display.figures.acknowledged = 4
        display.update()
    assert "sending" in text_of(console)
    assert "acknowledged 4, processed 0" in text_of(console)


def test_a_terminal_shows_the_panel() -> None:
    """On a terminal the figures stand in a panel with bars."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Display(console, total=10) as display:
        display.figures = Figures(acknowledged=4, late=2, stream_time_ms=1_357_035_300_000)
        display.update()
    shown = text_of(console)
    assert "4/10" in shown
    assert "2013-01-01 10:15" in shown


def test_the_table_shows_every_result() -> None:
    """Key, start, length, and one column for each result, whatever they are called."""
    console = Console(file=io.StringIO(), width=200)
    session = {
        "key": "UA-EWR",
        "start": 1_357_035_300_000,
        "end": 1_357_042_500_000,
        "flights": 1234,
        "mean_delay": 4.25,
    }
    console.print(longest_table([session], "banks"))
    shown = text_of(console)
    for part in ("Longest banks", "UA-EWR", "2013-01-01 10:15", "2.0", "1,234", "4.2", "mean delay"):
        assert part in shown


def test_no_session_is_said_and_not_shown_as_an_empty_table() -> None:
    """Where nothing has closed there is no table of nothing."""
    console = Console(file=io.StringIO(), width=200)
    console.print(longest_table([], "banks"))
    assert text_of(console) == "Longest banks: none, since none has closed yet\n"
