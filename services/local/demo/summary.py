"""The outcome of a demo, and its summary: printed for people, and as the JSON object of `penstock demo --json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.services.local.demo.display import counted, day_time
from penstock.services.local.demo.events import DemoEvents
from penstock.services.local.demo.replay import ReplayCounts
from penstock.services.terminal_tables import plain


@dataclass(slots=True)
class DemoOutcome:
    """The results of the demo."""

    counts: ReplayCounts
    restores: list[dict[str, Any]] = field(default_factory=list)
    compactions: int = 0
    replay_seconds: float = 0.0
    audit_ok: bool = False
    audit: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    unfit: int = 0
    delta_rows: int = 0
    longest: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notable: int = 0
    seconds: float = 0.0

    @property
    def dead_letters_ok(self) -> bool:
        """Whether the number of dead letters is that of the unfit events.

        An event that ingest rejected becomes no dead letter, and it is unknown whether it was unfit. So each rejected
        event may lower the expected number by one.
        """
        dead: int = self.audit.get("dead_letters", -1)
        return self.unfit - self.counts.rejected <= dead <= self.unfit

    @property
    def ok(self) -> bool:
        """Whether the demo passed."""
        return self.audit_ok and self.dead_letters_ok and self.batch_ok

    @property
    def batch_ok(self) -> bool:
        """Whether the batch produced the same windows and late records as the aggregator, and at least one."""
        return self.batch.get("batch_rows", 0) > 0 and not self.batch["batch_differences"]

    @property
    def restore_ms(self) -> int:
        """The longest restore of a task after the crash, in ms. All tasks restore concurrently."""
        return max((task["restore_ms"] for task in self.restores), default=0)

    def restored(self, what: str) -> int:
        """Return the number of `windows` (snapshot), `changelog_windows` or `changelog_records` that restore read."""
        return sum(task[f"restored_{what}"] for task in self.restores)


def json_summary(outcome: DemoOutcome) -> dict[str, Any]:
    """Return the object that `penstock demo --json` prints."""
    audit = outcome.audit
    counts = outcome.counts
    return {
        "events_sent": counts.sent,
        "events_acked": counts.acknowledged,
        "events_rejected": counts.rejected,
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
        "delta_rows": outcome.delta_rows,
        "notable": outcome.notable,
        "events_per_second": round(counts.acknowledged / outcome.replay_seconds) if outcome.replay_seconds else 0,
        **outcome.batch,
        "batch_ok": outcome.batch_ok,
        "audit": audit,
        "audit_ok": outcome.audit_ok,
        "seconds": round(outcome.seconds, 1),
    }


def print_summary(console: Console, source: DemoEvents, outcome: DemoOutcome, folder: Path) -> None:
    """Print the longest sessions and the summary of the demo's outcome."""
    console.print()
    console.print(longest_table(outcome.longest, source.plan.results))
    console.print()
    for rejection in outcome.counts.errors:
        console.print(
            f"  rejected by the ingest: {rejection}", highlight=False, markup=False, style="yellow", soft_wrap=True
        )
    for name, text in _summary_lines(json_summary(outcome), source, outcome, folder).items():
        console.print(f"  [bold]{name:<13}[/bold]{text}", emoji=False, highlight=False, soft_wrap=True)


def _summary_lines(figures: dict[str, Any], source: DemoEvents, outcome: DemoOutcome, folder: Path) -> dict[str, str]:
    """Return the lines of the printed summary by name, as rich's markup."""
    plan = source.plan
    rejected = figures["events_rejected"]
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
        "notable": f"{counted(figures['notable'], 'session')}, kept by the consumer in "
        + escape(str(folder / "notable.jsonl")),
        "crash": f"restored in {figures['restore_ms']:,} ms from {counted(figures['restored_windows'], 'window')}"
        f" in Delta and {counted(figures['restored_changelog_windows'], 'change')} in the changelog",
        "lake": f"{counted(figures['delta_rows'], 'row')}, written by {counted(figures['compactions'], 'compaction')},"
        f" in {escape(str(folder / 'lake'))}",
        "batch": f"{counted(figures['batch_rows'], 'row')} of the same events, windows and late records, "
        + ("all as the aggregator's" if figures["batch_ok"] else "[red]WRONG[/red]: not as the aggregator's"),
        "audit": "[green]passed[/green]: every event is in exactly one group, every session follows the rule"
        if outcome.audit_ok
        else f"[red]FAILED[/red]: see {escape(str(folder / 'logs' / 'final-jobs.log'))}",
        "time": f"{figures['seconds']:.0f} s",
    }
    if not skipped:
        del lines["skipped"]
    if not figures["notable"]:
        lines["notable"] = "none"
    return lines


def _dead_letters_verdict(figures: dict[str, Any], noun: str) -> str:
    """Return what the summary says about whether the dead letters are the expected ones, as rich's markup."""
    sent = counted(figures["dead_letters_expected"], noun)
    if not figures["dead_letters_ok"]:
        return f": [red]WRONG[/red], {sent} {'was' if sent.startswith('1 ') else 'were'} sent"
    return f", one for each {noun} sent" if figures["dead_letters_expected"] else ""


def longest_table(sessions: list[dict[str, Any]], name: str) -> Table | Text:
    """Return the longest sessions as a table: key, start, length, results; a text if there are none."""
    if not sessions:
        return Text(f"Longest {name}: none, since none has closed yet")
    table = Table(title=f"Longest {name}", title_justify="left")
    results = [column for column in sessions[0] if column not in ("key", "start", "end")]
    table.add_column("key")
    table.add_column("from (UTC)", no_wrap=True)
    for column in ("hours", *(c.replace("_", " ") for c in results)):
        table.add_column(column, justify="right")
    for session in sessions:
        hours = (session["end"] - session["start"]) / 3_600_000
        values = [_format_figure(session[column]) for column in results]
        table.add_row(plain(str(session["key"])), day_time(session["start"]), f"{hours:.1f}", *values)
    return table


def _format_figure(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
