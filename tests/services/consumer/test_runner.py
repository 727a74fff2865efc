"""The handler runner against a fake broker: what a loss leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from services.consumer.executor import Executor
from services.consumer.handlers import Handler
from services.consumer.runner import HandlerRunner
from services.consumer.runner_metrics import RunnerMetrics
from services.consumer.settings import ConsumerServiceSettings
from shared.clients.consumer import Consumer
from shared.clients.producer import Producer
from shared.common.clock import SYSTEM_CLOCK
from shared.common.records import ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from shared.common.settings import KafkaSettings
from shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster

RECORDS = 40


async def no_dead_letters(records: Sequence[ProducerRecord]) -> Sequence[Exception | None]:
    pytest.fail(f"dead letters: {records}")


async def until(true: Callable[[], object]) -> None:
    while True:
        if true():
            return
        await asyncio.sleep(0)


async def test_a_paused_partition_may_be_lost() -> None:
    """A member that the group forgets while a partition is paused and its handlers run comes back and goes on."""
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5)
        async with Producer(kafka) as producer:
            records = [ProducerRecord("t", b"%d" % i, b"%d" % i) for i in range(RECORDS)]
            assert await (await producer.send_many(records)).first_error() is None
        settings = ConsumerServiceSettings(
            kafka=kafka, topics=("t",), group_id="g", handler="tests:handle", buffered_records_max=10,
            max_concurrency=4, commit_interval_ms=10,
            consumer={
                "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20,
                "session_timeout_ms": 300,
            },
        )  # fmt: skip
        free, let_go, cancelled, turns = asyncio.Event(), asyncio.Event(), 0, 0

        async def handle(_: ConsumerRecord) -> None:
            nonlocal cancelled
            try:
                await free.wait()
            except asyncio.CancelledError:
                cancelled += 1
                await let_go.wait()
                raise

        metrics = RunnerMetrics(CollectorRegistry(), "g")
        executor = Executor(
            Handler("tests:handle", handle), settings.retry_policy(), no_dead_letters, metrics, group="g"
        )
        async with Consumer(kafka, settings.consumer_settings()) as consumer:
            runner = HandlerRunner(
                consumer, settings.scheduler(batch=False), executor, metrics, SYSTEM_CLOCK, settings.runner_options()
            )
            runner.subscribe(["t"])
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:

                async def run() -> None:
                    nonlocal turns
                    while True:
                        await runner.run_once()
                        turns += 1

                running = tasks.create_task(run())
                await until(consumer.paused)
                cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1)
                await until(lambda: cancelled == 4)
                seen = turns
                await until(lambda: turns > seen + 1)  # turns go on while the cancelled handlers take their time
                let_go.set()
                free.set()
                await until(lambda: cluster.committed("g") == {TopicPartition("t", 0): OffsetAndMetadata(RECORDS)})
                running.cancel()
            await runner.stop(1_000)
        assert cancelled == 4
        assert runner.finished == RECORDS
