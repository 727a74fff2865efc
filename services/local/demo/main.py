"""`penstock demo`: real events through the whole pipeline, on this machine, with a crash in the middle and an audit at
the end. With `--json` the last line is one object with the results."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from penstock.services.exit_status import ExitStatus, exit_status_of
from penstock.services.local.demo.csv_events import DEFAULT_GAP, DEFAULT_GRACE, CsvEvents
from penstock.services.local.demo.data_folder import fresh_folder, require_a_demos
from penstock.services.local.demo.display import Display
from penstock.services.local.demo.events import DemoEvents
from penstock.services.local.demo.flights import FlightEvents
from penstock.services.local.demo.scenario import Scenario
from penstock.services.local.demo.summary import DemoOutcome, json_summary, print_summary
from penstock.shared.common import log
from penstock.shared.common.errors import ConfigError, PenstockError
from penstock.shared.common.settings import LogSettings

DEFAULT_FOLDER = Path(".penstock/demo")
# Output to a file or a pipe has this width, in characters.
PLAIN_WIDTH = 120

PROGRAM = "penstock demo"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="Only the first N events.", metavar="N")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    input: Annotated[
        Path | None,
        typer.Option(help="A CSV file of events: plain, gz, xz or zip; needs --key and --time.", metavar="FILE"),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The file's column with the key.", metavar="COLUMN")] = None,
    time: Annotated[str | None, typer.Option(help="The file's column with the event time.", metavar="COLUMN")] = None,
    time_format: Annotated[
        str | None,
        typer.Option(help="epoch, epoch_ms, epoch_us or a strptime format; default: ISO 8601.", metavar="FORMAT"),
    ] = None,
    gap: Annotated[
        str | None, typer.Option(help=f"Inactivity that ends a session; default: {DEFAULT_GAP}.", metavar="DURATION")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(help=f"How long late events are accepted; default: {DEFAULT_GRACE}.", metavar="DURATION"),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Folder of Kafka's data, the lake and the logs.", metavar="FOLDER")
    ] = DEFAULT_FOLDER,
) -> None:
    """Run the demo: the flights that left New York in 2013, or your own CSV file, go through the whole pipeline."""
    log.configure(LogSettings(level="error"), "demo")
    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        # The folder is checked before the events are read, which takes seconds.
        require_a_demos(data_dir.absolute())
        source = _event_source(input, key, time, time_format, gap, grace, events)
        # `count` reads all events, so a truncated file is found before anything changes.
        total = source.count()
        with fresh_folder(data_dir) as folder, Display(console, total) as display:
            outcome = asyncio.run(_run_scenario(Scenario(source, folder, display), display))
    except PenstockError as e:
        raise typer.Exit(_print_error(e)) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    print_summary(console, source, outcome, folder)
    if json:
        sys.stdout.write(msgspec.json.encode(json_summary(outcome)).decode() + "\n")
    raise typer.Exit(ExitStatus.OK if outcome.ok else ExitStatus.FAILED)


async def _run_scenario(scenario: Scenario, display: Display) -> DemoOutcome:
    """Run the scenario as a task that SIGTERM and Ctrl-C cancel, so everything started is stopped again.

    The second signal ends this process at once. The guards of its children then stop them (see `ChildProcess`).
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(scenario.run())

    def stop_scenario() -> None:
        if task.cancelling():
            display.close()
            os._exit(ExitStatus.INTERRUPTED)
        display.step("stopping Kafka and all services, which takes some seconds (Ctrl-C again: at once) …")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_scenario)
    return await task


def _event_source(
    file: Path | None,
    key: str | None,
    time: str | None,
    time_format: str | None,
    gap: str | None,
    grace: str | None,
    limit: int | None,
) -> DemoEvents:
    if file is None:
        options = {"--key": key, "--time": time, "--time-format": time_format, "--gap": gap, "--grace": grace}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ConfigError(f"{' and '.join(given)}: only with --input FILE; without it the flights are replayed")
        return FlightEvents(limit)
    if not key or not time:
        raise ConfigError("--input also needs --key COLUMN and --time COLUMN")
    gap = gap or DEFAULT_GAP
    grace = grace or DEFAULT_GRACE
    return CsvEvents(file, key, time, time_format=time_format, gap=gap, grace=grace, limit=limit)


def _print_error(error: PenstockError) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return exit_status_of(error)


def main(arguments: list[str]) -> int:
    """Run `penstock demo`. Returns the exit status."""
    result = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    return result if isinstance(result, int) else ExitStatus.OK
