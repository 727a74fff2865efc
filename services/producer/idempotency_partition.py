"""One partition of the topic of Idempotency-Keys, and its ownership (an edge).

`store` runs one transaction at a time. The first request acquires the ownership. If the outcome of a transaction is
unknown, the ownership is released. The next request acquires it again, which ends the transaction, and reads the
partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.api.ingest.atomic import IdempotencyKey, MakeResponse, StoredResponse
from penstock.api.ingest.result import Outcome
from penstock.api.settings import IngestSettings
from penstock.services.producer.idempotency_keys import StoredKeys, encode
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import FatalError, PenstockError, TransactionAborted
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)

POLL_MS = 1_000
CLOSE_MS = 10_000


class IdempotencyPartition:
    """A partition of Idempotency-Keys; `number` is the partition's number. See the module."""

    def __init__(
        self,
        kafka: KafkaSettings,
        admin: Admin,
        settings: IngestSettings,
        number: int,
        open_owner: Callable[[int], Awaitable[Producer]],
    ) -> None:
        self.number = number
        self._kafka = kafka
        self._admin = admin
        self._open_owner = open_owner
        self._tp = TopicPartition(settings.idempotency_topic, number)
        self._keys = StoredKeys(
            settings.idempotency_ttl_ms, settings.max_idempotency_keys, settings.max_idempotency_bytes
        )
        self._lock = asyncio.Lock()
        self._producer: Producer | None = None
        self._read_to = 0
        """The offset up to which the partition was read."""

    def __repr__(self) -> str:
        return f"IdempotencyPartition({self.number}, {'owned' if self._producer else 'not owned'}, {self._keys})"

    async def store(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse
    ) -> tuple[StoredResponse, bool]:
        """See `Transactor.send_keyed`. Raises ProducerFenced if the ownership was lost meanwhile."""
        async with self._lock:
            producer = self._producer or await self._acquire_ownership()
            now_ms = SYSTEM_CLOCK.now_ms()
            known = self._keys.get(key, now_ms)
            if known is not None:
                return known, True
            self._keys.check_room(now_ms)
            response: StoredResponse | None = None
            value = b""

            def key_record(outcomes: Sequence[Outcome]) -> ProducerRecord:
                nonlocal response, value
                response = make_response(outcomes)
                value = encode(key.fingerprint, response, now_ms)
                return ProducerRecord(self._tp.topic, value, key.digest, (), self.number, now_ms)

            try:
                result = await send_in_transaction(producer, records, key_record)
            except BaseException:
                await self._release_ownership()
                raise
            if isinstance(result, PenstockError):
                raise result
            assert response is not None, "a committed transaction has the key's record"
            self._keys.put(key.digest, value)
            return response, False

    async def close(self) -> None:
        """Release the ownership."""
        async with self._lock:
            await self._release_ownership()

    async def _acquire_ownership(self) -> Producer:
        """Acquire the ownership and read the partition. Returns the producer that owns the transactional id."""
        producer = await self._open_owner(self.number)
        try:
            await self._read_keys_to_end()
        except BaseException:
            await producer.close(timeout_ms=CLOSE_MS)
            raise
        self._producer = producer
        return producer

    async def _release_ownership(self) -> None:
        """Close the producer. The next request acquires the ownership again."""
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
                    for digest, value in zip(columns.keys, columns.values, strict=True):
                        if digest is not None and value is not None:
                            self._keys.put(digest, value)
            self._read_to = position


async def send_in_transaction(
    producer: Producer,
    records: Sequence[ProducerRecord],
    last_record: Callable[[Sequence[Outcome]], ProducerRecord] | None = None,
) -> Sequence[Outcome] | PenstockError:
    """Commit all records, and the one that `last_record` makes of their outcomes. There are three cases:

    1. The transaction is committed: returns the outcomes of `records`.
    2. Nothing was stored and the producer is still usable: returns the error.
    3. Otherwise the error is raised, and the producer must be closed. The error's `maybe_written` is true if the commit
       was requested and its result is unknown.
    """
    await producer.begin_transaction()
    try:
        outcomes = await (await producer.send_many(list(records)))
        failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if failure is not None:
            raise failure
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
    """Abort the transaction and return the cause. Raises it if the abort fails, since the producer is then unusable."""
    try:
        await producer.abort_transaction()
    except PenstockError as e:
        log.warning("abort failed", reason=str(e), cause=str(cause))
        raise cause from e
    return cause
