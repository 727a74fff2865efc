"""A partition's checks of a producer's next batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.testing.fake_broker.broker_batches import Batch, assign_offset, parse
from penstock.shared.testing.fake_broker.producer_states import Appended, ProducerStates
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from tests.shared.testing.fake_broker.test_broker_batches import built


def batch_of(sequence: int, *, epoch: int = 0, count: int = 2) -> Batch:
    return parse(built(*[b"v"] * count, producer=(7, epoch, sequence)))


def append(states: ProducerStates, batch: Batch, offset: int) -> None:
    assert states.check(batch) is ErrorCode.NONE
    states.appended(assign_offset(batch, offset, 0))


def test_the_last_five_are_remembered() -> None:
    """One of the last five batches is found with its offset, and the sixth is out of order."""
    states = ProducerStates()
    for sequence in range(0, 12, 2):
        append(states, batch_of(sequence), 100 + sequence)
    assert states.check(batch_of(2)) == Appended(2, 3, 102, -1)
    assert states.check(batch_of(10)) == Appended(10, 11, 110, -1)
    assert states.check(batch_of(0)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_longer_batch_is_another_one() -> None:
    """A batch with the same first sequence and another last one is no repetition."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    assert states.check(batch_of(0, count=3)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_marker_fences() -> None:
    """A marker's epoch fences the one before it, and its first sequence is zero."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    states.fenced(7, 1)
    assert states.check(batch_of(2)) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert states.check(batch_of(2, epoch=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert states.check(batch_of(0, epoch=1)) is ErrorCode.NONE


def test_a_marker_of_the_same_epoch_changes_nothing() -> None:
    """After a marker of its own epoch a producer's sequence continues."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    states.fenced(7, 0)
    assert states.check(batch_of(2)) is ErrorCode.NONE


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 2**31 - 1))
def test_batches_in_order_are_taken(counts: list[int], first: int) -> None:
    """Batches of any size in order are accepted, also beyond the highest sequence, and then known."""
    states, sequence, offset = ProducerStates(), first, 0
    for count in counts:
        batch = batch_of(sequence, count=count)
        append(states, batch, offset)
        assert states.check(batch_of(sequence, count=count)) == Appended(sequence, batch.last_sequence, offset, -1)
        sequence, offset = (sequence + count) % 2**31, offset + count
