"""The sender: takes due batches to their leaders and decides on every answer.

One turn is `run_once(now_ms)`: expire, prepare (producer id, partitions of the transaction), drain, send. It returns
how long time alone changes nothing; what else happens (a full batch, an answer, a flush) calls `wake`.

An answer completes a batch, or sends it back to the front of its partition's queue with a backoff of its own, or ends
it. `delivery_timeout_ms` ends a batch wherever it is; where its request is still out, the partition stays closed until
that is over, so a late write is never overtaken by a younger batch.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from shared.clients.connection import Connection, error_for_code, produce_request
from shared.clients.connection.errors import DUPLICATE_SEQUENCE_NUMBER, MAYBE_APPENDED
from shared.clients.producer.accumulator import RecordAccumulator
from shared.clients.producer.batch import Batch, BatchState, ProducerState
from shared.clients.producer.buffer_memory import BufferMemory
from shared.clients.producer.coordinator import TransactionCoordinator
from shared.clients.producer.interceptors import Interceptors
from shared.clients.producer.metrics import ProducerMetrics
from shared.clients.producer.sequences import SequenceLedger
from shared.clients.producer.settings import ProducerSettings
from shared.clients.producer.transactions import Transaction, TxnState
from shared.common.clock import Clock
from shared.common.errors import (
    BrokerNotAvailable,
    CorruptRecord,
    DeliveryTimeout,
    FatalError,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    PenstockError,
    ProducerFenced,
    RetriableError,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from shared.common.log import get_logger
from shared.common.records import TopicPartition

log = get_logger(__name__)

STALE_METADATA = (NotLeaderOrFollower, UnknownTopicOrPartition, BrokerNotAvailable)


class Sender:
    """Runs beside the producer, on the same event loop."""

    def __init__(
        self,
        connection: Connection,
        accumulator: RecordAccumulator,
        memory: BufferMemory,
        settings: ProducerSettings,
        transaction: Transaction | None,
        interceptors: Interceptors,
        metrics: ProducerMetrics,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._accumulator = accumulator
        self._memory = memory
        self._settings = settings
        self._transaction = transaction
        self._interceptors = interceptors
        self._metrics = metrics
        self._clock = clock
        self.ledger = SequenceLedger()
        self.coordinator = TransactionCoordinator(connection, settings, self.ledger)
        self._wake = asyncio.Event()
        self._requests: dict[int, int] = defaultdict(int)
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._refresh_at_ms = 0

    def __repr__(self) -> str:
        return f"<Sender {self._accumulator!r}, {sum(self._requests.values())} requests, {self.ledger!r}>"

    def wake(self) -> None:
        """Something other than time has changed."""
        self._wake.set()

    async def main_loop(self) -> None:
        """`run_once` until cancelled."""
        while True:
            self._wake.clear()
            delay_ms = self.run_once(self._clock.monotonic_ms())
            try:
                async with asyncio.timeout(None if delay_ms is None else delay_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def run_once(self, now_ms: int) -> float | None:
        """One turn; gives the milliseconds until the next is due, None where only `wake` makes it so."""
        self._expire(now_ms)
        if not self._prepared():
            return self._accumulator.delay_ms(now_ms, lambda tp: True)
        requests, leaderless = self._accumulator.drain(
            now_ms,
            self._connection.leader,
            lambda node: self._requests[node] < self._settings.max_in_flight_requests_per_connection,
            self._muted,
            hurry=self._memory.waiting > 0,
        )
        for node, batches in requests.items():
            self._requests[node] += 1
            self._spawn(self._produce(node, batches, now_ms))
        delay_ms = self._accumulator.delay_ms(now_ms, self._muted)
        if leaderless:
            self._refresh(now_ms)
            retry_ms = float(self._connection.settings.retry_backoff_ms)
            delay_ms = retry_ms if delay_ms is None else min(delay_ms, retry_ms)
        return delay_ms

    async def close(self) -> None:
        """Stop every task; requests that are out are given up."""
        tasks = [*self._tasks, *([self._preparing] if self._preparing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail_all(self, error: PenstockError, *, in_flight: bool) -> None:
        """End what is queued, and with `in_flight` also what is out, with an error."""
        for batch in self._accumulator.take_all():
            if batch.state is not BatchState.DONE and (in_flight or not self._is_out(batch)):
                self._fail(batch, error)

    async def until_landed(self) -> None:
        """Until no produce request is out, and no partition is just being added to the transaction."""
        while self._tasks or self._preparing:
            await asyncio.wait([*self._tasks, *([self._preparing] if self._preparing else [])])

    async def until_prepared(self) -> None:
        """Until no partition is just being added to the transaction."""
        while self._preparing is not None:
            await asyncio.wait([self._preparing])

    def _is_out(self, batch: Batch) -> bool:
        return self._accumulator.in_flight.get(batch.tp) is batch

    def _muted(self, tp: TopicPartition) -> bool:
        return self._transaction is not None and self._transaction.muted(tp)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refresh(self, now_ms: int) -> None:
        if now_ms >= self._refresh_at_ms:
            self._refresh_at_ms = now_ms + self._connection.settings.retry_backoff_ms
            self._connection.refresh_metadata()

    def _prepared(self) -> bool:
        """Whether something may be drained; starts what is missing for it."""
        if self._transaction is not None:
            if self._transaction.state in (TxnState.IN_TRANSACTION, TxnState.COMMITTING):
                self._transaction.want(set(self._accumulator.queued()))
                if self._transaction.pending and self._preparing is None:
                    self._preparing = asyncio.ensure_future(self._add_partitions(set(self._transaction.pending)))
            return self.ledger.ready
        if self._settings.enable_idempotence and not self.ledger.ready:
            if self._preparing is None and self._accumulator.incomplete:
                self._preparing = asyncio.ensure_future(self._fetch_producer_id())
            return False
        return True

    async def _fetch_producer_id(self) -> None:
        try:
            await self.coordinator.init_producer_id()
        except PenstockError as e:
            log.warning("no producer id", client_id=self._connection.client_id, reason=str(e))
            if not isinstance(e, RetriableError):
                self.fail_all(e, in_flight=False)
            await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)
        finally:
            self._preparing = None
            self.wake()

    async def _add_partitions(self, partitions: set[TopicPartition]) -> None:
        assert self._transaction is not None
        try:
            await self.coordinator.add_partitions(partitions)
            self._transaction.added |= partitions
        except PenstockError as e:
            self.fail_transaction(e)
        finally:
            self._transaction.pending -= partitions
            self._preparing = None
            self.wake()

    def fail_transaction(self, error: PenstockError) -> None:
        """The transaction cannot be committed any more: what it still has queued is dropped."""
        assert self._transaction is not None
        self._transaction.fail(error)
        fatal = isinstance(error, FatalError)
        where = f"transactional id {self._transaction.transactional_id}"
        self.fail_all(error if fatal else TransactionAborted(f"{where}: not sent, since {error}"), in_flight=False)

    async def _produce(self, node: int, batches: list[Batch], now_ms: int) -> None:
        topics: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        sizes: dict[TopicPartition, int] = {}
        for batch in batches:
            batch.attempts += 1
            data = batch.data(self._stamp(batch))
            sizes[batch.tp] = len(data)
            topics[batch.tp.topic].append((batch.tp.partition, data))
        acks = -1 if self._settings.acks == "all" else self._settings.acks
        request = produce_request(
            self._settings.transactional_id, acks, self._connection.settings.request_timeout_ms, list(topics.items())
        )
        answered: dict[TopicPartition, tuple[int, int, int]] = {}
        failure: PenstockError | None = None
        try:
            self._metrics.in_flight.inc()
            response = await self._connection.send(node, request, f"produce to node {node}")
            if acks == 0:
                answered = {batch.tp: (0, -1, -1) for batch in batches}
            else:
                for topic, rows in response.topics:
                    for partition, code, offset, timestamp, *_ in rows:
                        answered[TopicPartition(topic, partition)] = code, offset, timestamp
        except PenstockError as e:
            failure = e
        finally:
            self._metrics.in_flight.dec()
            self._requests[node] -= 1
            landed_ms = self._clock.monotonic_ms()
            self._metrics.requested(landed_ms - now_ms)
            for batch in batches:
                self._accumulator.landed(batch)
            self.wake()
        for batch in batches:
            if (answer := answered.get(batch.tp)) is not None:
                self._handle(batch, *answer, sizes[batch.tp], landed_ms)
            else:
                self._unanswered(
                    batch, failure or BrokerNotAvailable(f"{batch.tp}: missing in the response"), landed_ms
                )

    def _stamp(self, batch: Batch) -> ProducerState:
        if not self._settings.enable_idempotence:
            return ProducerState()
        return batch.producer_state if batch.producer_state.producer_id >= 0 else self.ledger.state(batch.tp)

    def _handle(self, batch: Batch, code: int, offset: int, timestamp: int, size: int, now_ms: int) -> None:
        if code not in (0, DUPLICATE_SEQUENCE_NUMBER):
            batch.fate_unknown |= code in MAYBE_APPENDED
            self._failed(batch, error_for_code(code, f"{batch.tp}"), now_ms)
            return
        if self._settings.enable_idempotence:
            self.ledger.acknowledged(batch.tp, batch.producer_state, batch.count)
        if batch.state is BatchState.DONE:
            self._give_back(batch)
            log.warning("a batch was written after its delivery timeout", topic_partition=str(batch.tp), offset=offset)
            return
        batch.complete(offset, timestamp)
        self._metrics.acknowledged(batch.tp.topic, batch.count, size, now_ms - batch.created_ms)
        self._release(batch)

    def _unanswered(self, batch: Batch, error: PenstockError, now_ms: int) -> None:
        batch.fate_unknown = True
        self._failed(batch, type(error)(f"{batch.tp}: {error}"), now_ms)

    def _failed(self, batch: Batch, error: PenstockError, now_ms: int) -> None:
        if isinstance(error, STALE_METADATA):
            self._refresh(now_ms)
        if batch.state is BatchState.DONE:
            self._give_back(batch)
            if batch.fate_unknown:
                self._unresolved()
            return
        if (
            self._transaction is None
            and isinstance(error, OutOfOrderSequence | ProducerFenced)
            and not batch.fate_unknown
        ):
            # The broker lost or never had this producer's state, and nothing of this batch: start a new epoch with it.
            self.ledger.bump()
            batch.producer_state = ProducerState()
            error = NotLeaderOrFollower(str(error))
        passing = isinstance(error, RetriableError | CorruptRecord)
        if passing and batch.attempts <= self._settings.retries and not self._lost_transaction():
            self._metrics.retried(batch.tp.topic)
            log.info("retrying", topic_partition=str(batch.tp), attempt=batch.attempts, reason=str(error))
            batch.last_error = error
            self._accumulator.reenqueue(batch, now_ms + self._backoff_ms(batch.attempts))
            return
        if batch.fate_unknown:
            self._unresolved()
        self._fail(batch, error)
        if self._transaction is not None:
            self.fail_transaction(error)

    def _lost_transaction(self) -> bool:
        return self._transaction is not None and self._transaction.state not in (
            TxnState.IN_TRANSACTION,
            TxnState.COMMITTING,
        )

    def _backoff_ms(self, attempts: int) -> int:
        backoff_ms: int = self._connection.settings.retry_backoff_ms << min(attempts - 1, 10)
        return min(backoff_ms, self._settings.retry_backoff_max_ms)

    def _unresolved(self) -> None:
        if self._transaction is not None:
            self._transaction.epoch_is_spent = True
        elif self._settings.enable_idempotence:
            self.ledger.bump()

    def _expire(self, now_ms: int) -> None:
        for batch in self._accumulator.expire(now_ms):
            out = self._is_out(batch)
            if not out and batch.fate_unknown:
                self._unresolved()
            fate = "it may still be written" if out or batch.fate_unknown else "it was not written"
            last = f", last error: {batch.last_error}" if batch.last_error else ""
            error = DeliveryTimeout(
                f"{batch.tp}: not acknowledged within "
                f"delivery_timeout_ms={self._settings.delivery_timeout_ms}; {fate}{last}"
            )
            self._fail(batch, error)
            if self._transaction is not None:
                self.fail_transaction(error)

    def _fail(self, batch: Batch, error: PenstockError) -> None:
        batch.fail(error)
        self._metrics.failed(batch.tp.topic, batch.count)
        self._release(batch)

    def _give_back(self, batch: Batch) -> None:
        """Free a batch's memory once: of two batches in one response the first may fail the second before its turn."""
        self._memory.release(batch.memory)
        batch.memory = 0

    def _release(self, batch: Batch) -> None:
        self._accumulator.forget(batch)
        if not self._is_out(batch):
            self._give_back(batch)
        self._metrics.buffer_available.set(self._memory.available)
        for index, callback in batch.callbacks:
            try:
                if batch.error is None:
                    callback(batch.metadata(index), None)
                else:
                    callback(None, batch.error)
            except Exception:
                log.exception("on_delivery failed", topic_partition=str(batch.tp))
        if self._interceptors:
            for index in range(batch.count):
                self._interceptors.on_acknowledgement(None if batch.error else batch.metadata(index), batch.error)
