"""The way of a record that is not appended straight to an open batch: metadata, checks, partition, memory, a new batch.

A record that is refused on it, or whose `send` is cancelled, is counted and makes an open transaction abortable,
whether its error is raised (`send`) or is its result (`send_many`): a commit would leave it out without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from time import time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.shared.clients.connection import BatchRecord, Connection
from penstock.shared.clients.producer.accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.clients.producer.batch import Batch, Callback, OnDelivery
from penstock.shared.clients.producer.buffer_memory import BufferMemory
from penstock.shared.clients.producer.bulk import NO_HEADERS, Bulk, ColumnBulk
from penstock.shared.clients.producer.checks import (
    HeaderList,
    checked_callback,
    checked_headers,
    checked_partition,
    checked_size,
    checked_timestamp,
    serialized,
)
from penstock.shared.clients.producer.delivery import Delivery, size_of
from penstock.shared.clients.producer.held_up_share import HeldUpShare
from penstock.shared.clients.producer.interceptors import Interceptors
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.routing import RoutedTopic, Routes
from penstock.shared.clients.producer.sender import Sender
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transactions import Transaction, TxnState
from penstock.shared.common import compilation
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.compilation import loaded
from penstock.shared.common.errors import (
    BufferExhausted,
    FatalError,
    IllegalState,
    PenstockError,
    SendCancelled,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.serialization import Serializer
from penstock.shared.common.topic_names import check_topic_name

if TYPE_CHECKING:
    from penstock.shared.clients.producer.column_slices import ColumnSlice, Group

log = get_logger(__name__)

YIELD_EVERY_BATCHES = 32
"""New batches that sends may open before the event loop must have had a turn: a loop of sends starves nobody."""

UNLOADED: Any = object()


def _load_slices() -> ModuleType | None:
    if not compilation.IS_COMPILED:
        return None
    from penstock.shared.clients.producer import column_slices  # it loads numba, which takes half a second

    column_slices.compile_kernels()
    return column_slices


class UntilClosed:
    """Ends what waits, all of it and at once, when the producer is closed."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<UntilClosed {len(self._waits)} waiting>"

    @contextlib.asynccontextmanager
    async def __call__(self, what: str) -> AsyncIterator[None]:
        """Wait in this block; IllegalState with `what` from the moment of `end` on."""
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if not wait.expired():
                raise
            raise IllegalState(f"the producer was closed while {what}") from None

    def end(self) -> None:
        """End what waits now."""
        now = asyncio.get_running_loop().time()
        while self._waits:
            self._waits.pop().reschedule(now)


class Intake:
    """The part of `Producer` that takes records the long way."""

    _settings: ProducerSettings
    _connection: Connection
    _memory: BufferMemory
    _accumulator: RecordAccumulator
    _metrics: ProducerMetrics
    _sender: Sender
    _transaction: Transaction | None
    _held_up: HeldUpShare
    _routes: Routes
    _interceptors: Interceptors
    _key_serializer: Serializer
    _value_serializer: Serializer
    _until_closed: UntilClosed
    _direct: dict[str, RoutedTopic]
    _may_be_direct: bool
    _slices: Any = UNLOADED
    """column_slices.py, once columns were sent; None where it is not used."""
    _state: str

    def _check_open(self) -> None: ...

    async def _take_columns(self, bulk: ColumnBulk) -> None:
        """The next records of columns: by kernels, or left to be taken one by one where that does not do.

        One by one go records where there is no compiler, where something is to be done with each (serializers,
        interceptors, partitioners), where an earlier one was refused, and where one is invalid, too large, or for a
        partition that is not known: its own way says so, or waits for it.
        """
        at, columns = len(bulk), bulk.columns
        if self._slices is UNLOADED:
            self._slices = await loaded(_load_slices, "the encoding of records") if self._may_be_direct else None
            self._check_open()
        if self._slices is None or bulk.refusals:
            bulk.one_by_one(len(columns))
            return
        known, partition = self._known(columns.topic), columns.partition
        if known is None:
            bulk.one_by_one(at + 1)  # waits for the topic
            return
        limit = min(self._settings.max_request_size, self._settings.buffer_memory)
        part = self._slices.slice_of(columns, at, bulk.timestamp, limit)
        if part is None or (partition is not None and (type(partition) is not int or partition not in known.queues)):
            bulk.one_by_one(at + self._slices.SLICE_RECORDS)
            return
        if partition is not None:
            part.to_partition(known.queues[partition])
            await self._take_slice(bulk, part)
            return
        queues = [known.queues[number] for number in known.numbers]
        some_without_key = part.by_key(queues, partial(self._routes.spread, known))
        await self._take_slice(bulk, part)
        if some_without_key:
            self._routes.slice_taken(known)

    async def _take_slice(self, bulk: ColumnBulk, part: ColumnSlice) -> None:
        """Move a slice of columns into batches, one of each partition in turns.

        What ends a wait for memory is the result of every record that is left.
        """
        groups, topic = part.groups, bulk.columns.topic
        try:
            while groups:
                for group in groups:
                    await self._fill_batch(group)
                groups = [group for group in groups if group.left]
        except asyncio.CancelledError:
            cancelled = SendCancelled(f"topic {topic}: the send was cancelled")
            part.fail(cancelled)
            self._metrics.failed(topic, 1)
            self._fail_transaction(cancelled)
            raise
        except Exception as e:
            left = part.fail(e)
            if isinstance(e, IllegalState):
                raise
            self._metrics.failed(topic, left)
            if isinstance(e, BufferExhausted):
                self._metrics.buffer_exhausted(left)
            self._fail_transaction(e)
            bulk.slice_failed(e, left)
        finally:
            bulk.sliced(len(part), part.spans)

    async def _fill_batch(self, group: Group) -> None:
        """Move records into the partition's open batch, then into one new batch if some are left."""
        queue = group.queue
        group.fill(queue.open)
        if not group.left:
            return
        memory = max(self._accumulator.batch_size, group.next_size())
        await self._acquire(queue, memory, SYSTEM_CLOCK.monotonic_ms() + self._settings.max_block_ms)
        if group.fill(queue.open):  # somebody opened it in the meantime
            self._memory.release(memory)
            return
        assert self._slices is not None
        batch = self._accumulator.open_batch(queue, memory, SYSTEM_CLOCK.monotonic_ms(), self._slices.new_builder)
        taken = group.fill(batch)
        assert taken, "the first record of a batch always fits"
        self._opened()

    async def _take_one(self, bulk: Bulk, record: object) -> None:
        """The next record of a bulk; what `send` would raise is its result."""
        if not isinstance(record, ProducerRecord):
            wrong = TypeError(f"send_many: record {len(bulk)} is a {type(record).__name__}, not a ProducerRecord")
            self._fail_transaction(wrong)
            raise wrong
        try:
            if (known := bulk.refused(record)) is not None:
                self._count_refused(record, known)
                raise known
            if record.timestamp is None:
                record = msgspec.structs.replace(record, timestamp=bulk.timestamp)
            delivery = await self._take(record, None, patient=record.topic not in bulk.impatient)
        except IllegalState:
            raise
        except Exception as e:  # of a partitioner or serializer as well
            unknown = isinstance(e, UnknownTopicOrPartition) and self._connection.partitions(record.topic) is None
            bulk.failed(record, self._own_error(record, e), whole_topic=unknown)
        else:
            bulk.taken(delivery)

    def _count_refused(self, record: ProducerRecord, error: Exception) -> None:
        self._metrics.failed(record.topic, 1)
        if isinstance(error, BufferExhausted):
            self._metrics.buffer_exhausted(1)

    def _own_error(self, record: ProducerRecord, error: Exception) -> Exception:
        """The transaction is lost to an earlier record; one that could not be sent anyway says why all the same."""
        if isinstance(error, TransactionAborted):
            try:
                self._check(record)
                self._encoded(record)
            except Exception as own:
                return own
        return error

    async def _take(self, record: ProducerRecord, on_delivery: OnDelivery | None, *, patient: bool = True) -> Delivery:
        """Take a record; without `patient` it does not wait for metadata, as an earlier one has."""
        told = False
        try:
            self._check_open()
            checked_callback(on_delivery)
            record = record.with_header_pairs()
            if self._interceptors:
                record, told = self._interceptors.on_send(record), True
                on_delivery = self._interceptors.told_too(record, on_delivery)
            return await self._enqueue(record, on_delivery, patient=patient)
        except Exception as e:
            if not isinstance(e, IllegalState):
                self._count_refused(record, e)
                self._fail_transaction(e)
            if told:
                self._interceptors.on_acknowledgement(None, e, record.headers)
            raise
        except asyncio.CancelledError:
            cancelled = SendCancelled(f"topic {record.topic}: the send was cancelled")
            self._metrics.failed(record.topic, 1)
            self._fail_transaction(cancelled)
            if told:
                self._interceptors.on_acknowledgement(None, cancelled, record.headers)
            raise

    def _fail_transaction(self, error: Exception) -> None:
        """A record was refused: the open transaction cannot be committed without it. The producer can go on."""
        if self._transaction is None or self._transaction.state is not TxnState.IN_TRANSACTION:
            return
        if not isinstance(error, PenstockError) or isinstance(error, FatalError):
            error = TransactionAborted(f"a record was refused: {error!r}")
        self._sender.fail_transaction(error)

    async def _enqueue(self, record: ProducerRecord, on_delivery: OnDelivery | None, *, patient: bool) -> Delivery:
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.max_block_ms
        metadata_by_ms = deadline_ms if patient else 0
        topic = record.topic
        self._check(record)
        if self._known(topic) is None:
            async with self._until_closed("a send waited for metadata"):
                await self._connection.wait_for_topic(topic, max(0, metadata_by_ms - SYSTEM_CLOCK.monotonic_ms()))
        key, value, headers, size = self._encoded(record)
        known, queue = await self._choose(record, key, value, metadata_by_ms)
        at = time_ns() // 1_000_000 if record.timestamp is None else record.timestamp
        fields = at, key, value, headers
        batch = queue.open
        if batch is not None and batch.append(batch.count, *fields) is None:
            batch = None
            queue = self._routes.after_full(known, record, key, queue)
        if batch is None:
            batch = await self._with_room(queue, fields, size, deadline_ms)
            self._routes.opened(known, record, key, batch)
        index, batch.count = batch.count, batch.count + 1
        if on_delivery is not None:
            batch.callbacks.append(Callback(index, at, size_of(key), size_of(value), on_delivery))
        return Delivery(batch, index, at, size_of(key), size_of(value))

    def _check(self, record: ProducerRecord) -> None:
        """What needs no metadata, and no serializer."""
        topic = record.topic
        checked_timestamp(topic, record.timestamp)
        checked_partition(topic, record.partition)
        if self._known(topic) is None:
            check_topic_name(topic)

    def _encoded(self, record: ProducerRecord) -> tuple[bytes | None, bytes | None, HeaderList, int]:
        """Key, value and headers as they are sent, and how many bytes that is at most."""
        topic = record.topic
        key = serialized(topic, "key", self._key_serializer, record.key)
        value = serialized(topic, "value", self._value_serializer, record.value)
        headers = checked_headers(topic, record.headers) if record.headers else NO_HEADERS
        return key, value, headers, checked_size(topic, key, value, headers, self._settings)

    async def _with_room(self, queue: PartitionQueue, fields: BatchRecord, size: int, deadline_ms: float) -> Batch:
        """The batch that the record was appended to: a new one, or one that somebody opened in the meantime."""
        memory = max(self._accumulator.batch_size, size)
        await self._acquire(queue, memory, deadline_ms)
        batch = queue.open
        if batch is not None and batch.append(batch.count, *fields) is not None:
            self._memory.release(memory)
            return batch
        batch = self._accumulator.open_batch(queue, memory, SYSTEM_CLOCK.monotonic_ms())
        appended = batch.append(0, *fields)
        assert appended is not None, "the first record of a batch always fits"
        self._opened()
        return batch

    def _opened(self) -> None:
        self._sender.batches_since_turn += 1
        self._sender.wake()

    async def _acquire(self, queue: PartitionQueue, memory: int, deadline_ms: float) -> None:
        """Wait for the memory of a new batch of a partition."""
        if self._sender.batches_since_turn >= YIELD_EVERY_BATCHES:
            await asyncio.sleep(0)
        if self._held_up.must_wait(queue, memory):
            await self._held_up.wait(queue, memory, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        if not self._memory.try_acquire(memory):
            self._sender.wake()
            await self._memory.acquire(memory, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        try:
            self._check_open()
        except BaseException:
            self._memory.release(memory)
            raise

    async def _choose(
        self, record: ProducerRecord, key: bytes | None, value: bytes | None, deadline_ms: float
    ) -> tuple[RoutedTopic, PartitionQueue]:
        while True:
            known, number = self._known(record.topic), record.partition
            if known is not None:
                number = self._routes.number_for(known, record, key, value)
                queue = self._routes.queue_for(known, number, key)
                if queue is not None:
                    return known, queue
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            if left_ms <= 0:
                raise UnknownTopicOrPartition(
                    f"topic {record.topic}, partition {number}: "
                    f"the topic has {len(known.numbers) if known else 0} partitions"
                )
            async with self._until_closed(f"a send waited for partition {number} of topic {record.topic}"):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_ms / 1000):
                        await self._connection.refresh_metadata()
                        await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)

    def _known(self, topic: str) -> RoutedTopic | None:
        known = self._direct.get(topic) or self._routes.topic(topic)
        if known is not None and self._may_be_direct and self._state == "open":
            self._direct[topic] = known
        return known
