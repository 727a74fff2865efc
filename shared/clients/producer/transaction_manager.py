"""The producer's identity towards the broker: idempotence and transactions (Java: `TransactionManager`).

There is no I/O here: transaction_requests.py sends the requests.

`SequenceLedger` knows which producer id, epoch and sequence number a batch carries. Several batches of a partition may
be in flight, so a number is assigned when a batch is first drained. A retry keeps its number, by which the broker
detects a duplicate. The broker's response decides how a hole in the numbers is closed. There are three cases.

1. A batch is rejected with OUT_OF_ORDER_SEQUENCE_NUMBER while no earlier one is pending. This shows a gap: an earlier
   batch never reached the log, so neither did this one nor any after it. All queued batches may get new numbers in a
   new epoch (KIP-360).
2. A batch was given up, and batches after it have numbers. They are sent as they are: they are acknowledged (then the
   batch reached the log after all) or they show the gap.
3. A batch was given up, and none is left after it. `settle` decides before a new number is assigned: numbers that were
   certainly rejected are used again; a batch that may still arrive costs an epoch, so that the broker rejects it.

Other partitions move to a new epoch when all their numbers are acknowledged. Under a new producer id or epoch a
partition has one batch in flight until the first is acknowledged (`may_assign`).

>>> ledger = SequenceLedger()
>>> ledger.adopt(7, 0)
>>> tp = TopicPartition("clicks", 0)
>>> first, second = ledger.assign(tp, 10), ledger.assign(tp, 5)
>>> second
ProducerState(producer_id=7, epoch=0, base_sequence=10)
>>> ledger.acknowledged(tp, first, 10)
>>> ledger.given_up(tp, lost=False)
>>> ledger.settle(tp)
>>> ledger.assign(tp, 1).base_sequence
10

`Transaction` is the state of a transactional producer, as a table, and the partitions of its open transaction.

    UNINITIALIZED ─init─▶ READY ─begin─▶ IN_TRANSACTION ─commit─▶ COMMITTING ─▶ READY
                                             │    └─abort─▶ ABORTING ─▶ READY
                                             └─error─▶ ABORTABLE_ERROR ─abort─▶ ABORTING
    COMMITTING ─error─▶ ABORTABLE_ERROR
    COMMITTING ─cancelled before EndTxn─▶ IN_TRANSACTION
    every state ─fatal─▶ FATAL_ERROR

An error of a record or of an offset makes the transaction abortable: it can no longer be committed. A FatalError that
is not marked as `abortable` is fatal: it ends the producer.
"""

from __future__ import annotations

from enum import Enum, auto

from penstock.shared.clients.producer.producer_batch import SEQUENCES, ProducerState
from penstock.shared.common.errors import FatalError, IllegalState, PenstockError, TransactionAborted
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)

EPOCH_MAX = 2**15 - 1
NO_IDENTITY = -1, -1
"""The producer id and epoch of a producer that has none."""


class _Sequences:
    """The sequence numbers of one partition under one producer id and epoch.

    `next` is the number that the next new batch gets. `expected` is the number after the last acknowledged record,
    which the broker expects next.
    """

    __slots__ = ("epoch", "expected", "gap", "known", "lost", "next", "producer_id")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.next = 0
        self.expected = 0
        self.known = False
        """Whether a batch was acknowledged: from then on the broker checks the numbers."""
        self.lost = False
        """Whether a batch was given up that may still be written."""
        self.gap = False
        """Whether the broker has shown that an earlier batch never reached the log."""


class SequenceLedger:
    """The sequence numbers of each partition, and the current producer id and epoch."""

    def __init__(self) -> None:
        self.producer_id, self.epoch = NO_IDENTITY
        self._partitions: dict[TopicPartition, _Sequences] = {}
        self._troubled: dict[TopicPartition, None] = {}

    def __repr__(self) -> str:
        return f"<SequenceLedger producer {self.producer_id} epoch {self.epoch}, {len(self._partitions)} partitions>"

    @property
    def ready(self) -> bool:
        """Whether there is a producer id."""
        return self.producer_id >= 0

    def adopt(self, producer_id: int, epoch: int) -> None:
        """Use a producer id and epoch that the broker returned."""
        self.producer_id = producer_id
        self.epoch = epoch

    def forget(self) -> None:
        """Drop the numbers of every partition; no batch may be in flight."""
        self._partitions.clear()
        self._troubled.clear()

    def bump(self) -> None:
        """Go to the next epoch; after the last one a new producer id is needed (`ready` is False)."""
        if self.epoch >= EPOCH_MAX:
            self.producer_id, self.epoch = NO_IDENTITY
        else:
            self.epoch += 1

    def assign(self, tp: TopicPartition, count: int) -> ProducerState:
        """Return the producer state of a partition's next new batch, and reserve sequence numbers for its `count`
        records."""
        assert self.ready, "no producer id yet"
        known = self._partitions.get(tp)
        # A partition moves to a new id or epoch, and to number 0, once every assigned number is acknowledged (Java:
        # `TransactionManager.maybeUpdateProducerIdAndEpoch`). Until then it keeps its own: a retry under the old epoch
        # would be rejected once the broker has seen the new one.
        if known is None or (
            known.next == known.expected and (known.producer_id, known.epoch) != (self.producer_id, self.epoch)
        ):
            known = _Sequences(self.producer_id, self.epoch)
            self._partitions[tp] = known
        state = ProducerState(known.producer_id, known.epoch, known.next)
        known.next = (known.next + count) % SEQUENCES
        return state

    def acknowledged(self, tp: TopicPartition, state: ProducerState, count: int) -> None:
        """Note that the broker has the batch of `count` records that begins at `state`, and so all batches before it.

        Does nothing if the partition has another producer id or epoch by now.
        """
        known = self._partitions.get(tp)
        # An earlier epoch has numbers of its own: its late response says nothing about the current ones.
        if known is None or (known.producer_id, known.epoch) != (state.producer_id, state.epoch):
            return
        known.known = True
        after = (state.base_sequence + count) % SEQUENCES
        # `expected` only moves forward, since two brokers may answer out of order after a change of leader. The numbers
        # wrap: a number is ahead if it is less than half of the ring away.
        if (after - known.expected) % SEQUENCES < SEQUENCES // 2:
            known.expected = after

    def given_up(self, tp: TopicPartition, *, lost: bool) -> None:
        """Note that a numbered batch ended without an acknowledgement; `lost` if it may still be in the log."""
        if (known := self._partitions.get(tp)) is not None:
            self._troubled[tp] = None
            known.lost |= lost

    def gap_shown(self, tp: TopicPartition) -> None:
        """Note that the broker rejected a sequence number or an epoch although no earlier batch is pending."""
        if (known := self._partitions.get(tp)) is not None:
            self._troubled[tp] = None
            known.gap = True

    def may_assign(self, tp: TopicPartition) -> bool:
        """Whether the partition's next batch may get a sequence number.

        It may not if there is no producer id, if a given-up batch or a gap is not resolved yet by `settle`, or if the
        partition's first batch under a new producer id or epoch is not acknowledged.
        """
        if not self.ready or tp in self._troubled:
            return False
        known = self._partitions.get(tp)
        # Under a new producer id or epoch only one batch may have a number until it is acknowledged. A broker without
        # state for a producer accepts any first number (`ProducerAppendInfo.checkSequence`). It would accept the second
        # batch without the first.
        return known is None or known.known or known.next == known.expected

    def is_troubled(self, tp: TopicPartition) -> bool:
        """Whether `settle` must be called once no batch of the partition is in flight."""
        return tp in self._troubled

    def troubled(self) -> list[TopicPartition]:
        """The partitions that `settle` must be called for."""
        return list(self._troubled)

    def has_gap(self, tp: TopicPartition) -> bool:
        """Whether the broker has shown a gap that `settle` has not resolved yet."""
        known = self._partitions.get(tp)
        return known is not None and known.gap

    def settle(self, tp: TopicPartition) -> None:
        """Decide which sequence number the partition assigns next, after a given-up batch or a gap.

        It is the number after the last acknowledged record, or 0 under another producer id or epoch. Call it only if no
        batch of the partition is in flight, and no queued batch must keep its number.
        """
        del self._troubled[tp]
        known = self._partitions[tp]
        # There are two cases.
        # 1. A gap was shown, or no later batch was acknowledged after a lost one. The lost batch may still arrive with
        #    its old number. A new epoch makes the broker reject it (KIP-360).
        if known.gap or (known.lost and known.next != known.expected):
            del self._partitions[tp]
            # Several troubled partitions share one bump: any epoch newer than the partition's own is enough.
            if (known.producer_id, known.epoch) == (self.producer_id, self.epoch):
                self.bump()
        # 2. The numbers from `expected` on are free again: the broker has rejected them, or never received them. (In a
        #    transaction a lost batch is noted in `epoch_is_spent` instead.)
        else:
            known.next = known.expected
            known.lost = False


class TxnState(Enum):
    """The states of a transactional producer."""

    UNINITIALIZED = auto()
    READY = auto()
    IN_TRANSACTION = auto()
    COMMITTING = auto()
    ABORTABLE_ERROR = auto()
    ABORTING = auto()
    FATAL_ERROR = auto()


# COMMITTING and ABORTING may follow themselves: a commit or abort whose response was lost may be requested again.
TRANSITIONS: dict[TxnState, frozenset[TxnState]] = {
    TxnState.UNINITIALIZED: frozenset({TxnState.READY}),
    TxnState.READY: frozenset({TxnState.IN_TRANSACTION}),
    TxnState.IN_TRANSACTION: frozenset({TxnState.COMMITTING, TxnState.ABORTING, TxnState.ABORTABLE_ERROR}),
    TxnState.COMMITTING: frozenset({TxnState.READY, TxnState.COMMITTING, TxnState.ABORTABLE_ERROR}),
    TxnState.ABORTABLE_ERROR: frozenset({TxnState.ABORTING}),
    TxnState.ABORTING: frozenset({TxnState.READY, TxnState.ABORTING}),
    TxnState.FATAL_ERROR: frozenset(),
}


def is_fatal(error: Exception) -> bool:
    """Whether an error ends the producer, and not the transaction alone."""
    return isinstance(error, FatalError) and not error.abortable


def fenced_by(transaction_timeout_ms: int) -> str:
    """The possible reasons of PRODUCER_FENCED and INVALID_PRODUCER_EPOCH, for an error message."""
    return (
        "a newer producer with this transactional id exists, or the coordinator aborted a transaction that took longer "
        f"than transaction_timeout_ms={transaction_timeout_ms}"
    )


class Transaction:
    """The state of a transactional id's producer. The errors that it makes itself name the id."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.state = TxnState.UNINITIALIZED
        self.number = 0
        """The number of transactions that have begun."""
        self.error: PenstockError | None = None
        self.added: set[TopicPartition] = set()
        """The partitions that the coordinator knows."""
        self.pending: set[TopicPartition] = set()
        """Partitions that have records and must be added first."""
        self.is_empty = True
        """Whether no request to add a partition or a group was sent: then no EndTxn is needed. After a request without
        a response, the coordinator may have begun the transaction."""
        self.epoch_is_spent = False
        """Whether the next transaction needs the next epoch: a batch is lost (KIP-360), or a request had no response
        (KIP-890)."""
        self.abort_failed = False
        """Whether an abort has failed and no other is in progress."""

    def __repr__(self) -> str:
        return f"<Transaction {self.transactional_id}: {self.state.name}, {len(self.added)} partitions>"

    def move(self, target: TxnState) -> None:
        """Go to a state. Raises IllegalState if the table lacks the transition, or the fatal error if there is one."""
        self.check_fatal()
        if target is not TxnState.FATAL_ERROR and target not in TRANSITIONS[self.state]:
            hint = "; if no commit is running, call commit_transaction again" * (self.state is TxnState.COMMITTING)
            raise IllegalState(
                f"transactional id {self.transactional_id}: {self.state.name} cannot become {target.name}{hint}"
            )
        self.state = target

    def check_fatal(self) -> None:
        """Raise the error that ended this producer, if there is one."""
        if self.state is TxnState.FATAL_ERROR:
            assert self.error is not None
            # A copy: the same object would collect the traceback of every call.
            raise type(self.error)(*self.error.args)

    def check_open(self, what: str) -> None:
        """Raise unless a transaction is open and can still be committed."""
        self.check_fatal()
        if self.state is TxnState.ABORTABLE_ERROR:
            raise TransactionAborted(
                f"transactional id {self.transactional_id}: abort first: {self.error}"
            ) from self.error
        if self.state is not TxnState.IN_TRANSACTION:
            raise IllegalState(f"transactional id {self.transactional_id}: {what} needs an open transaction")

    def begin(self) -> None:
        """Open a transaction."""
        self.move(TxnState.IN_TRANSACTION)
        self.number += 1

    def fail(self, error: PenstockError) -> None:
        """Note an error: fatal ones end the producer, others make the open transaction abortable."""
        if self.state is TxnState.FATAL_ERROR:
            return
        was = self.state
        if is_fatal(error):
            self.state = TxnState.FATAL_ERROR
            self.error = error
        # The first abortable error decides. An abort in progress already ends the transaction (Java:
        # `TransactionManager.transitionToAbortableError`).
        elif self.state in (TxnState.IN_TRANSACTION, TxnState.COMMITTING):
            self.state = TxnState.ABORTABLE_ERROR
            self.error = error
        if self.state is not was:
            log.warning(
                "transaction failed",
                transactional_id=self.transactional_id,
                was=was.name,
                state=self.state.name,
                reason=str(error),
            )

    def not_committed(self) -> None:
        """Reopen the transaction: the commit ended before EndTxn was sent."""
        if self.state is TxnState.COMMITTING:
            self.state = TxnState.IN_TRANSACTION

    def muted(self, tp: TopicPartition) -> bool:
        """Whether a partition must not be written yet: the coordinator does not know that it takes part."""
        return tp not in self.added

    def want(self, partitions: set[TopicPartition]) -> None:
        """Note partitions that have queued records."""
        self.pending |= partitions - self.added

    def adding(self) -> bool:
        """Note that a request to add a partition or a group is sent. Return whether it is the transaction's first."""
        first = self.is_empty
        self.is_empty = False
        return first

    def ended(self) -> None:
        """Note that the transaction was committed or aborted."""
        self.move(TxnState.READY)
        self.error = None
        self.added.clear()
        self.pending.clear()
        self.is_empty = True
