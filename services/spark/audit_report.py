"""An audit for people, as a table, and for machines, as one line of JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.services.spark.audit import Report
from penstock.shared.common.tables import console_for, plain

NOTHING = "nothing was compared"


def as_object(report: Report) -> dict[str, Any]:
    """The report as JSON has it; `differences` counts them by check."""
    names = ["records", "in_sessions", "late", "dead_letters", "skipped", "unprocessed"]
    names += ["sessions_closed", "sessions_open", "batch_sessions", "split_sessions"]
    numbers = {name: getattr(report, name) for name in names}
    differences = {check.name: check.differences for check in report.checks}
    more: dict[str, Any] = {"kind": report.kind, "sample": report.sample}
    if report.is_part:
        more |= {"start_ms": report.start_ms, "end_ms": report.end_ms, "left_out": report.left_out}
        more |= {"late_left_out": report.late_left_out, "edge_sessions": report.edges.stream}
        more |= {"edge_batch_sessions": report.edges.batch}
    more |= {"differences": differences, "not_compared": report.not_compared, "seconds": report.seconds}
    return {"audit_ok": report.ok, "nothing_compared": report.is_empty, **numbers, **more}


def print_report(report: Report, *, as_json: bool, console: Console | None = None) -> None:
    """Print the checks, the first differences of each, and the JSON object as the last line where it is asked for."""
    console = console or console_for()
    console.print(
        f"{report.records} records {'=' if report.unaccounted == 0 else '≠'} {report.in_sessions} in sessions "
        f"+ {report.late} late + {report.dead_letters} dead letters + {report.skipped} skipped (without a key) "
        f"+ {report.unprocessed} not processed" + f" + {report.left_out} left out" * report.is_part
    )
    what, split = ("sessions", f", of which {report.split_sessions} were split")
    if report.kind != "session":
        what, split = f"{report.kind} windows", ""
    console.print(
        f"{report.sessions_closed} closed and {report.sessions_open} open {what}; "
        f"Spark makes {report.batch_sessions}{split}"
    )
    if report.is_part:
        console.print(_part(report, what))
    if report.sample < 1:
        console.print(f"a sample: {report.sample:.4%} of the keys")
    console.print(_checks(report))
    if report.differs:
        console.print(_differences(report))
    for reason in report.not_compared:
        console.print(plain(f"not compared: {reason}"))
    if report.is_empty:
        console.print(f"{NOTHING}: neither the stream nor Spark has a window among what was asked for")
    if as_json:
        print(json.dumps(as_object(report)), flush=True)


def _part(report: Report, what: str) -> str:
    begin = "the beginning" if report.start_ms is None else f"{report.start_ms} ms"
    end = "the end" if report.end_ms is None else f"{report.end_ms} ms"
    return (
        f"a part, from {begin} to {end}. Left out at its edges: {report.edges.stream} {what} of the stream, "
        f"{report.edges.batch} of Spark's, and {report.late_left_out} late records near them; and what lies beyond"
    )


def _checks(report: Report) -> Table:
    outcome = "DIFFERENCES" if report.differs else NOTHING if report.is_empty else "no differences"
    table = Table(title=f"Audit in {report.seconds:.1f} s: {outcome}")
    table.add_column("check")
    table.add_column("what must hold")
    table.add_column("differences", justify="right")
    for check in report.checks:
        table.add_row(check.name, check.claim, str(check.differences), style="red" if check.differences else None)
    return table


def _differences(report: Report) -> Table:
    table = Table(title="Differences (the first of each check)")
    table.add_column("check")
    table.add_column("partition", justify="right")
    table.add_column("key")
    table.add_column("event time", justify="right")
    table.add_column("what differs", overflow="fold")
    for check in report.checks:
        for row in check.shown:
            places = ("" if row[name] is None else str(row[name]) for name in ("partition", "key", "at_ms"))
            table.add_row(check.name, *map(plain, places), plain(row["detail"]))
    return table
