"""The producer: records in, acknowledgements out, with the Java producer's names, defaults and guarantees.

    async with Producer(KafkaSettings(bootstrap_servers="localhost:9092")) as producer:
        delivery = await producer.send("clicks", b"{}", key=b"ann")
        metadata = await delivery

`send` suspends only where it must: until the topic's metadata is there, and while the buffer is full. What it appends
to is sent by the `Sender` beside it; see accumulator.py for when, and sender.py for what an answer means.

A record whose delivery has timed out may still be written if its request was out; the error says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Self

from prometheus_client import CollectorRegistry

from shared.clients.connection import Connection, record_size
from shared.clients.producer.accumulator import RecordAccumulator
from shared.clients.producer.batch import Batch, OnDelivery
from shared.clients.producer.buffer_memory import BufferMemory
from shared.clients.producer.delivery import Deliveries, Delivery
from shared.clients.producer.interceptors import Interceptors, ProducerInterceptor
from shared.clients.producer.metrics import ProducerMetrics
from shared.clients.producer.partitioner import Partitioner
from shared.clients.producer.sender import Sender
from shared.clients.producer.settings import ProducerSettings
from shared.clients.producer.transactional import TransactionalCalls
from shared.clients.producer.transactions import Transaction
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import (
    BufferExhausted,
    ConfigError,
    IllegalState,
    InvalidTimestamp,
    PenstockError,
    RecordTooLarge,
    UnknownTopicOrPartition,
)
from shared.common.log import get_logger
from shared.common.records import Headers, ProducerRecord, TopicPartition
from shared.common.serialization import Serializer, bytes_serializer
from shared.common.settings import KafkaSettings

log = get_logger(__name__)

YIELD_EVERY = 2_048
"""Records that `send_many` takes between two turns of the event loop, so that sending goes on beside it."""


NO_HEADERS: list[tuple[str, bytes | None]] = []

_Fields = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]
"""Key, value, headers, and the most bytes they take."""


class _Topic:
    __slots__ = ("available", "numbers", "partitions")

    def __init__(self, topic: str, numbers: list[int], available: list[int]) -> None:
        self.numbers, self.available = numbers, available
        self.partitions = {number: TopicPartition(topic, number) for number in numbers}


class Producer(TransactionalCalls):
    """Sends records; use it from one event loop, in `async with` or between `start` and `close`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: ProducerSettings | None = None,
        *,
        key_serializer: Serializer = bytes_serializer,
        value_serializer: Serializer = bytes_serializer,
        interceptors: Sequence[ProducerInterceptor] = (),
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._settings = settings = _with_timeouts_that_fit(kafka, settings or ProducerSettings())
        self._connection = Connection(kafka)
        self._key_serializer, self._value_serializer = key_serializer, value_serializer
        self._interceptors = Interceptors(interceptors)
        self._metrics = ProducerMetrics(registry, self._connection.client_id)
        self._memory = BufferMemory(settings.buffer_memory)
        self._metrics.buffer_available.set(settings.buffer_memory)
        self._accumulator = RecordAccumulator(settings)
        self._partitioner = Partitioner(settings.batch_size)
        self._transaction = Transaction(settings.transactional_id) if settings.transactional_id is not None else None
        self._sender = Sender(
            self._connection,
            self._accumulator,
            self._memory,
            settings,
            self._transaction,
            self._interceptors,
            self._metrics,
            SYSTEM_CLOCK,
        )
        self._loop_task: asyncio.Task[None] | None = None
        self._state = "new"
        self._size_max = min(settings.max_request_size, settings.buffer_memory)
        self._topics: dict[str, _Topic] = {}
        self._topics_of: object = None

    def __repr__(self) -> str:
        return f"<Producer {self._state}, {self._connection!r}, {self._sender!r}>"

    async def start(self) -> None:
        """Connect; BrokerNotAvailable with the address within `request_timeout_ms`, AuthenticationFailed at once."""
        if self._state != "new":
            raise IllegalState(f"the producer is {self._state}; make a new one")
        await self._connection.open()
        self._state = "open"
        self._loop_task = asyncio.ensure_future(self._sender.main_loop())
        self._loop_task.add_done_callback(self._sender_ended)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Send what is buffered for up to `timeout_ms` (None: as long as it takes), end the rest with IllegalState.

        An open transaction is aborted. Sends that wait for buffer memory end in IllegalState.
        """
        if self._state not in ("open", "broken"):
            self._state = "closed"
            return
        broken, self._state = self._state == "broken", "closed"
        self._memory.close()
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if self._transaction is not None and not broken:
                    await self._abort_on_close()
                await self._flush()
        except TimeoutError:
            log.warning(
                "closed with records unsent",
                client_id=self._connection.client_id,
                batches=len(self._accumulator.incomplete),
            )
        finally:
            assert self._loop_task is not None
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            await self._sender.close()
            self._sender.fail_all(
                IllegalState("the producer was closed before the record was acknowledged"), in_flight=True
            )
            await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Take a record; `timestamp` is in ms since the epoch, by default now.

        Raises before anything is enqueued: SerializationError, RecordTooLarge, InvalidTimestamp,
        UnknownTopicOrPartition (not known within `max_block_ms`), BufferExhausted, IllegalState (closed, no open
        transaction), TransactionAborted, ProducerFenced. `on_delivery(metadata, None)` or `(None, error)` is called
        once, on the event loop.
        """
        record = ProducerRecord(topic, value, key, headers, partition, timestamp)
        self._check_open()
        taken = self._take_now(record, SYSTEM_CLOCK.monotonic_ms(), SYSTEM_CLOCK.now_ms())
        batch, index = taken or await self._take(record, self._deadline())
        if on_delivery is not None:
            batch.callbacks.append((index, on_delivery))
        return Delivery(batch, index)

    async def send_many(self, records: Iterable[ProducerRecord]) -> Deliveries:
        """Take many records, in order; the order of each partition is theirs.

        What would make `send` raise for one record is that record's result instead. Once the buffer has stayed full for
        `max_block_ms`, all that follow end in BufferExhausted at once. Raises IllegalState where the producer is closed
        or has no open transaction, and the transaction's error.
        """
        self._check_open()
        places: list[tuple[Batch, int] | Exception] = []
        exhausted: BufferExhausted | None = None
        unknown: dict[str, UnknownTopicOrPartition] = {}
        now_ms, wall_ms = SYSTEM_CLOCK.monotonic_ms(), SYSTEM_CLOCK.now_ms()
        for count, record in enumerate(records, 1):
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)
                self._check_open()
                now_ms, wall_ms = SYSTEM_CLOCK.monotonic_ms(), SYSTEM_CLOCK.now_ms()
            try:
                if exhausted is not None or record.topic in unknown:
                    raise exhausted or unknown[record.topic]
                places.append(self._take_now(record, now_ms, wall_ms) or await self._take(record, self._deadline()))
            except IllegalState:
                raise
            except BufferExhausted as e:
                places.append(exhausted := e)
            except UnknownTopicOrPartition as e:
                if record.partition is None:
                    unknown[record.topic] = e
                places.append(e)
            except PenstockError as e:
                places.append(e)
            if isinstance(places[-1], Exception):
                self._metrics.failed(record.topic, 1)
        return Deliveries(places)

    async def flush(self) -> None:
        """Send what is buffered without lingering and wait until the fate of all of it is known."""
        self._check_usable()
        await self._flush()

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partitions; UnknownTopicOrPartition after `max_block_ms`."""
        self._check_usable()
        return list(await self._connection.wait_for_topic(topic, self._settings.max_block_ms))

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and what is buffered and in flight now."""
        return {
            **self._metrics.totals,
            "buffer_available_bytes": float(self._memory.available),
            "buffer_waiting": float(self._memory.waiting),
            "batches_incomplete": float(len(self._accumulator.incomplete)),
        }

    async def _flush(self) -> None:
        self._accumulator.flushes += 1
        self._sender.wake()
        try:
            for batch in list(self._accumulator.incomplete):
                await batch.wait()
        finally:
            self._accumulator.flushes -= 1

    async def _take(self, record: ProducerRecord, deadline_ms: float) -> tuple[Batch, int]:
        """The way of a record that may have to wait."""
        self._check_open()
        if self._interceptors:
            record = self._interceptors.on_send(record)
        if self._known(record.topic) is None:
            await self._connection.wait_for_topic(record.topic, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        fields = self._serialize(record)
        tp = await self._choose(record, fields, deadline_ms)
        size = fields[3]
        if not self._memory.try_acquire(size):
            self._sender.wake()
            await self._memory.acquire(size, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
            try:
                self._check_open()
            except BaseException:
                self._memory.release(size)
                raise
        return self._append(record, tp, fields, SYSTEM_CLOCK.monotonic_ms(), SYSTEM_CLOCK.now_ms())

    def _take_now(self, record: ProducerRecord, now_ms: int, wall_ms: int) -> tuple[Batch, int] | None:
        """The way of a record that need not wait; None where it must."""
        known = self._known(record.topic)
        if known is None or self._interceptors:
            return None
        fields = self._serialize(record)
        tp = self._partition(record, fields, known)
        if tp is None or not self._memory.try_acquire(fields[3]):
            return None
        return self._append(record, tp, fields, now_ms, wall_ms)

    def _append(
        self, record: ProducerRecord, tp: TopicPartition, fields: _Fields, now_ms: int, wall_ms: int
    ) -> tuple[Batch, int]:
        key, value, headers, size = fields
        timestamp = wall_ms if record.timestamp is None else record.timestamp
        batch, news = self._accumulator.append(tp, key, value, headers, timestamp, now_ms)
        batch.memory += size
        if news:
            self._sender.wake()
        return batch, batch.count - 1

    def _serialize(self, record: ProducerRecord) -> _Fields:
        topic = record.topic
        key = self._key_serializer(topic, record.key)
        value = self._value_serializer(topic, record.value)
        headers = list(record.headers) if record.headers else NO_HEADERS
        size = record_size(key, value, headers)
        if size > self._size_max:
            limit = min(("max_request_size", "buffer_memory"), key=lambda name: getattr(self._settings, name))
            raise RecordTooLarge(f"topic {topic}: a record of {size} bytes; {limit}={self._size_max}")
        if record.timestamp is not None and record.timestamp < 0:
            raise InvalidTimestamp(f"topic {topic}: timestamp {record.timestamp} is below 0")
        return key, value, headers, size

    async def _choose(self, record: ProducerRecord, fields: _Fields, deadline_ms: float) -> TopicPartition:
        while True:
            known = self._known(record.topic)
            if known is not None and (tp := self._partition(record, fields, known)) is not None:
                return tp
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            if left_ms <= 0:
                raise UnknownTopicOrPartition(
                    f"topic {record.topic}, partition {record.partition}: "
                    f"the topic has {len(known.partitions) if known else 0} partitions"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_ms / 1000):
                    await self._connection.refresh_metadata()
                    await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)

    def _partition(self, record: ProducerRecord, fields: _Fields, known: _Topic) -> TopicPartition | None:
        partitions = known.partitions
        if record.partition is not None:
            return partitions.get(record.partition)
        key = fields[0]
        if key is not None:
            return partitions[self._partitioner.for_key(key, len(partitions))]
        return partitions[self._partitioner.sticky(record.topic, fields[3], known.available, known.numbers)]

    def _known(self, topic: str) -> _Topic | None:
        """A topic's partitions, kept until the metadata is another."""
        snapshot = self._connection.metadata_snapshot()
        if snapshot is not self._topics_of:
            self._topics, self._topics_of = {}, snapshot
        known = self._topics.get(topic)
        if known is None and (numbers := self._connection.partitions(topic)) is not None:
            known = self._topics[topic] = _Topic(topic, numbers, self._connection.available_partitions(topic))
        return known

    def _sender_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the sender ended", client_id=self._connection.client_id, exc_info=error)
            self._state = "broken"
            self._memory.close()
            self._sender.fail_all(IllegalState(f"the producer's sender ended: {error!r}"), in_flight=True)

    def _deadline(self) -> float:
        return SYSTEM_CLOCK.monotonic_ms() + self._settings.max_block_ms

    def _check_usable(self) -> None:
        if self._state != "open":
            raise IllegalState(f"the producer is {self._state}")

    def _check_open(self) -> None:
        if self._state != "open":
            raise IllegalState(f"the producer is {self._state}")
        if self._transaction is not None:
            self._transaction.check_open("send")


def _with_timeouts_that_fit(kafka: KafkaSettings, settings: ProducerSettings) -> ProducerSettings:
    least = settings.linger_ms + kafka.request_timeout_ms
    if settings.delivery_timeout_ms >= least:
        return settings
    if "delivery_timeout_ms" in settings.model_fields_set:
        raise ConfigError(
            f"delivery_timeout_ms={settings.delivery_timeout_ms} is below linger_ms + request_timeout_ms = {least}"
        )
    log.warning("delivery_timeout_ms raised to linger_ms + request_timeout_ms", delivery_timeout_ms=least)
    return settings.model_copy(update={"delivery_timeout_ms": least})
