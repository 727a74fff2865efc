"""Runs handler runners as separate processes for the chaos test, which may kill and stop them.

A member writes events to its log, one a line: which partitions it is assigned and releases, and
the start and the end of each call of its handler. The times are from the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop
from penstock.services.consumer.handler_runner import RecordProducer
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer
from penstock.shared.common import log
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import ConsumerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings, LogSettings

FAILURES = 0.05
HANDLER_SECONDS_MAX = 0.03


class Journal:
    """The log of one member. Each line is written to the file before `write` returns, without a buffer."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, *values: object) -> None:
        os.write(self._file, f"{time.monotonic_ns()} {what} {' '.join(map(str, values))}\n".encode())


class Recorded(HandlerLoop):
    """A handler loop that logs the partitions that it owns, and the generation in which they were assigned."""

    journal: Journal
    group_consumer: Consumer

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        generation = self.group_consumer.group_metadata().generation_id
        self.journal.write("assigned", generation, *sorted(tp.partition for tp in partitions))
        await super().on_partitions_assigned(partitions)

    async def _drain_and_release_partitions(self, partitions: frozenset[TopicPartition], drain_timeout_ms: int) -> bool:
        committed = await super()._drain_and_release_partitions(partitions, drain_timeout_ms)
        self.journal.write("released" if committed else "lost", *sorted(tp.partition for tp in partitions))
        return committed

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        await super().on_partitions_lost(partitions)
        self.journal.write("lost", *sorted(tp.partition for tp in partitions))


def settings_of(servers: str, topic: str, strategy: str) -> ConsumerServiceSettings:
    consumer = {
        "session_timeout_ms": 1_500, "heartbeat_interval_ms": 300, "auto_offset_reset": "earliest",
        "listener_timeout_ms": 8_000, "partition_assignment_strategy": strategy,
    }  # fmt: skip
    return ConsumerServiceSettings(
        kafka=KafkaSettings(bootstrap_servers=servers), topics=(topic,), group_id=topic, handler="chaos:handle",
        commit_interval_ms=200, max_attempts=100, retry={"backoff_ms": 5, "backoff_max_ms": 50}, max_concurrency=16,
        consumer=consumer,
    )  # fmt: skip


async def member(settings: ConsumerServiceSettings, journal: Journal) -> None:
    rng = random.Random()

    async def handle(record: ConsumerRecord) -> None:
        what = record.partition, record.offset, (record.key or b"").decode()
        journal.write("start", *what)
        ended = "cancelled"
        try:
            await asyncio.sleep(rng.random() * HANDLER_SECONDS_MAX)
            ended = "failed" if rng.random() < FAILURES else "done"
        finally:
            journal.write(ended, *what)
        if ended == "failed":
            raise ConnectionError("try again")

    metrics = RunnerMetrics(CollectorRegistry(), settings.group_id)
    async with Producer(settings.kafka) as producer, Consumer(settings.kafka, settings.consumer_settings()) as consumer:
        executor = Executor(
            Handler("chaos:handle", handle), settings.retry_policy(), RecordProducer(producer), metrics, group="chaos"
        )
        runner = Recorded(
            consumer, settings.scheduler(batch=False), executor, metrics, SYSTEM_CLOCK, settings.handler_loop_options()
        )
        runner.journal, runner.group_consumer = journal, consumer
        runner.subscribe(settings.topics)
        running = asyncio.create_task(runner.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            await runner.stop(5_000)


def run(name: str, servers: str, topic: str, strategy: str, folder: Path) -> None:
    """Run a member. Its log and its errors are in the files of `folder` that begin with `name`."""
    errors = os.open(folder / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    log.configure(LogSettings(format="json"), "chaos")
    asyncio.run(member(settings_of(servers, topic, strategy), Journal(folder / f"{name}.log")))
