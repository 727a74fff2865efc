"""The effects of failed batches on a transaction: abortable or fatal errors, and requests of the abort."""

from __future__ import annotations

import pytest

from penstock.shared.clients.producer.transaction_manager import Transaction, TxnState
from penstock.shared.common.errors import (
    AuthorizationFailed,
    DeliveryTimeout,
    InvalidTxnState,
    OutOfOrderSequence,
    ProducerFenced,
    RecordTooLarge,
    TransactionAborted,
)
from tests.shared.clients.producer.harness import (
    ABORTABLE,
    CLUSTER_AUTHORIZATION,
    FENCED,
    INVALID_TXN_STATE,
    NOT_LEADER,
    OLD_EPOCH,
    OUT_OF_ORDER,
    TOO_LARGE,
    TOPIC_AUTHORIZATION,
    UNKNOWN_PRODUCER,
    A,
    B,
    C,
    Harness,
)


def open_transaction(**settings: object) -> tuple[Harness, Transaction]:
    core = Harness(transactional_id="tx", batch_size=100, **settings)
    core.warm_up(A, B)
    assert core.transaction is not None
    return core, core.transaction


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (OUT_OF_ORDER, OutOfOrderSequence),
        (UNKNOWN_PRODUCER, OutOfOrderSequence),
        (INVALID_TXN_STATE, InvalidTxnState),
        (OLD_EPOCH, ProducerFenced),
        (TOPIC_AUTHORIZATION, AuthorizationFailed),
    ],
)
def test_errors_that_abort_the_transaction_only(code: int, error: type[Exception]) -> None:
    """The transaction must be aborted with a new epoch. The record gets the error, and queued records are dropped."""
    core, transaction = open_transaction()
    record, queued = core.send(A), core.send(B)
    core.leaders[B] = None
    core.respond(core.turn_one(), code)
    assert type(record.fate) is error
    assert isinstance(queued.fate, TransactionAborted)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert transaction.epoch_is_spent
    assert core.all_memory_is_back
    with pytest.raises(TransactionAborted):
        transaction.check_open("send")


@pytest.mark.parametrize(
    ("code", "error"),
    [(FENCED, ProducerFenced), (CLUSTER_AUTHORIZATION, AuthorizationFailed)],
)
def test_refusals_that_end_the_producer(code: int, error: type[Exception]) -> None:
    """After fencing or a denied authorization every later call raises the error. Fencing may be due to the timeout."""
    core, transaction = open_transaction()
    record, queued = core.send(A), core.send(B)
    core.leaders[B] = None
    core.respond(core.turn_one(), code)
    assert type(record.fate) is type(queued.fate) is error
    assert ("transaction_timeout_ms=60000" in str(record.fate)) is (code == FENCED)
    assert transaction.state is TxnState.FATAL_ERROR
    with pytest.raises(error):
        transaction.check_open("send")


def test_an_abortable_error_of_the_broker() -> None:
    """TRANSACTION_ABORTABLE makes the transaction abortable."""
    core, transaction = open_transaction()
    record = core.send()
    core.respond(core.turn_one(), ABORTABLE)
    assert isinstance(record.fate, TransactionAborted)
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_what_follows_from_the_first_failure_is_not_fatal() -> None:
    """A batch after a rejected one fails for the sequence gap. The abort resolves it, and the sequence number is
    reused."""
    core, transaction = open_transaction()
    core.send(value=b"x" * 60)
    core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, TOO_LARGE)
    assert isinstance(one.error, RecordTooLarge)
    core.respond(two, OUT_OF_ORDER)
    assert isinstance(two.error, OutOfOrderSequence)
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_out_of_order_behind_a_pending_batch_is_tried_again() -> None:
    """The batch waits for the one before it, and the transaction continues."""
    core, transaction = open_transaction()
    core.send(value=b"x" * 60)
    core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, NOT_LEADER)
    core.respond(two, OUT_OF_ORDER)
    for batch in (one, two):
        assert core.after_backoff() == [batch]
        core.respond(batch)
    assert transaction.state is TxnState.IN_TRANSACTION


def test_several_batches_expire_at_once() -> None:
    """Each batch fails once: the first with DeliveryTimeout, the others of the transaction with TransactionAborted."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    core.down = {1}
    one, two = core.send(A), core.send(B)
    core.after(1_000)
    assert isinstance(one.fate, DeliveryTimeout)
    assert isinstance(two.fate, TransactionAborted)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert not transaction.epoch_is_spent, "nothing of it was sent"
    assert core.all_memory_is_back


def test_a_batch_in_flight_expires_behind_queued_ones() -> None:
    """The first batch ends the transaction, and with it the queued second one. The third, in flight, expires too."""
    core, _ = open_transaction(delivery_timeout_ms=1_000)
    core.leaders |= {A: None, B: None}
    one, two, three = core.send(A), core.send(B), core.send(C)
    assert core.turn() == [three.batch]
    core.after(1_000)
    assert [type(record.fate) for record in (one, two, three)] == [DeliveryTimeout, TransactionAborted, DeliveryTimeout]


def test_expired_in_flight() -> None:
    """The transaction is abortable. Since the outcome is unknown, the abort requests a new epoch."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    record = core.send()
    batch = core.turn_one()
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert not transaction.epoch_is_spent
    core.lose(batch)
    assert transaction.epoch_is_spent
    assert core.all_memory_is_back


def test_a_late_refusal_of_an_expired_batch() -> None:
    """A late error for an expired batch has no effect."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    record = core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.respond(batch, INVALID_TXN_STATE)
    assert isinstance(record.fate, DeliveryTimeout)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    transaction.move(TxnState.ABORTING)


def test_one_partition_of_a_response_fails() -> None:
    """Successful batches of the response are acknowledged once, and their memory is released once."""
    core, transaction = open_transaction()
    core.send(A)
    good = core.send(B)
    one, two = core.turn()
    core.respond(one, TOO_LARGE)
    assert good.fate is None
    core.respond(two, offset=4)
    assert good.offset == 4
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert core.all_memory_is_back


def test_batches_of_an_aborting_transaction_are_not_retried() -> None:
    """Once a transaction must be aborted, failed batches are neither retried nor split."""
    core, transaction = open_transaction()
    core.send(A)
    records = [core.send(B) for _ in range(2)]
    one, two = core.turn()
    core.respond(one, INVALID_TXN_STATE)
    core.respond(two, TOO_LARGE)
    assert all(isinstance(record.fate, RecordTooLarge) for record in records)
    assert core.after_backoff() == []
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_records_that_were_taken_back_fail_an_open_transaction() -> None:
    """A commit would silently omit cancelled records. In an aborting transaction, or without one, they have no
    effect."""
    for state, expected in (
        (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR),
        (TxnState.COMMITTING, TxnState.ABORTABLE_ERROR),
        (TxnState.ABORTING, TxnState.ABORTING),
    ):
        core = Harness(transactional_id="tx", linger_ms=10)
        assert core.transaction is not None
        record, other = core.send(A), core.send(B)
        core.transaction.state = state
        assert record.cancel()
        record.batch.cancelled_records()
        assert core.transaction.state is expected
        assert isinstance(other.fate, TransactionAborted) is (expected is TxnState.ABORTABLE_ERROR)
    core = Harness(linger_ms=10)
    record, other = core.send(A), core.send(B)
    assert record.cancel()
    record.batch.cancelled_records()
    assert [batch.tp for batch in core.after(10)] == [B]
    assert other.fate is None


def test_a_split_in_a_transaction() -> None:
    """The parts belong to the transaction and share the sequence numbers of the batch."""
    core, transaction = open_transaction()
    records = [core.send(value=b"%d" % i) for i in range(2)]
    core.respond(core.turn_one(), TOO_LARGE)
    for number in (1, 2):
        batch = core.turn_one()
        assert batch.transactional
        assert core.state(batch) == (0, number)
        core.respond(batch, offset=number)
    assert [record.offset for record in records] == [1, 2]
    assert transaction.state is TxnState.IN_TRANSACTION
    assert core.after(20_000) == []


def test_a_surely_refused_number_is_used_again_after_the_abort() -> None:
    """No outcome is unknown, so the next transaction continues in the same epoch."""
    core, transaction = open_transaction()
    core.send()
    core.respond(core.turn_one(), TOO_LARGE)
    assert not transaction.epoch_is_spent
    transaction.move(TxnState.ABORTING)
    transaction.ended()
    transaction.begin()
    transaction.added.add(A)
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_a_flush_for_the_commit_overrides_linger() -> None:
    """During a commit batches do not linger. In the next transaction they do."""
    core, transaction = open_transaction(linger_ms=0)
    core = Harness(transactional_id="tx", linger_ms=50)
    assert core.transaction is not None
    transaction = core.transaction
    record = core.send()
    assert core.turn() == []
    transaction.move(TxnState.COMMITTING)
    core.accumulator.flushes += 1
    assert core.turn() == [record.batch]
    core.respond(record.batch)
    core.accumulator.flushes -= 1
    transaction.ended()
    transaction.begin()
    transaction.added.add(A)
    again = core.send()
    assert core.after(49) == []
    assert core.after(1) == [again.batch]


def test_aborted_without_an_error() -> None:
    """Unsent batches fail with the abort's error. Batches in flight are waited for."""
    core, transaction = open_transaction()
    flying = core.send(A)
    core.turn()
    core.leaders[B] = None
    queued = core.send(B)
    transaction.move(TxnState.ABORTING)
    core.completion.fail_all(TransactionAborted("aborted before the record was sent"), out=False)
    assert isinstance(queued.fate, TransactionAborted)
    assert flying.fate is None
    core.respond(flying.batch, NOT_LEADER)
    assert flying.fate is not None
    assert transaction.state is TxnState.ABORTING
    transaction.ended()
