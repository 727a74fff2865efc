"""What a partition makes of a producer's next batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.testing.fake_broker.broker_batches import Batch, assign_offset, parse
from penstock.shared.testing.fake_broker.producer_states import Appended, ProducerStates
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from tests.shared.testing.fake_broker.test_broker_batches import built


def of(sequence: int, *, epoch: int = 0, count: int = 2) -> Batch:
    return parse(built(*[b"v"] * count, producer=(7, epoch, sequence)))


def append(states: ProducerStates, batch: Batch, offset: int) -> None:
    assert states.check(batch) is ErrorCode.NONE
    states.appended(assign_offset(batch, offset, 0))


def test_the_last_five_are_remembered() -> None:
    """One of the last five batches is found where it was; the sixth is out of order."""
    states = ProducerStates()
    for sequence in range(0, 12, 2):
        append(states, of(sequence), 100 + sequence)
    assert states.check(of(2)) == Appended(2, 3, 102, -1)
    assert states.check(of(10)) == Appended(10, 11, 110, -1)
    assert states.check(of(0)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_longer_batch_is_another_one() -> None:
    """The same first sequence with another last one is no repetition."""
    states = ProducerStates()
    append(states, of(0), 0)
    assert states.check(of(0, count=3)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_marker_fences() -> None:
    """The epoch that a marker brought refuses the one before it, and starts at zero."""
    states = ProducerStates()
    append(states, of(0), 0)
    states.fenced(7, 1)
    assert states.check(of(2)) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert states.check(of(2, epoch=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert states.check(of(0, epoch=1)) is ErrorCode.NONE


def test_a_marker_of_the_same_epoch_changes_nothing() -> None:
    """After a marker of its own epoch a producer goes on counting."""
    states = ProducerStates()
    append(states, of(0), 0)
    states.fenced(7, 0)
    assert states.check(of(2)) is ErrorCode.NONE


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 2**31 - 1))
def test_batches_in_order_are_taken(counts: list[int], first: int) -> None:
    """Whatever their sizes, and round the end, batches in order are taken and each is then known."""
    states, sequence, offset = ProducerStates(), first, 0
    for count in counts:
        batch = of(sequence, count=count)
        append(states, batch, offset)
        assert states.check(of(sequence, count=count)) == Appended(sequence, batch.last_sequence, offset, -1)
        sequence, offset = (sequence + count) % 2**31, offset + count
