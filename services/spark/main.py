"""`penstock compact`, `penstock batch` and `penstock audit`.

Progress goes to standard error, the result to standard output. `compact` prints one line for each compaction, `batch`
one line for each batch.

Exit statuses of `compact`: 0 done (also if there was nothing new), 1 failed, 2 invalid settings, 3 another job or
writer committed to a table first. A compaction that printed its line is committed, whatever the status. If the status
is not 0 nevertheless, a step after the commit or a later compaction failed.
Exit statuses of `batch`: 0 done (also if SIGTERM ended it with `--every`), 1 failed (also if the group has members), 2
invalid settings, 3 fenced by a live instance that started during the batch. With `--every`, a failed step after a
compaction's commit does not end the command; the batch's line lists it (`failed`).
Exit statuses of `audit`: 0 no differences, 1 differences, 2 invalid settings, 3 the audit could not be carried out or
there was no window to compare. The audit cannot be carried out either if processor nodes before the window make Spark's
windows incomparable with the stream's; the message names these nodes.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from threading import Event
from typing import TYPE_CHECKING

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ConfigError, PenstockError
from penstock.shared.common.log import configure
from penstock.shared.common.time_text import duration_ms

if TYPE_CHECKING:
    from penstock.services.spark.audit.report import AuditReport

FENCED = 3
AUDIT_DIFFERENCES = 1
AUDIT_FAILED = 3


def compact_main(arguments: list[str]) -> int:
    """Run `penstock compact`: consecutive compactions until no records are left.

    `compactions_max` limits their number (0: no limit). Returns the exit status.
    """
    try:
        settings = CompactSettings.load(arguments, program="penstock compact")
    except ConfigError as e:
        return _print_to_stderr(str(e), ExitStatus.WRONG_SETTING)
    configure(settings.log, "compact")
    # Imported late: importing pyspark takes a second, which --help and an invalid setting need not wait for.
    from penstock.services.spark.compaction.compact import CompactionJob
    from penstock.services.spark.compaction.delta_writer import CompactionConflict
    from penstock.services.spark.spark_session import spark_session

    committed = ""
    try:
        started = time.monotonic()
        with spark_session(settings.spark, f"penstock compact {settings.application}", *settings.spark_uris) as spark:
            start_seconds = round(time.monotonic() - started, 3)
            for number in itertools.count(1):
                job = CompactionJob(spark, settings, _print_to_stderr)
                committed = ""
                summary = job.run()
                print(json.dumps({**summary._asdict(), "spark_start_seconds": start_seconds}), flush=True)
                committed = "the compaction is committed, but a later step failed: "
                job.maintenance.failed.raise_first()
                if not summary.remaining_records or number == settings.compactions_max:
                    break
                _print_to_stderr(f"{summary.remaining_records} records are left")
    except CompactionConflict as e:
        return _print_to_stderr(str(e), ExitStatus.COMMIT_CONFLICT)
    except ConfigError as e:
        return _print_to_stderr(f"{committed}{e}", ExitStatus.WRONG_SETTING)
    except PenstockError as e:
        return _print_to_stderr(f"{committed}{type(e).__name__}: {e}", ExitStatus.FAILED)
    return ExitStatus.OK


def batch_main(arguments: list[str]) -> int:
    """Run `penstock batch`: one batch, or, if `every` is set, batches at that interval until SIGTERM or a failed batch.

    Returns the exit status.
    """
    try:
        settings = BatchSettings.load(arguments, program="penstock batch")
    except ConfigError as e:
        return _print_to_stderr(str(e), ExitStatus.WRONG_SETTING)
    configure(settings.log, "batch")
    from penstock.services.spark.batch.batch import BatchFenced, BatchJob
    from penstock.services.spark.spark_session import jobs_cancelled_on, spark_session

    stop = Event()
    if settings.every is not None:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        started = time.monotonic()
        with spark_session(settings.spark, f"penstock batch {settings.application}", *settings.spark_uris) as spark:
            start_seconds = round(time.monotonic() - started, 3)
            batch = BatchJob(spark, settings, _print_to_stderr)
            while not stop.is_set():
                began = time.monotonic()
                with jobs_cancelled_on(stop, spark):
                    done = batch.run()
                print(json.dumps({**done._asdict(), "spark_start_seconds": start_seconds}), flush=True)
                if settings.every is None:
                    batch.failed.raise_first()
                    break
                stop.wait(max(0.0, duration_ms(settings.every) / 1000 - (time.monotonic() - began)))
    except BatchFenced as e:
        return _print_to_stderr(str(e), FENCED)
    except ConfigError as e:
        return _print_to_stderr(str(e), ExitStatus.WRONG_SETTING)
    except PenstockError as e:
        if stop.is_set():
            # Commits before the stop are kept, and the next batch continues after them.
            return _print_to_stderr(f"stopped during a batch: {e}")
        return _print_to_stderr(f"{type(e).__name__}: {e}", ExitStatus.FAILED)
    return ExitStatus.OK


def audit_main(arguments: list[str]) -> int:
    """Run `penstock audit`. Returns the exit status."""
    try:
        settings = AuditSettings.load(
            ["--json-line" if argument == "--json" else argument for argument in arguments], program="penstock audit"
        )
    except ConfigError as e:
        return _print_to_stderr(str(e), ExitStatus.WRONG_SETTING)
    configure(settings.log, "audit")
    from penstock.services.spark.audit.audit import run_audit
    from penstock.services.spark.audit.report import print_report
    from penstock.services.spark.spark_session import spark_session

    try:
        with spark_session(settings.spark, f"penstock audit {settings.application}", *settings.spark_uris) as spark:
            report = run_audit(spark, settings, _print_to_stderr)
    except ConfigError as e:
        return _print_to_stderr(str(e), ExitStatus.WRONG_SETTING)
    except PenstockError as e:
        return _print_to_stderr(f"{type(e).__name__}: {e}", AUDIT_FAILED)
    print_report(report, as_json=settings.json_line)
    return audit_exit_status(report)


def audit_exit_status(report: AuditReport) -> int:
    """Return the exit status of the command `penstock audit` after an audit that was carried out."""
    if report.differs:
        return AUDIT_DIFFERENCES
    return AUDIT_FAILED if report.is_empty else ExitStatus.OK


def _print_to_stderr(text: str, status: int = ExitStatus.OK) -> int:
    print(text, file=sys.stderr, flush=True)
    return status
