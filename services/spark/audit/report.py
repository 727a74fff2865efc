"""The report of an audit: it counts the differences, and is printed as tables and, on request, a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.services.spark.audit.audit_inputs import Read
from penstock.services.spark.audit.common_checks import (
    ACCEPTED,
    DEAD,
    LATE,
    LEFT_OUT,
    RECOMPUTED,
    SESSION_CHECKS,
    SKIPPED,
    WINDOW_CHECKS,
)
from penstock.services.spark.audit.differences import Compared, union_of
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.terminal_tables import console_for, plain

NOTHING = "nothing was compared"


class AuditCheck(NamedTuple):
    """One check in a report: the claim that holds without differences, their number, and the first few of them."""

    name: str
    claim: str
    differences: int
    shown: list[dict[str, Any]]


class AuditReport(msgspec.Struct, frozen=True):
    """The result of an audit. The six groups from `in_windows` to `left_out` add up to `records` if no record was lost
    or counted twice.

    If windows overlap or no aggregation counts records, `in_windows` is the number of records in no other group, and
    the check `conserved` is left out.
    """

    records: int
    in_windows: int
    """The sum of the counts of the stream's windows."""
    late: int
    dead_letters: int
    skipped: int
    """Records without a key, and for sliding windows those without a value."""
    uncovered: int
    """Records after the lake's covered offsets."""
    left_out: int
    """Records that may share windows with deleted records."""
    windows_closed: int
    windows_open: int
    spark_windows: int
    split_sessions: int
    checks: list[AuditCheck]
    not_compared: list[str]
    """The parts that could not be compared, with the reason."""
    assumed: list[str]
    """Assumptions that cannot be verified."""
    seconds: float
    store: str
    kind: str = "session"
    sample: float = 1.0

    @property
    def unaccounted(self) -> int:
        """The number of records in no group; below zero if records are in two groups."""
        others = self.late + self.dead_letters + self.skipped + self.uncovered + self.left_out
        return self.records - self.in_windows - others

    @property
    def differs(self) -> bool:
        return any(check.differences for check in self.checks)

    @property
    def is_empty(self) -> bool:
        """True if neither side had a window to compare and nothing else differed."""
        return not self.differs and not (self.windows_closed or self.windows_open or self.spark_windows)

    @property
    def ok(self) -> bool:
        """True if windows were compared and nothing differed."""
        return not self.differs and not self.is_empty


def summarize(compared: Compared, read: Read, settings: AuditSettings) -> AuditReport:
    """Return the report of an audit: count and list the differences, and add the checks of numbers of records."""
    inputs = read.inputs
    count = _index_of_count_aggregation(read)
    counts = _count_rows(compared, count)
    outcomes = {name: rows for (of, name), (rows, _) in counts.items() if of == "outcome"}
    is_session = inputs.store.kind == "session"
    needs_times = RECOMPUTED if inputs.store.kind in ("session", "sliding") else RECOMPUTED - {"windows"}
    claims = {
        name: claim
        for name, claim in (SESSION_CHECKS if is_session else WINDOW_CHECKS).items()
        if inputs.recomputes or name not in needs_times
    }
    # The number of uncovered records in a sample is unknown, because these records are not read.
    uncovered = read.uncovered if settings.sample == 1 else 0
    report = AuditReport(
        records=sum(outcomes.values()) + uncovered,
        in_windows=outcomes.get(ACCEPTED, 0) if count is None else sum(held for _, held in counts.values()),
        late=outcomes.get(LATE, 0),
        dead_letters=outcomes.get(DEAD, 0),
        skipped=outcomes.get(SKIPPED, 0),
        uncovered=uncovered,
        left_out=outcomes.get(LEFT_OUT, 0),
        windows_closed=counts.get(("closed", "true"), (0, 0))[0],
        windows_open=counts.get(("closed", "false"), (0, 0))[0],
        spark_windows=counts[("computed", None)][0],
        split_sessions=counts.get(("split", None), (0, 0))[0],
        checks=_list_differences(compared.differences, claims, settings.differences_max),
        not_compared=[*read.not_compared, *compared.not_compared],
        assumed=read.assumed,
        seconds=0.0,
        store=inputs.store.name,
        kind=inputs.store.kind,
        sample=settings.sample,
    )
    expected = _check_expected_records(read.records, settings.expect_records)
    conserved = [] if count is None else [_check_conservation(report)]
    checks = [*conserved, *([] if expected is None else [expected]), *report.checks]
    return msgspec.structs.replace(report, checks=checks)


def _index_of_count_aggregation(read: Read) -> int | None:
    """Return the index of the aggregation whose counts the report sums up.

    Return None if none counts records, or if windows overlap.
    """
    store = read.inputs.store
    if store.kind not in ("session", "tumbling"):
        return None
    return next((i for i, a in enumerate(store.aggregations) if a.function == "count"), None)


def _check_conservation(report: AuditReport) -> AuditCheck:
    claim = "records = in windows + late + dead letters + skipped + not covered yet"
    claim += " + left out" if report.left_out else ""
    n = report.unaccounted
    shown = (
        [_difference_without_window(f"{n} records are in no group" if n > 0 else f"{-n} records are counted twice")]
        if n
        else []
    )
    return AuditCheck("conserved", claim, abs(n), shown)


def _list_differences(differences: DataFrame, checks: Mapping[str, str], shown_max: int) -> list[AuditCheck]:
    order = SparkWindow.partitionBy("check").orderBy("partition", "at_ms", "key", "detail")
    total = F.count(F.lit(1)).over(SparkWindow.partitionBy("check"))
    ranked = differences.withColumn("nth", F.row_number().over(order)).withColumn("total", total)
    rows = ranked.filter(F.col("nth") <= max(1, shown_max)).orderBy("check", "nth").collect()
    results = []
    for name, claim in checks.items():
        own = [row for row in rows if row.check == name]
        shown = [{k: row[k] for k in ("partition", "key", "at_ms", "detail")} for row in own[:shown_max]]
        results.append(AuditCheck(name, claim, own[0].total if own else 0, shown))
    return results


def _count_rows(compared: Compared, count: int | None) -> dict[tuple[str, str | None], tuple[int, int]]:
    """Return numbers of rows, each with the number of records in the windows of these rows.

    The keys are ("outcome", outcome) for the labelled records, ("closed", "true") and ("closed", "false") for the
    stream's windows, ("computed", None) for the computed windows, and ("split", None) for the computed sessions that
    are several sessions of the stream. Only the stream's windows have a number of records: the sum of the counts of the
    aggregation with the index `count`.
    """
    rows = F.count(F.lit(1)).alias("rows")
    none = F.lit(0).cast("bigint").alias("held")
    held = none if count is None else F.coalesce(F.sum(f"m{count}"), F.lit(0)).alias("held")
    parts = {
        "outcome": compared.labelled.groupBy(F.col("outcome").alias("name")).agg(rows, none),
        "closed": compared.stream.groupBy(F.col("closed").cast("string").alias("name")).agg(rows, held),
        "computed": compared.computed.agg(F.lit(None).cast("string").alias("name"), rows, none),
    }
    if compared.contained is not None:
        sessions = compared.contained.filter(F.col("computed_ms").isNotNull())
        split = sessions.groupBy("partition", "key", "computed_ms").agg(rows).filter("rows > 1")
        parts["split"] = split.agg(F.lit(None).cast("string").alias("name"), rows, none)
    # One query costs less than four.
    found = union_of([part.select(F.lit(of).alias("of"), "*") for of, part in parts.items()]).collect()
    return {(row.of, row.name): (row.rows, row.held) for row in found}


def _check_expected_records(records: int | None, expected: int | None) -> AuditCheck | None:
    if expected is None:
        return None
    shown = (
        []
        if records == expected
        else [_difference_without_window(f"the source holds {records} records, {expected} were expected")]
    )
    return AuditCheck("records", f"the source topic holds {expected} records", len(shown), shown)


def _difference_without_window(detail: str) -> dict[str, Any]:
    return {"partition": None, "key": None, "at_ms": None, "detail": detail}


# --- printing ---


def report_as_json(report: AuditReport) -> dict[str, Any]:
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
    """Print the report as tables: the checks, and the first differences of each. `as_json` adds a last line of JSON."""
    console = console or console_for()
    console.print(
        f"{report.records} records {'=' if report.unaccounted == 0 else '≠'} {report.in_windows} in windows "
        f"+ {report.late} late + {report.dead_letters} dead letters + {report.skipped} skipped "
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
        print(json.dumps(report_as_json(report)), flush=True)


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
    table.add_column("key", overflow="fold")
    table.add_column("event time", justify="right")
    table.add_column("what differs", overflow="fold")
    for check in report.checks:
        for row in check.shown:
            cells = ("" if row[name] is None else str(row[name]) for name in ("partition", "key", "at_ms"))
            table.add_row(check.name, *map(plain, cells), plain(row["detail"]))
    return table
