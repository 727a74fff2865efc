"""`penstock audit`: the stream's windows against Spark's own over the source topic.

What the stream says is read from where it says it: closed windows from the lake and from the changelog past the
covered offset, live ones from the snapshot and the same tail. What should be is computed from the source topic by
Spark. Nothing of the aggregator's window code takes part. See audit_checks for what is compared of sessions, and
audit_windows for tumbling, hopping and sliding windows.
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

from penstock.services.spark.audit_checks import (
    CHECKS,
    DEAD,
    NULL_KEY,
    OF_WINDOWS,
    Compared,
    compare,
    within,
)
from penstock.services.spark.audit_inputs import Read, read_inputs
from penstock.services.spark.audit_part import ACCEPTED, LATE, LATE_LEFT_OUT, LEFT_OUT, Edges
from penstock.services.spark.audit_windows import compare_windows
from penstock.services.spark.failures import translated
from penstock.services.spark.settings import AuditSettings


class CheckResult(NamedTuple):
    """One check: what holds if there are no differences, how many there are, and the first few."""

    name: str
    claim: str
    differences: int
    shown: list[dict[str, Any]]


class Report(msgspec.Struct, frozen=True):
    """What an audit found. Every record that was read is in one of six places, so their numbers add up to `records`.

    `in_sessions` is counted by the stream's sessions themselves, or, where they count nothing, is the number of records
    that are in none of the other places. `skipped` had no key, and `unprocessed` are not covered by a commit yet.
    Of a part of the source (`start_ms`, `end_ms`) `left_out` are records that lie beyond it or in sessions at its
    `edges`, and `late_left_out` those of the late ones that were not judged. `not_compared` names what could not be
    compared, and why.
    """

    records: int
    in_sessions: int
    late: int
    dead_letters: int
    skipped: int
    unprocessed: int
    sessions_closed: int
    sessions_open: int
    batch_sessions: int
    split_sessions: int
    checks: list[CheckResult]
    not_compared: list[str]
    seconds: float
    kind: str = "session"
    sample: float = 1.0
    start_ms: int | None = None
    end_ms: int | None = None
    left_out: int = 0
    late_left_out: int = 0
    edges: Edges = Edges()

    @property
    def unaccounted(self) -> int:
        """Records that are in no place; below zero where some are in two."""
        others = self.late + self.dead_letters + self.skipped + self.unprocessed + self.left_out
        return self.records - self.in_sessions - others

    @property
    def is_part(self) -> bool:
        return self.start_ms is not None or self.end_ms is not None

    @property
    def differs(self) -> bool:
        return any(check.differences for check in self.checks)

    @property
    def is_empty(self) -> bool:
        """Whether there was no window to compare, on either side, and nothing else differed."""
        return not self.differs and not (self.sessions_closed or self.sessions_open or self.batch_sessions)

    @property
    def ok(self) -> bool:
        """Whether windows were compared, and nothing differed."""
        return not self.differs and not self.is_empty


def run_audit(spark: SparkSession, settings: AuditSettings, say: Callable[[str], Any]) -> Report:
    """Read everything, compare it, and say what differs.

    Raises ConfigError (a store or topic that is not there), NotAuditable, CorruptRecord, ChangelogHole, or an error of
    Kafka's or Spark's.
    """
    started = time.monotonic()
    try:
        read = read_inputs(spark, settings, say)
        is_session = read.inputs.store.kind == "session"
        compared = compare(read.inputs) if is_session else compare_windows(read.inputs)
        report = summarize(compared, read, settings)
    except (Py4JError, PySparkException, ConnectionError) as e:
        raise translated(e) from e
    finally:
        spark.catalog.clearCache()
    return msgspec.structs.replace(report, seconds=round(time.monotonic() - started, 3))


def summarize(compared: Compared, read: Read, settings: AuditSettings) -> Report:
    """Count and list the differences; the checks that need no session are made here."""
    fates = {row.fate: row["count"] for row in compared.labelled.groupBy("fate").count().collect()}
    kinds = {row.closed: row["count"] for row in compared.stream.groupBy("closed").count().collect()}
    batch = compared.batch.count()
    is_session = read.inputs.store.kind == "session"
    split = _split(compared) if is_session else 0
    checks = [_expected(read.records, settings.expect_records), _processed(read, settings.allow_unprocessed)]
    checks += _listed(compared.differences, CHECKS if is_session else OF_WINDOWS, settings.differences_max)
    # Of a sample nobody knows how many of the records that were not read would be in it.
    unprocessed = read.records - sum(fates.values()) if settings.sample == 1 else 0
    part = read.inputs.part
    report = Report(
        records=sum(fates.values()) + unprocessed,
        in_sessions=_counted(compared, read, fates.get(ACCEPTED, 0)),
        late=fates.get(LATE, 0) + fates.get(LATE_LEFT_OUT, 0),
        dead_letters=fates.get(DEAD, 0),
        skipped=fates.get(NULL_KEY, 0),
        unprocessed=unprocessed,
        sessions_closed=kinds.get(True, 0),
        sessions_open=kinds.get(False, 0),
        batch_sessions=batch,
        split_sessions=split,
        checks=[check for check in checks if check is not None],
        not_compared=[*read.not_compared, *compared.not_compared],
        kind=read.inputs.store.kind,
        sample=settings.sample,
        seconds=0.0,
        start_ms=None if part is None else part.start_ms,
        end_ms=None if part is None else part.end_ms,
        left_out=fates.get(LEFT_OUT, 0),
        late_left_out=fates.get(LATE_LEFT_OUT, 0),
        edges=compared.edges,
    )
    return msgspec.structs.replace(report, checks=[_conserved(report), *report.checks])


def _counted(compared: Compared, read: Read, accepted: int) -> int:
    """How many records the stream's sessions say they hold; `accepted` where they do not count.

    So do windows that overlap: a record is in several of them.
    """
    if read.inputs.store.kind not in ("session", "tumbling"):
        return accepted
    counts = [i for i, a in enumerate(read.inputs.store.aggregations) if a.function == "count"]
    if not counts:
        return accepted
    return int(compared.stream.agg(F.coalesce(F.sum(f"m{counts[0]}"), F.lit(0)).alias("n")).collect()[0].n)


def _conserved(report: Report) -> CheckResult:
    claim = f"records = in sessions + late + dead letters + skipped + not processed{' + left out' * report.is_part}"
    n = report.unaccounted
    shown = [_plain(f"{n} records are in no place" if n > 0 else f"{-n} records too many")] if n else []
    return CheckResult("conserved", claim, abs(n), shown)


def _listed(differences: DataFrame, checks: Mapping[str, str], shown_max: int) -> list[CheckResult]:
    order = SparkWindow.partitionBy("check").orderBy("partition", "at_ms", "key", "detail")
    total = F.count(F.lit(1)).over(SparkWindow.partitionBy("check"))
    ranked = differences.withColumn("nth", F.row_number().over(order)).withColumn("total", total)
    rows = ranked.filter(F.col("nth") <= max(1, shown_max)).orderBy("check", "nth").collect()
    results = []
    for name, claim in checks.items():
        own = [row for row in rows if row.check == name]
        shown = [{k: row[k] for k in ("partition", "key", "at_ms", "detail")} for row in own[:shown_max]]
        results.append(CheckResult(name, claim, own[0].total if own else 0, shown))
    return results


def _split(compared: Compared) -> int:
    """Batch sessions that are more than one session of the stream."""
    held = within(compared.stream, compared.batch).filter(F.col("batch_ms").isNotNull())
    return int(held.groupBy("partition", "key", "batch_ms").count().filter("count > 1").count())


def _expected(records: int, expected: int | None) -> CheckResult | None:
    if expected is None:
        return None
    shown = [] if records == expected else [_plain(f"the source holds {records} records, {expected} were expected")]
    return CheckResult("records", f"the source topic holds {expected} records", len(shown), shown)


def _processed(read: Read, allowed: bool) -> CheckResult | None:
    if allowed:
        return None
    shown = [
        {**_plain(f"{left} records from offset {offset} on are not covered by a commit"), "partition": partition}
        for partition, (offset, left) in read.unprocessed.items()
    ]
    return CheckResult("processed", "every record of the source was processed and committed", len(shown), shown)


def _plain(detail: str) -> dict[str, Any]:
    return {"partition": None, "key": None, "at_ms": None, "detail": detail}
