"""`penstock demo`: real events through the whole pipeline, on this machine, with a crash in the middle and an audit at
the end. With `--json` the last line is one object with the results."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from penstock.services.exit_status import ExitStatus
from penstock.services.local.demo.csv_events import DEFAULT_GAP, DEFAULT_GRACE, CsvEvents
from penstock.services.local.demo.data_folder import fresh_folder
from penstock.services.local.demo.display import Display, counted, longest_table
from penstock.services.local.demo.events import DemoEvents
from penstock.services.local.demo.flights import FlightEvents
from penstock.services.local.demo.scenario import DemoOutcome, Scenario
from penstock.shared.common import log
from penstock.shared.common.errors import ConfigError, PenstockError
from penstock.shared.common.settings import LogSettings

DEFAULT_FOLDER = Path(".penstock/demo")
PLAIN_WIDTH = 120  # of output to a file or a pipe

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
    """Replay the flights that left New York in 2013, or your own CSV file, through the whole pipeline."""
    log.configure(LogSettings(level="error"), "demo")
    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        source = _event_source(input, key, time, time_format, gap, grace, events)
        total = source.count()  # reads all of it: a truncated file is found before anything changes
        with fresh_folder(data_dir) as folder, Display(console, total) as display:
            outcome = asyncio.run(_run_scenario(Scenario(source, folder, display), display))
    except ConfigError as e:
        raise typer.Exit(_print_error(e, ExitStatus.WRONG_SETTING)) from None
    except PenstockError as e:
        raise typer.Exit(_print_error(e, ExitStatus.FAILED)) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    _print_summary(console, source, outcome, folder)
    if json:
        sys.stdout.write(msgspec.json.encode(summary(outcome)).decode() + "\n")
    raise typer.Exit(ExitStatus.OK if outcome.ok else ExitStatus.FAILED)


async def _run_scenario(scenario: Scenario, display: Display) -> DemoOutcome:
    """Run the scenario as a task that SIGTERM and Ctrl-C cancel, so everything started is stopped again.

    The second signal ends this process at once, and its children end with it.
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


def summary(outcome: DemoOutcome) -> dict[str, Any]:
    """Return the object of `--json`."""
    audit = outcome.audit
    counts = outcome.counts
    return {
        "events_sent": counts.sent,
        "events_acked": counts.acknowledged,
        "events_refused": counts.rejected,
        "sessions_closed": audit["windows_closed"],
        "sessions_open": audit["windows_open"],
        "late_records": audit["late"],
        "dead_letters": audit["dead_letters"],
        "dead_letters_expected": outcome.unfit,
        "dead_letters_ok": outcome.dead_letters_ok,
        "skipped_records": audit["skipped"],
        "restore_ms": outcome.restore_ms,
        "restored_windows": outcome.restored("windows"),
        "restored_changelog_windows": outcome.restored("changelog_windows"),
        "restored_changelog_records": outcome.restored("changelog_records"),
        "compactions": outcome.compactions,
        "delta_rows": outcome.lake["live_rows"] + sum(outcome.lake["closed_rows"].values()),
        "notable": outcome.notable,
        "events_per_second": round(counts.acknowledged / outcome.replay_seconds) if outcome.replay_seconds else 0,
        **outcome.batch,
        "batch_ok": outcome.batch_ok,
        "audit": audit,
        "audit_ok": outcome.audit_ok,
        "seconds": round(outcome.seconds, 1),
    }


def _print_summary(console: Console, source: DemoEvents, outcome: DemoOutcome, folder: Path) -> None:
    console.print()
    console.print(longest_table(outcome.longest, source.plan.results))
    console.print()
    for rejection in outcome.counts.errors:
        console.print(
            f"  rejected by the ingest: {rejection}", highlight=False, markup=False, style="yellow", soft_wrap=True
        )
    for name, text in _summary_lines(summary(outcome), source, outcome, folder).items():
        console.print(f"  [bold]{name:<13}[/bold]{text}", highlight=False, soft_wrap=True)


def _summary_lines(figures: dict[str, Any], source: DemoEvents, outcome: DemoOutcome, folder: Path) -> dict[str, str]:
    """Return the summary, line by line, as rich's markup."""
    plan = source.plan
    rejected = figures["events_refused"]
    skipped = figures["skipped_records"]
    lines = {
        "events": f"{figures['events_sent']:,} sent, {figures['events_acked']:,} acknowledged by Kafka"
        + (f", [yellow]{rejected:,} rejected by the ingest[/yellow]" if rejected else "")
        + f" ({figures['events_per_second']:,} a second from HTTP through the aggregator)",
        "sessions": f"{figures['sessions_closed']:,} closed, {figures['sessions_open']:,} still open",
        "late": f"{counted(figures['late_records'], 'record')}, in topic {plan.late}",
        "dead letters": f"{counted(figures['dead_letters'], 'record')}, in topic {plan.dead_letters}"
        + _dead_letters_verdict(figures, plan.unfit)
        + "".join(f"\n{'':<15}such as: {escape(reason)}" for reason in outcome.reasons),
        "skipped": f"{counted(skipped, 'record')} without a key",
        "notable": f"{counted(figures['notable'], 'session')}, kept by the consumer in {folder / 'notable.jsonl'}",
        "crash": f"restored in {figures['restore_ms']:,} ms from {counted(figures['restored_windows'], 'window')}"
        f" in Delta and {counted(figures['restored_changelog_windows'], 'change')} in the changelog",
        "lake": f"{counted(figures['delta_rows'], 'row')}, folded by {counted(figures['compactions'], 'compaction')},"
        f" in {folder / 'lake'}",
        "batch": f"{counted(figures['batch_rows'], 'row')} of the same events, windows and late records, "
        + ("all as the aggregator's" if figures["batch_ok"] else "[red]WRONG[/red]: not as the aggregator's"),
        "audit": "[green]passed[/green]: every event is in exactly one group, every session follows the rule"
        if outcome.audit_ok
        else f"[red]FAILED[/red]: see {folder / 'logs' / 'final-jobs.log'}",
        "time": f"{figures['seconds']:.0f} s",
    }
    if not skipped:
        del lines["skipped"]
    if not figures["notable"]:
        lines["notable"] = "none"
    return lines


def _dead_letters_verdict(figures: dict[str, Any], noun: str) -> str:
    """Return whether the dead letters are the expected ones, as rich's markup."""
    sent = counted(figures["dead_letters_expected"], noun)
    if not figures["dead_letters_ok"]:
        return f": [red]WRONG[/red], {sent} {'was' if sent.startswith('1 ') else 'were'} sent"
    return f", one for each {noun} sent" if figures["dead_letters_expected"] else ""


def _print_error(error: PenstockError, status: int) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return status


def main(arguments: list[str]) -> int:
    """Run the demo. Returns the exit status."""
    result = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    return result if isinstance(result, int) else ExitStatus.OK
