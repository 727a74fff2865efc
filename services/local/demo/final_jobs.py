"""The demo's last Spark jobs, in one session: compact, run the same events as a batch, compare the two, audit.

`run_in_child` runs this module as a child process, which calls `main`. Each job prints its result as a JSON object. The
audit is the last job.

A job over few events spends most of its time on starting Spark's JVM, so all jobs share one session. They share nothing
else: each reads everything from Kafka and the lake again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.main import AUDIT_FAILED, audit_exit_status
from penstock.shared.common.child_process import ChildProcess
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.setting_names import ENV_PREFIX, without_settings
from penstock.shared.common.settings import KafkaSettings

if TYPE_CHECKING:
    from penstock.services.spark.audit.report import AuditReport

STOP_TIMEOUT_MS = 10_000

# A compaction is attempted again if a job that outlived its aggregator commits first.
ATTEMPTS_MAX = 3
# This suffix keeps the batch's application and topics apart from the aggregator's.
SUFFIX = "-of-batch"


class FinalJobs(msgspec.Struct, frozen=True):
    """The arguments of the demo's last Spark jobs.

    `options` are the topology's options. The audit must find `records` records in the source topic.
    """

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
    """How many windows and late records the batch has, and how many only the batch or only the aggregator has."""

    batch_rows: int
    batch_differences: int


def main(arguments: list[str]) -> int:
    """Run the demo's last Spark jobs and print each job's result as a line of JSON.

    Returns the audit's exit status, or AUDIT_FAILED if a job failed.
    """
    jobs = msgspec.json.decode(arguments[0], type=FinalJobs)
    try:
        report, comparison = run(jobs)
    except PenstockError as e:
        _log_to_stderr(f"{type(e).__name__}: {e}")
        return AUDIT_FAILED
    from penstock.services.spark.audit.report import print_report

    print_report(report, as_json=True)
    # After the report, whose tables may be long: `run_in_child` reads the last lines.
    _print_job_report(comparison)
    return audit_exit_status(report)


def run(jobs: FinalJobs) -> tuple[AuditReport, Comparison]:
    """Run the demo's last Spark jobs in order. Returns the results of the last two. Raises the jobs' errors."""
    common = ["--lake", jobs.lake, "--spark.conf", msgspec.json.encode(jobs.spark_conf).decode()]
    own = ["--application", jobs.application, *common]
    options = msgspec.json.encode({**jobs.options, "suffix": SUFFIX}).decode()
    topology = ["--topology", jobs.topology, "--topology-options", options]
    compact = CompactSettings.load([*own, "--delete-covered"], program="penstock compact")
    batch = BatchSettings.load(["--application", jobs.batch, *common, *topology], program="penstock batch")
    audit = AuditSettings.load([*own, "--expect-records", str(jobs.records)], program="penstock audit")
    from penstock.services.spark.audit.audit import run_audit
    from penstock.services.spark.batch.batch import BatchJob
    from penstock.services.spark.spark_session import spark_session

    with spark_session(audit.spark, "penstock demo", *compact.spark_uris, *batch.spark_uris) as spark:
        _run_compaction(spark, compact)
        _print_job_report(BatchJob(spark, batch, _log_to_stderr).run())
        comparison = compare_with_batch(spark, jobs.store, live=compact.tables, batch=batch.tables)
        return run_audit(spark, audit, _log_to_stderr), comparison


def _run_compaction(spark: Any, settings: CompactSettings) -> None:
    from penstock.services.spark.compaction.compact import CompactionJob
    from penstock.services.spark.compaction.delta_writer import CompactionConflict

    for attempt in range(ATTEMPTS_MAX):
        try:
            job = CompactionJob(spark, settings, _log_to_stderr)
            _print_job_report(job.run())
            job.maintenance.failed.raise_first()
            return
        except CompactionConflict as e:
            if attempt == ATTEMPTS_MAX - 1:
                raise
            _log_to_stderr(str(e))


def compare_with_batch(spark: Any, store: str, *, live: str, batch: str) -> Comparison:
    """Compare the outputs of the demo's aggregator and of its batch. `live` and `batch` are their folders in the lake.

    The outputs are windows with their bounds, results and times of closing, and late records.
    """
    live_rows, batch_rows = (windows_and_late_records(spark, folder, store) for folder in (live, batch))
    # Each folder is read once: a row of the batch counts 1, and an equal one of the live application -1.
    rows = batch_rows.selectExpr("*", "1 AS of_batch", "1 AS sign").unionAll(live_rows.selectExpr("*", "0", "-1"))
    of_equal_rows = rows.groupBy(batch_rows.columns).agg({"of_batch": "sum", "sign": "sum"})
    counts = of_equal_rows.selectExpr("`sum(of_batch)` AS of_batch", "abs(`sum(sign)`) AS differences")
    found = counts.agg({"of_batch": "sum", "differences": "sum"}).first()
    return Comparison(found["sum(of_batch)"] or 0, found["sum(differences)"] or 0)


def windows_and_late_records(spark: Any, folder: str, store: str) -> Any:
    """Return the closed and open windows and the late records of the demo's aggregator or batch, for the comparison.

    The state and the changelog coordinates of windows and of late records are left out.
    """
    from penstock.services.spark.lake_tables import LakeTables

    tables = LakeTables(spark, folder)
    schema = tables.windowed_store(store)
    columns = ("state", "partition", "changelog_offset", "topic_id")
    parts = [rows.drop(*columns) for rows in (tables.closed(schema), tables.live(schema), tables.late(schema))]
    return parts[0].unionByName(parts[1], True).unionByName(parts[2], True)


def _print_job_report(found: Any) -> None:
    print(msgspec.json.encode(found._asdict()).decode(), flush=True)


def _log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run_in_child(
    arguments: Sequence[str], kafka: KafkaSettings, log_file: Path
) -> tuple[int, dict[str, Any], dict[str, Any], ChildProcess]:
    """Run the jobs with these arguments of `main` in a child process.

    Returns its exit status, the results of the audit and of the comparison ({} if it printed none), and the ended
    child. The child reads no settings file, and its only setting is the address of Kafka. A cancellation ends the
    child.
    """
    environment = without_settings(os.environ)
    environment[f"{ENV_PREFIX}KAFKA__BOOTSTRAP_SERVERS"] = kafka.bootstrap_servers
    command = [sys.executable, "-m", "penstock.services.local.demo.final_jobs", *arguments]
    child = await ChildProcess.start(command, log_file=log_file, name="the demo's last Spark jobs", env=environment)
    try:
        status = await child.wait()
    finally:
        if child.returncode is None:
            await child.terminate(STOP_TIMEOUT_MS)
    printed = child.log_tail()
    return status, last_object(printed, "audit_ok"), last_object(printed, "batch_differences"), child


def last_object(lines: Sequence[str], key: str) -> dict[str, Any]:
    """Return the last line that is a JSON object with the member `key`, decoded; {} if there is none.

    Log lines may be JSON objects too.

    >>> last_object(["reading", '{"rows": 3}', '{"event": "bye"}'], "rows")
    {'rows': 3}
    """
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = decode_json(line)
            except InvalidJson:
                continue
            if isinstance(found, dict) and key in found:
                return found
    return {}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
