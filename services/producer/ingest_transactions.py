"""Transactions of ingest: those of `?atomic=true`, and those with an Idempotency-Key.

A key belongs to one partition of the topic of keys. The producer with the transactional id
`<idempotency_topic>-<partition>` owns that partition. A new owner fences the previous owner and ends its open
transaction (`init_transactions`). Then it reads the partition to its end, so it knows every stored key. Two services
never both store the same key: the commit of the fenced one is rejected. The same holds for a service and a zombie
process of it.
"""

from __future__ import annotations

import asyncio
import math
import uuid
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.api.ingest.atomic import IdempotencyKey, MakeResponse, StoredResponse
from penstock.api.ingest.result import Outcome
from penstock.api.settings import IngestSettings
from penstock.services.producer.stored_keys import StoredKeys, encode_stored_key
from penstock.shared.clients.admin import Admin, NewTopic, describe_configs_if_authorized
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.producer.settings import IN_FLIGHT_MAX_FOR_IDEMPOTENCE
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    AuthorizationFailed,
    FatalError,
    IllegalState,
    InvalidRequest,
    KafkaTimeout,
    PenstockError,
    ProducerFenced,
    SchemaMismatch,
    TransactionAborted,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)
T = TypeVar("T")

POLL_MS = 1_000
CLOSE_MS = 10_000
WAIT_SHARE = 0.5
"""The share of the time to close in which the transactions in progress may end."""

TURN_MS = 200
TURN_MAX_MS = 2_000
"""How long a service leaves a partition of keys to the one that has fenced it. Otherwise two services with concurrent
requests fence each other before either commits. The time doubles if no key was stored in it, and else is halved."""

SHUTTING_DOWN = "the service is shutting down"

SEGMENTS = 8
"""The approximate number of segments of the topic of keys. Kafka deletes expired records by segment."""


class KafkaTransactor:
    """Implements `penstock.api.ingest.atomic.Transactor`. Producers are created on first use."""

    def __init__(
        self, kafka: KafkaSettings, producer: ProducerSettings, settings: IngestSettings, admin: Admin
    ) -> None:
        self._kafka = kafka
        self._admin = admin
        self._settings = settings
        # The settings of all other requests may switch idempotence off, which transactions need.
        in_flight = min(producer.max_in_flight_requests_per_connection, IN_FLIGHT_MAX_FOR_IDEMPOTENCE)
        self._producer = producer.model_copy(
            update={
                "linger_ms": 0,
                "acks": "all",
                "enable_idempotence": True,
                "retries": max(1, producer.retries),
                "max_in_flight_requests_per_connection": in_flight,
            }
        )
        self._name = f"{settings.idempotency_topic}-atomic-{uuid.uuid4().hex[:12]}"
        # `close` closes these: every producer that was started.
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._idle: list[Producer] = []
        self._slots = asyncio.Semaphore(settings.atomic_producers)
        # This counts the producers of `?atomic=true`. The count is part of the next transactional id.
        self._opened = 0
        self._partitions: list[KeyedTransactions] | None = None
        self._opening = asyncio.Lock()
        self._running: set[asyncio.Task[object]] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"KafkaTransactor({self._opened} producers, partitions={self._partitions})"

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> Sequence[Outcome]:
        """See `penstock.api.ingest.atomic.Transactor`."""
        return await self._await_transaction(lambda begun: self._store_atomically(records, begun))

    async def send_keyed(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse
    ) -> tuple[StoredResponse, bool]:
        """See `penstock.api.ingest.atomic.Transactor`."""
        return await self._await_transaction(lambda begun: self._store_with_key(key, records, make_response, begun))

    async def close(self, timeout_ms: float) -> None:
        """Close every producer within `timeout_ms`.

        The transactions in progress may end within a share of this time. Those that do not are cancelled: they are
        aborted unless their commit was requested already. Later transactions are rejected.
        """
        self._is_closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_ms * WAIT_SHARE / 1000)
        # A transaction that went on could still open a producer, which nobody would close.
        running = list(self._running)
        for task in running:
            task.cancel()
        left_ms = max(0.0, deadline - loop.time()) * 1000
        await asyncio.gather(*(producer.close(left_ms) for producer in list(self._producers)))
        if running:
            await asyncio.wait(running, timeout=max(0.0, deadline - loop.time()))

    async def _await_transaction(self, work: Callable[[asyncio.Event], Awaitable[T]]) -> T:
        """Return the result of a transaction.

        Raises KafkaTimeout after `ack_timeout_ms`, and IllegalState after `close`, also if it cancels the transaction.

        `work` sets its event when the transaction begins. A transaction that has begun continues even if the caller is
        cancelled or the time is over. One that still waits for its turn is cancelled.
        """
        if self._is_closed:
            raise IllegalState(SHUTTING_DOWN)
        begun = asyncio.Event()
        task = asyncio.ensure_future(work(begun))
        self._running.add(task)
        task.add_done_callback(self._transaction_ended)
        try:
            async with asyncio.timeout(self._settings.ack_timeout_ms / 1000):
                return await asyncio.shield(task)
        except TimeoutError:
            timeout = KafkaTimeout(f"not committed within ack_timeout_ms={self._settings.ack_timeout_ms}")
            timeout.maybe_written = begun.is_set()
            raise timeout from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # If the caller is not cancelled, `close` has cancelled the transaction.
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            closed = IllegalState(SHUTTING_DOWN)
            closed.maybe_written = begun.is_set()
            raise closed from None
        except PenstockError as e:
            if not begun.is_set():
                # Nothing was sent yet, whatever the default of the error's class is.
                e.maybe_written = False
            raise
        finally:
            if not begun.is_set():
                task.cancel()

    def _transaction_ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Retrieve the exception, or asyncio logs that nobody did.
            task.exception()

    async def _store_atomically(self, records: Sequence[ProducerRecord], begun: asyncio.Event) -> Sequence[Outcome]:
        async with self._slots:
            if self._idle:
                producer = self._idle.pop()
            else:
                self._opened += 1
                producer = await self._open_producer(f"{self._name}-{self._opened}")
            begun.set()
            try:
                result = await send_in_transaction(producer, records)
            except BaseException:
                await producer.close(timeout_ms=self._kafka.request_timeout_ms)
                raise
            self._idle.append(producer)
            if isinstance(result, PenstockError):
                raise result
            return result

    async def _store_with_key(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse, begun: asyncio.Event
    ) -> tuple[StoredResponse, bool]:
        partitions = await self._key_partitions()
        partition = partitions[int.from_bytes(key.digest[:8], "big") % len(partitions)]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.ack_timeout_ms / 1000
        maybe_written = False
        # If another service acquires the partition of keys meanwhile, the request is repeated, also if its commit was
        # fenced: each attempt looks the key up before it sends the records.
        while True:
            try:
                return await partition.store(key, records, make_response, begun, maybe_written)
            except ProducerFenced as e:
                maybe_written = e.maybe_written
                if loop.time() >= deadline:
                    raise
                log.warning("another service acquired the partition of keys", partition=partition.number)

    async def _key_partitions(self) -> list[KeyedTransactions]:
        async with self._opening:
            if self._partitions is None:
                settings = self._settings
                topic = settings.idempotency_topic
                ttl_ms = settings.idempotency_ttl_ms
                configs = {"retention.ms": str(ttl_ms), "segment.ms": str(max(60_000, ttl_ms // SEGMENTS))}
                new = NewTopic(topic, settings.idempotency_partitions, configs=configs)
                await self._admin.create_topics([new], exist_ok=True)
                await self._raise_retention()
                description = (await self._admin.describe_topics([topic]))[topic]
                self._partitions = [
                    KeyedTransactions(self._kafka, self._admin, settings, p.partition, self._open_producer)
                    for p in description.partitions
                ]
            return self._partitions

    async def _raise_retention(self) -> None:
        """Raise the retention of an existing topic of keys to `idempotency_ttl_ms`. A longer retention remains."""
        topic = self._settings.idempotency_topic
        ttl_ms = self._settings.idempotency_ttl_ms
        retention_ms = int((await describe_configs_if_authorized(self._admin, topic)).get("retention.ms") or -1)
        if not 0 <= retention_ms < ttl_ms:
            return
        try:
            await self._admin.alter_configs(topic, {"retention.ms": str(ttl_ms)})
        except (AuthorizationFailed, InvalidRequest) as e:
            log.error(
                "Kafka deletes keys before idempotency_ttl_ms: repeated requests may be stored twice",
                topic=topic,
                retention_ms=retention_ms,
                idempotency_ttl_ms=ttl_ms,
                reason=str(e),
            )

    async def _open_producer(self, transactional_id: str) -> Producer:
        """Return a producer that owns the transactional id. The previous owner is fenced."""
        producer = Producer(self._kafka, self._producer.model_copy(update={"transactional_id": transactional_id}))
        await producer.start()
        self._producers.add(producer)
        try:
            await producer.init_transactions()
        except BaseException:
            await producer.close(timeout_ms=self._kafka.request_timeout_ms)
            raise
        return producer


class KeyedTransactions:
    """The transactions with the Idempotency-Keys of the partition `number`, and the ownership of this partition.

    `store` runs one transaction at a time, and first acquires the ownership if necessary. If a transaction's outcome is
    unknown, the ownership is released. The next request then finds out whether the key is stored.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        admin: Admin,
        settings: IngestSettings,
        number: int,
        open_producer: Callable[[str], Awaitable[Producer]],
    ) -> None:
        self.number = number
        self._kafka = kafka
        self._admin = admin
        self._open_producer = open_producer
        self._tp = TopicPartition(settings.idempotency_topic, number)
        self._keys = StoredKeys(settings.idempotency_ttl_ms, settings.max_idempotency_bytes)
        self._lock = asyncio.Lock()
        self._producer: Producer | None = None
        self._turn_ms: float = TURN_MS
        """How long another service may keep the partition before this one acquires it again."""
        self._owned_at = -math.inf
        """When this service last owned the partition for certain, in seconds of the loop's clock. -inf before the
        first acquisition, and after this service has given up the partition itself."""
        self._read_to = 0
        """The offset up to which the partition was read."""

    def __repr__(self) -> str:
        return f"KeyedTransactions({self.number}, {'owned' if self._producer else 'not owned'}, {self._keys})"

    async def store(
        self,
        key: IdempotencyKey,
        records: Sequence[ProducerRecord],
        make_response: MakeResponse,
        begun: asyncio.Event,
        maybe_written: bool,
    ) -> tuple[StoredResponse, bool]:
        """See `Transactor.send_keyed`. Sets `begun` when the request's turn has come. `maybe_written` is whether an
        earlier attempt of the request may have stored it.

        Raises ProducerFenced if another service has acquired the partition of keys.
        """
        async with self._lock:
            if self._producer is None:
                await self._wait_for_turn()
            begun.set()
            try:
                producer = self._producer or await self._acquire_ownership()
            except PenstockError as e:
                # The key is not looked up, so the result of an earlier attempt stays unknown.
                e.maybe_written = maybe_written
                raise
            now_ms = SYSTEM_CLOCK.now_ms()
            known = self._keys.get(key, now_ms)
            if known is not None:
                # A key that is known after a fenced commit is that of this request.
                return known, not maybe_written
            self._keys.check_room(now_ms)
            response: StoredResponse | None = None
            value = b""

            def key_record(outcomes: Sequence[Outcome]) -> ProducerRecord:
                nonlocal response, value
                response = make_response(outcomes)
                value = encode_stored_key(key.fingerprint, response, now_ms)
                return ProducerRecord(self._tp.topic, value, key.digest, (), self.number, now_ms)

            try:
                result = await send_in_transaction(producer, records, key_record)
            except BaseException as e:
                if not isinstance(e, ProducerFenced):
                    self._owned_at = -math.inf
                await self._release_ownership()
                raise
            if isinstance(result, PenstockError):
                raise result
            assert response is not None, "a committed transaction has the key's record"
            self._keys.put(key.digest, value)
            self._owned_at = asyncio.get_running_loop().time()
            return response, False

    async def _wait_for_turn(self) -> None:
        """Wait until the service that has fenced this one has had its turn."""
        await asyncio.sleep(max(0.0, self._owned_at + self._turn_ms / 1000 - asyncio.get_running_loop().time()))

    async def _acquire_ownership(self) -> Producer:
        """Acquire the ownership of the partition of keys, and read the partition to its end.

        Returns the producer of the transactions.
        """
        known = len(self._keys)
        # This ends an open transaction of the previous owner. So reading then shows whether its key is stored.
        producer = await self._open_producer(f"{self._tp.topic}-{self.number}")
        try:
            await self._read_keys_to_end()
        except BaseException:
            await producer.close(timeout_ms=CLOSE_MS)
            raise
        if len(self._keys) > known:
            self._turn_ms = max(TURN_MS, self._turn_ms / 2)
        elif math.isfinite(self._owned_at):
            self._turn_ms = min(self._turn_ms * 2, TURN_MAX_MS)
        self._owned_at = asyncio.get_running_loop().time()
        self._producer = producer
        return producer

    async def _release_ownership(self) -> None:
        """Close the producer of the transactions. The next request acquires the ownership again."""
        producer = self._producer
        self._producer = None
        if producer is not None:
            await producer.close(timeout_ms=CLOSE_MS)

    async def _read_keys_to_end(self) -> None:
        """Read the keys up to the end. No transaction is open, since this service now owns the transactional id."""
        tp = self._tp
        end = (await self._admin.list_offsets({tp: "latest"}))[tp]
        start = max(self._read_to, (await self._admin.list_offsets({tp: "earliest"}))[tp])
        if start >= end:
            return
        settings = ConsumerSettings(
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            commit_strategy="none",
            max_poll_records=None,
        )
        async with Consumer(self._kafka, settings) as consumer:
            consumer.assign([tp])
            consumer.seek(tp, start)
            while (position := await consumer.position(tp)) < end:
                for columns in (await consumer.poll(POLL_MS)).values():
                    for offset, digest, value in zip(columns.offsets, columns.keys, columns.values, strict=True):
                        if digest is not None and value is not None:
                            try:
                                self._keys.put(digest, value)
                            except SchemaMismatch as e:
                                reason = f"{tp} at offset {offset}: {e}"
                                log.error("the keys cannot be read", reason=reason)
                                raise SchemaMismatch(reason) from None
            self._read_to = position


async def send_in_transaction(
    producer: Producer,
    records: Sequence[ProducerRecord],
    last_record: Callable[[Sequence[Outcome]], ProducerRecord] | None = None,
) -> Sequence[Outcome] | PenstockError:
    """Commit `records` in one transaction, with one more record that `last_record` makes from their outcomes.

    Returns the outcomes of `records`, or the error if nothing was stored and the producer is still usable. Otherwise
    raises the error, and the producer must be closed. The error's `maybe_written` is true if the result of the commit
    is unknown.
    """
    result = await _try_transaction(producer, records, last_record)
    # The coordinator forgets a producer that is idle for `transactional.id.expiration.ms` (by default 7 days), and
    # rejects its next transaction. The abort has requested a new producer id (KIP-360).
    if isinstance(result, TransactionAborted):
        log.info("the transaction is repeated", reason=str(result))
        result = await _try_transaction(producer, records, last_record)
    return result


async def _try_transaction(
    producer: Producer,
    records: Sequence[ProducerRecord],
    last_record: Callable[[Sequence[Outcome]], ProducerRecord] | None,
) -> Sequence[Outcome] | PenstockError:
    try:
        await producer.begin_transaction()
    except PenstockError as e:
        e.maybe_written = False
        raise
    try:
        outcomes = await (await producer.send_many(list(records)))
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            # A record's own error is also the reason why other records of the transaction fail.
            raise next((failure for failure in failures if not isinstance(failure, TransactionAborted)), failures[0])
        if last_record is not None:
            (outcome,) = await (await producer.send_many([last_record(outcomes)]))
            if isinstance(outcome, PenstockError):
                raise outcome
    except PenstockError as e:
        e.maybe_written = False
        if isinstance(e, FatalError):
            raise
        return await _abort_transaction(producer, e)
    try:
        await producer.commit_transaction()
    except TransactionAborted as e:
        e.maybe_written = False
        return await _abort_transaction(producer, e)
    except PenstockError as e:
        e.maybe_written = True
        raise
    return outcomes


async def _abort_transaction(producer: Producer, cause: PenstockError) -> PenstockError:
    """Abort the transaction and return `cause`.

    If the abort fails, raises `cause`, since the producer is then unusable.
    """
    try:
        await producer.abort_transaction()
    except PenstockError as e:
        log.warning("abort failed", reason=str(e), cause=str(cause))
        raise cause from e
    return cause
