"""The producer: records in, acknowledgements out, with the Java producer's names, defaults and guarantees.

    async with Producer("localhost:9092") as producer:
        delivery = await producer.send("clicks", b"{}", key=b"ann")
        metadata = await delivery

`send` suspends only where it must: until the topic's metadata is there, and while the buffer is full. What it appends
to is sent by the `Sender` beside it; see accumulator.py for when, and sender.py for what an answer means.

A record whose delivery has timed out may still be written if its request was out; the error says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from time import time_ns
from typing import Any, Self, overload

from prometheus_client import CollectorRegistry

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer.accumulator import RecordAccumulator
from penstock.shared.clients.producer.batch import Callback, OnDelivery
from penstock.shared.clients.producer.buffer_memory import BufferMemory
from penstock.shared.clients.producer.bulk import NO_HEADERS, ColumnBulk, bulk_of
from penstock.shared.clients.producer.checks import NO_VALUE, is_callback, record_of
from penstock.shared.clients.producer.delivery import Deliveries, Delivery
from penstock.shared.clients.producer.held_up_share import HeldUpShare
from penstock.shared.clients.producer.intake import Intake, UntilClosed
from penstock.shared.clients.producer.interceptors import Interceptors, ProducerInterceptor
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.partitioner import Partitioner
from penstock.shared.clients.producer.routing import RoutedTopic, Routes
from penstock.shared.clients.producer.sender import Sender
from penstock.shared.clients.producer.settings import ProducerSettings, with_timeouts_that_fit
from penstock.shared.clients.producer.transactional import TransactionalCalls
from penstock.shared.clients.producer.transactions import Transaction, TxnState
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import IllegalState, SendCancelled
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import AnyHeaders, ProducerRecord, RecordMetadata
from penstock.shared.common.serialization import Serializer, bytes_serializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import check_topic_name

log = get_logger(__name__)


class Producer(TransactionalCalls, Intake):
    """Sends records; use it from one event loop, in `async with` or between `start` and `close`."""

    def __init__(
        self,
        kafka: KafkaSettings | str,
        settings: ProducerSettings | None = None,
        *,
        key_serializer: Serializer = bytes_serializer,
        value_serializer: Serializer = bytes_serializer,
        interceptors: Sequence[ProducerInterceptor] = (),
        partitioner: Partitioner | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`kafka` says where the brokers are: settings, or bootstrap servers as text.

        ConfigError names a setting that is wrong.
        """
        kafka = KafkaSettings.of(kafka)
        self._settings = settings = with_timeouts_that_fit(kafka, ProducerSettings.given(settings))
        self._connection = Connection(kafka)
        self._key_serializer, self._value_serializer = key_serializer, value_serializer
        self._interceptors = Interceptors(interceptors)
        self._memory = BufferMemory(settings.buffer_memory)
        self._metrics = ProducerMetrics(
            registry,
            self._connection.client_id,
            SYSTEM_CLOCK.monotonic_ms,
            self._memory,
            window_ms=settings.metrics_sample_window_ms,
            windows=settings.metrics_num_samples,
        )
        self._accumulator = RecordAccumulator(settings)
        self._transaction = Transaction(settings.transactional_id) if settings.transactional_id is not None else None
        self._sender = Sender(
            self._connection, self._accumulator, self._memory, settings, self._transaction, self._metrics, SYSTEM_CLOCK
        )
        self._held_up = HeldUpShare(self._accumulator, self._memory, SYSTEM_CLOCK.monotonic_ms, self._sender.is_away)
        self._state = "new"
        self._until_closed = UntilClosed()
        self._closed = asyncio.Event()
        self._close_deadline: asyncio.Timeout | None = None
        self._routes = Routes(self._connection, self._accumulator, settings, partitioner, self._sender.is_slow)
        # Topics whose records may go straight into an open batch; empty while something else is to be done first.
        self._direct: dict[str, RoutedTopic] = {}
        plain = key_serializer is bytes_serializer and value_serializer is bytes_serializer
        self._may_be_direct = (
            plain and not interceptors and partitioner is None and not settings.partitioner_ignore_keys
        )

    def __repr__(self) -> str:
        return f"<Producer {self._state}, {self._connection!r}, {self._sender!r}>"

    async def start(self) -> None:
        """Connect; BrokerNotAvailable with the address within `request_timeout_ms`, AuthenticationFailed at once."""
        if self._state != "new":
            raise IllegalState(f"the producer is {self._state}; make a new one")
        await self._connection.open()
        self._connection.on_metadata(self._metadata_updated)
        self._state = "open"
        self._sender.start(self._sender_broke)
        log.info("producer open", client_id=self._connection.client_id)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Send what is buffered for up to `timeout_ms` (None: as long as it takes), end the rest with IllegalState.

        An open transaction is aborted. Calls that wait for metadata or buffer memory end in IllegalState at once. A
        second call waits for the first, and cuts it short where its own `timeout_ms` passes before.
        """
        if self._state == "closed":
            self._close_within(timeout_ms)
            await self._closed.wait()
            return
        if self._state == "new":
            self._state = "closed"
            self._metrics.close()
            self._closed.set()
            return
        broken, self._state = self._state == "broken", "closed"
        self._end_waits()
        try:
            async with asyncio.timeout(None) as self._close_deadline:
                self._close_within(timeout_ms)
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
            self._close_deadline = None
            try:
                await self._sender.close()
                error = IllegalState("the producer was closed before the record was acknowledged")
                self._sender.fail_all(error, out=True)
                await self._connection.close()
            finally:
                self._metrics.close()
                self._closed.set()
                log.info("producer closed", client_id=self._connection.client_id)

    def _close_within(self, timeout_ms: float | None) -> None:
        deadline = self._close_deadline
        if deadline is None or timeout_ms is None or deadline.expired():
            return
        when, sooner = deadline.when(), asyncio.get_running_loop().time() + timeout_ms / 1000
        if when is None or sooner < when:
            deadline.reschedule(sooner)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @overload
    async def send(self, record: ProducerRecord[Any, Any], /, *, on_delivery: OnDelivery | None = None) -> Delivery: ...

    @overload
    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: AnyHeaders = (),
        partition: int | None = None,
        timestamp: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery: ...

    async def send(
        self,
        topic: str | ProducerRecord[Any, Any],
        value: Any = NO_VALUE,
        *,
        key: Any = None,
        headers: AnyHeaders = (),
        partition: int | None = None,
        timestamp: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Take a record, given whole or in its parts; `timestamp` is in ms since the epoch, by default now.

        Raises before anything is enqueued: SerializationError, RecordTooLarge, InvalidTimestamp, DataError (no number
        of a partition), UnknownTopicOrPartition (not known within `max_block_ms`), BufferExhausted, IllegalState
        (closed, no open transaction), TransactionAborted, ProducerFenced, TypeError (`on_delivery` cannot be called, or
        is async). A transaction whose record was refused or taken back can only be aborted.
        `on_delivery(metadata, None)` or `(None, error)` is called once, on the event loop; not where this raises.
        """
        # A call, a property or an object here is felt.
        try:
            known, transaction = self._direct.get(topic), self._transaction  # type: ignore[arg-type]
            if (
                known is not None
                and partition is None
                and not headers
                and (transaction is None or transaction.state is TxnState.IN_TRANSACTION)
                and (on_delivery is None or is_callback(on_delivery))
            ):
                queue = known.sticky_queue if key is None else known.by_key.get(key) or known.for_key(key)
                if queue is not None and (batch := queue.open) is not None:
                    at = time_ns() // 1_000_000 if timestamp is None else timestamp
                    index = batch.count
                    if type(at) is int and at >= 0 and batch.append(index, at, key, value, NO_HEADERS) is not None:
                        batch.count = index + 1
                        key_size, value_size = -1 if key is None else len(key), -1 if value is None else len(value)
                        if on_delivery is not None:
                            batch.callbacks.append(Callback(index, at, key_size, value_size, on_delivery))
                        return Delivery(batch, index, at, key_size, value_size)
        except (TypeError, OverflowError):
            pass  # not bytes, no timestamp, or a record that has no hash: the long way says so
        record = record_of(topic, value, key, headers, partition, timestamp)
        return await self._take(record, on_delivery)

    @overload
    async def send_and_wait(
        self, record: ProducerRecord[Any, Any], /, *, on_delivery: OnDelivery | None = None
    ) -> RecordMetadata: ...

    @overload
    async def send_and_wait(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: AnyHeaders = (),
        partition: int | None = None,
        timestamp: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> RecordMetadata: ...

    async def send_and_wait(self, topic: Any, value: Any = NO_VALUE, **rest: Any) -> RecordMetadata:
        """Take a record as `send` does, and wait until it is acknowledged. Raises what `send` raises, or what awaiting
        its delivery raises.

        One record after the other: each waits for `linger_ms` and the broker. `send` and `send_many` do not wait.
        """
        return await (await self.send(topic, value, **rest))

    async def send_many(self, records: Iterable[ProducerRecord[Any, Any]]) -> Deliveries:
        """Take many records, in order; the order of each partition is theirs.

        What would make `send` raise for one record is that record's result instead, and makes a transaction abortable.
        Once the buffer has stayed full for `max_block_ms`, all that follow end in BufferExhausted at once; a topic's
        unknown partitions are waited for once. Raises IllegalState where the producer is closed or has no open
        transaction, the transaction's error, and TypeError at what is no ProducerRecord: the records before it are then
        taken back where they are not under way.
        """
        self._check_open()
        bulk = bulk_of(records, time_ns() // 1_000_000)
        try:
            while len(bulk) < len(bulk.records):
                if isinstance(bulk, ColumnBulk) and len(bulk) == bulk.stop:
                    await self._take_columns(bulk)
                    continue
                record = bulk.fill(self._direct)
                if len(bulk) < bulk.stop:
                    await self._take_one(bulk, record)
        except BaseException:
            bulk.deliveries().cancel()  # nobody will have them
            raise
        if bulk.refusals:
            log.warning("records rejected", records=bulk.refusals, reason=str(bulk.first_refusal))
        return bulk.deliveries()

    async def flush(self) -> None:
        """Send what is buffered without lingering and wait until the fate of all of it is known."""
        self._check_usable()
        await self._flush()

    def abort_pending(self) -> int:
        """End every record that is not in a request with SendCancelled; gives how many batches that were.

        A transaction that loses records so can only be aborted.
        """
        error = SendCancelled("abort_pending was called before the record was acknowledged")
        failed = self._sender.fail_all(error, out=False)
        if self._transaction is not None and failed:
            self._sender.fail_transaction(error)
        return failed

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partitions, ascending.

        Raises UnknownTopicOrPartition after `max_block_ms`, InvalidTopic at once, IllegalState once it is closed.
        """
        self._check_usable()
        check_topic_name(topic)
        async with self._until_closed("partitions_for waited for metadata"):
            return list(await self._connection.wait_for_topic(topic, self._settings.max_block_ms))

    def metrics(self) -> dict[str, float]:
        """By the Java producer's names: totals since the start, what is buffered and in flight now, rates (a second),
        averages and maxima (bytes, ms) of the last `metrics_num_samples` windows of `metrics_sample_window_ms`.
        """
        return {
            **self._metrics.figures(),
            "requests_in_flight": float(self._sender.requests),
            "buffer_available_bytes": float(self._memory.available),
            "buffer_waiting": float(self._memory.waiting + self._held_up.waiting),
            "batches_incomplete": float(len(self._accumulator.incomplete)),
        }

    async def _flush(self) -> None:
        self._accumulator.flushes += 1
        self._sender.wake()
        try:
            for batch in list(self._accumulator.incomplete):
                await batch.wait_all()
        finally:
            self._accumulator.flushes -= 1

    def _end_waits(self) -> None:
        self._direct = {}
        self._until_closed.end()
        self._memory.close()
        self._held_up.close()

    def _metadata_updated(self) -> None:
        self._direct = {}
        self._routes.forget_idle(SYSTEM_CLOCK.monotonic_ms())
        self._sender.wake()

    def _sender_broke(self, error: Exception) -> None:
        log.error("the sender ended", client_id=self._connection.client_id, exc_info=error)
        self._state = "broken"
        self._end_waits()
        self._sender.fail_all(IllegalState(f"the producer's sender ended: {error!r}"), out=True)

    def _check_usable(self) -> None:
        if self._state != "open":
            raise IllegalState(f"the producer is {self._state}")

    def _check_open(self) -> None:
        if self._state != "open":
            raise IllegalState(f"the producer is {self._state}")
        if self._transaction is not None:
            self._transaction.check_open("send")
