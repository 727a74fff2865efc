"""`penstock demo`: real events through the whole chain, on this machine, with a crash in the middle and a proof at the
end. The last line of `--json` is one object with what came of it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from services.local.demo.csv_events import CsvEvents
from services.local.demo.display import Display, longest_table
from services.local.demo.events import Events
from services.local.demo.flights import FlightEvents
from services.local.demo.scenario import Outcome, Scenario
from shared.common import log
from shared.common.errors import ConfigError, PenstockError
from shared.common.settings import LogSettings

DEFAULT_FOLDER = Path(".penstock/demo")
MARKER = "penstock-demo"  # a file in the folder: only a folder that a demo made is emptied by the next
PLAIN_WIDTH = 120  # of what goes into a file or a pipe
OK, FAILED, WRONG_SETTINGS, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(name="penstock demo")
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="Only the first N events.", metavar="N")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    input: Annotated[Path | None, typer.Option(help="A CSV file of events: plain, gz, xz or zip.")] = None,
    key: Annotated[str | None, typer.Option(help="The file's column with the key.", metavar="COLUMN")] = None,
    time: Annotated[str | None, typer.Option(help="The file's column with the event time.", metavar="COLUMN")] = None,
    time_format: Annotated[
        str | None, typer.Option(help="epoch, epoch_ms, epoch_us or a strptime format; default ISO 8601.")
    ] = None,
    gap: Annotated[str, typer.Option(help="Inactivity that ends a session.")] = "30m",
    grace: Annotated[str, typer.Option(help="How long after that late events are still taken.")] = "15m",
    data_dir: Annotated[Path, typer.Option(help="Where Kafka, the lake and the logs go.")] = DEFAULT_FOLDER,
) -> None:
    """Replay the flights that left New York in 2013, or a CSV file of yours, through the whole chain."""
    log.configure(LogSettings(level="error"), "demo")
    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        source = _source(input, key, time, time_format, gap, grace, events)
        folder = _fresh_folder(data_dir)
        with Display(console, source.count()) as display:
            outcome = asyncio.run(_run(Scenario(source, folder, display)))
    except ConfigError as e:
        raise typer.Exit(_say(e, WRONG_SETTINGS)) from None
    except PenstockError as e:
        raise typer.Exit(_say(e, FAILED)) from None
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
    _print(console, source, outcome, folder)
    if json:
        sys.stdout.write(msgspec.json.encode(summary(outcome)).decode() + "\n")
    raise typer.Exit(OK if outcome.audit_ok else FAILED)


async def _run(scenario: Scenario) -> Outcome:
    """Run it as a task that SIGTERM and Ctrl-C cancel, so that everything started is stopped again."""
    task = asyncio.ensure_future(scenario.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def _source(
    file: Path | None,
    key: str | None,
    time: str | None,
    time_format: str | None,
    gap: str,
    grace: str,
    limit: int | None,
) -> Events:
    if file is None:
        if key or time:
            raise ConfigError("--key and --time go with --input")
        return FlightEvents(limit)
    if not key or not time:
        raise ConfigError("--input also needs --key COLUMN and --time COLUMN")
    return CsvEvents(file, key, time, time_format=time_format, gap=gap, grace=grace, limit=limit)


def _fresh_folder(folder: Path) -> Path:
    """An empty folder for this run; ConfigError rather than emptying one that is not a demo's."""
    folder = folder.absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / MARKER).is_file():
                raise ConfigError(f"--data-dir: {folder} is not empty, and no demo made it")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text("This folder belongs to `penstock demo`, which empties it at its next start.\n")
    except OSError as e:
        raise ConfigError(f"--data-dir: {folder}: {e.strerror or e}") from None
    return folder


def summary(outcome: Outcome) -> dict[str, Any]:
    """The object of `--json`."""
    audit, counts = outcome.audit, outcome.counts
    return {
        "events_sent": counts.sent,
        "events_acked": counts.acknowledged,
        "events_refused": counts.refused,
        "sessions_closed": audit["sessions_closed"],
        "sessions_open": audit["sessions_open"],
        "late_records": audit["late"],
        "dead_letters": audit["dead_letters"],
        "restore_ms": outcome.restore_ms,
        "restored_windows": sum(task["restored_windows"] for task in outcome.restores),
        "restored_changelog_records": sum(task["restored_changelog_records"] for task in outcome.restores),
        "compactions": outcome.compactions,
        "delta_rows": outcome.lake["live_rows"] + sum(outcome.lake["closed_rows"].values()),
        "notable": outcome.notable,
        "events_per_second": round(counts.acknowledged / outcome.replay_seconds) if outcome.replay_seconds else 0,
        "audit": audit,
        "audit_ok": outcome.audit_ok,
        "seconds": round(outcome.seconds, 1),
    }


def _print(console: Console, source: Events, outcome: Outcome, folder: Path) -> None:
    figures, plan = summary(outcome), source.plan
    console.print()
    console.print(longest_table(outcome.longest, plan.results))
    console.print()
    lines = {
        "events": f"{figures['events_sent']:,} sent, {figures['events_acked']:,} acknowledged by Kafka"
        f" ({figures['events_per_second']:,} a second from HTTP to the last commit)",
        "sessions": f"{figures['sessions_closed']:,} closed, {figures['sessions_open']:,} still open",
        "late": f"{figures['late_records']:,} records, in topic {plan.late}",
        "dead letters": f"{figures['dead_letters']:,} records, in topic {plan.dead_letters}",
        "notable": f"{figures['notable']:,} sessions, kept by the consumer in {folder / 'notable.jsonl'}",
        "crash": f"restored in {figures['restore_ms']:,} ms from {figures['restored_windows']:,} windows in Delta"
        f" and {figures['restored_changelog_records']:,} changelog records",
        "lake": f"{figures['delta_rows']:,} rows, folded by {figures['compactions']} compactions, in {folder / 'lake'}",
        "audit": "[green]passed[/green]: every event is in exactly one place, no session is split for nothing"
        if outcome.audit_ok
        else f"[red]FAILED[/red]: see {folder / 'logs' / 'audit.log'}",
        "time": f"{figures['seconds']:.0f} s",
    }
    for refusal in outcome.counts.errors:
        console.print(f"  refused: {refusal}", highlight=False, style="yellow")
    for name, text in lines.items():
        console.print(f"  [bold]{name:<13}[/bold]{text}", highlight=False, soft_wrap=True)


def _say(error: PenstockError, status: int) -> int:
    print(f"penstock demo: {error}", file=sys.stderr)
    return status


def main(arguments: list[str]) -> int:
    """Run the demo; the exit status."""
    result = app(arguments, standalone_mode=False)
    return result if isinstance(result, int) else OK
