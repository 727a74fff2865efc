"""Compaction, asked for by a wall-clock punctuator and run as a child process.

The asyncio process never holds a JVM: a job is `penstock compact …`, started here, with its last line of output as
its result. One at a time; a request that comes while one runs is not queued, the next grid point asks again. A failed
job is tried again with back-off and never harms the aggregator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from api.state import CompactionState
from services.aggregator.settings import AggregatorSettings
from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.log import get_logger
from shared.common.metrics import counter, gauge

log = get_logger(__name__)

JobCommand = Callable[[AggregatorSettings], list[str]]

SCHEDULE_NAME = "compaction"
STOP_TIMEOUT_MS = 10_000
OUTPUT_LINES_MAX = 200  # of a failed job, kept for its report

HISTORY_MAX = 20  # runs kept for REST and the dashboard

OK = 0
LOST_TO_ANOTHER = 3
"""`penstock compact` exits with this where another job committed first; nothing is wrong then."""


def command(settings: AggregatorSettings) -> list[str]:
    """The job's command line; secrets go through the environment, see `environment`."""
    streams, compaction = settings.streams, settings.compaction
    assert streams.lake is not None
    arguments = {
        "application": streams.application_id,
        "changelog": streams.changelog_topic,
        "lake": streams.lake,
        "spark.master": compaction.spark_master,
        "spark.driver-memory": compaction.spark_memory,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    flags.append("--delete-covered" if compaction.delete_covered else "--no-delete-covered")
    return [sys.executable, "-m", "services.cli", "compact", *flags]


def environment(settings: AggregatorSettings) -> dict[str, str]:
    """The job's environment: this process's, with all that may hold a secret, as it was set here by whatever way."""
    connection = {}
    for name in type(settings.kafka).model_fields:
        value = getattr(settings.kafka, name)
        if value is not None:
            text = value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)
            connection[f"PENSTOCK_KAFKA__{name.upper()}"] = text
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return (
        ours
        | connection
        | {
            "PENSTOCK_SPARK__CONF": msgspec.json.encode(settings.compaction.spark_conf).decode(),
            "PENSTOCK_LOG__FORMAT": settings.log.format,
            "PENSTOCK_LOG__LEVEL": settings.log.level,
        }
    )


class CompactionSupervisor:
    """Starts jobs when asked and keeps what came of them."""

    def __init__(
        self,
        settings: AggregatorSettings,
        registry: CollectorRegistry,
        clock: Clock = SYSTEM_CLOCK,
        *,
        job: JobCommand = command,
    ) -> None:
        self._settings, self._clock, self._job_command = settings, clock, job
        self._asked = asyncio.Event()
        self._job: asyncio.subprocess.Process | None = None
        self._history: deque[CompactionState] = deque(maxlen=HISTORY_MAX)
        self.enabled = settings.compaction.enabled and settings.streams.lake is not None
        self._failures_in_a_row = 0
        self._runs = counter(registry, "compaction_runs", "Compactions started.", "outcome")
        self._seconds = gauge(registry, "compaction_last_seconds", "Duration of the last successful compaction.")
        self._entries = gauge(registry, "compaction_last_entries", "Changelog entries the last compaction read.")
        self._at = gauge(registry, "compaction_last_success_seconds", "When the last one succeeded, epoch seconds.")

    def ask(self, now_ms: int) -> None:
        """Ask for a compaction; does not wait. The punctuator's callback."""
        if self._job is None:
            self._asked.set()

    async def run(self) -> None:
        """Serve requests until cancelled; a job under way is stopped then."""
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._run_job()
                if self._failures_in_a_row:
                    await self._back_off()
                    self._asked.set()
        finally:
            await self._stop_job()

    def describe(self) -> list[CompactionState]:
        """The last runs, newest first."""
        return list(self._history)

    async def _run_job(self) -> None:
        started_ms, started = self._clock.now_ms(), self._clock.monotonic_ms()
        state = CompactionState(started_at_ms=started_ms, seconds=None, status="running", rows=None, detail="")
        self._history.appendleft(state)
        log.info("compaction started")
        status = None
        try:
            self._job = await asyncio.create_subprocess_exec(
                *self._job_command(self._settings),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(self._settings),
            )
            async with asyncio.timeout(self._settings.compaction.timeout_ms / 1000):
                out, err = await self._job.communicate()
            status = self._job.returncode
        except TimeoutError:
            await self._stop_job()
            out, err = b"", f"stopped after {self._settings.compaction.timeout_ms} ms".encode()
        except OSError as e:
            out, err = b"", f"the job could not be started: {e}".encode()
        self._job = None
        state["seconds"] = (self._clock.monotonic_ms() - started) / 1000
        self._note(state, status, out, err)

    def _note(self, state: CompactionState, status: int | None, out: bytes, err: bytes) -> None:
        if status == OK:
            result = _last_json(out)
            self._failures_in_a_row = 0
            state |= {"status": "done", "rows": result.get("live_rows", 0) + result.get("finals", 0)}
            self._runs.labels(outcome="done").inc()
            self._seconds.set(state["seconds"] or 0)
            self._entries.set(result.get("entries", 0))
            self._at.set(self._clock.now_ms() / 1000)
            log.info("compaction done", **result)
        elif status == LOST_TO_ANOTHER:
            self._failures_in_a_row = 0
            state |= {"status": "done", "rows": 0, "detail": "another job was first"}
            self._runs.labels(outcome="lost").inc()
            log.info("compaction: another job was first")
        else:
            self._failures_in_a_row += 1
            lines = err.decode(errors="replace").splitlines()[-OUTPUT_LINES_MAX:]
            state |= {"status": "failed", "detail": lines[-1] if lines else f"exit status {status}"}
            self._runs.labels(outcome="failed").inc()
            log.error("compaction failed", status=status, output="\n".join(lines))

    async def _back_off(self) -> None:
        compaction = self._settings.compaction
        delay = min(compaction.retry_backoff_ms * 2 ** (self._failures_in_a_row - 1), compaction.interval_ms)
        await asyncio.sleep(delay / 1000)

    async def _stop_job(self) -> None:
        job, self._job = self._job, None
        if job is None or job.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            job.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_MS / 1000):
                await job.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
            await job.wait()


def _last_json(out: bytes) -> dict[str, Any]:
    lines = out.strip().splitlines()
    try:
        result = msgspec.json.decode(lines[-1]) if lines else {}
    except msgspec.DecodeError:
        return {}
    return result if isinstance(result, dict) else {}
