"""`penstock audit`: compares a store's windows with Spark's own windows over the source topic.

The audit checks two properties. Conservation: for each of its windows, a record is in exactly one of the window, the
late records, the dead letters and the records that were skipped because they have no key. Recomputation: the windows
and the late records are those that the windowing rule yields. The windows come from the lake and the records from
Kafka; the audit runs none of the engine's code. See `session_checks` for sessions, `window_checks` for the other kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.audit_inputs import Read, read_inputs
from penstock.services.spark.audit.differences import Compared
from penstock.services.spark.audit.session_checks import (
    ACCEPTED,
    CHECKS,
    DEAD,
    LATE,
    LEFT_OUT,
    NULL_KEY,
    OF_WINDOWS,
    RECOMPUTED,
    compare,
)
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.audit.window_checks import compare_windows
from penstock.services.spark.errors import translated


class AuditCheck(NamedTuple):
    """One check: the claim that holds without differences, the number of differences, and the first few of them."""

    name: str
    claim: str
    differences: int
    shown: list[dict[str, Any]]


class AuditReport(msgspec.Struct, frozen=True):
    """The result of an audit. Every record that was read is in one of six groups, whose sizes add up to `records`.

    `in_windows` is the sum of the counts of the stream's windows. If the windows have no count or overlap, it is the
    number of records in none of the other groups, and conservation is not checked. `skipped` records have no key,
    `uncovered` records are after the lake's covered offsets, and `left_out` records may share windows with records that
    are gone. `not_compared` lists the parts that could not be compared, with the reason. `assumed` lists assumptions.
    """

    records: int
    in_windows: int
    late: int
    dead_letters: int
    skipped: int
    uncovered: int
    left_out: int
    windows_closed: int
    windows_open: int
    spark_windows: int
    split_sessions: int
    checks: list[AuditCheck]
    not_compared: list[str]
    assumed: list[str]
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


def run_audit(spark: SparkSession, settings: AuditSettings, log: Callable[[str], Any]) -> AuditReport:
    """Read the inputs, compare them, and return the report.

    Raises ConfigError (a store or topic that does not exist), NotAuditable, or an error of Kafka or Spark.
    """
    started = time.monotonic()
    try:
        read = read_inputs(spark, settings, log)
        is_session = read.inputs.store.kind == "session"
        compared = compare(read.inputs) if is_session else compare_windows(read.inputs)
        report = summarize(compared, read, settings)
    except (Py4JError, PySparkException, ConnectionError) as e:
        raise translated(e) from e
    finally:
        spark.catalog.clearCache()
    return msgspec.structs.replace(report, seconds=round(time.monotonic() - started, 3))


def summarize(compared: Compared, read: Read, settings: AuditSettings) -> AuditReport:
    """Return the report: count and list the differences, and add the checks that need no window."""
    inputs = read.inputs
    outcomes = {row.outcome: row["count"] for row in compared.labelled.groupBy("outcome").count().collect()}
    kinds = {row.closed: row["count"] for row in compared.stream.groupBy("closed").count().collect()}
    is_session = inputs.store.kind == "session"
    needs_times = RECOMPUTED if inputs.store.kind in ("session", "sliding") else RECOMPUTED - {"windows"}
    claims = {
        name: claim
        for name, claim in (CHECKS if is_session else OF_WINDOWS).items()
        if inputs.recomputes or name not in needs_times
    }
    # The number of uncovered records in a sample is unknown, because these records are not read.
    uncovered = read.uncovered if settings.sample == 1 else 0
    report = AuditReport(
        records=sum(outcomes.values()) + uncovered,
        in_windows=_count_records_of_windows(compared, read, outcomes.get(ACCEPTED, 0)),
        late=outcomes.get(LATE, 0),
        dead_letters=outcomes.get(DEAD, 0),
        skipped=outcomes.get(NULL_KEY, 0),
        uncovered=uncovered,
        left_out=outcomes.get(LEFT_OUT, 0),
        windows_closed=kinds.get(True, 0),
        windows_open=kinds.get(False, 0),
        spark_windows=compared.computed.count(),
        split_sessions=_count_split_sessions(compared),
        checks=_list_differences(compared.differences, claims, settings.differences_max),
        not_compared=[*read.not_compared, *compared.not_compared],
        assumed=read.assumed,
        seconds=0.0,
        store=inputs.store.name,
        kind=inputs.store.kind,
        sample=settings.sample,
    )
    expected = _check_expected_records(read.records, settings.expect_records)
    conserved = [_check_conservation(report)] if _index_of_count_aggregation(read) is not None else []
    checks = [*conserved, *([] if expected is None else [expected]), *report.checks]
    return msgspec.structs.replace(report, checks=checks)


def _count_records_of_windows(compared: Compared, read: Read, accepted: int) -> int:
    """Return the number of records by the counts of the stream's windows; `accepted` if no count can be used."""
    if (count := _index_of_count_aggregation(read)) is None:
        return accepted
    return int(compared.stream.agg(F.coalesce(F.sum(f"m{count}"), F.lit(0)).alias("n")).collect()[0].n)


def _index_of_count_aggregation(read: Read) -> int | None:
    """Return the index of the aggregation that counts records. Return None without one, or if windows overlap."""
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


def _count_split_sessions(compared: Compared) -> int:
    """Return the number of computed sessions that are more than one session of the stream."""
    if compared.contained is None:
        return 0
    held = compared.contained.filter(F.col("computed_ms").isNotNull())
    return int(held.groupBy("partition", "key", "computed_ms").count().filter("count > 1").count())


def _check_expected_records(records: int, expected: int | None) -> AuditCheck | None:
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
