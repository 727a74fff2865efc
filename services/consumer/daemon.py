"""The handler daemon: wires consumer, scheduler, handler and dead letters together (an edge).

The handler is loaded first: a wrong one ends the process before anything is read. `/health` and `/metrics` answer from
then on. Until Kafka is reached and the topics exist, the daemon waits; then it creates missing dead-letter topics and
joins the group. SIGTERM: nothing new is started, what is in flight drains within `shutdown_timeout_ms`, its offsets
are committed, the member leaves the group.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from penstock.api.contact import Contact
from penstock.api.health import Check, CheckResult, create_health_app
from penstock.api.server import HttpServer
from penstock.services.consumer.commits import TransactionalCommits
from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handlers import load_decoder, load_exceptions, load_handler
from penstock.services.consumer.runner import HandlerRunner
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import GIVE_UP_RESERVE_MS, ConsumerServiceSettings
from penstock.services.consumer.transactor import Transactor
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.collector import spare_the_collector
from penstock.shared.common.errors import PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, RecordMetadata

log = get_logger(__name__)

SERVICE = "consumer"
DEAD_LETTER_HEADROOM_BYTES = 65_536
"""What a dead letter's own headers may add to the largest record of its source topic."""
CONNECT_RETRY_MS = 1_000


class RecordProducer:
    """Writes dead letters and handlers' output through a Producer, acknowledged by all in-sync replicas."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def __call__(self, records: Sequence[ProducerRecord]) -> Sequence[Exception | None]:
        try:
            results = await (await self._producer.send_many(records))
        except PenstockError as e:
            return [e] * len(records)
        return [None if isinstance(result, RecordMetadata) else result for result in results]


class ConsumerDaemon:
    """Settings to a running service; `server.url` is known after `startup`.

    ConfigError for a wrong handler, and for names of exceptions in `retry` that there are none of.
    """

    def __init__(self, settings: ConsumerServiceSettings, registry: CollectorRegistry | None = None) -> None:
        self._settings = settings
        self._registry = CollectorRegistry() if registry is None else registry
        self._handler = load_handler(settings.handler)
        self._decode = load_decoder(settings.value)
        # Once the handler's modules are there, which may define exceptions of their own.
        self._policy = replace(
            settings.retry_policy(),
            retriable=load_exceptions(settings.retry.retriable, "retry.retriable"),
            not_retriable=load_exceptions(settings.retry.not_retriable, "retry.not_retriable"),
        )
        self._clients = contextlib.AsyncExitStack()
        self._metrics = RunnerMetrics(self._registry, settings.group_id)
        self.runner: HandlerRunner | None = None
        self._consumer: Consumer | None = None
        self._waits_for = "not connected to Kafka yet"
        self._contact = Contact(lambda: self._consumer, settings.kafka_silence_max_ms)
        checks: dict[str, Check] = {"progress": self.check, "kafka": self._contact}
        self.server = HttpServer(create_health_app(SERVICE, checks, self._registry), settings.http)

    def __repr__(self) -> str:
        return f"ConsumerDaemon({self.server!r}, {self.runner!r})"

    async def startup(self) -> None:
        """Listen; ConfigError where the address cannot be had."""
        spare_the_collector()
        await self.server.start()

    async def main_loop(self) -> None:
        """Connect, then handle records until cancelled."""
        settings = self._settings
        largest = await self._prepare_dead_letter_topics() if settings.create_dead_letter_topics else 0
        consumer = Consumer(settings.kafka, settings.consumer_settings(), registry=self._registry)
        self._consumer = await self._clients.enter_async_context(consumer)
        self.runner = await self._make_runner(consumer, settings.producer_settings(largest))
        self.runner.subscribe(settings.topics)
        log.info("handling", topics=settings.topics, group=settings.group_id, handler=settings.handler)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._contact.run())
            await self.runner.run()

    async def _make_runner(self, consumer: Consumer, producing: ProducerSettings) -> HandlerRunner:
        settings, metrics = self._settings, self._metrics

        def make_producer() -> Producer:
            return Producer(settings.kafka, producing, registry=self._registry)

        write: RecordProducer | None = None
        if not settings.is_exactly_once:
            write = RecordProducer(await self._clients.enter_async_context(make_producer()))
        executor = Executor(
            self._handler,
            self._policy,
            write,
            metrics,
            group=settings.group_id,
            dead_letter_topic=settings.dead_letter_topic,
            decode=self._decode,
        )
        scheduler = settings.scheduler(batch=self._handler.batch)
        commits = None
        if settings.is_exactly_once:
            transactor = Transactor(make_producer, consumer.committed)
            commits = TransactionalCommits(transactor, consumer.group_metadata, scheduler, executor.refused, metrics)
            await transactor.start()
        return HandlerRunner(consumer, scheduler, executor, metrics, SYSTEM_CLOCK, settings.runner_options(), commits)

    async def shutdown(self) -> None:
        """Drain, commit, leave, close."""
        drain_ms = max(0, self._settings.shutdown_timeout_ms - GIVE_UP_RESERVE_MS)
        try:
            if self.runner is not None:
                await self.runner.stop(drain_ms)
        finally:
            await self._clients.aclose()
            await self.server.stop(grace_ms=1_000)

    def check(self) -> CheckResult:
        """Unhealthy until Kafka is reached, with `stuck_after_ms` of a partition's lag without progress or of a
        rebalance that does not end, and while a dead letter cannot be written."""
        if self.runner is None:
            return CheckResult(False, self._waits_for)
        progress = self.runner.progress
        facts = {"lag": progress.lag, "finished": self.runner.finished, "in_flight": self.runner.scheduler.in_flight}
        rebalance_ms = 0.0 if self._consumer is None else self._consumer.rebalance_ms()
        trouble = progress.trouble(SYSTEM_CLOCK.monotonic_ms(), rebalance_ms)
        trouble = "; ".join(filter(None, (trouble, self.runner.unwritten())))
        return CheckResult(not trouble, trouble, facts)

    async def _prepare_dead_letter_topics(self) -> int:
        """Create what is missing, wide enough for every record of its source; returns the widest, in bytes."""
        while True:
            try:
                async with Admin(self._settings.kafka) as admin:
                    widths = [
                        await _dead_letter_topic(admin, *pair) for pair in self._settings.dead_letter_topics.items()
                    ]
                return max(widths)
            except RetriableError as e:  # a broker or a topic that is not there yet
                if self._waits_for != str(e):
                    log.warning("waiting for Kafka", error=type(e).__name__, reason=str(e))
                self._waits_for = str(e)
                await asyncio.sleep(CONNECT_RETRY_MS / 1000)


async def _dead_letter_topic(admin: Admin, source: str, target: str) -> int:
    partitions = len((await admin.describe_topics([source]))[source].partitions)
    configs = await admin.describe_configs(source)
    width = int(configs["max.message.bytes"] or 0) + DEAD_LETTER_HEADROOM_BYTES
    wide = {"retention.ms": "-1", "max.message.bytes": str(width)}
    await admin.create_topics([NewTopic(target, partitions, configs=wide)], exist_ok=True)
    return width
