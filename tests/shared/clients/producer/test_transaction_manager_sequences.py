"""Sequence numbers of an idempotent producer are in order and without gaps, after any failure."""

from __future__ import annotations

import pytest

from penstock.shared.clients.producer.producer_batch import ProducerState
from penstock.shared.clients.producer.transaction_manager import EPOCH_MAX, SequenceLedger
from penstock.shared.common.records import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def ledger(epoch: int = 0) -> SequenceLedger:
    made = SequenceLedger()
    made.adopt(7, epoch)
    return made


def test_numbers_are_handed_out_in_order() -> None:
    """Each batch starts where the previous one of its partition ended. Partitions have separate sequence numbers."""
    sequences = ledger()
    assert sequences.assign(A, 5) == ProducerState(7, 0, 0)
    assert sequences.assign(A, 2) == ProducerState(7, 0, 5)
    assert sequences.assign(B, 1) == ProducerState(7, 0, 0)


def test_numbers_wrap() -> None:
    """Sequence numbers wrap from 2^31 - 1 to 0, and an acknowledgement across the wrap moves forward."""
    sequences = ledger()
    first = sequences.assign(A, 2**31 - 1)
    second = sequences.assign(A, 3)
    assert sequences.assign(A, 1).base_sequence == 2
    sequences.acknowledged(A, first, 2**31 - 1)
    sequences.acknowledged(A, second, 3)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.epoch == 1, "the third was lost"


def test_acknowledgements_may_come_in_any_order() -> None:
    """An acknowledged batch implies all earlier ones. Later responses for those change nothing."""
    sequences = ledger()
    first, second = sequences.assign(A, 1), sequences.assign(A, 9)
    sequences.acknowledged(A, second, 9)
    sequences.acknowledged(A, first, 1)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 10)


def test_acknowledgements_across_the_wrap_may_come_in_any_order() -> None:
    """Numbers after the wrap are ahead of those before it, also if their acknowledgement comes first."""
    sequences = ledger()
    for count in (2**30 - 1, 2**30 - 1):
        sequences.acknowledged(A, sequences.assign(A, count), count)
    before, after = sequences.assign(A, 2), sequences.assign(A, 3)
    assert (before.base_sequence, after.base_sequence) == (2**31 - 2, 0)
    sequences.acknowledged(A, after, 3)
    sequences.acknowledged(A, before, 2)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 3)


def test_one_batch_at_a_time_until_the_first_is_acknowledged() -> None:
    """A new producer id or epoch allows one unacknowledged batch per partition until the first acknowledgement."""
    sequences = ledger()
    assert sequences.may_assign(A)
    state = sequences.assign(A, 1)
    assert not sequences.may_assign(A)
    assert sequences.may_assign(B)
    sequences.acknowledged(A, state, 1)
    assert sequences.may_assign(A)
    sequences.gap_shown(A)
    assert not sequences.may_assign(A)
    sequences.settle(A)
    assert sequences.may_assign(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)
    assert not sequences.may_assign(A)


def test_what_was_surely_refused_is_used_again() -> None:
    """The sequence number of a batch that the broker certainly did not write is used again, in the same epoch."""
    sequences = ledger()
    sequences.assign(A, 4)
    sequences.given_up(A, lost=False)
    assert sequences.troubled() == [A]
    assert not sequences.may_assign(A)
    sequences.settle(A)
    assert sequences.troubled() == []
    assert sequences.assign(A, 1) == ProducerState(7, 0, 0)


def test_what_was_lost_costs_an_epoch() -> None:
    """A lost batch may still arrive, so the next batch uses a new epoch and the broker rejects the old one."""
    sequences = ledger()
    sequences.assign(A, 4)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)


def test_one_lost_batch_of_several_costs_an_epoch() -> None:
    """A later rejection does not undo that an earlier batch may still arrive."""
    sequences = ledger()
    sequences.assign(A, 1)
    sequences.assign(A, 1)
    sequences.given_up(A, lost=True)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)


def test_a_new_producer_id_begins_at_number_0() -> None:
    """A partition moves to it once all its records are acknowledged. Kafka's first producer id is 0."""
    sequences = SequenceLedger()
    assert not sequences.ready
    sequences.adopt(0, 0)
    assert sequences.ready
    first = sequences.assign(A, 1_000)
    sequences.adopt(1, 0)
    assert sequences.assign(A, 1_000) == ProducerState(0, 0, 1_000)
    sequences.acknowledged(A, first, 1_000)
    sequences.acknowledged(A, ProducerState(0, 0, 1_000), 1_000)
    assert sequences.assign(A, 1) == ProducerState(1, 0, 0)


def test_trouble_is_of_a_partition() -> None:
    """A gap in one partition does not stop the others. They move to the new epoch once all their batches are
    acknowledged."""
    sequences = ledger()
    state = sequences.assign(B, 1)
    sequences.acknowledged(B, state, 1)
    pending = sequences.assign(B, 1)
    sequences.assign(A, 1)
    sequences.gap_shown(A)
    assert sequences.has_gap(A)
    assert sequences.is_troubled(A)
    assert not sequences.is_troubled(B)
    sequences.settle(A)
    assert sequences.assign(B, 1) == ProducerState(7, 0, 2)
    sequences.acknowledged(B, pending, 1)
    sequences.acknowledged(B, ProducerState(7, 0, 2), 1)
    assert sequences.assign(B, 1) == ProducerState(7, 1, 0)


def test_one_bump_for_all_in_trouble() -> None:
    """Several troubled partitions share one epoch bump."""
    sequences = ledger()
    for tp in (A, B):
        sequences.assign(tp, 1)
        sequences.gap_shown(tp)
    sequences.settle(A)
    sequences.settle(B)
    assert sequences.epoch == 1
    assert sequences.assign(A, 1) == sequences.assign(B, 1) == ProducerState(7, 1, 0)


def test_an_answer_of_the_old_epoch_does_not_disturb_the_new() -> None:
    """A batch of the old epoch that is acknowledged late leaves the new numbers alone."""
    sequences = ledger()
    old = sequences.assign(A, 5)
    sequences.gap_shown(A)
    sequences.settle(A)
    sequences.acknowledged(A, sequences.assign(A, 3), 3)
    sequences.acknowledged(A, old, 5)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 3)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 3)


def test_epochs_run_out() -> None:
    """After the last epoch, no sequence number is assigned until there is a new producer id."""
    sequences = ledger(EPOCH_MAX)
    for tp in (A, B):
        sequences.assign(tp, 1)
        sequences.gap_shown(tp)
    for tp in (A, B):
        sequences.settle(tp)
    assert not sequences.ready
    assert not sequences.may_assign(A)
    with pytest.raises(AssertionError):
        sequences.assign(A, 1)
    sequences.adopt(8, 0)
    assert sequences.assign(A, 1) == ProducerState(8, 0, 0)


def test_the_last_epoch_is_used_before_it_is_given_up() -> None:
    """The last epoch follows the one before it. Only the trouble after that needs a new producer id."""
    sequences = ledger(EPOCH_MAX - 1)
    sequences.assign(A, 1)
    sequences.gap_shown(A)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, EPOCH_MAX, 0)
    sequences.gap_shown(A)
    sequences.settle(A)
    assert not sequences.ready


def test_a_lost_batch_that_was_written_is_settled_once() -> None:
    """A later batch was acknowledged, so the lost one is in the log. A rejection afterwards costs no epoch."""
    sequences = ledger()
    sequences.assign(A, 1)
    second = sequences.assign(A, 1_000)
    sequences.given_up(A, lost=True)
    sequences.acknowledged(A, second, 1_000)
    sequences.settle(A)
    assert sequences.assign(A, 4) == ProducerState(7, 0, 1_001)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 1_001)


def test_forgetting() -> None:
    """After `forget`, no partition is troubled and sequence numbers start at 0 again."""
    sequences = ledger()
    sequences.assign(A, 1)
    sequences.given_up(A, lost=False)
    sequences.forget()
    assert sequences.troubled() == []
    assert sequences.assign(A, 1) == ProducerState(7, 0, 0)


def test_trouble_of_a_partition_that_has_no_numbers() -> None:
    """A response for a partition without sequence numbers is ignored."""
    sequences = ledger()
    sequences.given_up(A, lost=True)
    sequences.gap_shown(A)
    sequences.acknowledged(A, ProducerState(7, 0, 0), 1)
    assert not sequences.has_gap(A)
    assert sequences.troubled() == []
    assert repr(sequences) == "<SequenceLedger producer 7 epoch 0, 0 partitions>"
