"""The handler daemon: invalid settings at start-up, and its health, which reports that it is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.handler_runner import DEAD_LETTER_HEADROOM_BYTES, HandlerRunner
from penstock.services.consumer.progress_watch import ProgressWatch
from penstock.services.consumer.settings import GIVE_UP_RESERVE_MS, ConsumerServiceSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.admin.types import DEFAULT_MAX_MESSAGE_BYTES
from penstock.shared.clients.consumer import ReadingSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import HttpSettings, KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, ErrorCode, Fail, FakeCluster, Request
from tests.shared.clients.cancelled_close import Close, cancel_close_at_each_turn


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    name = f"handler_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "class Away(Exception): ...\nasync def handle(record):\n if record.value == b'bad': raise Away\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return ["--topics", "clicks", "--group-id", "g", "--handler", f"{name}:handle"]


def test_an_unknown_exception_is_an_error_at_start_up(arguments: list[str]) -> None:
    """An unknown exception name is a ConfigError, while one of the handler's own module is known."""
    ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.retriable", "Away,OSError"], environ={}))
    with pytest.raises(ConfigError, match=r"retry\.retriable: .*'Nonsense'"):
        ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.retriable", "OSError,Nonsense"], environ={}))
    with pytest.raises(ConfigError, match=r"retry\.not_retriable: .*'Nonsense'"):
        ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.not-retriable", "Nonsense"], environ={}))


@asynccontextmanager
async def running(cluster: FakeCluster, arguments: list[str], **given: object) -> AsyncIterator[ConsumerDaemon]:
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5)
    reading = {"heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20, "auto_offset_reset": "earliest"}
    settings = ConsumerServiceSettings.load(arguments, environ={}).model_copy(
        update={
            "kafka": kafka,
            "consumer": ReadingSettings.model_validate(reading),
            "http": HttpSettings(port=0),
            **given,
        }
    )
    daemon = ConsumerDaemon(settings)
    await daemon.startup()
    running = asyncio.create_task(daemon.main_loop())
    try:
        async with asyncio.timeout(20):
            yield daemon
    finally:
        running.cancel()
        await asyncio.wait([running])
        await daemon.shutdown()


async def test_an_endless_rebalance_is_reported(arguments: list[str]) -> None:
    """The health reports a rebalance that takes longer than `stuck_after_ms`, until the member is in the group."""
    is_held_up = True

    def hold_up(_: Request) -> Fail | None:
        return Fail(ErrorCode.REBALANCE_IN_PROGRESS) if is_held_up else None

    async with FakeCluster() as cluster:
        cluster.create_topic("clicks")
        cluster.control(Api.SYNC_GROUP, hold_up)
        async with running(cluster, arguments, stuck_after_ms=100) as daemon:
            while "not in the group: its rebalance takes" not in daemon.check().detail:  # noqa: ASYNC110
                await asyncio.sleep(0)
            is_held_up = False
            while not daemon.check().ok:  # noqa: ASYNC110 - the daemon is another task
                await asyncio.sleep(0)


@pytest.mark.parametrize("create", [True, False])
async def test_the_service_waits_for_kafka(create: bool, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If Kafka is down at the start, the service waits, also if it creates no dead-letter topics."""
    monkeypatch.setattr("penstock.services.first_connection.RETRY_MS", 10)
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks")
        await cluster.stop_node(1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=500, retry_backoff_ms=5)
        async with running(cluster, arguments, kafka=kafka, create_dead_letter_topics=create) as daemon:
            while cluster.bootstrap_servers not in daemon.check().detail:  # noqa: ASYNC110 - the daemon is another task
                await asyncio.sleep(0)
            await cluster.start_node(1)
            while not daemon.check().ok:  # noqa: ASYNC110 - the daemon is another task
                await asyncio.sleep(0)


async def test_a_shared_dead_letter_topic_is_as_large_as_its_largest_source(arguments: list[str]) -> None:
    """A dead-letter topic of several topics has the most partitions of them, and takes the largest dead letter."""
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks", configs={"max.message.bytes": "1000000"})
        cluster.create_topic("orders", partitions=3, configs={"max.message.bytes": "10000000"})
        cluster.create_topic("views", configs={"max.message.bytes": "2000000"})
        given = {"topics": ("clicks", "orders", "views"), "dead_letter_topic": "all-dlq"}
        async with running(cluster, arguments, **given) as daemon:
            while not daemon.check().ok:  # noqa: ASYNC110 - the daemon is another task
                await asyncio.sleep(0)
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            assert len((await admin.describe_topics(["all-dlq"]))["all-dlq"].partitions) == 3
            configs = await admin.describe_configs("all-dlq")
            assert configs["max.message.bytes"] == str(10_000_000 + DEAD_LETTER_HEADROOM_BYTES)


async def test_a_source_topic_may_have_the_largest_record_limit(arguments: list[str]) -> None:
    """Its dead-letter topic then has the same `max.message.bytes`, because Kafka allows no larger one."""
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks", configs={"max.message.bytes": str(2**31 - 1)})
        async with running(cluster, arguments) as daemon:
            while not daemon.check().ok:  # noqa: ASYNC110 - the daemon is another task
                await asyncio.sleep(0)
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            assert (await admin.describe_configs("clicks-dlq"))["max.message.bytes"] == str(2**31 - 1)


async def test_the_configs_of_a_source_topic_need_not_be_readable(arguments: list[str]) -> None:
    """Its records then count as large as Kafka's default allows."""
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks", configs={"max.message.bytes": "1000"})
        with cluster.control(Api.DESCRIBE_CONFIGS, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)):
            async with running(cluster, arguments) as daemon:
                while not daemon.check().ok:  # noqa: ASYNC110 - the daemon is another task
                    await asyncio.sleep(0)
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            configs = await admin.describe_configs("clicks-dlq")
            assert configs["max.message.bytes"] == str(DEFAULT_MAX_MESSAGE_BYTES + DEAD_LETTER_HEADROOM_BYTES)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_a_cancelled_close_leaves_nothing_running(guarantee: str, arguments: list[str]) -> None:
    """All its tasks end in the background, at whichever turn its close is cancelled."""
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks")
        args = [*arguments, "--processing-guarantee", guarantee, "--kafka.bootstrap-servers", cluster.bootstrap_servers]
        settings = ConsumerServiceSettings.load([*args, "--consumer.fetch-max-wait-ms", "20"], environ={})

        async def start() -> Close:
            runner = HandlerRunner(settings)
            running = asyncio.create_task(runner.run())
            while runner.consumer is None or runner.loop is None or not runner.consumer.assignment():  # noqa: ASYNC110
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            return runner.close

        assert await cancel_close_at_each_turn(start, again=True, step=5) > 1


async def test_a_shutdown_without_kafka_ends_soon(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the last commit is given up, no client waits for it or for a dead letter."""
    for limit in ("handler_loop.GIVE_UP_COMMIT_TIMEOUT_MS", "handler_runner.CLOSE_TIMEOUT_MS"):
        monkeypatch.setattr(f"penstock.services.consumer.{limit}", 10)
    async with FakeCluster() as cluster, asyncio.timeout(15):
        cluster.create_topic("clicks")
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
            await (await producer.send_many([ProducerRecord("clicks", b"good"), ProducerRecord("clicks", b"bad")]))
        unwritten = cluster.control(Api.PRODUCE, Drop())
        args = [*arguments, "--max-attempts", "1"]
        async with running(cluster, args, shutdown_timeout_ms=GIVE_UP_RESERVE_MS + 1) as daemon:
            while not (unwritten.acted and daemon.runner.loop and daemon.runner.loop.finished):  # noqa: ASYNC110
                await asyncio.sleep(0)
            cluster.pause_node(1)


A, B = "t-0", "t-1"


def test_lag_without_progress_is_stuck_after_the_limit() -> None:
    """A partition is stuck only if no record was finished for the whole limit."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 5}, {})
    watch.observe(90, {A: 5}, {})
    assert watch.trouble(100) == ""
    assert watch.trouble(101) == "t-0: 5 records behind, none finished for 101 ms"


def test_one_finished_record_restarts_the_limit() -> None:
    """One finished record restarts the limit, so a slow partition is not stuck even while its lag grows."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 5}, {})
    watch.observe(99, {A: 500}, {A: 1})
    assert watch.trouble(199) == ""
    assert watch.trouble(200) == "t-0: 500 records behind, none finished for 101 ms"


def test_lag_after_an_idle_time_restarts_the_limit() -> None:
    """A topic that was idle for a long time is not stuck at its first new record."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe(0, {A: 0}, {})
    watch.observe(5_000, {A: 3}, {})
    assert watch.trouble(5_100) == ""


def test_progress_of_one_partition_does_not_hide_a_stuck_one() -> None:
    """A stuck partition is named although others make progress, until another member owns it."""
    watch = ProgressWatch(stuck_after_ms=100)
    for now_ms in (0, 60, 120):
        watch.observe(now_ms, {A: 5, B: 5}, {B: now_ms})
    assert watch.trouble(121) == "t-0: 5 records behind, none finished for 121 ms"
    assert watch.lag == 10
    watch.observe(130, {B: 5}, {B: 130})
    assert watch.trouble(131) == ""


def test_a_transaction_that_is_not_committed_is_stuck() -> None:
    """Finished records whose transaction is not committed are named as such, and count as lag, also when partitions are
    revoked."""
    watch = ProgressWatch(stuck_after_ms=100)
    watch.observe_uncommitted(0, 5, 7)
    watch.observe(90, {A: 0}, {A: 5})
    watch.observe_uncommitted(90, 5, 7)
    assert watch.trouble(101) == "5 finished records are not committed, and none was finished for 101 ms"
    assert watch.lag == 5
    watch.observe_uncommitted(110, 0, 7)
    assert watch.trouble(999) == ""


def test_a_member_outside_of_the_group_is_stuck() -> None:
    """A member outside of the group is stuck after the same limit, although it has no lag."""
    watch = ProgressWatch(stuck_after_ms=100)
    assert watch.trouble(500, rebalance_ms=100) == ""
    assert "rebalance takes 101 ms" in watch.trouble(500, rebalance_ms=101)
