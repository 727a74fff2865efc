"""Compaction: a wall-clock punctuator requests it, and a child process runs it.

The asyncio process never holds a JVM. A job is `penstock compact …`, started here, and its last line of output is its
result. The rules:

1. One job runs at a time. A request during a job is dropped; the punctuator requests again at its next time. If a job
   has left records, the next job starts at once.
2. A failed job is retried after a backoff, which a request ends early. A failure does not stop the aggregator.
3. If a job began to read and committed nothing, for example because of its timeout or of too little memory, the next
   job reads at most half as many records. So a backlog of any size is compacted in the end. Each job that prints its
   result doubles the number again, up to the setting.
4. If partition 0 moves to another instance, a running job is stopped. The next owner starts its own.

Metrics, `/health` and a line in the log at start-up report that compaction is off. Metrics and `/health` also report
that it fails or falls behind. The check `compaction` of `/health` stays ok, since a restart would fix nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from penstock.api.http.health import CheckResult
from penstock.api.streams.task_views import CompactionState
from penstock.services.aggregator.compaction_lag import CompactionLagWatch
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.exit_status import ExitStatus
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.child_process import ChildProcess, describe_exit_status
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.lake.compaction_history import Compaction
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import counter, gauge
from penstock.shared.common.setting_names import without_settings

log = get_logger(__name__)

JobCommand = Callable[[AggregatorSettings], list[str]]

SCHEDULE_NAME = "compaction"
STOP_TIMEOUT_MS = 10_000
# The log has at most this many lines, the last ones, of a failed job's error output.
OUTPUT_LINES_MAX = 200

# A longer line of progress is cut.
LINE_CHARACTERS_MAX = 300
JVM_LINE_PREFIXES = ("WARNING: ", "Setting default log level", "To adjust logging level")
"""Prefixes of lines that Spark's JVM writes before it reads its log settings."""
# REST and the dashboard show at most this many compactions.
HISTORY_MAX = 20
# The lake is behind if no compaction has succeeded for more than this many intervals.
BEHIND_INTERVALS = 3

READING = "reading "
"""The prefix of the line by which a job reports that Spark runs and reads the changelog."""
COMMITTED = "committed "
"""The prefix of the line by which a job reports its commit of `state`, before the steps that follow the commit."""
WRITTEN = ("live_rows", "deleted_rows", "closed_rows", "late_rows")
"""The fields of a job's result that count written rows."""
# No job exits with this status. It means that the job was stopped because another instance may compact now.
OWNERSHIP_LOST = 1_000
OWNERSHIP_POLL_MS = 100
NOT_THE_OWNER = "the instance that owns partition 0 compacts"


def command(settings: AggregatorSettings) -> list[str]:
    """Return the job's command line: a flag for each setting that `environment` does not pass.

    A setting that the aggregator has unset is passed as the text `None`. Without it, the job would use its own default.
    """
    streams = settings.streams
    compaction = settings.compaction
    assert streams.lake is not None
    given = {
        "application": streams.application_id,
        "lake": streams.lake,
        "spark.master": compaction.spark.master,
        "spark.driver-memory": compaction.spark.driver_memory,
        "spark.shuffle-partitions": compaction.spark.shuffle_partitions,
        "kafka-timeout-ms": compaction.kafka_timeout_ms,
        "changelog-records-max": compaction.changelog_records_max,
        "compactions-max": 1,
        "optimize-files-max": compaction.optimize_files_max,
        "retention-hours": compaction.retention_hours,
        "vacuum-every": compaction.vacuum_every,
        "closed-retention-days": compaction.closed_retention_days,
        "after": compaction.after,
    }
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    flags.append("--delete-covered" if compaction.delete_covered else "--no-delete-covered")
    return [sys.executable, "-m", "penstock.services.cli", "compact", *flags]


def environment(settings: AggregatorSettings) -> dict[str, str]:
    """Return the environment of the compaction job: that of this process, but with other settings.

    The settings are those of Kafka and the log, the lake's options and Spark's `conf`, which may hold secrets. The
    lake's AWS_ options are variables too. The job reads no settings file, since the file may hold other settings, for a
    `penstock compact` by hand. `command` passes the other settings.
    """
    connection = {}
    for name in type(settings.kafka).model_fields:
        value = getattr(settings.kafka, name)
        if value is not None:
            text = value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)
            connection[f"PENSTOCK_KAFKA__{name.upper()}"] = text
    options = {name.upper(): value for name, value in settings.streams.lake_options.items()}
    return (
        without_settings(os.environ)
        | {name: value for name, value in options.items() if name.startswith("AWS_")}
        | connection
        | {
            "PENSTOCK_LAKE_OPTIONS": msgspec.json.encode(settings.streams.lake_options).decode(),
            "PENSTOCK_SPARK__CONF": msgspec.json.encode(settings.compaction.spark.conf).decode(),
            "PENSTOCK_LOG__FORMAT": settings.log.format,
            "PENSTOCK_LOG__LEVEL": settings.log.level,
        }
    )


class CompactionSupervisor:
    """Starts jobs on request and keeps their results."""

    def __init__(
        self,
        settings: AggregatorSettings,
        registry: CollectorRegistry,
        clock: Clock = SYSTEM_CLOCK,
        *,
        lag_watch: CompactionLagWatch,
        job: JobCommand = command,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._job_command = job
        self._lag_watch = lag_watch
        self._requested = asyncio.Event()
        self._job: ChildProcess | None = None
        self._is_running = False
        self._history: deque[CompactionState] = deque(maxlen=HISTORY_MAX)
        self.enabled = settings.compaction.enabled and settings.streams.lake is not None
        self._consecutive_failures = 0
        self._changelog_records_max = settings.compaction.changelog_records_max
        self._is_before_commit = False
        self._last_success_ms: int | None = None
        self._compactions = counter(registry, "compactions", "Compactions that ended.", "outcome")
        # Each counter starts at 0, so that rates include the first compaction with its outcome.
        for outcome in ("done", "lost", "failed"):
            self._compactions.labels(outcome=outcome)
        gauge(registry, "compaction_enabled", "1 if this instance may start compactions, else 0.").set(self.enabled)
        self._failing = gauge(
            registry, "compaction_consecutive_failures", "Failed compactions since the last successful one."
        )
        self._seconds = gauge(registry, "compaction_last_seconds", "Duration of the last successful compaction.")
        self._running = gauge(registry, "compaction_running", "1 while this instance runs a compaction, else 0.")
        self._rows = gauge(registry, "compaction_last_rows", "Rows that the last successful compaction appended.")
        self._entries = gauge(
            registry, "compaction_last_entries", "Changelog entries that the last successful compaction read."
        )
        at = gauge(
            registry,
            "compaction_last_success_seconds",
            "Unix time of the last successful compaction; NaN if it is not known.",
        )
        at.set_function(self._last_success_seconds)

    def _last_success_seconds(self) -> float:
        """Return the Unix time of the newest success, of this process or in the lake; NaN if none is known."""
        measured = self._lag_watch.last
        newest_ms = max(self._last_success_ms or 0, (measured.snapshot_ms if measured is not None else None) or 0)
        return newest_ms / 1000 if newest_ms else math.nan

    def why_off(self) -> str:
        """Return the reason why compactions are off, or ""."""
        if self._settings.streams.lake is None:
            return "streams.lake is not set"
        return "" if self._settings.compaction.enabled else "compaction.enabled is false"

    def warn(self) -> None:
        """Log at start-up if compaction is off, with the consequences."""
        if not self.enabled:
            log.warning(
                f"compaction is off ({self.why_off()}): unless another program runs `penstock compact "
                "--delete-covered`, the changelog grows without bound, and so does the time of a restore",
                changelog=self._settings.streams.changelog_topic,
            )

    def health(self) -> CheckResult:
        """Return the state for `/health`. It is always ok, since it is never a reason to restart the service."""
        lag = self._lag_watch.last
        facts = {
            "last_success_at_ms": self._last_success_ms,
            "consecutive_failures": self._consecutive_failures,
            "changelog_records": None if lag is None else lag.records,
            "snapshot_at_ms": None if lag is None else lag.snapshot_ms,
        }
        state, detail = self._compaction_state()
        return CheckResult(True, detail, {"state": state, **facts})

    def _compaction_state(self) -> tuple[str, str]:
        if not self.enabled:
            return "off", f"{self.why_off()}: the changelog grows without bound"
        if self._consecutive_failures:
            detail = next((own["detail"] for own in self._history if own["status"] == "failed"), "")
            return "failing", detail
        if not self._lag_watch.is_owned():
            return "elsewhere", NOT_THE_OWNER
        if self._is_lake_behind():
            return "behind", f"no compaction has succeeded for more than {BEHIND_INTERVALS} intervals"
        return ("running" if self._is_running else "waiting"), ""

    def _is_lake_behind(self) -> bool:
        newest_ms = self._lag_watch.newest_sign_ms()
        if newest_ms is None:
            return False
        without_ms = self._clock.now_ms() - max(newest_ms, self._last_success_ms or 0)
        return without_ms > BEHIND_INTERVALS * self._settings.compaction.interval_ms

    def why_not_now(self) -> str:
        """Return the reason why a requested compaction would not start, or ""."""
        if not self.enabled:
            return f"compaction is off: {self.why_off()}"
        if not self._lag_watch.is_owned():
            return NOT_THE_OWNER
        return "one is running" if self._is_running or self._requested.is_set() else ""

    def request(self) -> None:
        """Request a compaction, without waiting. Does nothing if compactions are off, or while one is running."""
        if self.enabled and not self._is_running:
            self._requested.set()

    async def run(self) -> None:
        """Run the requested compactions until cancelled. A cancellation stops a running job."""
        try:
            while True:
                await self._requested.wait()
                self._requested.clear()
                await self._run_job()
                if self._consecutive_failures:
                    await self._wait_before_compaction_retry()
                    self._request_remaining_compaction()
        finally:
            await self._stop_job()

    def describe(self) -> list[CompactionState]:
        """Return the last compactions, newest first: this instance's own, and others in the lake."""
        own = list(self._history)
        others = (one for one in self._lag_watch.compactions if not any(_is_made_by_job(one, job) for job in own))
        found = [*own, *map(_state_of_lake_compaction, others)]
        return sorted(found, key=lambda state: -state["started_at_ms"])[:HISTORY_MAX]

    async def _run_job(self) -> None:
        started_ms = self._clock.now_ms()
        started = self._clock.monotonic_ms()
        state = CompactionState(started_at_ms=started_ms, seconds=None, status="running", rows=None, detail="")
        self._history.appendleft(state)
        log.info("compaction started")
        self._is_before_commit = False
        self._is_running = True
        self._running.set(1)
        status: int | None = None
        out = b""
        err = b""
        try:
            wanted = self._job_command(self._settings_with_bounded_records())
            self._job = await ChildProcess.start(
                wanted,
                name="the compaction",
                on_line=self._log_job_progress,
                env=environment(self._settings),
                orphan_limit_ms=STOP_TIMEOUT_MS,
            )
            async with asyncio.timeout(self._settings.compaction.timeout_ms / 1000):
                status = await self._wait_while_owned(self._job)
            out = self._job.output
            err = self._job.error_output
            if status == OWNERSHIP_LOST:
                await self._stop_job()
        except TimeoutError:
            await self._stop_job()
            err = f"stopped after {self._settings.compaction.timeout_ms} ms".encode()
        except ConfigError as e:
            err = str(e).encode()
        self._job = None
        self._is_running = False
        self._running.set(0)
        state["seconds"] = (self._clock.monotonic_ms() - started) / 1000
        self._record_result(state, status, out, err)

    async def _wait_while_owned(self, job: ChildProcess) -> int:
        """Return the job's exit status, or OWNERSHIP_LOST once another instance may own partition 0."""
        while True:
            with contextlib.suppress(TimeoutError):
                # On Python 3.11 `asyncio.wait_for` would lose a cancellation in the moment in which the job ends.
                async with asyncio.timeout(OWNERSHIP_POLL_MS / 1000):
                    return await job.wait()
            if not self._lag_watch.is_owned():
                return OWNERSHIP_LOST

    def _settings_with_bounded_records(self) -> AggregatorSettings:
        """Return the settings with the limit of the records that the next job reads (rule 3 of the module)."""
        bounds = {"changelog_records_max": self._changelog_records_max}
        compaction = self._settings.compaction.model_copy(update=bounds)
        return self._settings.model_copy(update={"compaction": compaction})

    def _log_job_progress(self, line: str) -> None:
        """Keep and log a line of the job's progress."""
        if line.startswith((READING, COMMITTED)):
            self._is_before_commit = line.startswith(READING)
        # Lines of the job's own log are JSON, and are not progress.
        if self._is_running and line and not line.startswith(("{", *JVM_LINE_PREFIXES)):
            self._history[0]["progress"] = line[:LINE_CHARACTERS_MAX]
            log.info("compaction", progress=line[:LINE_CHARACTERS_MAX])

    def _record_result(self, state: CompactionState, status: int | None, out: bytes, err: bytes) -> None:
        result = _parse_job_result(out)
        lines = err.decode(errors="replace").splitlines()[-OUTPUT_LINES_MAX:]
        if status == ExitStatus.OK or result:
            self._count_job_result(state, result)
        if status == ExitStatus.OK:
            self._end_job(state, "done", "")
            log.info("compaction done", **result)
            if result.get("remaining_records"):
                self._request_remaining_compaction()
        elif status == ExitStatus.COMMIT_CONFLICT:
            self._end_job(state, "lost", "another job was first")
            log.info("compaction: another job was first")
        elif status == OWNERSHIP_LOST:
            self._end_job(state, "stopped", "partition 0 went to another instance")
            log.info("compaction stopped: partition 0 went to another instance")
        else:
            # Fewer records do not help if Spark did not start, or if a step after the commit failed.
            if self._is_before_commit and not result:
                self._changelog_records_max = max(1, self._changelog_records_max // 2)
            self._end_job(state, "failed", _describe_failure(status, lines[-1] if lines else ""))
            log.error("compaction failed", status=status, output="\n".join(lines), result=result)

    def _count_job_result(self, state: CompactionState, result: dict[str, Any]) -> None:
        """Record the result of a job that has committed to the lake, even if a later step of the job failed."""
        self._last_success_ms = self._clock.now_ms()
        limit = self._settings.compaction.changelog_records_max
        self._changelog_records_max = min(limit, 2 * self._changelog_records_max)
        state["rows"] = sum(result.get(name, 0) for name in WRITTEN)
        self._seconds.set(state["seconds"] or 0)
        self._rows.set(state["rows"] or 0)
        self._entries.set(result.get("entries", 0))

    def _end_job(self, state: CompactionState, status: str, detail: str) -> None:
        state |= {"status": status, "detail": detail}
        self._consecutive_failures = self._consecutive_failures + 1 if status == "failed" else 0
        self._compactions.labels(outcome="lost" if status == "stopped" else status).inc()
        self._failing.set(self._consecutive_failures)

    def _request_remaining_compaction(self) -> None:
        """Request the rest of a job's work, unless another instance may own partition 0 by now."""
        if self._lag_watch.is_owned():
            self._requested.set()
            return
        self._requested.clear()
        self._consecutive_failures = 0
        self._failing.set(0)
        log.info("compaction: another instance owns partition 0 now, and compacts the rest")

    async def _wait_before_compaction_retry(self) -> None:
        compaction = self._settings.compaction
        backoff = ExponentialBackoff(compaction.retry_backoff_ms, compaction.interval_ms)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.wait_ms(self._consecutive_failures) / 1000):
                await self._requested.wait()

    async def _stop_job(self) -> None:
        job = self._job
        self._job = None
        self._is_running = False
        self._running.set(0)
        if job is not None:
            try:
                await job.terminate(STOP_TIMEOUT_MS)
            except TimeoutError:
                # SIGKILL waits for a system call, such as one on a disk that hangs. The process does nothing after it.
                log.warning("compaction: the job has not ended after SIGKILL")


def _describe_failure(status: int | None, last_line: str) -> str:
    """Return why a job failed. The last line of a job that a signal killed is its progress, not the reason.

    >>> _describe_failure(1, "KafkaTimeout: no broker"), _describe_failure(-9, "reading 9 records")
    ('KafkaTimeout: no broker', 'killed by SIGKILL; its last output: reading 9 records')
    """
    if last_line and (status is None or status >= 0):
        return last_line
    return f"{describe_exit_status(status or 0)}{'; its last output: ' if last_line else ''}{last_line}"


def _is_made_by_job(one: Compaction, job: CompactionState) -> bool:
    """Return whether a compaction in the lake counts as one that this job made: it began while the job ran.

    A job that lost to another one made none. If a compaction's start is unknown, its end counts.
    """
    if job["status"] == "lost":
        return False
    started_ms = job["started_at_ms"]
    seconds = job["seconds"]
    ended_ms = math.inf if seconds is None else started_ms + 1_000 * seconds
    return started_ms <= _compaction_started_ms(one) <= ended_ms


def _compaction_started_ms(one: Compaction) -> int:
    return one.ended_at_ms if one.started_at_ms is None else one.started_at_ms


def _state_of_lake_compaction(one: Compaction) -> CompactionState:
    return CompactionState(
        started_at_ms=_compaction_started_ms(one), seconds=one.seconds, status="done", rows=one.rows, detail=""
    )


def _parse_job_result(out: bytes) -> dict[str, Any]:
    lines = out.strip().splitlines()
    try:
        result = decode_json(lines[-1]) if lines else {}
    except InvalidJson:
        return {}
    return result if isinstance(result, dict) else {}
