"""The end of a batch: it is acknowledged, retried, split, or failed. There is no I/O here.

A response completes a batch, fails it, splits it, or puts it back into its partition's queue with a backoff of its
own. If some of its records are invalid, only these fail. After `delivery_timeout_ms` a batch fails in any state. If it
fails in flight, its memory is released at the end of its request, which still reads it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence

from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.producer_batch import NO_STATE, BatchState, ProducerBatch, ProducerState
from penstock.shared.clients.producer.record_accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import (
    SequenceLedger,
    Transaction,
    TxnState,
    fenced_by,
    is_fatal,
)
from penstock.shared.clients.protocol.errors import (
    CODE_OF,
    DUPLICATE_SEQUENCE_NUMBER,
    MAYBE_APPENDED,
    NO_ERROR,
    codes_of,
    error_for_code,
)
from penstock.shared.clients.protocol.produce import PartitionProduceResponse
from penstock.shared.clients.protocol.record_batches import SealedBatch
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    CorruptRecord,
    DeliveryTimeout,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    PenstockError,
    ProducerFenced,
    RetriableError,
    SendCancelled,
    TransactionAborted,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

STALE_METADATA = (NotLeaderOrFollower, UnknownTopicOrPartition, BrokerNotAvailable)
"""Errors after which the leader is looked up again (Java: `InvalidMetadataException`)."""
MESSAGE_TOO_LARGE = CODE_OF["MESSAGE_TOO_LARGE"]
FENCED = codes_of("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")
ENDS_TRANSACTION_ALONE = codes_of(
    "TOPIC_AUTHORIZATION_FAILED",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_TXN_STATE",
    "INVALID_PRODUCER_ID_MAPPING",
    "UNKNOWN_PRODUCER_ID",
)
"""Codes after which the transaction must be aborted and the producer can go on: a missing permission for the topic, and
epochs, sequences and transaction states that a new epoch corrects (KIP-360). INVALID_PRODUCER_EPOCH is also the
response after the coordinator has timed the transaction out (KIP-588). The abort requests the next epoch, which shows
whether a newer producer exists."""
RETRY_BACKOFF_JITTER = 0.2


def _cuts_around(invalid: Sequence[int], count: int) -> list[int]:
    """Return the indices at which the records of a batch change between valid and invalid ones.

    >>> _cuts_around([0, 3, 4], 6), _cuts_around([], 2), _cuts_around([0, 1], 2)
    ([1, 3, 5], [], [])
    """
    if not invalid:
        return []
    wrong = set(invalid)
    return [index for index in range(1, count) if (index in wrong) != (index - 1 in wrong)]


class BatchCompletion:
    """Applies responses and the passing of time to the accumulator, the sequence ledger and the buffer pool."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        memory: BufferPool,
        settings: ProducerSettings,
        transaction: Transaction | None,
        metrics: ProducerMetrics,
        retry_backoff_ms: int,
    ) -> None:
        self._accumulator = accumulator
        self._memory = memory
        self._settings = settings
        self._transaction = transaction
        self._metrics = metrics
        self._backoff = ExponentialBackoff(retry_backoff_ms, settings.retry_backoff_max_ms, jitter=RETRY_BACKOFF_JITTER)
        self._random = random.Random()  # noqa: S311 - spreads retries, protects nothing
        self.ledger = SequenceLedger()
        self.metadata_is_stale = False
        accumulator.on_cancelled = None if transaction is None else self._fail_transaction_after_cancel

    def __repr__(self) -> str:
        return f"<BatchCompletion {self.ledger!r}>"

    def settle(self) -> None:
        """Settle the sequence numbers of partitions with a batch that was given up, or with a gap that the broker has
        shown (`SequenceLedger`).

        Partitions with a batch in flight, or whose next batch must keep its number, are left out. Call it before
        batches are drained: it may begin a new epoch. After EPOCH_MAX the ledger is not `ready` until it has a new
        producer id.
        """
        ledger = self.ledger
        for tp in ledger.troubled():
            queue = self._accumulator.queue(tp)
            gap = ledger.has_gap(tp)
            # There are two reasons to wait (Java: `TransactionManager.maybeResolveSequences`). 1. A batch in flight may
            # still be acknowledged, and with it every batch before. 2. A retry keeps its number: the broker's response
            # to it shows whether there is a gap. Once a gap is shown, the numbers of the queued batches are void.
            if queue.out or (not gap and queue.queued and queue.queued[0].sequenced):
                continue
            # This comes before the drain: a new epoch would also apply to batches that were drained under the old one.
            epoch = ledger.epoch
            ledger.settle(tp)
            if ledger.epoch != epoch:
                log.warning("new epoch: a batch is lost", topic_partition=str(tp), epoch=ledger.epoch, gap=gap)
            if gap:
                self._accumulator.renumber(tp)

    def may_send(self, queue: PartitionQueue) -> bool:
        """Whether the first batch of a partition may be sent now."""
        # The coordinator writes its marker only to partitions that were added to the transaction. A batch in any other
        # partition would hang there as an open transaction. Brokers since KIP-890 reject it with INVALID_TXN_STATE.
        if self._transaction is not None and self._transaction.muted(queue.tp):
            return False
        if not self._settings.enable_idempotence:
            return True
        # A retry keeps its number: another number would store the batch twice if an earlier attempt has succeeded. Only
        # a gap shows that no attempt has, and `settle` then clears the number before the batch is sent again.
        if queue.queued[0].sequenced:
            return not self.ledger.has_gap(queue.tp)
        return self.ledger.may_assign(queue.tp)

    def waiting(self, queue: PartitionQueue) -> bool:
        """Whether a partition waits for something other than time."""
        if self._transaction is not None and self._transaction.muted(queue.tp):
            return True
        return bool(queue.out) and self.ledger.is_troubled(queue.tp)

    def sent(self, batch: ProducerBatch, now_ms: int) -> SealedBatch:
        """Count an attempt and return the bytes of a drained batch."""
        if not batch.attempts:
            self._metrics.drained(now_ms - batch.created_ms)
        batch.attempts += 1
        batch.sent_ms = now_ms
        return batch.data(self._assign_sequence(batch))

    def _assign_sequence(self, batch: ProducerBatch) -> ProducerState:
        if not self._settings.enable_idempotence:
            return NO_STATE
        return batch.producer_state if batch.sequenced else self.ledger.assign(batch.tp, batch.count)

    def answered(self, batch: ProducerBatch, response: PartitionProduceResponse, now_ms: int) -> None:
        """Handle the broker's response for a batch. The batch is no longer in flight."""
        self._accumulator.landed(batch)
        code = response.error_code
        # There are six cases (compare Java's `Sender.completeBatch`).
        #
        # 1. The batch is in the log. DUPLICATE_SEQUENCE_NUMBER means that an earlier attempt succeeded (KIP-98) and
        #    that the broker no longer knows its offset: for one of the last five batches it answers with the offset.
        if code in (NO_ERROR, DUPLICATE_SEQUENCE_NUMBER):
            self._complete_acknowledged_batch(batch, response, now_ms)
            return
        batch.fate_unknown |= code in MAYBE_APPENDED
        detail = response.detail or None
        if code in FENCED and self._transaction is not None:
            detail = fenced_by(self._settings.transaction_timeout_ms)
        error = error_for_code(code, f"{batch.tp}", detail)
        if isinstance(error, STALE_METADATA):
            self.metadata_is_stale = True
        # 2. The batch has failed while its request was in flight: its waiters have their error already.
        if self._was_given_up_in_flight(batch):
            return
        # 3. The broker's limit is smaller than the batch: send it in parts (KIP-126).
        if code == MESSAGE_TOO_LARGE and batch.count > 1 and not self._transaction_is_lost():
            log.info("a batch is too large for the broker: split", topic_partition=str(batch.tp), records=batch.count)
            for part in self._split_batch(batch):
                self._accumulator.reenqueue(part, now_ms)
            return
        # 4. Some of its records are invalid, and the broker names all of these (KIP-467): the others are sent again.
        #    If an earlier attempt may have succeeded, they could be stored twice, so the whole batch fails (case 6).
        if (cuts := _cuts_around(response.invalid, batch.count)) and not batch.fate_unknown:
            parts = self._split_batch(batch, cuts)
            # Parts of valid and of invalid records alternate.
            first_valid = int(0 in response.invalid)
            for part in parts[first_valid::2]:
                self._accumulator.reenqueue(part, now_ms)
            self._fail_each(parts[1 - first_valid :: 2], error)
            # The valid records then fail with TransactionAborted.
            if self._transaction is not None:
                self.fail_transaction(error)
            return
        # 5. The broker rejected the sequence number or epoch (KIP-98): the batch is not in the log, whatever became of
        #    earlier attempts.
        if isinstance(error, OutOfOrderSequence | ProducerFenced) and batch.sequenced:
            batch.fate_unknown = False
            pending = self._accumulator.queue(batch.tp).earlier_pending(batch)
            # Without an earlier batch that could fill the gap, this partition needs a new epoch (KIP-360). A
            # transaction gets one from the coordinator when it is aborted.
            if self._transaction is None and not pending:
                self.ledger.gap_shown(batch.tp)
            # Retry in both cases: the batch follows an earlier one that is pending, or it gets a new number
            # (Java: `TransactionManager.canRetry`). NotLeaderOrFollower stands for any retriable error here.
            if self._transaction is None or (pending and isinstance(error, OutOfOrderSequence)):
                error = NotLeaderOrFollower(str(error))
        # 6. Any other error decides by its class whether the batch is retried.
        self._handle_rejected_batch(batch, error, now_ms, alone=code in ENDS_TRANSACTION_ALONE)

    def unanswered(self, batch: ProducerBatch, error: PenstockError, now_ms: int) -> None:
        """Handle a request without a response. The batch is no longer in flight, and may be in the log. Only
        UnsupportedVersion is raised before a request is written."""
        self._accumulator.landed(batch)
        batch.fate_unknown |= not isinstance(error, UnsupportedVersion)
        if isinstance(error, STALE_METADATA):
            self.metadata_is_stale = True
        if not self._was_given_up_in_flight(batch):
            self._handle_rejected_batch(batch, type(error)(f"{batch.tp}: {error}"), now_ms)

    def expire(self, now_ms: int) -> None:
        """Fail every batch that is older than `delivery_timeout_ms`."""
        for batch in self._accumulator.expire(now_ms):
            if batch.state is BatchState.DONE:
                # An earlier batch failed the transaction, which ended this batch too.
                continue
            out = self._accumulator.is_out(batch)
            fate = "it may still be written" if out or batch.fate_unknown else "it was not written"
            last = f", last error: {batch.last_error}" if batch.last_error else ""
            why = f", {batch.held_up_by}" if batch.held_up_by else ""
            error = DeliveryTimeout(
                f"{batch.tp}: not acknowledged within "
                f"delivery_timeout_ms={self._settings.delivery_timeout_ms}; {fate}{last}{why}"
            )
            self.fail(batch, error)
            # A commit would leave out the expired records silently.
            if self._transaction is not None:
                self.fail_transaction(error)

    def fail_transaction(self, error: PenstockError) -> None:
        """Fail the transaction and drop its queued batches: it can no longer be committed."""
        assert self._transaction is not None
        self._transaction.fail(error)
        fatal = is_fatal(error)
        where = f"transactional id {self._transaction.transactional_id}"
        # Batches in flight are left alone: the broker may append them. The abort waits for their responses.
        self.fail_all(error if fatal else TransactionAborted(f"{where}: not acknowledged, since {error}"), out=False)

    def _fail_transaction_after_cancel(self, error: SendCancelled) -> None:
        """Fail the transaction after records were cancelled: a commit would leave them out silently."""
        assert self._transaction is not None
        if self._transaction.state in (TxnState.IN_TRANSACTION, TxnState.COMMITTING):
            self.fail_transaction(error)

    def fail_all(self, error: PenstockError, *, out: bool) -> int:
        """Fail all queued batches, and with `out` those in flight too. Returns their number."""
        batches = self._accumulator.take_all(out=out)
        self._fail_each(batches, error)
        return len(batches)

    def emptied(self, batch: ProducerBatch) -> None:
        """End a batch of which every record was cancelled before it was sent."""
        batch.fail(batch.cancelled_error())
        self._finish_batch(batch)

    def fail(self, batch: ProducerBatch, error: PenstockError) -> None:
        """End a batch with an error and call its callbacks."""
        # The response of a batch in flight settles its numbers, see `_was_given_up_in_flight`: it may still be
        # acknowledged.
        if batch.sequenced and not self._accumulator.is_out(batch):
            self._note_given_up_sequence(batch)
        # Cancelled records have ended in SendCancelled already: leave them out of the log line and the metrics.
        if batch.state is BatchState.OPEN:
            batch.without_removed()
        maybe_written = batch.fate_unknown or self._accumulator.is_out(batch)
        if error.maybe_written is not maybe_written:
            # One error may end several batches, each with its own fate.
            error = copy.copy(error)
            error.maybe_written = maybe_written
        # An abort drops the records of all partitions. The error that led to it, if any, was logged before.
        is_of_abort = isinstance(error, TransactionAborted) and self._is_aborting()
        (log.debug if is_of_abort else log.warning)(
            "records given up",
            topic_partition=str(batch.tp),
            records=batch.count,
            maybe_written=maybe_written,
            reason=str(error),
        )
        batch.fail(error)
        self._metrics.failed(batch.tp.topic, batch.count)
        self._finish_batch(batch)

    def _is_aborting(self) -> bool:
        return self._transaction is not None and self._transaction.state is TxnState.ABORTING

    def _complete_acknowledged_batch(
        self, batch: ProducerBatch, response: PartitionProduceResponse, now_ms: int
    ) -> None:
        queue = self._accumulator.queue(batch.tp)
        queue.batches_at_ack = queue.batches
        # First the ledger, also for a batch that has failed: its numbers are used, and the next batch must not repeat
        # them.
        if batch.sequenced:
            self.ledger.acknowledged(batch.tp, batch.producer_state, batch.count)
        if batch.state is BatchState.DONE:
            self._release_batch_memory(batch)
            log.warning(
                "a batch was written after its delivery timeout",
                topic_partition=str(batch.tp),
                offset=response.base_offset,
            )
            return
        batch.complete(response.base_offset, response.log_append_time)
        self._metrics.acknowledged(batch.tp.topic, batch.count, batch.size(), now_ms - batch.created_ms)
        self._finish_batch(batch)

    def _split_batch(self, batch: ProducerBatch, cuts: Sequence[int] = ()) -> list[ProducerBatch]:
        self._metrics.split(batch.tp.topic)
        parts = batch.split(cuts)
        self._accumulator.replace(batch, parts)
        return parts

    def _fail_each(self, batches: Iterable[ProducerBatch], error: PenstockError) -> None:
        for batch in batches:
            # A callback of an earlier batch may have ended this one.
            if batch.state is not BatchState.DONE:
                self.fail(batch, error)

    def _was_given_up_in_flight(self, batch: ProducerBatch) -> bool:
        """Return whether the batch was given up while its request was in flight. If so, release its memory, and note
        that its sequence numbers were given up."""
        if batch.state is not BatchState.DONE:
            return False
        self._release_batch_memory(batch)
        if batch.sequenced:
            self._note_given_up_sequence(batch)
        return True

    def _handle_rejected_batch(
        self, batch: ProducerBatch, error: PenstockError, now_ms: int, *, alone: bool = False
    ) -> None:
        # CORRUPT_MESSAGE is retriable here, as in Java: the bytes were damaged on their way, and the batch itself is
        # intact. The consumer's CorruptRecord is not, since it is in the log.
        passing = isinstance(error, RetriableError | CorruptRecord)
        # An attempt that ended in a split is no failure: it counts neither as a retry nor for the backoff.
        attempts = batch.attempts - batch.splits
        if passing and attempts <= self._settings.retries and not self._transaction_is_lost():
            self._metrics.retried(batch.tp.topic, batch.count)
            log.info("retrying", topic_partition=str(batch.tp), attempt=batch.attempts, reason=str(error))
            batch.last_error = error
            self._accumulator.reenqueue(batch, now_ms + round(self._backoff.wait_ms(attempts, self._random.random())))
            return
        error.abortable |= alone
        # First this batch with its own error. `fail_transaction` then fails the queued ones with TransactionAborted.
        self.fail(batch, error)
        if self._transaction is not None:
            self._transaction.epoch_is_spent |= alone
            self.fail_transaction(error)

    def _note_given_up_sequence(self, batch: ProducerBatch) -> None:
        if self._transaction is not None:
            # Only the coordinator grants epochs here (KIP-360): aborting the transaction requests one.
            self._transaction.epoch_is_spent |= batch.fate_unknown
            self.ledger.given_up(batch.tp, lost=False)
        else:
            self.ledger.given_up(batch.tp, lost=batch.fate_unknown)

    def _transaction_is_lost(self) -> bool:
        return self._transaction is not None and self._transaction.state not in (
            TxnState.IN_TRANSACTION,
            TxnState.COMMITTING,
        )

    def _release_batch_memory(self, batch: ProducerBatch) -> None:
        self._accumulator.freed(batch)
        self._memory.release(batch.memory)

    def _finish_batch(self, batch: ProducerBatch) -> None:
        self._accumulator.forget(batch)
        # The request of a batch that expired in flight still holds its bytes. Java's producer reused such a buffer, and
        # records arrived in the wrong topic (KAFKA-19012).
        if not self._accumulator.is_out(batch):
            self._release_batch_memory(batch)
        # A callback may call the producer: take the list first, so that no callback runs twice.
        callbacks = batch.callbacks
        batch.callbacks = []
        for callback in callbacks:
            if batch.error is None:
                callback.call(batch.metadata(*callback[:-1]), None)
            else:
                callback.call(None, batch.error)
