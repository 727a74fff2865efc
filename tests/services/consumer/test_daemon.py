"""The handler daemon: invalid settings, and its health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.clients.consumer import ReadingSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HttpSettings, KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Request


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    name = f"handler_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("class Away(Exception): ...\nasync def handle(record): ...\n")
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
