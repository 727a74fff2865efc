"""Prints an audit: as tables for people, and as one line of JSON for machines."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.services.spark.audit.audit import AuditReport
from penstock.services.terminal_tables import console_for, plain

NOTHING = "nothing was compared"


def as_object(report: AuditReport) -> dict[str, Any]:
    """Return the report as a JSON object. `differences` has their number by check."""
    names = ["records", "in_windows", "late", "dead_letters", "skipped", "uncovered", "left_out"]
    names += ["windows_closed", "windows_open", "spark_windows", "split_sessions"]
    numbers = {name: getattr(report, name) for name in names}
    differences = {check.name: check.differences for check in report.checks}
    more: dict[str, Any] = {"store": report.store, "kind": report.kind, "sample": report.sample}
    more |= {"differences": differences, "not_compared": report.not_compared, "assumed": report.assumed}
    more |= {"seconds": report.seconds}
    return {"audit_ok": report.ok, "nothing_compared": report.is_empty, **numbers, **more}


def print_report(report: AuditReport, *, as_json: bool, console: Console | None = None) -> None:
    """Print the checks and the first differences of each. With `as_json`, the last line is the JSON object."""
    console = console or console_for()
    console.print(
        f"{report.records} records {'=' if report.unaccounted == 0 else '≠'} {report.in_windows} in windows "
        f"+ {report.late} late + {report.dead_letters} dead letters + {report.skipped} skipped (without a key) "
        f"+ {report.uncovered} not covered yet" + f" + {report.left_out} left out" * bool(report.left_out)
    )
    windows = "sessions"
    split = f", of which {report.split_sessions} were split"
    if report.kind != "session":
        windows = f"{report.kind} windows"
        split = ""
    console.print(
        f"{report.windows_closed} closed and {report.windows_open} open {windows}; "
        f"Spark computes {report.spark_windows}{split}"
    )
    if report.sample < 1:
        console.print(f"a sample: {report.sample:.4%} of the keys")
    console.print(_checks_table(report))
    if report.differs:
        console.print(_differences_table(report))
    for reason in report.not_compared:
        console.print(plain(f"not compared: {reason}"))
    for reason in report.assumed:
        console.print(plain(f"assumed: {reason}"))
    if report.is_empty:
        console.print(f"{NOTHING}: neither the stream nor Spark has a window")
    if as_json:
        print(json.dumps(as_object(report)), flush=True)


def _checks_table(report: AuditReport) -> Table:
    outcome = "DIFFERENCES" if report.differs else NOTHING if report.is_empty else "no differences"
    table = Table(title=f"Audit of {escape(report.store)} in {report.seconds:.1f} s: {outcome}")
    table.add_column("check")
    table.add_column("what must hold")
    table.add_column("differences", justify="right")
    for check in report.checks:
        table.add_row(check.name, check.claim, str(check.differences), style="red" if check.differences else None)
    return table


def _differences_table(report: AuditReport) -> Table:
    table = Table(title="Differences (the first of each check)")
    table.add_column("check")
    table.add_column("partition", justify="right")
    table.add_column("key")
    table.add_column("event time", justify="right")
    table.add_column("what differs", overflow="fold")
    for check in report.checks:
        for row in check.shown:
            cells = ("" if row[name] is None else str(row[name]) for name in ("partition", "key", "at_ms"))
            table.add_row(check.name, *map(plain, cells), plain(row["detail"]))
    return table
