"""The producer sends records and returns their acknowledgements, with the Java producer's names and guarantees.

    async with Producer("localhost:9092") as producer:
        delivery = await producer.send("clicks", b"{}", key=b"ann")
        metadata = await delivery

`send` waits only for the topic's metadata, and for buffer memory. It appends most records directly to an open batch of
their partition. It passes the others to `_enqueue_record`: checks, metadata, serializers, partition, memory, a new
batch. The `Sender` sends the batches. record_accumulator.py decides when a batch is due. batch_completion.py
handles the response.

The records and offsets that a transactional producer sends between begin and commit become visible to `read_committed`
consumers all at once, or never:

    async with producer.transaction():
        await producer.send("out", b"...")
        await producer.send_offsets_to_transaction(offsets, consumer.group_metadata())

After an error of a record or of an offset, a transaction can only be aborted. The same holds after a rejected or
cancelled `send`, since a commit would leave out its record silently. `transaction()` aborts on any exception and raises
it again. It does not abort if the outcome of its commit is unknown.

If the delivery of a record times out while its request is in flight, the record may still be written. Then
`maybe_written` of the error is True.
"""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from time import time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, overload

import msgspec
from prometheus_client import CollectorRegistry

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.connection.offsets import checked_offsets
from penstock.shared.clients.interceptors.interceptors import ProducerInterceptor, ProducerInterceptors
from penstock.shared.clients.producer.buffer_pool import BufferPool, HeldUpShare
from penstock.shared.clients.producer.bulk_append import NO_HEADERS, Bulk, ColumnBulk, bulk_of
from penstock.shared.clients.producer.delivery import Deliveries, Delivery, serialized_size
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.partitioner import PartitionedTopic, Partitioner, ProducerPartitioner
from penstock.shared.clients.producer.producer_batch import ProducerBatch, RecordCallback
from penstock.shared.clients.producer.record_accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.clients.producer.record_validation import (
    NO_VALUE,
    HeaderList,
    check_callback,
    check_partition,
    check_timestamp,
    checked_headers,
    checked_size,
    is_valid_callback,
    record_of,
    serialized,
)
from penstock.shared.clients.producer.sender import Sender
from penstock.shared.clients.producer.settings import ProducerSettings, with_timeouts_that_fit
from penstock.shared.clients.producer.transaction_manager import Transaction, TxnState, is_fatal
from penstock.shared.clients.protocol.record_batches import BatchRecord
from penstock.shared.common import kernel_loading
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    BufferExhausted,
    ConfigError,
    FatalError,
    IllegalState,
    InvalidTxnState,
    PenstockError,
    ProducerFenced,
    SendCancelled,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.kernel_loading import loaded
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import (
    AnyHeaders,
    GroupMetadata,
    OffsetAndMetadata,
    OnDelivery,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.serialization import Serializer, bytes_serializer, check_serializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import check_topic_name

if TYPE_CHECKING:
    from penstock.shared.clients.producer.column_slices import ColumnSlice, PartitionSlice

log = get_logger(__name__)

REJECTIONS_A_TURN = 1_000
"""After so many records with the error of an earlier one, `send_many` yields to the event loop."""
YIELD_EVERY_BATCHES = 32
"""The number of new batches that sends may open before they yield to the event loop, so that other tasks can run."""

UNLOADED: Any = object()


class Producer:
    """Sends records; use it in `async with`, or between `start` and `close`.

    It belongs to the process and the event loop in which it was started. Elsewhere its methods raise IllegalState,
    except `metrics`, and a `send` to a batch that is open: there the wait for the delivery raises it.
    """

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
        """`kafka` has the brokers' addresses: settings, or bootstrap servers as text.

        Raises ConfigError, which names the wrong setting.
        """
        self._state = "new"
        kafka = KafkaSettings.of(kafka)
        settings = with_timeouts_that_fit(kafka, ProducerSettings.given(settings))
        # ProducerSettings rejects this too, but `model_copy` does not validate. The broker would accept the records
        # without a producer id, and an abort would not undo them.
        if settings.transactional_id is not None and not settings.enable_idempotence:
            raise ConfigError("transactional_id needs enable_idempotence=true")
        check_serializer("key_serializer", key_serializer)
        check_serializer("value_serializer", value_serializer)
        self._settings = settings
        self._connection = Connection(kafka)
        self._key_serializer = key_serializer
        self._value_serializer = value_serializer
        self._interceptors = ProducerInterceptors(interceptors)
        self._memory = BufferPool(settings.buffer_memory)
        self._metrics = ProducerMetrics(
            registry,
            self._connection.client_id,
            SYSTEM_CLOCK.monotonic_ms,
            self._memory,
            window_ms=settings.metrics_sample_window_ms,
            windows=settings.metrics_num_samples,
        )
        self._accumulator = RecordAccumulator(settings)
        self._accumulator.check_waiter = self._check_waiter
        self._transaction = Transaction(settings.transactional_id) if settings.transactional_id is not None else None
        self._sender = Sender(
            connection=self._connection,
            accumulator=self._accumulator,
            memory=self._memory,
            settings=settings,
            transaction=self._transaction,
            metrics=self._metrics,
            clock=SYSTEM_CLOCK,
        )
        self._held_up = HeldUpShare(self._accumulator, self._memory, SYSTEM_CLOCK.monotonic_ms, self._sender.is_away)
        self._slices: Any = UNLOADED
        """The module column_slices, once columns were sent; None if it is not used."""
        self._until_closed = UntilClosed()
        self._closed = asyncio.Event()
        self._ending_calls = 0
        """The calls that are committing or aborting the transaction."""
        self._no_ending_call = asyncio.Event()
        self._disconnecting: asyncio.Task[None] | None = None
        self._close_deadline: asyncio.Timeout | None = None
        self._partitioner = ProducerPartitioner(
            self._connection, self._accumulator, settings, partitioner, self._sender.is_slow
        )
        # Topics whose records may go straight into an open batch. A metadata update, close and a failure empty it, so
        # `send` needs no check of the producer's state.
        self._direct: dict[str, PartitionedTopic] = {}
        plain = key_serializer is bytes_serializer and value_serializer is bytes_serializer
        self._may_be_direct = (
            plain and not interceptors and partitioner is None and not settings.partitioner_ignore_keys
        )

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if self._state in ("open", "broken") and not self._connection.is_of_parent:
            warn(f"not closed, so its buffered records are lost: {self!r}", ResourceWarning, source=self)

    def __repr__(self) -> str:
        return f"<Producer {self._state}, {self._connection!r}, {self._sender!r}>"

    async def start(self) -> None:
        """Connect to the cluster.

        Raises BrokerNotAvailable with the addresses after `request_timeout_ms`. Raises AuthenticationFailed at once.
        An `async with` that raises one of these closes the producer: make a new one for the next try.
        """
        if self._state == "open":
            raise IllegalState("the producer is started already")
        if self._state != "new":
            raise IllegalState(f"the producer is {self._state}; make a new one")
        await self._connection.open()
        self._connection.on_metadata(self._on_metadata_update)
        self._connection.on_fork(self._clear_direct)
        self._state = "open"
        self._sender.start(self._sender_broke)
        log.info("producer open", client_id=self._connection.client_id)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Send the buffered records for up to `timeout_ms` (None: no limit), then fail those left with IllegalState.

        An open transaction is aborted, and its unsent records are dropped. A commit or abort of another task ends
        first. A commit with an unknown outcome is requested again. Calls that wait for metadata or buffer memory raise
        IllegalState at once. A second call waits for the first one, and may shorten its time. If the call is cancelled,
        the records left fail at once, and the sockets are closed in the background.
        """
        # There are three cases. 1. Another call closes the producer: wait for it, perhaps for a shorter time.
        if self._state == "closed":
            self._shorten_close_timeout(timeout_ms)
            await self._closed.wait()
            return
        # 2. The producer was not started.
        if self._state == "new":
            self._state = "closed"
            self._metrics.close()
            self._closed.set()
            return
        # 3. It is open or broken. First end the waits: a waiting send would add records after the flush.
        self._connection.check_loop()
        broken = self._state == "broken"
        self._state = "closed"
        self._end_waits()
        try:
            async with asyncio.timeout(None) as self._close_deadline:
                self._shorten_close_timeout(timeout_ms)
                if self._transaction is not None and not broken:
                    await self._abort_on_close()
                await self._flush_batches()
        except TimeoutError:
            log.warning(
                "closed with records unsent",
                client_id=self._connection.client_id,
                batches=len(self._accumulator.incomplete),
            )
        finally:
            self._close_deadline = None
            # A task of its own, which a cancellation of the caller does not reach.
            self._disconnecting = asyncio.create_task(self._disconnect())
            await asyncio.shield(self._disconnecting)

    async def _disconnect(self) -> None:
        """Stop the sender, fail the records left and close the sockets."""
        try:
            await self._sender.close()
            error = IllegalState("the producer was closed before the record was acknowledged")
            self._sender.completion.fail_all(error, out=True)
        finally:
            try:
                await self._connection.close()
            finally:
                self._metrics.close()
                self._closed.set()
                log.info("producer closed", client_id=self._connection.client_id)

    def _shorten_close_timeout(self, timeout_ms: float | None) -> None:
        deadline = self._close_deadline
        if deadline is None or timeout_ms is None or deadline.expired():
            return
        # A second call may shorten the time, not extend it.
        when = deadline.when()
        sooner = asyncio.get_running_loop().time() + timeout_ms / 1000
        if when is None or sooner < when:
            deadline.reschedule(sooner)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        # `__aexit__` is not called, and the metrics would stay in the registry.
        except BaseException:
            if self._state == "new":
                await self.close()
            raise
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
        """Enqueue a record, which is passed whole or as its fields. `timestamp` is in ms since the epoch, by default
        now.

        These errors are raised before anything is enqueued: SerializationError, RecordTooLarge, InvalidTimestamp,
        InvalidTopic, DataError (invalid partition number), UnknownTopicOrPartition (not known within `max_block_ms`),
        BrokerNotAvailable (no broker responded in this time, and the topic is not known yet), AuthorizationFailed,
        BufferExhausted, IllegalState (closed, no open transaction, or the transaction ended while the call waited),
        TransactionAborted, the error that ended the producer (for example ProducerFenced), TypeError (wrong arguments,
        for example an async `on_delivery`). If a record is rejected or cancelled, its transaction can only be aborted.

        `on_delivery(metadata, None)` or `on_delivery(None, error)` is called once on the event loop, but never if this
        method raises.
        """
        # The hot path: one more call, property or object here lowers the throughput. So the event loop is not checked
        # here: in another one, the wait for the delivery raises the error.
        try:
            known = self._direct.get(topic)  # type: ignore[arg-type]
            transaction = self._transaction
            if (
                known is not None
                and partition is None
                and not headers
                and (timestamp is None or (type(timestamp) is int and timestamp >= 0))
                # Before the append: the builder takes any buffer. `__class__` costs less than `type` or `isinstance`.
                and (value.__class__ is bytes or value is None)
                and (transaction is None or transaction.state is TxnState.IN_TRANSACTION)
                and (on_delivery is None or is_valid_callback(on_delivery))
            ):
                queue = known.sticky_queue if key is None else known.by_key.get(key) or known.for_key(key)
                if queue is not None and (batch := queue.open) is not None:
                    at = time_ns() // 1_000_000 if timestamp is None else timestamp
                    index = batch.count
                    # `append` is a slot and not a method: to read it first costs less than `batch.append(...)`.
                    append = batch.append
                    if append(index, at, key, value, NO_HEADERS) is not None:
                        batch.count = index + 1
                        key_size = -1 if key is None else len(key)
                        value_size = -1 if value is None else len(value)
                        if on_delivery is not None:
                            batch.callbacks.append(RecordCallback(index, at, key_size, value_size, on_delivery))
                        return Delivery(batch, index, at, key_size, value_size)
        # Not bytes, no timestamp, or a record without a hash: `_enqueue_record` serializes it, or raises the error that
        # fits.
        except (TypeError, ValueError, OverflowError, BufferError):
            pass
        record = record_of(topic, value, key, headers, partition, timestamp)
        self._check_usable()
        return await self._take_record(record, on_delivery, self._transaction_number)

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
        """Enqueue a record as `send` does, and wait until it is acknowledged. Raises the errors of `send` and of the
        delivery.

        In a loop each call waits for `linger_ms` and for the broker. Use `send` or `send_many` there.
        """
        return await (await self.send(topic, value, **rest))

    async def send_many(self, records: Iterable[ProducerRecord[Any, Any]]) -> Deliveries:
        """Enqueue many records in order. The order is kept within each partition. RecordColumns are not copied: do not
        change them until the deliveries are read.

        An error that `send` would raise for a record becomes the result of that record, and its transaction can only be
        aborted. If the buffer stays full for `max_block_ms`, all later records end in BufferExhausted at once. The call
        waits only once for a topic's unknown partitions.

        Raises IllegalState if the producer is closed or has no open transaction, or the transaction ended while the
        call waited. Raises TransactionAborted if the transaction can only be aborted when the call begins, or the
        producer's fatal error. Raises TypeError for an object that is not a ProducerRecord. If this call raises or is
        cancelled, the earlier records are cancelled, except those that a request has contained. If there are such
        records, `maybe_written` of IllegalState is True.
        """
        number = self._transaction_number
        self._check_usable()
        self._check_open(number)
        bulk = bulk_of(records, time_ns() // 1_000_000, may_be_columns=self._may_be_direct and self._slices is not None)
        try:
            while len(bulk) < len(bulk.records):
                # After a record that has failed while it waited, too.
                self._check_transaction_number(number)
                if isinstance(bulk.ended, BufferExhausted):
                    self._reject_rest(bulk, bulk.ended)
                    break
                if isinstance(bulk, ColumnBulk) and len(bulk) == bulk.stop:
                    await self._take_columns(bulk, number)
                    continue
                record = bulk.fill(self._direct)
                if len(bulk) < bulk.stop:
                    await self._take_bulk_record(bulk, record, number)
        except BaseException as e:
            # The caller does not get the deliveries, and would send the records again.
            cancelled = bulk.deliveries().cancel()
            # There may be no record to cancel, and a commit would leave out those that were not taken.
            self._fail_transaction(e if isinstance(e, Exception) else SendCancelled("send_many was cancelled"), number)
            if isinstance(e, IllegalState):
                e.maybe_written = cancelled < len(bulk) - bulk.rejections
            raise
        if bulk.rejections:
            log.warning("records rejected", records=bulk.rejections, reason=str(bulk.first_rejection))
        return bulk.deliveries()

    async def flush(self) -> None:
        """Send the buffered records without lingering, and wait until all of them are done."""
        self._check_usable()
        await self._flush_batches()

    def abort_pending(self) -> int:
        """Fail with SendCancelled every batch that is not in a request now, also those that wait for a retry. Returns
        the number of batches.

        A transaction that loses records by this can only be aborted.
        """
        self._connection.check_loop()
        error = SendCancelled("abort_pending was called before the record was acknowledged")
        failed = self._sender.completion.fail_all(error, out=False)
        # A commit would leave out the dropped records silently.
        if self._transaction is not None and failed:
            self._sender.completion.fail_transaction(error)
        return failed

    async def partitions_for(self, topic: str) -> list[int]:
        """Return the topic's partitions, ascending.

        After `max_block_ms`, raises UnknownTopicOrPartition, or BrokerNotAvailable if no broker has responded. Raises
        InvalidTopic at once, AuthorizationFailed if the principal may not read the topic's metadata, IllegalState if
        the producer is closed.
        """
        self._check_usable()
        check_topic_name(topic)
        async with self._until_closed("partitions_for waited for metadata"):
            return list(await self._connection.wait_for_topic(topic, self._settings.max_block_ms))

    def metrics(self) -> dict[str, float]:
        """Return metrics of the Java producer under their names, in snake_case, and a few of this producer's own.

        There are totals since the start, and the current state of the buffer and the requests. Rates (per second),
        averages and maxima (bytes, ms) cover the last `metrics_num_samples` windows of `metrics_sample_window_ms`.
        """
        return {
            **self._metrics.figures(),
            "requests_in_flight": float(self._sender.requests),
            "buffer_available_bytes": float(self._memory.available),
            "buffer_waiting": float(self._memory.waiting + self._held_up.waiting),
            "batches_incomplete": float(len(self._accumulator.incomplete)),
        }

    async def init_transactions(self) -> None:
        """Take over the transactional id: fence older producers that use it, and abort their open transaction.

        Raises KafkaTimeout after `max_block_ms` (the call may be repeated). Raises ProducerFenced if a newer producer
        takes over the id meanwhile. After a fatal error, raises that error.
        """
        self._check_usable()
        txn = self._require_transaction()
        txn.check_fatal()
        if txn.state is not TxnState.UNINITIALIZED:
            raise IllegalState(f"transactional id {txn.transactional_id}: init_transactions was called before")
        with self._note_transaction_errors(txn):
            await self._sender.transaction_requests.init_producer_id()
        txn.move(TxnState.READY)

    async def begin_transaction(self) -> None:
        """Open a transaction.

        If the last abort was cancelled or failed, repeats it first, and raises its errors. If a request of the last
        transaction had no response, requests the next epoch. Raises KafkaTimeout if that takes `max_block_ms`. Raises
        IllegalState if the producer is closed, a transaction is open, or `init_transactions` was not called. After a
        fatal error, raises that error.
        """
        self._check_usable()
        txn = self._require_transaction()
        if txn.abort_failed:
            await self.abort_transaction()
        if txn.state is TxnState.READY:
            # After a commit. An abort has renewed the epoch already.
            with self._note_transaction_errors(txn):
                await self._renew_epoch(txn)
        txn.begin()

    async def commit_transaction(self) -> None:
        """Flush, which takes up to `delivery_timeout_ms`, then commit.

        Raises TransactionAborted if a record or offset failed: abort, then repeat the transaction. Raises KafkaTimeout
        `max_block_ms` after the flush, or BrokerError for an unknown response of the coordinator. The outcome is then
        unknown, and the call may be repeated. Raises ProducerFenced. If the call is cancelled during the flush, the
        transaction stays open. If it is cancelled later, the outcome is unknown: call it again.
        """
        self._check_usable()
        with self._ending_call():
            await self._commit_transaction()

    async def _commit_transaction(self) -> None:
        txn = self._require_transaction()
        # A commit whose outcome is unknown may be requested again: the coordinator answers a repeated EndTxn with
        # success once the transaction is committed.
        again = txn.state is TxnState.COMMITTING
        if not again:
            txn.check_open("commit")
        txn.move(TxnState.COMMITTING)
        # 1. Every record must be acknowledged first: the coordinator's marker commits what lies before it in the log.
        try:
            await self._flush_batches()
            await self._sender.until_prepared()
        except BaseException:
            # EndTxn was not sent, so the transaction can still be aborted.
            if not again:
                txn.not_committed()
            raise
        # 2. A record may have failed during the flush.
        txn.check_fatal()
        if txn.state is TxnState.ABORTABLE_ERROR:
            raise TransactionAborted(
                f"transactional id {txn.transactional_id}: not committed: {txn.error}"
            ) from txn.error
        # During the flush another call may have committed the transaction. If it was cancelled, it may have aborted it.
        if txn.state is not TxnState.COMMITTING:
            raise IllegalState(f"transactional id {txn.transactional_id}: another call has changed the transaction")
        # 3. For a transaction that it does not know, the coordinator would answer INVALID_TXN_STATE.
        if not txn.is_empty:
            with self._note_transaction_errors(txn):
                await self._sender.transaction_requests.end(commit=True)
        txn.ended()

    async def abort_transaction(self) -> None:
        """Drop the records that are in no request now, then abort. Their deliveries end in TransactionAborted.

        Raises ProducerFenced. Raises KafkaTimeout if the batches in flight take longer than `max_block_ms`, or if a
        request to the coordinator does. The call may then be repeated.
        """
        txn = self._require_transaction()
        self._connection.check_loop()
        txn.move(TxnState.ABORTING)
        txn.abort_failed = False
        try:
            with self._ending_call():
                await self._abort_transaction(txn)
        except BaseException:
            txn.abort_failed = txn.state is TxnState.ABORTING
            raise
        txn.ended()

    async def _abort_transaction(self, txn: Transaction) -> None:
        dropped = TransactionAborted(
            f"transactional id {txn.transactional_id}: aborted before the record was acknowledged"
        )
        # 1. Drop what is not sent, and wait for what is in flight: a batch that reaches the broker after the
        #    coordinator's marker would open a transaction there that nobody ends (KIP-890 calls it a hanging
        #    transaction).
        self._sender.completion.fail_all(dropped, out=False)
        await self._sender.until_landed(self._settings.max_block_ms)
        txn.check_fatal()
        self._sender.completion.fail_all(dropped, out=False)
        with self._note_transaction_errors(txn):
            # 2. Abort at the coordinator.
            if not txn.is_empty:
                try:
                    await self._sender.transaction_requests.end(commit=False)
                except (ProducerFenced, InvalidTxnState):
                    # Step 3 shows which of four cases it is. 1. The coordinator has aborted the transaction after its
                    # timeout: it grants the next epoch (KIP-588). 2. It has forgotten the id: it grants a new one
                    # (KIP-360). 3. It has no transaction, since the first request of this one was rejected or did not
                    # arrive: it grants the next epoch. 4. A newer producer has the id: it answers PRODUCER_FENCED.
                    txn.epoch_is_spent = True
            # 3. A lost batch may still be in flight with sequence numbers that are used again.
            await self._renew_epoch(txn)

    async def _renew_epoch(self, txn: Transaction) -> None:
        """Request the next epoch if this one is spent, or if one of its requests may still arrive.

        Brokers reject what arrives later with the old epoch: a lost batch (KIP-360), or a request that would end or
        begin a transaction (KIP-890).
        """
        if txn.epoch_is_spent:
            await self._sender.transaction_requests.init_producer_id(bump=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Begin a transaction. Commit it at the end of the block, or abort it if the block or the commit raises.

        If the outcome of the commit is unknown, the transaction is not aborted, and `close` requests the commit again.
        If the abort fails too, its error is added to the first error as a note. But if the abort's error is fatal and
        the first error is a PenstockError, the fatal error is raised.
        """
        await self.begin_transaction()
        txn = self._require_transaction()
        try:
            yield
            await self.commit_transaction()
        except BaseException as e:
            # Not in COMMITTING: the commit may have succeeded, and an abort would contradict it.
            if txn.state in (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR):
                try:
                    await self.abort_transaction()
                except PenstockError as also:
                    log.warning("abort failed", transactional_id=txn.transactional_id, reason=str(also))
                    if isinstance(e, PenstockError) and is_fatal(also):
                        raise also from e
                    e.add_note(f"the abort failed as well: {also}")
            raise

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int], group: GroupMetadata
    ) -> None:
        """Commit a consumer's offsets with the transaction. The group's generation and member id fence old members
        (KIP-447).

        After KafkaTimeout, IllegalGeneration, UnknownMember, FencedInstanceId or AuthorizationFailed (of the group),
        or if the call is cancelled, abort the transaction; the producer can go on. Also raises ProducerFenced. Raises
        ValueError or TypeError for an invalid offset before any request.
        """
        self._check_usable()
        txn = self._require_transaction()
        txn.check_open("send_offsets_to_transaction")
        checked = checked_offsets(offsets)
        if not checked:
            return
        number = txn.number
        try:
            with self._note_transaction_errors(txn):
                await self._sender.transaction_requests.add_offsets(checked, group, first=txn.adding())
        except asyncio.CancelledError:
            # The coordinator may lack the offsets, and so may a commit.
            self._fail_transaction(TransactionAborted("send_offsets_to_transaction was cancelled"), number)
            raise

    @contextmanager
    def _ending_call(self) -> Iterator[None]:
        """Let `close` wait for the block, which commits or aborts the transaction."""
        self._ending_calls += 1
        self._no_ending_call.clear()
        try:
            yield
        finally:
            self._ending_calls -= 1
            if not self._ending_calls:
                self._no_ending_call.set()

    async def _abort_on_close(self) -> None:
        txn = self._require_transaction()
        # Another task may be committing. If it is cancelled before EndTxn, the transaction is open again, and
        # `transaction()` aborts it.
        while self._ending_calls:
            await self._no_ending_call.wait()
        if txn.state in (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR, TxnState.ABORTING):
            unsent = self._accumulator.incomplete
            # An error was logged before. Without one, the program may have forgotten to commit.
            if txn.state is TxnState.IN_TRANSACTION and (unsent or not txn.is_empty):
                log.warning(
                    "open transaction aborted on close",
                    client_id=self._connection.client_id,
                    transactional_id=txn.transactional_id,
                    unacknowledged_records=sum(batch.count for batch in unsent),
                )
            try:
                await self.abort_transaction()
            except PenstockError as e:
                log.warning("abort on close failed", transactional_id=txn.transactional_id, reason=str(e))
        # The commit was requested, and its outcome is unknown: request it again, or the transaction stays open until
        # its timeout and is then aborted.
        elif txn.state is TxnState.COMMITTING:
            try:
                await self._commit_transaction()
            except PenstockError as e:
                log.warning("commit on close failed", transactional_id=txn.transactional_id, reason=str(e))

    def _require_transaction(self) -> Transaction:
        if self._transaction is None:
            raise IllegalState("no transactional_id is set")
        return self._transaction

    @contextmanager
    def _note_transaction_errors(self, txn: Transaction) -> Iterator[None]:
        """Fail the transaction with the PenstockError that leaves the block.

        An error of init, commit or abort fails it only if the error is fatal or abortable.
        """
        try:
            yield
        except PenstockError as e:
            # init, commit and abort can be repeated, which settles their outcome: after a timeout, and after an error
            # that does not say whether the coordinator has committed. After an error of `send_offsets_to_transaction`,
            # in contrast, the commit would lack its offsets.
            ending = txn.state in (TxnState.COMMITTING, TxnState.ABORTING, TxnState.UNINITIALIZED)
            if not ending or is_fatal(e) or e.abortable:
                self._sender.completion.fail_transaction(e)
            raise

    async def _take_columns(self, bulk: ColumnBulk, number: int) -> None:
        """Take the next records of columns with compiled kernels, or mark them to be taken one by one."""
        at = len(bulk)
        columns = bulk.columns
        # Records are taken one by one in four cases.
        # 1. There is no compiler, or serializers, interceptors or a partitioner must see each record.
        # 2. An earlier record was rejected: `Bulk.rejected` then decides for each record.
        if self._slices is UNLOADED:
            self._slices = await loaded(_load_slices, "the encoding of records") if self._may_be_direct else None
            self._check_open(number)
        if self._slices is None or bulk.rejections:
            bulk.one_by_one(len(columns))
            return
        # 3. The topic is unknown: the next record waits for it, and the others go on here.
        known = self._find_known_topic(columns.topic)
        if known is None:
            bulk.one_by_one(at + 1)
            return
        # 4. A record of this slice is invalid, too large, or for an unknown partition. Taken alone, it raises its own
        #    error or waits for its partition.
        partition = columns.partition
        limit = min(self._settings.max_request_size, self._settings.buffer_memory)
        part = self._slices.slice_of(columns, at, bulk.timestamp, limit)
        if part is None or (partition is not None and (type(partition) is not int or partition not in known.queues)):
            bulk.one_by_one(at + self._slices.SLICE_RECORDS)
            return
        if partition is not None:
            part.to_partition(known.queues[partition])
            await self._take_slice(bulk, part, number)
            return
        queues = [known.queues[number] for number in known.numbers]
        some_without_key = part.by_key(queues, partial(self._partitioner.spread, known))
        await self._take_slice(bulk, part, number)
        if some_without_key:
            self._partitioner.slice_taken(known)

    async def _take_slice(self, bulk: ColumnBulk, part: ColumnSlice, number: int) -> None:
        """Move a slice of columns into batches, in turn at most one new batch for each partition.

        If the wait for memory fails, its error becomes the result of the slice's records that are not in a batch.
        If this error is IllegalState, it is also raised: the producer was closed, its sender has ended, or its
        transaction ended.
        """
        groups = part.groups
        topic = bulk.columns.topic
        try:
            # One batch of each partition in turn: they share the buffer evenly when it becomes full.
            while groups:
                for group in groups:
                    await self._fill_batch(group, number)
                groups = [group for group in groups if group.left]
        except asyncio.CancelledError:
            # `send_many` cancels the records before as well, and fails the transaction.
            self._metrics.failed(topic, part.fail(SendCancelled(f"topic {topic}: the send was cancelled")))
            raise
        except Exception as e:
            left = part.fail(e)
            if isinstance(e, IllegalState):
                bulk.rejections += left
                raise
            self._metrics.failed(topic, left)
            if isinstance(e, BufferExhausted):
                self._metrics.buffer_exhausted(left)
            self._fail_transaction(e, number)
            bulk.slice_failed(e, left)
        finally:
            bulk.sliced(len(part), part.spans)

    async def _fill_batch(self, group: PartitionSlice, number: int) -> None:
        """Move records into the partition's open batch, then into one more batch if some are left."""
        queue = group.queue
        group.fill(queue.open)
        if not group.left:
            return
        memory = max(self._accumulator.batch_size, group.next_size())
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.max_block_ms
        await self._acquire_batch_memory(queue, memory, deadline_ms, number)
        # Another send may have opened a batch while this one waited: use the room there.
        if group.fill(queue.open):
            self._memory.release(memory)
            return
        assert self._slices is not None
        batch = self._accumulator.open_batch(queue, memory, SYSTEM_CLOCK.monotonic_ms(), self._slices.new_builder)
        taken = group.fill(batch)
        assert taken, "the first record of a batch always fits"
        self._on_batch_opened()

    async def _take_bulk_record(self, bulk: Bulk, record: object, number: int) -> None:
        """Enqueue the next record of a bulk. An error that `send` would raise becomes the record's result. Only
        IllegalState is raised, and TypeError for an object that is not a ProducerRecord."""
        record = _checked_bulk_record(record, len(bulk))
        if (known := bulk.rejected(record)) is not None:
            # Not raised: each raise would extend the traceback of the shared error.
            self._count_rejected(record, known)
            bulk.failed(record, self._error_of_record(record, known))
            if not bulk.rejections % REJECTIONS_A_TURN:
                await asyncio.sleep(0)
            return
        try:
            if record.timestamp is None:
                record = msgspec.structs.replace(record, timestamp=bulk.timestamp)
            delivery = await self._take_record(record, None, number, patient=record.topic not in bulk.impatient)
        # The producer was closed or has no transaction: this is an error of the call, not of the record.
        except IllegalState:
            raise
        # A partitioner or serializer may raise any exception.
        except Exception as e:
            missing = isinstance(e, UnknownTopicOrPartition | BrokerNotAvailable | AuthorizationFailed)
            unknown = missing and self._connection.partitions(record.topic) is None
            bulk.failed(record, self._error_of_record(record, e), whole_topic=unknown)
        else:
            bulk.add_delivery(delivery)

    def _reject_rest(self, bulk: Bulk, error: BufferExhausted) -> None:
        """Reject all later records of a bulk in one step."""
        if isinstance(bulk, ColumnBulk):
            counts = Counter({bulk.columns.topic: len(bulk.records) - len(bulk)})
        else:
            rest = enumerate(bulk.records[len(bulk) :], len(bulk))
            counts = Counter(_checked_bulk_record(record, index).topic for index, record in rest)
        for topic, count in counts.items():
            self._metrics.failed(topic, count)
        self._metrics.buffer_exhausted(counts.total())
        bulk.reject_rest(error)

    def _count_rejected(self, record: ProducerRecord, error: Exception) -> None:
        self._metrics.failed(record.topic, 1)
        if isinstance(error, BufferExhausted):
            self._metrics.buffer_exhausted(1)

    def _error_of_record(self, record: ProducerRecord, error: Exception) -> Exception:
        """The record's own error, if it has one, in place of the TransactionAborted that an earlier record caused."""
        if isinstance(error, TransactionAborted):
            try:
                self._check_record(record)
                self._serialize_record(record)
            except Exception as own:
                return own
        return error

    async def _take_record(
        self, record: ProducerRecord, on_delivery: OnDelivery | None, number: int, *, patient: bool = True
    ) -> Delivery:
        """Enqueue a record in the transaction with the number. Without `patient` the call does not wait for metadata,
        since an earlier record of the bulk already has."""
        is_observed = False
        try:
            self._check_open(number)
            check_callback(on_delivery)
            record = record.with_header_pairs()
            if self._interceptors:
                record = self._interceptors.on_send(record)
                is_observed = True
                on_delivery = self._interceptors.observed(record, on_delivery)
            return await self._enqueue_record(record, on_delivery, number, patient=patient)
        except Exception as e:
            if not isinstance(e, IllegalState):
                self._count_rejected(record, e)
                self._fail_transaction(e, number)
            if is_observed:
                self._interceptors.on_acknowledgement(None, e, record.headers)
            raise
        except asyncio.CancelledError:
            cancelled = SendCancelled(f"topic {record.topic}: the send was cancelled")
            self._metrics.failed(record.topic, 1)
            self._fail_transaction(cancelled, number)
            if is_observed:
                self._interceptors.on_acknowledgement(None, cancelled, record.headers)
            raise

    def _fail_transaction(self, error: Exception, number: int) -> None:
        """Make the transaction with the number abortable, if it is open: a commit would lack a record or offsets."""
        if self._transaction is None or self._transaction.state is not TxnState.IN_TRANSACTION:
            return
        if self._transaction.number != number:
            return
        if not isinstance(error, PenstockError) or isinstance(error, FatalError):
            error = TransactionAborted(f"a record was rejected: {error!r}")
        self._sender.completion.fail_transaction(error)

    async def _enqueue_record(
        self, record: ProducerRecord, on_delivery: OnDelivery | None, number: int, *, patient: bool
    ) -> Delivery:
        # `max_block_ms` bounds the wait for metadata and the wait for memory together, as in Java.
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.max_block_ms
        metadata_by_ms = deadline_ms if patient else 0
        topic = record.topic
        self._check_record(record)
        if self._find_known_topic(topic) is None:
            async with self._until_closed("a send waited for metadata"):
                await self._connection.wait_for_topic(topic, max(0, metadata_by_ms - SYSTEM_CLOCK.monotonic_ms()))
        key, value, headers, size = self._serialize_record(record)
        known, chosen, queue = await self._choose_partition(record, key, value, metadata_by_ms)
        # The transaction may have ended during the waits.
        self._check_open(number)
        at = time_ns() // 1_000_000 if record.timestamp is None else operator.index(record.timestamp)
        fields = at, key, value, headers
        batch = queue.open
        # A record without a key that needs a new batch may go to another partition (KIP-480).
        if batch is not None and batch.append(batch.count, *fields) is None:
            batch = None
            queue = self._partitioner.after_full(known, chosen, key, queue)
        if batch is None:
            batch = await self._append_to_new_batch(queue, fields, size, deadline_ms, number)
            self._partitioner.opened(known, chosen, key, batch)
        index = batch.count
        batch.count = index + 1
        if on_delivery is not None:
            batch.callbacks.append(RecordCallback(index, at, serialized_size(key), serialized_size(value), on_delivery))
        return Delivery(batch, index, at, serialized_size(key), serialized_size(value))

    def _check_record(self, record: ProducerRecord) -> None:
        """Check the record's timestamp, partition number and topic name. Raises the error that fits."""
        topic = record.topic
        check_timestamp(topic, record.timestamp)
        check_partition(topic, record.partition)
        if self._find_known_topic(topic) is None:
            check_topic_name(topic)

    def _serialize_record(self, record: ProducerRecord) -> tuple[bytes | None, bytes | None, HeaderList, int]:
        """Key, value and headers as they are sent, and an upper bound of the size of a batch with them alone."""
        topic = record.topic
        key = serialized(topic, "key", self._key_serializer, record.key)
        value = serialized(topic, "value", self._value_serializer, record.value)
        headers = checked_headers(topic, record.headers) if record.headers else NO_HEADERS
        return key, value, headers, checked_size(topic, key, value, headers, self._settings)

    async def _append_to_new_batch(
        self, queue: PartitionQueue, fields: BatchRecord, size: int, deadline_ms: float, number: int
    ) -> ProducerBatch:
        """Acquire memory, append the record to a new batch, and return the batch.

        If the queue has an open batch with room after the wait for memory, no batch is opened. Then the record goes
        into that batch, and the memory is released.
        """
        memory = max(self._accumulator.batch_size, size)
        await self._acquire_batch_memory(queue, memory, deadline_ms, number)
        batch = queue.open
        if batch is not None and batch.append(batch.count, *fields) is not None:
            self._memory.release(memory)
            return batch
        batch = self._accumulator.open_batch(queue, memory, SYSTEM_CLOCK.monotonic_ms())
        appended = batch.append(0, *fields)
        assert appended is not None, "the first record of a batch always fits"
        self._on_batch_opened()
        return batch

    def _on_batch_opened(self) -> None:
        self._sender.batches_since_turn += 1
        self._sender.wake()

    async def _acquire_batch_memory(self, queue: PartitionQueue, memory: int, deadline_ms: float, number: int) -> None:
        """Acquire the memory of a new batch of a partition, waiting up to the deadline."""
        # A loop of sends that never waits would keep the sender from its turns, until the buffer is full.
        if self._sender.batches_since_turn >= YIELD_EVERY_BATCHES:
            await asyncio.sleep(0)
        if self._held_up.must_wait(queue, memory):
            async with self._until_closed("a send waited for buffer memory"):
                await self._held_up.wait(queue, memory, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        # While a send waits for memory, batches do not linger: the sender must take a turn now.
        if not self._memory.try_acquire(memory):
            self._sender.wake()
            async with self._until_closed("a send waited for buffer memory"):
                await self._held_up.acquire(queue, memory, deadline_ms - SYSTEM_CLOCK.monotonic_ms())
        # The transaction may have ended during the waits.
        try:
            self._check_open(number)
        except BaseException:
            self._memory.release(memory)
            raise

    async def _choose_partition(
        self, record: ProducerRecord, key: bytes | None, value: bytes | None, deadline_ms: float
    ) -> tuple[PartitionedTopic, int | None, PartitionQueue]:
        """Return the topic, the partition that the record names or the custom partitioner chooses, and its queue."""
        # The partition may be new, and this client's metadata older than it (Java: `KafkaProducer.waitOnMetadata`).
        while True:
            known = self._find_known_topic(record.topic)
            number = record.partition
            if known is not None:
                number = self._partitioner.number_for(known, record, key, value)
                queue = self._partitioner.queue_for(known, number, key)
                if queue is not None:
                    return known, number, queue
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            if left_ms <= 0:
                raise UnknownTopicOrPartition(
                    f"topic {record.topic}, partition {number}: "
                    f"the topic has {len(known.numbers) if known else 0} partitions"
                )
            async with self._until_closed(f"a send waited for partition {number} of topic {record.topic}"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_ms / 1000):
                        await self._connection.refresh_metadata()
                        await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)

    def _find_known_topic(self, topic: str) -> PartitionedTopic | None:
        known = self._direct.get(topic) or self._partitioner.topic(topic)
        if known is not None and self._may_be_direct and self._state == "open":
            self._direct[topic] = known
        return known

    async def _flush_batches(self) -> None:
        # While `flushes` is above 0, batches do not linger.
        self._accumulator.flushes += 1
        self._sender.wake()
        try:
            # The batches of now: with other sends going on, a wait for all later ones would never end.
            for batch in list(self._accumulator.incomplete):
                await batch.wait_all()
        finally:
            self._accumulator.flushes -= 1

    def _clear_direct(self) -> None:
        self._direct = {}

    def _end_waits(self) -> None:
        self._clear_direct()
        self._until_closed.end()

    def _on_metadata_update(self) -> None:
        self._clear_direct()
        self._partitioner.forget_idle(SYSTEM_CLOCK.monotonic_ms())
        self._sender.wake()

    def _sender_broke(self, error: Exception) -> None:
        log.error("the sender ended", client_id=self._connection.client_id, exc_info=error)
        self._state = "broken"
        self._end_waits()
        # Programs may pass the message on to their clients, which must not see the text of a programming error.
        ended = IllegalState("the producer's sender has ended unexpectedly; the log has the reason")
        ended.__cause__ = error
        self._sender.completion.fail_all(ended, out=True)

    def _check_usable(self) -> None:
        """Raise IllegalState unless the producer is open, and the caller runs in its event loop."""
        self._check_state()
        self._connection.check_loop()

    def _check_state(self) -> None:
        if self._state == "broken":
            raise IllegalState("the producer is broken: its sender has ended; close it and make a new one")
        if self._state == "new":
            raise IllegalState("the producer is not started; use it in `async with`, or call start() first")
        if self._state != "open":
            raise IllegalState(f"the producer is {self._state}; make a new one")

    def _check_waiter(self) -> None:
        """Raise IllegalState if the caller cannot wait for a delivery, since it runs in another event loop."""
        try:
            self._connection.check_loop()
        except IllegalState as e:
            e.maybe_written = True
            raise

    @property
    def _transaction_number(self) -> int:
        return 0 if self._transaction is None else self._transaction.number

    def _check_transaction_number(self, number: int) -> None:
        """Raise IllegalState if another transaction has begun since the caller read `number`."""
        if self._transaction is not None and self._transaction.number != number:
            raise IllegalState(
                f"transactional id {self._transaction.transactional_id}: the transaction ended while a send waited"
            )

    def _check_open(self, number: int) -> None:
        """Raise unless the producer is open and, if it is transactional, the transaction with the number is open and
        can still be committed."""
        self._check_state()
        self._check_transaction_number(number)
        if self._transaction is not None:
            self._transaction.check_open("send")


class UntilClosed:
    """Ends all waits at once when the producer is closed."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<UntilClosed {len(self._waits)} waiting>"

    @asynccontextmanager
    async def __call__(self, what: str) -> AsyncIterator[None]:
        """Run the block, and cancel it when `end` is called.

        Raises IllegalState then. The message is "the producer was closed while", followed by `what`.
        """
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
        """End the current waits."""
        now = asyncio.get_running_loop().time()
        while self._waits:
            self._waits.pop().reschedule(now)


def _checked_bulk_record(record: object, index: int) -> ProducerRecord:
    if not isinstance(record, ProducerRecord):
        raise TypeError(f"send_many: record {index} is a {type(record).__name__}, not a ProducerRecord")
    return record


def _load_slices() -> ModuleType | None:
    if not kernel_loading.IS_COMPILED:
        return None
    # Imported late: it loads numba, which takes 0.5 s.
    from penstock.shared.clients.producer import column_slices

    column_slices.compile_kernels()
    return column_slices
