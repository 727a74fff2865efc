"""Sequence numbers of an idempotent producer: in order, without gaps, whatever fails."""

from __future__ import annotations

from shared.clients.producer.batch import ProducerState
from shared.clients.producer.sequences import EPOCH_MAX, SequenceLedger
from shared.common.records import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def ledger() -> SequenceLedger:
    made = SequenceLedger()
    made.adopt(7, 0)
    return made


def test_only_what_is_acknowledged_uses_numbers_up() -> None:
    """A partition's number stays until the broker has the batch; partitions do not share numbers."""
    sequences = ledger()
    assert sequences.state(A) == sequences.state(A) == ProducerState(7, 0, 0)
    sequences.acknowledged(A, sequences.state(A), 5)
    assert sequences.state(A) == ProducerState(7, 0, 5)
    assert sequences.state(B) == ProducerState(7, 0, 0)


def test_numbers_wrap() -> None:
    """After 2^31 - 1 comes 0."""
    sequences = ledger()
    sequences.acknowledged(A, ProducerState(7, 0, 2**31 - 2), 2)
    assert sequences.state(A).base_sequence == 0


def test_a_new_epoch_starts_every_partition_anew() -> None:
    """After a bump the next new batch of each partition carries the new epoch and 0."""
    sequences = ledger()
    sequences.acknowledged(A, sequences.state(A), 5)
    sequences.bump()
    assert sequences.state(A) == ProducerState(7, 1, 0)


def test_an_answer_of_the_old_epoch_does_not_disturb_the_new() -> None:
    """A batch of the old epoch that is acknowledged late leaves the new numbers alone."""
    sequences = ledger()
    old = sequences.state(A)
    sequences.bump()
    sequences.acknowledged(A, sequences.state(A), 3)
    sequences.acknowledged(A, old, 5)
    assert sequences.state(A) == ProducerState(7, 1, 3)


def test_epochs_run_out() -> None:
    """After the last epoch a new producer id is needed."""
    sequences = SequenceLedger()
    sequences.adopt(7, EPOCH_MAX)
    assert sequences.ready
    sequences.bump()
    assert not sequences.ready
