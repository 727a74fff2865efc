"""Compactions: the job's command line and environment, the supervisor's health and history, and the lake's lag."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.api.streams.task_views import CompactionState
from penstock.services.aggregator.compaction_lag import (
    CompactionLag,
    CompactionLagWatch,
    PartitionSize,
    measured_sizes,
    uncovered_bytes,
    uncovered_records,
)
from penstock.services.aggregator.compaction_supervisor import (
    BEHIND_INTERVALS,
    CompactionSupervisor,
    JobCommand,
    _parse_job_result,
    command,
    environment,
)
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.child_process import ChildProcess
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.compaction_history import Compaction
from penstock.shared.testing.manual_clock import ManualClock
from tests import virtual_time

SECRETS = {
    "PENSTOCK_KAFKA__SASL_PASSWORD": "hunter2",
    "PENSTOCK_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
    "PENSTOCK_KAFKA__SASL_MECHANISM": "PLAIN",
    "PENSTOCK_KAFKA__SASL_USERNAME": "me",
    "PENSTOCK_KAFKA__SSL_CERTFILE": "client.pem",
    "PENSTOCK_KAFKA__SSL_KEY_PASSWORD": "hunter3",
    "PENSTOCK_COMPACTION__SPARK__CONF": '{"spark.hadoop.fs.s3a.secret.key":"hunter4,x=y"}',
}


def settings(*flags: str, **environ: str) -> AggregatorSettings:
    return AggregatorSettings.load(["--topology=a:b", "--streams.lake=lake", *flags], environ=environ)


def supervisor_of(
    given: AggregatorSettings,
    registry: CollectorRegistry | None = None,
    clock: Clock = SYSTEM_CLOCK,
    job: JobCommand = command,
) -> CompactionSupervisor:
    """A supervisor on the instance that owns partition 0."""
    registry = registry or CollectorRegistry()
    watch = CompactionLagWatch(given, registry, lambda: True, clock)
    return CompactionSupervisor(given, registry, clock, lag_watch=watch, job=job)


def test_the_job_understands_its_command_line() -> None:
    """The job's settings, read from its command line and environment, equal the aggregator's."""
    given = settings(
        "--streams.application-id=app",
        "--compaction.spark.master=local[3]",
        "--compaction.spark.driver-memory=2g",
        "--compaction.spark.shuffle-partitions=9",
        "--no-compaction.delete-covered",
        "--compaction.optimize-files-max=7",
        "--compaction.retention-hours=30",
        "--compaction.vacuum-every=5",
        "--compaction.changelog-records-max=1234",
        "--compaction.kafka-timeout-ms=7000",
        "--compaction.closed-retention-days=90",
        "--compaction.after=my_steps:publish",
        '--streams.lake-options={"aws_endpoint_url": "http://s3", "timeout": "5s"}',
        "--kafka.bootstrap-servers=broker:1",
        **SECRETS,
    )
    python, *rest = command(given)
    assert rest[:3] == ["-m", "penstock.services.cli", "compact"]
    job = CompactSettings.load(rest[3:], environ=environment(given))
    assert python
    assert (job.application, job.changelog_topic, job.lake) == ("app", "app-changelog", "lake")
    assert job.spark == given.compaction.spark
    assert (job.spark.master, job.spark.driver_memory, job.spark.shuffle_partitions) == ("local[3]", "2g", 9)
    assert job.spark.conf == {"spark.hadoop.fs.s3a.secret.key": "hunter4,x=y"}
    assert not job.delete_covered
    assert (job.optimize_files_max, job.retention_hours, job.vacuum_every) == (7, 30, 5)
    assert job.closed_retention_days == 90
    assert job.after == "my_steps:publish"
    assert (job.changelog_records_max, job.compactions_max, job.kafka_timeout_ms) == (1234, 1, 7_000)
    assert environment(given)["AWS_ENDPOINT_URL"] == "http://s3"
    assert "TIMEOUT" not in environment(given)
    assert job.lake_options == given.streams.lake_options
    assert job.kafka == given.kafka
    assert job.log == given.log


def test_the_job_ignores_settings_of_manual_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the file for a manual `penstock compact` do not apply to the job."""
    monkeypatch.chdir(tmp_path)
    by_hand = (
        "delete_covered = true\nretention_hours = 24\nclosed_retention_days = 1\nvacuum_every = 9\n"
        "compactions_max = 3\nafter = 'my_steps:publish'\n"
        "[lake_options]\ntimeout = '5s'\n[spark.conf]\n'spark.ui.enabled' = 'true'\n"
    )
    (tmp_path / "penstock.toml").write_text(f"{by_hand}[streams]\nlake = 'lake'\n[compaction]\nvacuum_every = 2\n")
    given = AggregatorSettings.load(["--topology", "a:b", "--no-compaction.delete-covered"], environ={})
    given = given.model_copy(update={"compaction": given.compaction.model_copy(update={"retention_hours": None})})
    job = CompactSettings.load(command(given)[4:], environ=environment(given))
    assert not job.delete_covered
    assert (job.retention_hours, job.closed_retention_days) == (None, None)
    assert (job.vacuum_every, job.compactions_max) == (2, 1)
    assert (job.after, job.lake_options, job.spark.conf) == (None, {}, {})


def test_no_secret_in_the_command_line() -> None:
    """Secrets are passed in the environment, since every user of the machine can read a command line."""
    given = settings(**SECRETS)
    line = " ".join(command(given))
    for secret in ("hunter2", "hunter3", "hunter4"):
        assert secret not in line
        assert any(secret in value for value in environment(given).values())


def test_the_environment_is_this_process_with_our_settings_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job inherits the environment, with Penstock's variables replaced by the settings in force."""
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "stale:1")
    monkeypatch.setenv("PENSTOCK_DELETE_COVERED", "false")
    monkeypatch.setenv("PENSTOCK_CONNECT_TOKEN", "of penstock connectors")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    got = environment(settings("--kafka.bootstrap-servers=fresh:1"))
    assert got["PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"] == "fresh:1"
    assert "PENSTOCK_DELETE_COVERED" not in got
    assert "PENSTOCK_CONNECT_TOKEN" not in got
    assert "PENSTOCK_KAFKA__CLIENT_ID" not in got
    assert got["SOMETHING_ELSE"] == "kept"


def test_the_job_downloads_jars_from_the_same_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job inherits the variable of the Maven repository, which is not a setting."""
    monkeypatch.setenv("PENSTOCK_MAVEN_REPOSITORY", "https://maven.example/")
    assert environment(settings())["PENSTOCK_MAVEN_REPOSITORY"] == "https://maven.example/"


@pytest.mark.parametrize(("flags", "enabled"), [([], True), (["--no-compaction.enabled"], False)])
def test_enabled_by_its_switch(flags: list[str], enabled: bool) -> None:
    """With a lake, compaction is on unless it is switched off."""
    assert supervisor_of(settings(*flags)).enabled is enabled


def test_without_a_lake_compaction_is_off() -> None:
    """Without a lake compaction is off."""
    given = AggregatorSettings.load(["--topology=a:b"], environ={})
    assert not supervisor_of(given).enabled


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--topology=a:b"], "streams.lake is not set"),
        (["--topology=a:b", "--streams.lake=l", "--no-compaction.enabled"], "compaction.enabled is false"),
    ],
)
def test_disabled_compaction_is_reported(flags: list[str], why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Disabled compaction is a warning at start-up, a metric, and a state in /health that is not a failure."""
    registry = CollectorRegistry()
    supervisor = supervisor_of(AggregatorSettings.load(flags, environ={}), registry)
    supervisor.warn()
    output = caplog.text
    assert f"compaction is off ({why})" in output
    assert "the changelog grows without bound" in output
    health = supervisor.health()
    assert (health.ok, health.facts["state"]) == (True, "off")
    assert why in health.detail
    assert registry.get_sample_value("penstock_compaction_enabled") == 0


@pytest.mark.parametrize(
    ("flags", "why_not"),
    [([], "one is running"), (["--no-compaction.enabled"], "compaction is off: compaction.enabled is false")],
)
def test_requests_while_compaction_is_off_are_ignored(flags: list[str], why_not: str) -> None:
    """A request is kept until its job starts; while compaction is off, nothing is requested."""
    supervisor = supervisor_of(settings(*flags))
    supervisor.request()
    assert supervisor.why_not_now() == why_not
    assert supervisor._requested.is_set() is supervisor.enabled


def test_only_the_owner_of_partition_0_starts_a_compaction() -> None:
    """An instance that does not own partition 0 rejects a requested compaction with the reason."""
    is_ours = False
    watch = CompactionLagWatch(settings(), CollectorRegistry(), lambda: is_ours)
    supervisor = CompactionSupervisor(settings(), CollectorRegistry(), lag_watch=watch)
    assert "partition 0" in supervisor.why_not_now()
    is_ours = True
    assert supervisor.why_not_now() == ""


def test_too_many_bytes_trigger_a_compaction() -> None:
    """A measurement above the limit triggers a compaction; a lower or unknown one does not,
    and without a limit none does.
    """
    requests: list[str] = []
    for flags, sizes in ((["--compaction.changelog-bytes=100"], (99, None, 100, 200)), ([], (10**12,))):
        registry = CollectorRegistry()
        watch = CompactionLagWatch(
            settings(*flags), registry, lambda: True, ManualClock(7), lambda: requests.append("compaction")
        )
        for size in sizes:
            watch.note(CompactionLag(1, None, size))
        assert registry.get_sample_value("penstock_compaction_changelog_bytes") == sizes[-1]
    assert requests == ["compaction"] * 2


def test_bytes_that_a_compaction_leaves_trigger_no_other_one() -> None:
    """Bytes that a job does not cover trigger one compaction; the next needs a new snapshot or
    as many further bytes.
    """
    checks: list[int] = []
    clock = ManualClock(0)
    given = settings("--compaction.changelog-bytes=100")
    watch = CompactionLagWatch(given, CollectorRegistry(), lambda: True, clock, lambda: checks.append(clock.now_ms()))
    measured = [(None, 150), (None, 180), (7, 120), (7, 120), (7, 219), (7, 220), (7, 300), (9, 50), (9, 100), (9, 101)]
    for snapshot_ms, size in measured:
        clock.advance(1)
        watch.note(CompactionLag(1, snapshot_ms, size))
    assert checks == [1, 3, 6, 9]


def test_health_has_the_compactions_state() -> None:
    """The state is `elsewhere` if another instance compacts, `waiting` if all is well, and
    `behind` after too long without a compaction.
    """
    manual_clock = ManualClock(1_000_000)
    given, registry, ours = settings(), CollectorRegistry(), False
    watch = CompactionLagWatch(given, registry, lambda: ours, manual_clock)
    supervisor = CompactionSupervisor(given, registry, manual_clock, lag_watch=watch)
    supervisor.warn()
    assert supervisor.health().facts["state"] == "elsewhere"
    ours = True
    watch.owned_since_ms = manual_clock.now_ms()
    watch.note(CompactionLag(70, None))
    assert supervisor.health().facts == {
        "state": "waiting",
        "last_success_at_ms": None,
        "consecutive_failures": 0,
        "changelog_records": 70,
        "snapshot_at_ms": None,
    }
    manual_clock.advance(BEHIND_INTERVALS * given.compaction.interval_ms + 1)
    assert supervisor.health().facts["state"] == "behind"
    assert supervisor.health().ok
    assert math.isnan(registry.get_sample_value("penstock_compaction_last_success_seconds") or 0)
    watch.note(CompactionLag(70, manual_clock.now_ms() - 5_000))
    newest = registry.get_sample_value("penstock_compaction_last_success_seconds")
    # The time comes from the lake, since this process has run no compaction.
    assert newest == (manual_clock.now_ms() - 5_000) / 1000
    assert supervisor.health().facts["state"] == "waiting"
    assert registry.get_sample_value("penstock_compaction_changelog_records") == 70
    assert registry.get_sample_value("penstock_compaction_snapshot_age_seconds") == 5


def test_the_history_before_a_restart_comes_from_the_lake() -> None:
    """Earlier compactions come from the lake, and each of this instance's is listed once
    although the lake has it too.
    """
    registry, minute, now_ms = CollectorRegistry(), 60_000, 10**12
    manual_clock = ManualClock(now_ms)

    def of_lake(started_ms: int, rows: int, job: str = "ab") -> Compaction:
        return Compaction(rows, started_ms + 1_500, job, started_ms, 1.5, rows, 9)

    watch = CompactionLagWatch(settings(), registry, lambda: True, manual_clock)
    supervisor = CompactionSupervisor(settings(), registry, manual_clock, lag_watch=watch)
    assert supervisor.describe() == []
    before = (of_lake(now_ms - minute, 2), of_lake(now_ms - 2 * minute, 1))
    watch.note(CompactionLag(0, now_ms, None, before))
    assert [(one["started_at_ms"], one["rows"], one["status"]) for one in supervisor.describe()] == [
        (now_ms - minute, 2, "done"),
        (now_ms - 2 * minute, 1, "done"),
    ]
    own = CompactionState(started_at_ms=now_ms, seconds=3.0, status="done", rows=3, detail="")
    lost = CompactionState(started_at_ms=now_ms + minute, seconds=3.0, status="lost", rows=None, detail="")
    supervisor._history.extendleft([own, lost])
    watch.note(CompactionLag(0, now_ms, None, (of_lake(now_ms + minute + 5, 4), of_lake(now_ms + 900, 3), *before)))
    assert [one["rows"] for one in supervisor.describe()] == [4, None, 3, 2, 1]
    watch.note(None)  # The lake does not answer temporarily.
    assert len(supervisor.describe()) == 5


@pytest.mark.parametrize("out", [b"", b"done", b"[3]", b'"\xff"', b"[" * 100_000])
def test_output_without_a_result_is_an_empty_result(out: bytes) -> None:
    """A job whose last line is not JSON, is nested too deeply or is no object has no result."""
    assert _parse_job_result(out) == {}
    assert _parse_job_result(out + b'\n{"rows":3}\n') == {"rows": 3}


def test_records_that_remain_on_disk_after_they_were_deleted_are_not_uncovered_bytes() -> None:
    """The size on disk is that of whole segments, so a record's size is taken from all growth. It stays the same when
    the broker removes a segment and while no record is written. Bytes are never more than the size on disk."""
    sizes: dict[int, PartitionSize] = {}
    found = []
    for start, end, size in [
        (0, 1_000, 100_000),  # the first measurement
        (1_000, 1_010, 102_000),  # a compaction has deleted the first 1,000 records
        (1_010, 1_050, 103_000),
        (1_010, 1_060, 5_500),  # the broker has removed a segment
        (1_010, 1_060, 5_500),
        (1_010, 1_070, 100),
    ]:
        sizes = measured_sizes(sizes, {0: end}, {0: start}, {0: size})
        found.append(uncovered_bytes({0: end}, {0: start}, {0: start}, sizes))
    assert found == [100_000, 2_000, 2_400, 3_000, 3_000, 100]


def test_sizes_that_are_older_than_end_offsets_or_newer() -> None:
    """Bytes that one measurement counts without their offsets belong to the offsets of the next one."""
    sizes = measured_sizes({}, {0: 0}, {0: 0}, {0: 0})
    found = []
    for end, size in [(10, 3_000), (20, 4_000), (20, 6_000), (30, 6_000), (130, 26_000)]:
        sizes = measured_sizes(sizes, {0: end}, {0: 0}, {0: size})
        found.append(uncovered_bytes({0: end}, {0: 0}, {0: end - 10}, sizes))
    assert found == [3_000, 2_000, 3_000, 2_000, 2_000]


def test_uncovered_records() -> None:
    """A partition counts from its covered offset, or from its first record if that offset is unknown or deleted."""
    assert uncovered_records({0: 10, 1: 10, 2: 10, 3: 0}, {0: 2, 1: 8, 2: 0, 3: 0}, {0: 4, 1: 4}) == 6 + 2 + 10
    assert uncovered_records({0: 3}, {0: 0}, {0: 5}) == 0


def test_an_unmeasured_value_is_nan() -> None:
    """An unmeasured value is NaN, because 0 would mean that everything is covered."""
    registry = CollectorRegistry()
    watch = CompactionLagWatch(AggregatorSettings.load(["--topology=a:b"], environ={}), registry, lambda: False)
    for name in ("changelog_records", "snapshot_age_seconds"):
        value = registry.get_sample_value(f"penstock_compaction_{name}")
        assert value is not None
        assert math.isnan(value)
    assert watch.newest_sign_ms() is None


def test_compaction_jobs_use_the_token_provider() -> None:
    """With OAUTHBEARER compaction is enabled, and its jobs have the same Kafka settings."""
    flags = ("--kafka.security-protocol=SASL_SSL", "--kafka.sasl-mechanism=OAUTHBEARER")
    flags += ("--kafka.sasl-oauth-token-provider=tokens:give",)
    given = settings(*flags)
    assert given.compaction.enabled
    job = CompactSettings.load(["--application=a", "--lake=lake"], environ=environment(given))
    assert job.kafka == given.kafka


async def test_a_shutdown_as_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation in the moment in which the job ends is not lost."""

    class Job:
        output = b""
        error_output = b""

        async def wait(self) -> int:
            await asyncio.sleep(0)
            running.cancel()
            return 0

        async def terminate(self, timeout_ms: int) -> int:
            return 0

    async def start(*_args: object, **_settings: object) -> Job:
        return Job()

    monkeypatch.setattr(ChildProcess, "start", start)
    supervisor = supervisor_of(settings())
    supervisor.request()
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()


def test_a_request_ends_the_wait_after_a_failed_job() -> None:
    """After a failed job, a request starts the next job at once. Without one, the job is retried with backoff."""
    started_s: list[float] = []

    def fail(_given: AggregatorSettings) -> list[str]:
        started_s.append(asyncio.get_running_loop().time())
        raise ConfigError("no")

    async def scenario() -> None:
        clock = virtual_time.LoopClock()
        supervisor = supervisor_of(settings(), clock=clock, job=fail)
        running = asyncio.create_task(supervisor.run())
        supervisor.request()
        for _ in range(2):
            await virtual_time.let_pass(1)
            assert supervisor.why_not_now() == ""
            supervisor.request()
        await virtual_time.let_pass(42)
        running.cancel()

    virtual_time.run(scenario())
    # The third failure in a row is retried after 4 times `retry_backoff_ms`.
    assert started_s == [0, 1, 2, 42]


def test_a_job_that_was_killed_while_it_read_is_followed_by_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that runs out of memory reads half as many records at its next attempt. A failure before it reads does not
    change the limit, nor does one after its commit. A job that printed its result doubles the limit.
    """
    limits: list[int] = []

    class Job:
        error_output = b""

        def __init__(self, output: bytes) -> None:
            self.output = output

        async def wait(self) -> int:
            return 137

    async def start(*_args: object, on_line: Callable[[str], None], **_settings: object) -> Job:
        if len(limits) > 1:
            on_line("reading 9 changelog records")
        if len(limits) > 3:
            on_line("committed version 1 of `state`")
            on_line("rewriting 3 partitions of `state`, 9 rows")
        return Job(b'{"live_rows": 1}' if len(limits) > 4 else b"")

    def job(given: AggregatorSettings) -> list[str]:
        limits.append(given.compaction.changelog_records_max)
        return []

    async def scenario() -> None:
        given = settings("--compaction.changelog-records-max=100")
        supervisor = supervisor_of(given, clock=virtual_time.LoopClock(), job=job)
        running = asyncio.create_task(supervisor.run())
        for _ in range(6):
            supervisor.request()
            await virtual_time.let_pass(1)
        running.cancel()

    monkeypatch.setattr(ChildProcess, "start", start)
    virtual_time.run(scenario())
    assert limits == [100, 100, 50, 25, 25, 50]


def test_a_request_without_partition_0_is_dropped_after_a_failed_job() -> None:
    """A request in the wait after a failed job is dropped if partition 0 has moved to another instance."""
    started_s: list[float] = []
    is_ours = True

    def fail(_given: AggregatorSettings) -> list[str]:
        started_s.append(asyncio.get_running_loop().time())
        raise ConfigError("no")

    async def scenario() -> None:
        nonlocal is_ours
        clock = virtual_time.LoopClock()
        watch = CompactionLagWatch(settings(), CollectorRegistry(), lambda: is_ours, clock)
        supervisor = CompactionSupervisor(settings(), CollectorRegistry(), clock, job=fail, lag_watch=watch)
        running = asyncio.create_task(supervisor.run())
        supervisor.request()
        await virtual_time.let_pass(1)
        is_ours = False
        supervisor.request()
        await virtual_time.let_pass(600)
        is_ours = True
        assert supervisor.why_not_now() == ""
        running.cancel()

    virtual_time.run(scenario())
    assert started_s == [0]


@pytest.mark.parametrize("cause", ["timeout", "partition 0 moved", "shutdown"])
def test_a_job_that_cannot_be_ended_does_not_harm_the_aggregator(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may outlive SIGKILL in a call of the kernel. The supervisor leaves it, and starts the next job as usual."""
    started_s: list[float] = []
    is_ours = True

    class Job:
        output = b""
        error_output = b""

        async def wait(self) -> int:
            await asyncio.Event().wait()
            return 0

        async def terminate(self, timeout_ms: int) -> int:
            raise TimeoutError

    async def start(*_args: object, **_settings: object) -> Job:
        started_s.append(asyncio.get_running_loop().time())
        return Job()

    async def scenario() -> None:
        nonlocal is_ours
        clock = virtual_time.LoopClock()
        given = settings("--compaction.timeout-ms=60000")
        watch = CompactionLagWatch(given, CollectorRegistry(), lambda: is_ours, clock)
        supervisor = CompactionSupervisor(given, CollectorRegistry(), clock, lag_watch=watch)
        running = asyncio.create_task(supervisor.run())
        supervisor.request()
        await virtual_time.let_pass(30)
        if cause != "shutdown":
            is_ours = cause == "timeout"
            await virtual_time.let_pass(60)
            assert supervisor.describe()[-1]["status"] == ("failed" if is_ours else "stopped")
            is_ours = True
            supervisor.request()
            await virtual_time.let_pass(1)
            assert started_s == [0, 70 if cause == "timeout" else 90]
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    monkeypatch.setattr(ChildProcess, "start", start)
    virtual_time.run(scenario())
