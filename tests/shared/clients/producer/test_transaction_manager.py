"""The transaction's state table: the allowed transitions."""

from __future__ import annotations

import itertools

import pytest

from penstock.shared.clients.producer.transaction_manager import TRANSITIONS, Transaction, TxnState
from penstock.shared.common.errors import IllegalState, NotEnoughReplicas, ProducerFenced, TransactionAborted
from penstock.shared.common.records import TopicPartition

TP = TopicPartition("t", 0)


def in_state(state: TxnState) -> Transaction:
    made = Transaction("tx")
    made.state = state
    if state is TxnState.FATAL_ERROR:
        made.error = ProducerFenced("fenced")
    return made


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TxnState, TxnState)))
def test_the_table(source: TxnState, target: TxnState) -> None:
    """A transition is allowed exactly if the table has it."""
    transaction = in_state(source)
    if source is TxnState.FATAL_ERROR:
        with pytest.raises(ProducerFenced):
            transaction.move(target)
    elif target in TRANSITIONS[source] or target is TxnState.FATAL_ERROR:
        transaction.move(target)
        assert transaction.state is target
    else:
        with pytest.raises(IllegalState, match="tx"):
            transaction.move(target)


def test_errors() -> None:
    """An error makes an open transaction abortable. A fatal one ends the producer."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.fail(NotEnoughReplicas("t-0"))
    with pytest.raises(TransactionAborted, match="t-0"):
        transaction.check_open("send")
    transaction.fail(ProducerFenced("newer"))
    with pytest.raises(ProducerFenced, match="newer"):
        transaction.check_open("send")
    transaction.fail(NotEnoughReplicas("t-0"))
    assert transaction.state is TxnState.FATAL_ERROR


def test_an_error_without_a_transaction_has_no_effect() -> None:
    """An error without an open transaction has no effect."""
    transaction = in_state(TxnState.READY)
    transaction.fail(NotEnoughReplicas("t-0"))
    assert transaction.state is TxnState.READY


def test_a_new_producer_has_no_transaction() -> None:
    """Nothing is open, and an abort would need neither a new epoch nor a repetition."""
    transaction = Transaction("tx")
    with pytest.raises(IllegalState, match="send needs an open transaction"):
        transaction.check_open("send")
    assert (transaction.is_empty, transaction.epoch_is_spent, transaction.abort_failed) == (True, False, False)
    assert repr(transaction) == "<Transaction tx: UNINITIALIZED, 0 partitions>"


@pytest.mark.parametrize("state", TxnState)
def test_a_commit_that_was_not_sent_leaves_the_transaction_open(state: TxnState) -> None:
    """Only a transaction that is being committed is opened again."""
    transaction = in_state(state)
    transaction.not_committed()
    assert transaction.state is (TxnState.IN_TRANSACTION if state is TxnState.COMMITTING else state)


def test_partitions_added_to_a_transaction() -> None:
    """A partition is muted until it is added. A transaction without added partitions is empty."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.want({TP})
    assert transaction.muted(TP)
    assert transaction.is_empty
    transaction.added.add(TP)
    transaction.want({TP, TopicPartition("t", 1)})
    assert not transaction.muted(TP)
    assert not transaction.is_empty
    transaction.pending.discard(TP)
    transaction.want({TopicPartition("t", 2)})
    assert transaction.pending == {TopicPartition("t", 1), TopicPartition("t", 2)}
    transaction.move(TxnState.COMMITTING)
    transaction.ended()
    assert (transaction.state, transaction.added, transaction.pending) == (TxnState.READY, set(), set())
