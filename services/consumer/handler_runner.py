"""The handler runner calls a handler for every record of some topics, in your own program or in `penstock consumer`.

The handler is loaded first, so that an invalid one is rejected before any record is read. Then `run` waits for Kafka.
With `create_dead_letter_topics` it waits for the topics as well, and creates missing dead-letter topics. Then it joins
the group. At the end no new call starts, the calls in flight drain, their offsets are committed and the member leaves
the group.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry

from penstock.services.consumer.commits import TransactionalCommits
from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop
from penstock.services.consumer.handlers import load_decoder, load_handler
from penstock.services.consumer.retry_policy import load_exceptions
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import GIVE_UP_RESERVE_MS, ConsumerServiceSettings
from penstock.services.consumer.transactor import CLOSE_TIMEOUT_MS, OutputTransactor
from penstock.services.first_connection import first_connection
from penstock.shared.clients.admin import Admin, NewTopic, describe_configs_if_authorized, max_message_bytes_with
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, RecordMetadata

log = get_logger(__name__)

DEAD_LETTER_HEADROOM_BYTES = 65_536
"""The bytes that a dead letter's own headers may add to the largest record of its source topic."""


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


class HandlerRunner:
    """Runs a handler until `run` is cancelled: at least once or exactly once, as configured.

    `async with HandlerRunner(settings) as runner: await runner.run()`. The constructor raises ConfigError for an
    invalid handler or value format, and if an exception class that `retry` names is not found.
    """

    def __init__(self, settings: ConsumerServiceSettings, *, registry: CollectorRegistry | None = None) -> None:
        self._settings = settings
        self._registry = CollectorRegistry() if registry is None else registry
        self._handler = load_handler(settings.handler)
        self._decode = load_decoder(settings.value)
        # Loaded after the handler's modules, which may define exceptions.
        self._policy = replace(
            settings.retry_policy(),
            retriable=load_exceptions(settings.retry.retriable, "retry.retriable"),
            not_retriable=load_exceptions(settings.retry.not_retriable, "retry.not_retriable"),
        )
        self._clients = contextlib.AsyncExitStack()
        self._closing: asyncio.Task[None] | None = None
        self._metrics = RunnerMetrics(self._registry, settings.group_id)
        self.loop: HandlerLoop | None = None
        """The loop that polls and calls the handler. None before there is a connection."""
        self.consumer: Consumer | None = None
        self.waits_for = "not connected to Kafka yet"
        """The reason why `run` does not handle records yet, before there is a `loop`."""

    def __repr__(self) -> str:
        return f"HandlerRunner({self._settings.handler}, {self.loop or self.waits_for})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self) -> None:
        """Connect, then handle records until cancelled. Raises an error after which the runner cannot continue."""
        settings = self._settings
        largest = await first_connection(self._prepare_topics)
        consumer = Consumer(settings.kafka, settings.consumer_settings(), registry=self._registry)
        await self._start_client(consumer)
        self.consumer = consumer
        self.loop = await self._make_handler_loop(consumer, settings.producer_settings(largest))
        self.loop.subscribe(settings.topics)
        log.info("handling", topics=settings.topics, group=settings.group_id, handler=settings.handler)
        await self.loop.run()

    async def close(self) -> None:
        """Drain, commit, leave the group, close the clients.

        The calls in flight have `shutdown_timeout_ms` minus GIVE_UP_RESERVE_MS. Then they are cancelled. If this call
        is cancelled, all this continues in the background. A second call waits for its end.
        """
        if self._closing is None:
            # A task of its own, which a cancellation of the caller does not reach.
            self._closing = asyncio.create_task(self._drain_and_close())
        await asyncio.shield(self._closing)

    async def _drain_and_close(self) -> None:
        try:
            if self.loop is not None:
                await self.loop.stop(max(0, self._settings.shutdown_timeout_ms - GIVE_UP_RESERVE_MS))
        finally:
            await self._clients.aclose()

    async def _start_client(self, client: Consumer | Producer) -> None:
        """Start a client, which `close` closes within CLOSE_TIMEOUT_MS.

        `async with` would wait for Kafka until `commit_timeout_ms` or `delivery_timeout_ms`, although the last commit
        is over by then.
        """
        self._clients.push_async_callback(client.close, CLOSE_TIMEOUT_MS)
        await client.start()

    async def _make_handler_loop(self, consumer: Consumer, producing: ProducerSettings) -> HandlerLoop:
        settings = self._settings
        metrics = self._metrics

        def make_producer() -> Producer:
            return Producer(settings.kafka, producing, registry=self._registry)

        write: RecordProducer | None = None
        if not settings.is_exactly_once:
            producer = make_producer()
            await self._start_client(producer)
            write = RecordProducer(producer)
        executor = Executor(
            self._handler,
            self._policy,
            write,
            metrics,
            group=settings.group_id,
            dead_letter_topic_of=settings.dead_letter_topics.__getitem__,
            decode=self._decode,
        )
        scheduler = settings.scheduler(batch=self._handler.batch)
        commits = None
        if settings.is_exactly_once:
            transactor = OutputTransactor(make_producer, consumer.committed)
            commits = TransactionalCommits(
                transactor, consumer.group_metadata, scheduler, executor.dead_letters_of_rejected, metrics
            )
            await transactor.start()
        return HandlerLoop(
            consumer=consumer,
            scheduler=scheduler,
            executor=executor,
            metrics=metrics,
            clock=SYSTEM_CLOCK,
            options=settings.handler_loop_options(),
            commits=commits,
        )

    async def _prepare_topics(self) -> int:
        """Connect to Kafka, and create the missing dead-letter topics if `create_dead_letter_topics` is set.

        Returns the largest `max.message.bytes` that a dead-letter topic needs, or 0 if `create_dead_letter_topics` is
        not set. Raises RetriableError if no broker answers. With `create_dead_letter_topics`, also raises it if a
        source topic is missing.
        """
        try:
            async with Admin(self._settings.kafka) as admin:
                if not self._settings.create_dead_letter_topics:
                    return 0
                return await _create_dead_letter_topics(admin, self._settings.dead_letter_topics)
        except RetriableError as e:
            self.waits_for = str(e)
            raise


async def _create_dead_letter_topics(admin: Admin, dead_letter_topics: Mapping[str, str]) -> int:
    """Create the missing dead-letter topics of these source topics.

    Returns the largest `max.message.bytes` that one of the dead-letter topics needs.

    A source topic whose configs may not be read counts as one with Kafka's default of `max.message.bytes`.
    """
    # Several source topics may have the same dead-letter topic. A dead letter of every record of each of them fits.
    partitions: dict[str, int] = defaultdict(int)
    widths: dict[str, int] = defaultdict(int)
    for source, target in dead_letter_topics.items():
        description = (await admin.describe_topics([source]))[source]
        configs = await describe_configs_if_authorized(admin, source)
        partitions[target] = max(partitions[target], len(description.partitions))
        widths[target] = max(widths[target], max_message_bytes_with(configs, DEAD_LETTER_HEADROOM_BYTES))
    topics = [
        NewTopic(target, partitions[target], configs={"retention.ms": "-1", "max.message.bytes": str(width)})
        for target, width in widths.items()
    ]
    await admin.create_topics(topics, exist_ok=True)
    return max(widths.values())
