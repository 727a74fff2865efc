"""A compacted topic that every worker reads from its start and follows to its end.

`start` creates the topic if it is missing, and returns when `on_record` was called for all its records. From then on
`on_record` is called for each new record, one after another. `read_to_end` returns when `on_record` was called for all
records that the topic had at the time of the call. So a caller sees its own earlier records. If a transaction was open,
`read_to_end` waits until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.shared.clients.admin import Admin, NewTopic, describe_configs_if_authorized
from penstock.shared.clients.admin.admin import OffsetSpec
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import (
    ConfigError,
    IllegalState,
    KafkaTimeout,
    PenstockError,
    RetriableError,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord, RecordMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)

POLL_MS = 1_000
WAITED_FOR_POLL_MS = 50
"""The poll timeout while a caller waits for the end of the topic. It is short, since a transaction's markers wake no
poll."""
READ_TO_END_MS = 80_000
"""Longer than a crashed writer's transaction is open: the default of `transaction.timeout.ms` (60 s), and the interval
at which brokers check it (10 s)."""
RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class LogTopic:
    """The topic of a log. `partitions` is the number of partitions of a new topic."""

    name: str
    partitions: int
    replication_factor: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)
    is_single: bool = False
    """Whether the topic must have one partition, since its records are one sequence."""


class KafkaBasedLog:
    """One topic, read by this process. `producer` is shared with other logs and is not closed here."""

    def __init__(
        self,
        kafka: KafkaSettings,
        admin: Admin,
        producer: Producer,
        topic: LogTopic,
        on_record: Callable[[ConsumerRecord], None],
    ) -> None:
        self._kafka = kafka
        self._admin = admin
        self._producer = producer
        self._topic = topic
        self._on_record = on_record
        self._consumer: Consumer | None = None
        self._following: asyncio.Task[None] | None = None
        self._partitions: list[TopicPartition] = []
        self._waiting = 0
        self._moved = asyncio.Condition()
        self._broken: Exception | None = None

    def __repr__(self) -> str:
        return f"<KafkaBasedLog {self._topic.name}, {'following' if self._following else 'closed'}>"

    async def start(self) -> None:
        """Create the topic if it is missing, and read it to its end.

        Raises ConfigError if `cleanup.policy` is not just `compact`, or if the topic has several partitions although it
        must have one. A policy that this principal may not read counts as `compact`. Raises KafkaTimeout if the end is
        not reached within `READ_TO_END_MS`: retriable errors of reads are retried until then. Also raises all other
        errors of the consumer and of the admin client.
        """
        await self._create_compacted_topic()
        self._consumer = Consumer(
            self._kafka,
            # read_committed: a fenced leader's open or aborted transaction must not take effect.
            ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None),
        )
        await self._consumer.start()
        self._consumer.assign(self._partitions)
        self._following = asyncio.create_task(self._poll_topic_forever(), name=f"follow {self._topic.name}")
        await self.read_to_end()

    async def stop(self) -> None:
        """Stop following the topic. Waiting calls of `read_to_end` and `read_past` raise IllegalState."""
        following = self._following
        self._following = None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        consumer = self._consumer
        self._consumer = None
        if consumer is not None:
            await consumer.close(0)
        await self._notify_waiting()

    async def send(self, key: bytes, value: bytes | None, producer: Producer | None = None) -> RecordMetadata:
        """Write one record and wait for its acknowledgement. Raises any error of the producer."""
        return await (await (producer or self._producer).send(self._topic.name, value, key=key))

    async def send_all(self, records: Sequence[tuple[bytes, bytes | None]]) -> list[RecordMetadata]:
        """Write records together, and wait until Kafka has all of them."""
        deliveries = [await self._producer.send(self._topic.name, value, key=key) for key, value in records]
        return [await delivery for delivery in deliveries]

    async def read_past(self, written: Iterable[RecordMetadata]) -> None:
        """Wait until `on_record` was called for all of these written records.

        For records of a transaction, this is only some time after its end. Raises as `read_to_end` does, after
        READ_TO_END_MS.
        """
        ends: dict[TopicPartition, int] = {}
        for record in written:
            tp = TopicPartition(record.topic, record.partition)
            ends[tp] = max(ends.get(tp, 0), record.offset + 1)
        await self._wait_until(ends, _deadline_s(READ_TO_END_MS))

    async def read_to_end(self, timeout_ms: int = READ_TO_END_MS) -> None:
        """Wait until `on_record` was called for all current records, and all open transactions have ended.

        Raises KafkaTimeout after `timeout_ms`, IllegalState if the log is stopped, and any error of the admin client.
        While the topic cannot be read because of an error that is not retriable, raises that error.
        """
        deadline_s = _deadline_s(timeout_ms)
        # Over the admin's connection: on the consumer's own, a lookup waits behind a fetch for new records.
        specs: dict[TopicPartition, OffsetSpec] = dict.fromkeys(self._partitions, "latest")
        # The high watermark, as in Kafka Connect, and not the last stable offset: committed records may be behind
        # another writer's open transaction.
        ends = await self._admin.list_offsets(specs, timeout_ms=timeout_ms)
        await self._wait_until(ends, deadline_s)

    async def _wait_until(self, ends: Mapping[TopicPartition, int], deadline_s: float) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s), self._moved:
                await self._moved.wait_for(lambda: self._broken is not None or self._has_reached(ends))
        except TimeoutError:
            raise KafkaTimeout(f"topic {self._topic.name}: not read to its end in time") from None
        finally:
            self._waiting -= 1
        if self._broken is not None:
            raise self._broken

    def _has_reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        if self._consumer is None:
            raise IllegalState(f"topic {self._topic.name}: is no longer followed")
        return all((self._consumer.known_position(tp) or 0) >= end for tp, end in ends.items())

    async def _create_compacted_topic(self) -> None:
        topic = self._topic
        configs = {"cleanup.policy": "compact", **topic.configs}
        wanted = NewTopic(topic.name, topic.partitions, topic.replication_factor, configs)
        await self._admin.create_topics([wanted], exist_ok=True)
        policy = (await describe_configs_if_authorized(self._admin, topic.name)).get("cleanup.policy")
        found = [each.partition for each in (await self._admin.describe_topics([topic.name]))[topic.name].partitions]
        # As in TopicAdmin.verifyTopicCleanupPolicyOnlyCompact: with `delete`, Kafka would remove live records. A policy
        # that this principal may not read counts as compact.
        if policy not in ("compact", None):
            raise ConfigError(
                f"topic {topic.name}: cleanup.policy={policy}, but must be compact: records would be lost"
            )
        if topic.is_single and len(found) != 1:
            raise ConfigError(f"topic {topic.name}: has {len(found)} partitions, but must have 1 to keep its order")
        self._partitions = [TopicPartition(topic.name, partition) for partition in found]

    async def _poll_topic_forever(self) -> None:
        assert self._consumer is not None
        try:
            while True:
                await self._poll_topic(self._consumer)
        except Exception as e:
            # `read_to_end` raises the error for callers that wait now and for later ones.
            log.error("a topic cannot be read any more", topic=self._topic.name, reason=f"{type(e).__name__}: {e}")
            self._broken = e
            await self._notify_waiting()

    async def _notify_waiting(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def _poll_topic(self, consumer: Consumer) -> None:
        try:
            polled = await consumer.poll(WAITED_FOR_POLL_MS if self._waiting else POLL_MS)
        # As in Kafka Connect, any error of the consumer is retried: a missing right may be granted again.
        except PenstockError as e:
            log.warning("a topic cannot be read and is retried", topic=self._topic.name, reason=str(e))
            if not isinstance(e, RetriableError):
                self._broken = e
                await self._notify_waiting()
            await asyncio.sleep(RETRY_MS / 1000)
            return
        self._broken = None
        for columns in polled.values():
            for record in columns.records():
                self._on_record(record)
        if polled or self._waiting:
            await self._notify_waiting()


def _deadline_s(timeout_ms: int) -> float:
    """Return the running loop's time after a timeout."""
    return asyncio.get_running_loop().time() + timeout_ms / 1000
