"""Transactions of ingest: those of `?atomic=true`, and those with an Idempotency-Key (an edge).

A key belongs to one partition of the topic of keys. The producer with the transactional id
`<idempotency_topic>-<partition>` owns that partition. A new owner fences the previous one and ends its open transaction
(`init_transactions`). Then it reads the partition to its end, so it knows every key that is stored there. So two
services, or a service and its zombie, never both store one key: the commit of the older one is rejected.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from penstock.api.ingest.atomic import IdempotencyKey, MakeResponse, StoredResponse
from penstock.api.ingest.result import Outcome
from penstock.api.settings import IngestSettings
from penstock.services.producer.idempotency_partition import IdempotencyPartition, send_in_transaction
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import KafkaTimeout, PenstockError, ProducerFenced
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)
T = TypeVar("T")

SEGMENTS = 8
"""The approximate number of segments of the topic of keys. Kafka deletes expired records by segment."""
FENCED_RETRIES = 2
"""How often one request acquires a partition again after another service acquired it."""


class KafkaTransactor:
    """Implements `penstock.api.ingest.atomic.Transactor`. Producers are created on first use."""

    def __init__(
        self, kafka: KafkaSettings, producer: ProducerSettings, settings: IngestSettings, admin: Admin
    ) -> None:
        self._kafka = kafka
        self._admin = admin
        self._settings = settings
        self._producer = producer.model_copy(update={"linger_ms": 0})
        self._name = f"{settings.idempotency_topic}-atomic-{uuid.uuid4().hex[:12]}"
        self._idle: list[Producer] = []
        self._slots = asyncio.Semaphore(settings.atomic_producers)
        self._opened = 0  # producers of `?atomic=true`, for the number in the next transactional id
        self._partitions: list[IdempotencyPartition] | None = None
        self._opening = asyncio.Lock()
        self._running: set[asyncio.Task[object]] = set()

    def __repr__(self) -> str:
        return f"KafkaTransactor({self._opened} producers, partitions={self._partitions})"

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> Sequence[Outcome]:
        """See `penstock.api.ingest.atomic.Transactor`."""
        return await self._await_transaction(self._store_atomically(records))

    async def send_keyed(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse
    ) -> tuple[StoredResponse, bool]:
        """See `penstock.api.ingest.atomic.Transactor`."""
        return await self._await_transaction(self._store_with_key(key, records, make_response))

    async def close(self) -> None:
        """Wait for the transactions in progress, and close every producer."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.ack_timeout_ms / 1000)
        closing = [producer.close() for producer in self._idle]
        closing += [partition.close() for partition in self._partitions or []]
        await asyncio.gather(*closing)

    async def _await_transaction(self, work: Awaitable[T]) -> T:
        """Return the result of a transaction. Raises KafkaTimeout after `ack_timeout_ms`.

        The transaction completes even if its caller is cancelled.
        """
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._transaction_ended)
        try:
            async with asyncio.timeout(self._settings.ack_timeout_ms / 1000):
                return await asyncio.shield(task)
        except TimeoutError:
            timeout = KafkaTimeout(f"not committed within ack_timeout_ms={self._settings.ack_timeout_ms}")
            timeout.maybe_written = True
            raise timeout from None

    def _transaction_ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it as never retrieved

    async def _store_atomically(self, records: Sequence[ProducerRecord]) -> Sequence[Outcome]:
        async with self._slots:
            producer = self._idle.pop() if self._idle else await self._new_producer()
            try:
                result = await send_in_transaction(producer, records)
            except BaseException:
                await producer.close(timeout_ms=self._kafka.request_timeout_ms)
                raise
            self._idle.append(producer)
            if isinstance(result, PenstockError):
                raise result
            return result

    async def _new_producer(self) -> Producer:
        self._opened += 1
        return await open_producer(self._kafka, self._producer, f"{self._name}-{self._opened}")

    async def _store_with_key(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse
    ) -> tuple[StoredResponse, bool]:
        partitions = await self._key_partitions()
        partition = partitions[int.from_bytes(key.digest[:8], "big") % len(partitions)]
        for _ in range(FENCED_RETRIES):
            try:
                return await partition.store(key, records, make_response)
            except ProducerFenced as e:
                if e.maybe_written:
                    raise
                log.warning("another service acquired the partition of keys", partition=partition.number)
        return await partition.store(key, records, make_response)

    async def _key_partitions(self) -> list[IdempotencyPartition]:
        async with self._opening:
            if self._partitions is None:
                settings = self._settings
                topic = settings.idempotency_topic
                ttl_ms = settings.idempotency_ttl_ms
                configs = {"retention.ms": str(ttl_ms), "segment.ms": str(max(60_000, ttl_ms // SEGMENTS))}
                new = NewTopic(topic, settings.idempotency_partitions, configs=configs)
                await self._admin.create_topics([new], exist_ok=True)
                description = (await self._admin.describe_topics([topic]))[topic]
                self._partitions = [
                    IdempotencyPartition(self._kafka, self._admin, settings, p.partition, self._open_owner)
                    for p in description.partitions
                ]
            return self._partitions

    async def _open_owner(self, number: int) -> Producer:
        return await open_producer(self._kafka, self._producer, f"{self._settings.idempotency_topic}-{number}")


async def open_producer(kafka: KafkaSettings, settings: ProducerSettings, transactional_id: str) -> Producer:
    """Return a producer that owns the transactional id. The previous owner is fenced."""
    producer = Producer(kafka, settings.model_copy(update={"transactional_id": transactional_id}))
    await producer.start()
    try:
        await producer.init_transactions()
    except BaseException:
        await producer.close(timeout_ms=kafka.request_timeout_ms)
        raise
    return producer
