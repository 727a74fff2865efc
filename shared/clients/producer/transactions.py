"""The life of a transaction, as a table, and what belongs to the one that is open.

    UNINITIALIZED ─init─▶ READY ─begin─▶ IN_TRANSACTION ─commit─▶ COMMITTING ─▶ READY
                                             │    └─abort─▶ ABORTING ─▶ READY
                                             └─error─▶ ABORTABLE_ERROR ─abort─▶ ABORTING
    every state ─fatal─▶ FATAL_ERROR

An error of a record or of an offset makes the transaction abortable: it can no longer be committed. Being fenced is
fatal, and so is every FatalError that is not marked as `abortable`.
"""

from __future__ import annotations

from enum import Enum, auto

from penstock.shared.common.errors import FatalError, IllegalState, PenstockError, TransactionAborted
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)


class TxnState(Enum):
    """Where a transactional producer is."""

    UNINITIALIZED = auto()
    READY = auto()
    IN_TRANSACTION = auto()
    COMMITTING = auto()
    ABORTABLE_ERROR = auto()
    ABORTING = auto()
    FATAL_ERROR = auto()


TRANSITIONS: dict[TxnState, frozenset[TxnState]] = {
    TxnState.UNINITIALIZED: frozenset({TxnState.READY}),
    TxnState.READY: frozenset({TxnState.IN_TRANSACTION}),
    TxnState.IN_TRANSACTION: frozenset({TxnState.COMMITTING, TxnState.ABORTING, TxnState.ABORTABLE_ERROR}),
    TxnState.COMMITTING: frozenset({TxnState.READY, TxnState.COMMITTING, TxnState.ABORTABLE_ERROR}),
    TxnState.ABORTABLE_ERROR: frozenset({TxnState.ABORTING, TxnState.ABORTABLE_ERROR}),
    TxnState.ABORTING: frozenset({TxnState.READY, TxnState.ABORTING}),
    TxnState.FATAL_ERROR: frozenset(),
}


def is_fatal(error: Exception) -> bool:
    """Whether an error ends the producer, and not the transaction alone."""
    return isinstance(error, FatalError) and not error.abortable


def fenced_by(transaction_timeout_ms: int) -> str:
    """What a broker may mean that refuses a producer's epoch."""
    return (
        "a newer producer with this transactional id exists, or the coordinator aborted a transaction that took longer "
        f"than transaction_timeout_ms={transaction_timeout_ms}"
    )


class Transaction:
    """The state of a transactional id's producer; `transactional_id` is in every error."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.state = TxnState.UNINITIALIZED
        self.error: PenstockError | None = None
        self.added: set[TopicPartition] = set()
        self.pending: set[TopicPartition] = set()
        self.groups: set[str] = set()
        self.epoch_is_spent = False
        self.abort_failed = False
        """Whether an abort was begun that did not come to its end, and nobody is at it."""

    def __repr__(self) -> str:
        return f"<Transaction {self.transactional_id}: {self.state.name}, {len(self.added)} partitions>"

    def move(self, target: TxnState) -> None:
        """Go to a state; IllegalState where the table has no such way, the fatal error where there was one."""
        self.check_fatal()
        if target is not TxnState.FATAL_ERROR and target not in TRANSITIONS[self.state]:
            raise IllegalState(
                f"transactional id {self.transactional_id}: {self.state.name} cannot become {target.name}"
            )
        self.state = target

    def check_fatal(self) -> None:
        """Raise the error that ended this producer, if one did."""
        if self.state is TxnState.FATAL_ERROR:
            assert self.error is not None
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

    def fail(self, error: PenstockError) -> None:
        """Note an error: fatal ones end the producer, others make the open transaction abortable."""
        if self.state is TxnState.FATAL_ERROR:
            return
        was = self.state
        if is_fatal(error):
            self.state, self.error = TxnState.FATAL_ERROR, error
        elif self.state in (TxnState.IN_TRANSACTION, TxnState.COMMITTING):
            self.state, self.error = TxnState.ABORTABLE_ERROR, error
        if self.state is not was:
            log.warning(
                "transaction failed",
                transactional_id=self.transactional_id,
                was=was.name,
                state=self.state.name,
                reason=str(error),
            )

    def not_committed(self) -> None:
        """The commit was given up before the coordinator was asked: the transaction is open as before."""
        if self.state is TxnState.COMMITTING:
            self.state = TxnState.IN_TRANSACTION

    def muted(self, tp: TopicPartition) -> bool:
        """Whether a partition must not be written yet, as the coordinator does not know that it takes part."""
        return tp not in self.added

    def want(self, partitions: set[TopicPartition]) -> None:
        """Note partitions that have records waiting."""
        self.pending |= partitions - self.added

    @property
    def is_empty(self) -> bool:
        """Whether the coordinator knows nothing of this transaction, so that it need not be ended there."""
        return not self.added and not self.groups

    def ended(self) -> None:
        """The coordinator has committed or aborted."""
        self.move(TxnState.READY)
        self.error = None
        self.added.clear()
        self.pending.clear()
        self.groups.clear()
