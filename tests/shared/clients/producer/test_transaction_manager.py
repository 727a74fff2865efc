"""The transaction's table of states: what is allowed when."""

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
    """A state can be reached from another exactly where the table says so."""
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
    """An error makes an open transaction abortable, a fatal one ends the producer for good."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.fail(NotEnoughReplicas("t-0"))
    with pytest.raises(TransactionAborted, match="t-0"):
        transaction.check_open("send")
    transaction.fail(ProducerFenced("newer"))
    with pytest.raises(ProducerFenced, match="newer"):
        transaction.check_open("send")
    transaction.fail(NotEnoughReplicas("t-0"))
    assert transaction.state is TxnState.FATAL_ERROR


def test_an_error_after_the_end_is_nobodys() -> None:
    """An error that comes when no transaction is open changes nothing."""
    transaction = in_state(TxnState.READY)
    transaction.fail(NotEnoughReplicas("t-0"))
    assert transaction.state is TxnState.READY


def test_what_the_coordinator_knows() -> None:
    """A partition is muted until it was added; a transaction that the coordinator knows nothing of is empty."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.want({TP})
    assert transaction.muted(TP)
    assert transaction.is_empty
    transaction.added.add(TP)
    transaction.want({TP, TopicPartition("t", 1)})
    assert not transaction.muted(TP)
    assert not transaction.is_empty
    transaction.move(TxnState.COMMITTING)
    transaction.ended()
    assert (transaction.state, transaction.added, transaction.pending) == (TxnState.READY, set(), set())
