"""The demo's last Spark jobs, in one session: compact, run the same events as a batch, compare the two, audit.

Most of a job over few events is the start of Spark's JVM, which later jobs in the same session save. The jobs share
nothing else: each reads everything from Kafka and the lake again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.main import AUDIT_FAILED, status_of
from penstock.shared.common.errors import PenstockError

if TYPE_CHECKING:
    from penstock.services.spark.audit.audit import AuditReport

ATTEMPTS_MAX = 3  # of a compaction: a job that outlived its aggregator may commit before the first one
SUFFIX = "-of-batch"  # of the batch's application and topics, which keeps them apart from the aggregator's


class Jobs(msgspec.Struct, frozen=True):
    """The jobs' arguments. `records` is the number that the audit must find; `options` are the topology's."""

    application: str
    lake: str
    store: str
    topology: str
    options: Mapping[str, str]
    records: int
    spark_conf: Mapping[str, str]

    @property
    def batch(self) -> str:
        """The batch's application id."""
        return self.application + SUFFIX

    def arguments(self) -> list[str]:
        """Return the arguments of `main`."""
        return [msgspec.json.encode(self).decode()]


class Comparison(NamedTuple):
    """The number of the batch's windows and late records, and of those that only one of the two lakes has."""

    batch_rows: int
    batch_differences: int


def main(arguments: list[str]) -> int:
    """Return the audit's exit status, or AUDIT_FAILED if a job failed. Prints each job's result as a line of JSON."""
    jobs = msgspec.json.decode(arguments[0], type=Jobs)
    try:
        report = run(jobs)
    except PenstockError as e:
        _log_to_stderr(f"{type(e).__name__}: {e}")
        return AUDIT_FAILED
    from penstock.services.spark.audit.report import print_report

    print_report(report, as_json=True)
    return status_of(report)


def run(jobs: Jobs) -> AuditReport:
    """Run all jobs in order. Returns the audit's report. Raises the jobs' errors."""
    common = ["--lake", jobs.lake, "--spark.conf", msgspec.json.encode(jobs.spark_conf).decode()]
    own = ["--application", jobs.application, *common]
    options = msgspec.json.encode({**jobs.options, "suffix": SUFFIX}).decode()
    topology = ["--topology", jobs.topology, "--topology-options", options]
    compact = CompactSettings.load([*own, "--delete-covered"], program="penstock compact")
    batch = BatchSettings.load(["--application", jobs.batch, *common, *topology], program="penstock batch")
    audit = AuditSettings.load([*own, "--expect-records", str(jobs.records)], program="penstock audit")
    from penstock.services.spark.audit.audit import run_audit
    from penstock.services.spark.batch.batch import Batch
    from penstock.services.spark.spark_session import spark_session

    with spark_session(audit.spark, "penstock demo", *compact.spark_uris, *batch.spark_uris) as spark:
        _run_compaction(spark, compact)
        _print_job_report(Batch(spark, batch, _log_to_stderr).run())
        _print_job_report(compared(spark, jobs))
        return run_audit(spark, audit, _log_to_stderr)


def _run_compaction(spark: Any, settings: CompactSettings) -> None:
    from penstock.services.spark.compaction.compact import Compaction
    from penstock.services.spark.compaction.delta_writer import CompactionConflict

    for attempt in range(ATTEMPTS_MAX):
        try:
            job = Compaction(spark, settings, _log_to_stderr)
            _print_job_report(job.run())
            job.maintenance.require_done()
            return
        except CompactionConflict as e:
            if attempt == ATTEMPTS_MAX - 1:
                raise
            _log_to_stderr(str(e))


def compared(spark: Any, jobs: Jobs) -> Comparison:
    """Compare the output of the aggregator and the batch: bounds, results, times of closing, late records."""
    live, batch = (made(spark, jobs.lake, application, jobs.store) for application in (jobs.application, jobs.batch))
    differences = batch.exceptAll(live).unionAll(live.exceptAll(batch))
    return Comparison(batch.count(), differences.count())


def made(spark: Any, lake: str, application: str, store: str) -> Any:
    """Return an application's closed and open windows and its late records, without their changelog coordinates."""
    from penstock.services.spark.reading import closed, late, live

    columns = ("state", "partition", "changelog_offset", "topic_id")
    parts = [one(spark, lake, application, store).drop(*columns) for one in (closed, live, late)]
    return parts[0].unionByName(parts[1], True).unionByName(parts[2], True)


def _print_job_report(found: Any) -> None:
    print(msgspec.json.encode(found._asdict()).decode(), flush=True)


def _log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
