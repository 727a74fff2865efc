"""Producer ids, and the transactions of the coordinators.

The states of a transaction, with the events that change them:

    Empty, CompleteCommit, CompleteAbort --add partitions or offsets--> Ongoing
    CompleteCommit, CompleteAbort --InitProducerId--> Empty
    Ongoing --EndTxn--> PrepareCommit or PrepareAbort
    Ongoing --InitProducerId, or the timeout--> PrepareAbort, under the next epoch: the producer is fenced
    PrepareCommit --markers are written--> CompleteCommit, and PrepareAbort to CompleteAbort

EndTxn is answered once the end is prepared. Writing the markers takes `completion_ms`, by default no time, so that no
request sees a Prepare state. While the markers are written, the producer's InitProducerId, AddPartitionsToTxn,
AddOffsetsToTxn and repeated EndTxn are answered with CONCURRENT_TRANSACTIONS.

A producer that was fenced only by the timeout may request the new epoch, and continue (KIP-588).

If a producer repeats EndTxn with the same result after the markers are written, it gets the same response as the first
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.group_coordinator import Groups
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.timers import Timer, Timers
from penstock.shared.testing.fake_broker.topics import Partition

EPOCH_MAX = 2**15 - 1
NO_PRODUCER = (-1, -1)


class TransactionState(StrEnum):
    """Transaction states, with Kafka's names."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


END: dict[tuple[TransactionState, bool], TransactionState] = {
    (TransactionState.ONGOING, True): TransactionState.PREPARE_COMMIT,
    (TransactionState.ONGOING, False): TransactionState.PREPARE_ABORT,
    (TransactionState.COMPLETE_COMMIT, True): TransactionState.COMPLETE_COMMIT,
    (TransactionState.COMPLETE_ABORT, False): TransactionState.COMPLETE_ABORT,
}
"""The state and whether to commit, mapped to the state after EndTxn. All other pairs are errors."""

PREPARED: dict[TransactionState, TransactionState] = {
    TransactionState.PREPARE_COMMIT: TransactionState.COMPLETE_COMMIT,
    TransactionState.PREPARE_ABORT: TransactionState.COMPLETE_ABORT,
}
"""The state that follows a prepared end once its markers are written."""


@dataclass
class BrokerTransaction:
    """One transactional id: its producer, and the content of its transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    last_epoch: int = -1
    state: TransactionState = TransactionState.EMPTY
    partitions: set[TopicPartition] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    timer: Timer | None = field(default=None, repr=False)

    @property
    def is_completing(self) -> bool:
        """Whether its end is decided, but not yet written."""
        return self.state in PREPARED


class Transactions:
    """The producer ids and transactional ids of a cluster."""

    def __init__(
        self,
        configs: Mapping[str, str],
        timers: Timers,
        groups: Groups,
        partition: Callable[[TopicPartition], Partition | None],
        completion_ms: int = 0,
    ) -> None:
        """`partition` returns a partition, or None if it does not exist. Writing markers takes `completion_ms`."""
        self._configs = configs
        self._timers = timers
        self._groups = groups
        self._partition = partition
        self._completion_ms = completion_ms
        self._next_id = 1000
        self.known: dict[str, BrokerTransaction] = {}
        self._by_producer: dict[int, BrokerTransaction] = {}

    def __repr__(self) -> str:
        return f"Transactions({list(self.known.values())})"

    def new_producer_id(self) -> int:
        """A producer id that was never used before."""
        self._next_id += 1
        return self._next_id

    def init(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int], now_ms: int
    ) -> tuple[int, int] | ErrorCode:
        """Handle InitProducerId. Returns the producer id and the new epoch, which fences earlier epochs, or an error.

        `expected` is the id and epoch of a producer that continues after an error, otherwise NO_PRODUCER. If a
        transaction is open, aborts it and returns CONCURRENT_TRANSACTIONS.
        """
        if not 0 < timeout_ms <= int(self._configs["transaction.max.timeout.ms"]):
            return ErrorCode.INVALID_TRANSACTION_TIMEOUT
        known = self.known.get(transactional_id)
        if known is None:
            expected = NO_PRODUCER
            known = BrokerTransaction(transactional_id, self.new_producer_id(), -1, timeout_ms)
            self.known[transactional_id] = known
            self._by_producer[known.producer_id] = known
        mine = expected[0] == known.producer_id and expected[1] in (known.producer_epoch, known.last_epoch)
        if expected != NO_PRODUCER and not mine:
            return ErrorCode.PRODUCER_FENCED
        if known.is_completing:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if known.state is TransactionState.ONGOING:
            self._abort_fenced(known, now_ms)
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if expected != NO_PRODUCER and expected[1] == known.last_epoch >= 0:
            # The producer repeats a request whose response was lost.
            return known.producer_id, known.producer_epoch
        known.timeout_ms = timeout_ms
        known.state = TransactionState.EMPTY
        self._bump_producer_epoch(known, expected)
        return known.producer_id, known.producer_epoch

    def _bump_producer_epoch(self, known: BrokerTransaction, expected: tuple[int, int]) -> None:
        if known.producer_epoch >= EPOCH_MAX - 1:
            known.producer_id = self.new_producer_id()
            known.producer_epoch = 0
            known.last_epoch = -1
            self._by_producer[known.producer_id] = known
            return
        known.last_epoch = known.producer_epoch if expected != NO_PRODUCER else -1
        known.producer_epoch += 1

    def check(self, transactional_id: str, producer_id: int, epoch: int) -> BrokerTransaction | ErrorCode:
        """The transaction of a producer that is not fenced, otherwise the error code."""
        known = self.known.get(transactional_id)
        if known is None or known.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return known if known.producer_epoch == epoch else ErrorCode.PRODUCER_FENCED

    def verify(self, producer_id: int, epoch: int, tp: TopicPartition) -> ErrorCode:
        """NONE if the producer has an open transaction that contains the partition."""
        known = self._by_producer.get(producer_id)
        if known is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if known.producer_epoch != epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        is_in = known.state is TransactionState.ONGOING and tp in known.partitions
        return ErrorCode.NONE if is_in else ErrorCode.INVALID_TXN_STATE

    def add(
        self, known: BrokerTransaction, now_ms: int, *, partitions: set[TopicPartition], groups: set[str]
    ) -> ErrorCode:
        """Add partitions and groups to the transaction. The first of them begins it."""
        if known.is_completing:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if known.state is not TransactionState.ONGOING:
            known.state = TransactionState.ONGOING
            known.timer = self._timers.at(now_ms + known.timeout_ms, lambda at_ms: self._abort_fenced(known, at_ms))
        known.partitions |= partitions
        known.groups |= groups
        return ErrorCode.NONE

    def end(self, known: BrokerTransaction, now_ms: int, *, committed: bool) -> ErrorCode:
        """Commit or abort the transaction.

        A repeated request to commit, or to abort, succeeds once the markers are written; before, it gets
        CONCURRENT_TRANSACTIONS. A request for the opposite gets INVALID_TXN_STATE.
        """
        if known.is_completing and committed is (known.state is TransactionState.PREPARE_COMMIT):
            return ErrorCode.CONCURRENT_TRANSACTIONS
        target = END.get((known.state, committed))
        if target is None:
            return ErrorCode.INVALID_TXN_STATE
        known.state = target
        if not known.is_completing:
            return ErrorCode.NONE
        if known.timer is not None:
            known.timer.cancel()
        if self._completion_ms > 0:
            self._timers.at(now_ms + self._completion_ms, lambda at_ms: self._finish_transaction(known, at_ms))
        else:
            self._finish_transaction(known, now_ms)
        return ErrorCode.NONE

    def _abort_fenced(self, known: BrokerTransaction, now_ms: int) -> None:
        """Abort the transaction under the next epoch.

        Its producer has the old epoch: of its requests, the coordinator accepts only InitProducerId.
        """
        known.last_epoch = known.producer_epoch
        known.producer_epoch = known.producer_epoch + 1
        self.end(known, now_ms, committed=False)

    def _finish_transaction(self, known: BrokerTransaction, now_ms: int) -> None:
        committed = known.state is TransactionState.PREPARE_COMMIT
        known.state = PREPARED[known.state]
        for tp in sorted(known.partitions):
            partition = self._partition(tp)
            if partition is not None:
                partition.log.end_transaction(
                    known.producer_id,
                    known.producer_epoch,
                    partition.leader_epoch,
                    committed=committed,
                    now_ms=now_ms,
                )
                partition.wake_fetches()
        for group_id in known.groups:
            self._groups.end_transaction(group_id, known.producer_id, committed=committed)
        known.partitions = set()
        known.groups = set()
