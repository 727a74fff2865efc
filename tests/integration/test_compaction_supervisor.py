"""The compaction supervisor with real child processes; the job is a small script instead of a Spark job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.services.aggregator.compaction_lag import CompactionLagWatch
from penstock.services.aggregator.compaction_supervisor import CompactionSupervisor
from penstock.services.aggregator.settings import AggregatorSettings

WAIT_SECONDS = 20.0
DONE = 'print("noise"); print(\'{"live_rows": 4, "closed_rows": 3, "deleted_rows": 1, "entries": 9}\')'
LOST = "import sys; sys.exit(3)"
FAILED = 'import sys; print("trace", file=sys.stderr); print("the lake is gone", file=sys.stderr); sys.exit(1)'
HANGING = """
import os, pathlib, signal, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("reading 9 changelog records", file=sys.stderr, flush=True)
pathlib.Path({pid!r}).write_text(str(os.getpid()))
time.sleep(600)
"""


def settings(**compaction: int) -> AggregatorSettings:
    flags = [f"--compaction.{name.replace('_', '-')}={value}" for name, value in compaction.items()]
    return AggregatorSettings.load(["--topology=a:b", "--streams.lake=lake", *flags], environ={})


class Jobs:
    """A supervisor whose n-th job is the n-th script; the last script repeats."""

    def __init__(self, *scripts: str, lag_watch: CompactionLagWatch | None = None, **compaction: int) -> None:
        self._scripts = list(scripts)
        self.started = 0
        self.records_max: list[int] = []
        self.registry = CollectorRegistry()
        given = settings(**compaction)
        lag_watch = lag_watch or CompactionLagWatch(given, self.registry, lambda: True)
        self.supervisor = CompactionSupervisor(given, self.registry, lag_watch=lag_watch, job=self._command)

    def _command(self, given: AggregatorSettings) -> list[str]:
        script = self._scripts[min(self.started, len(self._scripts) - 1)]
        self.started += 1
        self.records_max.append(given.compaction.changelog_records_max)
        return [sys.executable, "-c", script]

    def ended(self, outcome: str) -> float:
        return self.registry.get_sample_value("penstock_compactions_total", {"outcome": outcome}) or 0.0

    def statuses(self) -> list[tuple[str, str]]:
        return [(state["status"], state["detail"]) for state in self.supervisor.describe()]


@asynccontextmanager
async def supervised(jobs: Jobs) -> AsyncIterator[CompactionSupervisor]:
    running = asyncio.create_task(jobs.supervisor.run())
    try:
        yield jobs.supervisor
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_job_that_succeeds() -> None:
    """The result on a job's last line is kept, counted and shown; no job starts without a request."""
    jobs = Jobs(DONE)
    async with supervised(jobs) as supervisor:
        await asyncio.sleep(0.1)
        assert (jobs.started, supervisor.describe()) == (0, [])
        supervisor.request()
        await until(lambda: jobs.ended("done") == 1)
        (state,) = supervisor.describe()
        assert (state["status"], state["rows"]) == ("done", 8)
        assert state["seconds"] is not None
        assert jobs.registry.get_sample_value("penstock_compaction_last_entries") == 9
        assert supervisor.health().facts["last_success_at_ms"] is not None
        await asyncio.sleep(0.2)
        assert jobs.started == 1


async def test_a_job_follows_one_that_left_records() -> None:
    """If a job leaves records, the next one starts without a request, until no records remain."""
    left = [f"print('{{\"remaining_records\": {number}}}')" for number in (20, 10, 0)]
    jobs = Jobs(*left, DONE)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("done") == 3)
        await asyncio.sleep(0.3)
        assert (jobs.started, jobs.ended("failed")) == (3, 0)


async def test_a_jobs_progress_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The progress that a job prints is shown, logged and measured while it runs."""
    caplog.set_level("INFO")
    message = "compaction 3: 9 entries", "WARNING: Using incubator modules", 'Setting default log level to "OFF".'
    jobs = Jobs(f"import sys, time; print(*{message!r}, sep='\\n', file=sys.stderr, flush=True); time.sleep(600)")
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: any(one.get("progress") == "compaction 3: 9 entries" for one in supervisor.describe()))
        await asyncio.sleep(0.1)  # by now the JVM's own messages have been read too
        (state,) = supervisor.describe()
        assert (state["status"], state["rows"], state.get("progress")) == ("running", None, "compaction 3: 9 entries")
        assert jobs.registry.get_sample_value("penstock_compaction_running") == 1
    assert jobs.registry.get_sample_value("penstock_compaction_running") == 0
    assert "compaction 3: 9 entries" in caplog.text


async def test_losing_to_another_job_is_no_failure() -> None:
    """A job that loses to another job's commit is not a failure and is not retried."""
    jobs = Jobs(LOST, retry_backoff_ms=10)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("lost") == 1)
        await asyncio.sleep(0.3)
        assert (jobs.started, jobs.statuses()) == (1, [("lost", "another job was first")])
        assert supervisor.health().facts["last_success_at_ms"] is None


async def test_a_failed_job_is_retried() -> None:
    """A failed job shows its last line, and is retried after a backoff until it succeeds."""
    jobs = Jobs(FAILED, FAILED, DONE, retry_backoff_ms=10)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("done") == 1)
        assert jobs.statuses() == [("done", ""), ("failed", "the lake is gone"), ("failed", "the lake is gone")]
        assert jobs.ended("failed") == 2
        assert supervisor.health().facts["state"] == "waiting"
        await asyncio.sleep(0.2)
        assert jobs.started == 3


@pytest.mark.parametrize("script", [FAILED, "print('{\"remaining_records\": 20}')"], ids=["failed", "left"])
async def test_an_instance_without_partition_0_starts_no_further_job(script: str) -> None:
    """After a job that failed or left records, an instance that has lost partition 0 starts no further job."""

    def is_owned() -> bool:
        return jobs.started < 2 or jobs.statuses()[0][0] == "running"

    watch = CompactionLagWatch(settings(), CollectorRegistry(), is_owned)
    jobs = Jobs(script, lag_watch=watch, retry_backoff_ms=10)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.started == 2 and len(jobs.statuses()) == 2 and jobs.statuses()[0][0] != "running")
        await asyncio.sleep(0.3)
        assert jobs.started == 2
        assert supervisor.health().facts["state"] == "elsewhere"
        assert jobs.registry.get_sample_value("penstock_compaction_consecutive_failures") == 0


async def test_losing_partition_0_stops_the_job(tmp_path: Path) -> None:
    """An instance that loses partition 0 stops its job, without counting a failure."""
    pid, ours = tmp_path / "pid", True
    watch = CompactionLagWatch(settings(), CollectorRegistry(), lambda: ours)
    jobs = Jobs(HANGING.format(deaf=False, pid=str(pid)), lag_watch=watch)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: pid.exists() and bool(pid.read_text()))
        job = int(pid.read_text())
        ours = False
        await until(lambda: jobs.ended("lost") == 1)
        assert jobs.statuses() == [("stopped", "partition 0 went to another instance")]
        assert jobs.ended("failed") == 0
        with pytest.raises(ProcessLookupError):
            os.kill(job, 0)
        ours = True
        supervisor.request()
        await until(lambda: jobs.started == 2)


async def test_a_job_that_cannot_be_started() -> None:
    """A command that cannot be started counts as a failed job, and the supervisor continues."""
    registry, commands = CollectorRegistry(), 0

    def job(given: AggregatorSettings) -> list[str]:
        nonlocal commands
        commands += 1
        return ["/nowhere/job"] if commands == 1 else [sys.executable, "-c", DONE]

    given = settings(retry_backoff_ms=10)
    watch = CompactionLagWatch(given, registry, lambda: True)
    supervisor = CompactionSupervisor(given, registry, lag_watch=watch, job=job)
    running = asyncio.create_task(supervisor.run())
    supervisor.request()
    labels = {"outcome": "done"}
    await until(lambda: registry.get_sample_value("penstock_compactions_total", labels) == 1)
    running.cancel()
    newest, oldest = supervisor.describe()
    assert newest["status"] == "done"
    assert oldest["detail"].startswith("the compaction cannot be started: ")


async def test_requests_while_a_job_runs_are_not_queued(tmp_path: Path) -> None:
    """One job runs at a time: requests meanwhile are dropped, and the next grid point requests again."""
    pid = tmp_path / "pid"
    jobs = Jobs(HANGING.format(deaf=False, pid=str(pid)))
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(pid.exists)
        for _ in range(3):
            supervisor.request()
        assert jobs.started == 1
        assert jobs.statuses() == [("running", "")]


@pytest.mark.parametrize("deaf", [False, True], ids=["willing", "deaf"])
async def test_a_job_over_its_timeout_is_stopped(tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job over its time limit is stopped, by SIGKILL if necessary, and counts as failed.

    The next job reads half as many records, so that a large backlog cannot time out forever.
    """
    monkeypatch.setattr("penstock.services.aggregator.compaction_supervisor.STOP_TIMEOUT_MS", 300)
    pid = tmp_path / "pid"
    hanging = HANGING.format(deaf=deaf, pid=str(pid))
    jobs = Jobs(hanging, DONE, timeout_ms=2_000, retry_backoff_ms=2_000, changelog_records_max=100)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("failed") == 1)
        assert jobs.statuses() == [("failed", "stopped after 2000 ms")]
        health = supervisor.health()
        assert (health.ok, health.detail, health.facts["state"]) == (True, "stopped after 2000 ms", "failing")
        assert jobs.registry.get_sample_value("penstock_compaction_consecutive_failures") == 1
        assert not is_alive(int(pid.read_text()))
        await until(lambda: jobs.ended("done") == 1)
        assert jobs.records_max == [100, 50]


async def test_records_max_recovers_after_a_success() -> None:
    """A job reads half as many records after one that timed out while it read, and twice as many after a success, up to
    the setting. A timeout before Spark starts changes nothing.
    """
    slow_start = "import time; time.sleep(600)"
    slow = f"import sys; print('reading 9 changelog records', file=sys.stderr, flush=True); {slow_start}"
    jobs = Jobs(slow_start, slow, DONE, timeout_ms=2_000, retry_backoff_ms=10, changelog_records_max=100)
    async with supervised(jobs) as supervisor:
        for done in (1, 2, 3):
            supervisor.request()
            await until(lambda done=done: jobs.ended("done") == done)  # type: ignore[misc]
        assert jobs.records_max == [100, 100, 50, 100, 100]


async def test_a_result_before_a_failure_is_kept() -> None:
    """If a job fails after it printed its result, its rows are shown, it counts as failed and it is retried."""
    jobs = Jobs(f"{DONE}; import sys; print('no DELETE', file=sys.stderr); sys.exit(1)", DONE, retry_backoff_ms=10)
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("done") == 1)
        (_, first) = supervisor.describe()
        assert (first["status"], first["detail"], first["rows"]) == ("failed", "no DELETE", 8)
        assert jobs.ended("failed") == 1


async def test_shutdown_stops_the_job(tmp_path: Path) -> None:
    """A cancelled supervisor leaves no child process behind."""
    pid = tmp_path / "pid"
    jobs = Jobs(HANGING.format(deaf=False, pid=str(pid)))
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: pid.exists() and bool(pid.read_text()))
    assert not is_alive(int(pid.read_text()))


PARENT = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from penstock.services.aggregator import compaction_supervisor
from penstock.services.aggregator.compaction_lag import CompactionLagWatch
from penstock.services.aggregator.settings import AggregatorSettings

async def main():
    compaction_supervisor.STOP_TIMEOUT_MS = 500
    settings = AggregatorSettings.load(["--topology=a:b", "--streams.lake=lake"], environ={{}})
    registry = CollectorRegistry()
    supervisor = compaction_supervisor.CompactionSupervisor(
        settings,
        registry,
        lag_watch=CompactionLagWatch(settings, registry, lambda: True),
        job=lambda _: [sys.executable, "-c", {job!r}],
    )
    supervisor.request()
    await supervisor.run()

asyncio.run(main())
"""


@pytest.mark.parametrize("deaf", [False, True], ids=["willing", "deaf"])
async def test_a_job_does_not_outlive_a_killed_aggregator(tmp_path: Path, deaf: bool) -> None:
    """If the aggregator is killed with SIGKILL, its job and the job's child processes end within seconds."""
    pid, child = tmp_path / "pid", tmp_path / "child"
    grandchild = f"import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(600)"
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}])"
    job = f"{spawn}\n{HANGING.format(deaf=deaf, pid=str(pid))}"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT.format(job=job))
    try:
        await until(lambda: all(file.exists() and file.read_text() for file in (pid, child)))
        pids = [int(file.read_text()) for file in (pid, child)]
        assert all(map(is_alive, pids))
    finally:
        parent.kill()
        await parent.wait()
    started = time.monotonic()
    await until(lambda: not any(map(is_alive, pids)))
    assert time.monotonic() - started < 5


async def test_a_job_without_a_result_counts_as_done() -> None:
    """A job that succeeds without printing a result counts as done with zero rows."""
    jobs = Jobs('print("all good")')
    async with supervised(jobs) as supervisor:
        supervisor.request()
        await until(lambda: jobs.ended("done") == 1)
        assert supervisor.describe()[0]["rows"] == 0
