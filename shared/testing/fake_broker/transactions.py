"""Producer ids, and the transactions that coordinators keep.

The life of a transaction, with what ends it (markers are written at once, so that there is no Prepare state to see):

    Empty, CompleteCommit, CompleteAbort --add partitions or offsets--> Ongoing
    Ongoing --EndTxn--> CompleteCommit or CompleteAbort
    Ongoing --InitProducerId of another, or the timeout--> CompleteAbort, under the next epoch: the producer is fenced

A producer that was fenced by the timeout alone may ask for that epoch, and go on (KIP-588); one that was fenced by
another may not.

Asking again for the end that a transaction already had is answered as the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from shared.common.records import TopicPartition
from shared.testing.fake_broker.protocol import ErrorCode
from shared.testing.fake_broker.timers import Timer

if TYPE_CHECKING:
    from shared.testing.fake_broker.cluster_state import ClusterState

EPOCH_MAX = 2**15 - 1
NO_PRODUCER = (-1, -1)


class TransactionState(StrEnum):
    """Kafka's words."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


END: dict[tuple[TransactionState, bool], TransactionState] = {
    (TransactionState.ONGOING, True): TransactionState.COMPLETE_COMMIT,
    (TransactionState.ONGOING, False): TransactionState.COMPLETE_ABORT,
    (TransactionState.COMPLETE_COMMIT, True): TransactionState.COMPLETE_COMMIT,
    (TransactionState.COMPLETE_ABORT, False): TransactionState.COMPLETE_ABORT,
}
"""State and whether to commit, to the state after EndTxn; what is not here is INVALID_TXN_STATE."""


@dataclass
class Transaction:
    """One transactional id: its producer, and what is in its transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    last_epoch: int = -1
    state: TransactionState = TransactionState.EMPTY
    partitions: set[TopicPartition] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    timer: Timer | None = field(default=None, repr=False)


class Transactions:
    """The producer ids and transactional ids of a cluster."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._next_id = 1000
        self.known: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}

    def __repr__(self) -> str:
        return f"Transactions({list(self.known.values())})"

    def new_producer_id(self) -> int:
        """A producer id that none had before."""
        self._next_id += 1
        return self._next_id

    def init(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int], now_ms: int
    ) -> tuple[int, int] | ErrorCode:
        """The producer id and epoch of a transactional id from now on; whoever had an earlier epoch is fenced.

        `expected` are the id and epoch of a producer that asks to go on after an error, else NO_PRODUCER. Where a
        transaction is open it is aborted, and CONCURRENT_TRANSACTIONS has the producer ask again.
        """
        if not 0 < timeout_ms <= int(self._state.configs["transaction.max.timeout.ms"]):
            return ErrorCode.INVALID_TRANSACTION_TIMEOUT
        known = self.known.get(transactional_id)
        if known is None:
            expected = NO_PRODUCER
            known = Transaction(transactional_id, self.new_producer_id(), -1, timeout_ms)
            self.known[transactional_id] = self._by_producer[known.producer_id] = known
        if expected != NO_PRODUCER:
            if expected[0] != known.producer_id or expected[1] not in (known.producer_epoch, known.last_epoch):
                return ErrorCode.PRODUCER_FENCED
            if expected[1] == known.last_epoch >= 0:
                return known.producer_id, known.producer_epoch  # the answer to the first try was lost
        if known.state is TransactionState.ONGOING:
            self._abort_fenced(known, now_ms)
            return ErrorCode.CONCURRENT_TRANSACTIONS
        known.timeout_ms = timeout_ms
        known.state = TransactionState.EMPTY
        self._bump(known, expected)
        return known.producer_id, known.producer_epoch

    def _bump(self, known: Transaction, expected: tuple[int, int]) -> None:
        if known.producer_epoch >= EPOCH_MAX - 1:
            known.producer_id, known.producer_epoch, known.last_epoch = self.new_producer_id(), 0, -1
            self._by_producer[known.producer_id] = known
            return
        known.last_epoch = known.producer_epoch if expected != NO_PRODUCER else -1
        known.producer_epoch += 1

    def check(self, transactional_id: str, producer_id: int, epoch: int) -> Transaction | ErrorCode:
        """The transaction of a producer that is not fenced."""
        known = self.known.get(transactional_id)
        if known is None or known.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return known if known.producer_epoch == epoch else ErrorCode.PRODUCER_FENCED

    def verify(self, producer_id: int, epoch: int, tp: TopicPartition) -> ErrorCode:
        """NONE where the producer has a transaction open that the partition is in."""
        known = self._by_producer.get(producer_id)
        if known is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if known.producer_epoch != epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        is_in = known.state is TransactionState.ONGOING and tp in known.partitions
        return ErrorCode.NONE if is_in else ErrorCode.INVALID_TXN_STATE

    def add(self, known: Transaction, now_ms: int, *, partitions: set[TopicPartition], groups: set[str]) -> None:
        """Put partitions and groups into the transaction, which begins with the first of them."""
        if known.state is not TransactionState.ONGOING:
            known.state = TransactionState.ONGOING
            known.timer = self._state.timers.at(
                now_ms + known.timeout_ms, lambda at_ms: self._abort_fenced(known, at_ms)
            )
        known.partitions |= partitions
        known.groups |= groups

    def end(self, known: Transaction, now_ms: int, *, committed: bool) -> ErrorCode:
        """End the transaction; asked for again, the same end is fine."""
        target = END.get((known.state, committed))
        if target is None:
            return ErrorCode.INVALID_TXN_STATE
        if known.state is TransactionState.ONGOING:
            self._finish(known, now_ms, committed=committed)
        known.state = target
        return ErrorCode.NONE

    def _abort_fenced(self, known: Transaction, now_ms: int) -> None:
        """Abort under the next epoch, so that the producer who had it open can do nothing but ask for that epoch."""
        known.last_epoch, known.producer_epoch = known.producer_epoch, known.producer_epoch + 1
        self.end(known, now_ms, committed=False)

    def _finish(self, known: Transaction, now_ms: int, *, committed: bool) -> None:
        if known.timer is not None:
            known.timer.cancel()
        for tp in sorted(known.partitions):
            partition = self._state.partition(tp)
            if partition is not None:
                partition.log.end_transaction(
                    known.producer_id,
                    known.producer_epoch,
                    partition.leader_epoch,
                    committed=committed,
                    now_ms=now_ms,
                )
                partition.changed()
        for group_id in known.groups:
            self._state.groups.end_transaction(group_id, known.producer_id, committed=committed)
        known.partitions, known.groups = set(), set()
