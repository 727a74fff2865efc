"""A batch of records: size limits, encoding, removing records, splitting, and completion."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.producer_batch import (
    NO_STATE,
    BatchState,
    ProducerBatch,
    ProducerState,
    RecordCallback,
)
from penstock.shared.clients.protocol.record_batches import read_batches
from penstock.shared.common.errors import DeliveryTimeout, SendCancelled
from penstock.shared.common.records import RecordMetadata, TopicPartition
from tests.shared.clients.protocol.compressions import COMPRESSION

TP = TopicPartition("t", 3)


def batch_of(count: int, compression: str = "none", *, transactional: bool = False) -> ProducerBatch:
    batch = ProducerBatch(TP, 16_384, COMPRESSION[compression], transactional, 0)
    for i in range(count):
        assert batch.append(i, 100 + i, b"k", b"%d" % i, [("h", b"%d" % i)]) is not None
        batch.count += 1
    return batch


def values(data: bytearray) -> list[bytes]:
    (found,) = read_batches(bytes(data))
    return [record.value for record in found]


@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_a_new_producer_state_is_written_over_the_old(compression: str) -> None:
    """A sealed batch that is stamped again has the new producer id, epoch and sequence, a valid checksum and the same
    records."""
    batch = batch_of(3, compression)
    batch.data(ProducerState(5, 1, 70))
    data = batch.data(ProducerState(9, 2, 0))
    (found,) = read_batches(bytes(data))
    assert (found.producer_id, found.producer_epoch, found.base_sequence) == (9, 2, 0)
    assert found.validate_crc()
    assert values(data) == [b"0", b"1", b"2"]


def test_the_same_state_is_encoded_to_the_same_bytes() -> None:
    """A retry sends the same bytes."""
    batch = batch_of(2)
    state = ProducerState(5, 1, 70)
    assert batch.data(state) is batch.data(state)


def test_transactional() -> None:
    """A transactional batch has the transactional flag, also after it is encoded again or split."""
    batch = batch_of(4, transactional=True)
    batch.remove(0)
    batch.without_removed()
    assert read_batches(bytes(batch.data(ProducerState(1, 0, 0))))[0].is_transactional
    assert all(read_batches(bytes(part.data(part.producer_state)))[0].is_transactional for part in batch.split())


def test_full() -> None:
    """A batch accepts a first record of any size, and no further record beyond batch_size."""
    batch = ProducerBatch(TP, 100, COMPRESSION["none"], False, 0)
    assert batch.append(0, 0, None, b"x" * 500, [])
    assert batch.append(1, 0, None, b"x", []) is None


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_taking_records_back(compression: str) -> None:
    """The bytes contain the remaining records with timestamps, keys and headers. Callbacks and indices close up."""
    batch = batch_of(5, compression)
    errors: list[Exception | None] = []
    batch.callbacks = [RecordCallback(i, 0, 1, 1, lambda _, e: errors.append(e)) for i in (1, 4)]
    assert batch.remove(1)
    assert not batch.remove(1), "gone already"
    assert batch.remove(3)
    assert [type(e) for e in errors] == [SendCancelled]
    assert batch.without_removed() == 3
    batch.state = BatchState.OUT
    assert not batch.remove(0), "under way"
    (found,) = read_batches(bytes(batch.data(NO_STATE)))
    assert [(r.value, r.timestamp, r.key, list(r.headers)) for r in found] == [
        (b"%d" % i, 100 + i, b"k", [("h", b"%d" % i)]) for i in (0, 2, 4)
    ]
    assert [c.record_index for c in batch.callbacks] == [2]
    assert [batch.locate(i)[1] for i in range(5)] == [0, -1, 1, -1, 2]


def test_a_callback_that_raises_does_not_keep_its_record() -> None:
    """An exception of a callback during a cancellation is not raised to the caller."""
    batch = batch_of(1)

    def raises(_: RecordMetadata | None, error: Exception | None) -> None:
        raise RuntimeError(str(error))

    batch.callbacks.append(RecordCallback(0, 0, 1, 1, raises))
    assert batch.remove(0)


def test_split() -> None:
    """The parts share the records, sequence numbers, age, attempts, memory and callbacks of the batch."""
    batch = batch_of(5)
    batch.memory, batch.attempts, batch.order, batch.nodes = 101, 2, (4, 0), (9,)
    batch.callbacks = [RecordCallback(i, 0, 1, 1, lambda *_: None) for i in range(5)]
    batch.data(ProducerState(5, 1, 70))
    one, two = batch.split()
    assert batch.state is BatchState.SPLIT
    assert values(one.data(one.producer_state)) + values(two.data(two.producer_state)) == [b"%d" % i for i in range(5)]
    assert (one.producer_state, two.producer_state) == (ProducerState(5, 1, 70), ProducerState(5, 1, 70 + one.count))
    assert (one.memory + two.memory, batch.memory) == (101, 0)
    assert one.order < two.order < (5, 0)
    assert {(part.attempts, part.nodes) for part in (one, two)} == {(2, (9,))}
    assert {part.created_ms for part in (one, two)} == {0}
    assert [[c.record_index for c in part.callbacks] for part in (one, two)] == [
        list(range(one.count)),
        list(range(two.count)),
    ]


def test_sequences_of_parts_wrap() -> None:
    """A part that starts behind 2^31 - 1 starts at 0."""
    batch = batch_of(2)
    batch.data(ProducerState(5, 1, 2**31 - 1))
    assert [part.producer_state.base_sequence for part in batch.split()] == [2**31 - 1, 0]


def test_a_single_record_cannot_be_split() -> None:
    """A batch of one record, or one that was never sent, cannot be split."""
    batch = batch_of(1)
    with pytest.raises(AssertionError):
        batch.split()
    batch.data(NO_STATE)
    with pytest.raises(AssertionError):
        batch.split()


@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=40), st.sets(st.integers(0, 39)))
def test_every_record_is_found_through_removal_and_splits(sizes: list[int], removed: set[int]) -> None:
    """However often a batch is split, `locate` finds each record."""
    batch = ProducerBatch(TP, 2**31 - 1, COMPRESSION["none"], False, 0)
    wanted = [b"%d-" % i + b"x" * size for i, size in enumerate(sizes)]
    for i, value in enumerate(wanted):
        batch.append(i, 0, None, value, [])
        batch.count += 1
    gone = {i for i in removed if i < len(sizes) and batch.remove(i)}
    if batch.without_removed() == 0:
        return
    batch.state = BatchState.OUT
    batch.data(ProducerState(1, 0, 0))
    whole, todo = {id(batch): values(batch.data(batch.producer_state))}, [batch]
    while todo:
        one = todo.pop()
        if one.count > 1:
            for part in one.split():
                whole[id(part)] = values(part.data(part.producer_state))
                todo.append(part)
    for i, value in enumerate(wanted):
        part, at = batch.locate(i)
        assert (at == -1) == (i in gone)
        if at >= 0:
            assert whole[id(part)][at] == value
            assert part.producer_state.base_sequence == i - len([g for g in gone if g < i])


async def test_metadata() -> None:
    """A record's offset is the base offset plus its index. Its timestamp is its own unless the log append time is
    given."""
    batch = batch_of(2)
    batch.complete(40, -1)
    assert batch.metadata(1, 101, 1, 1) == RecordMetadata("t", 3, 41, 101, 1, 1)
    stamped = batch_of(1)
    stamped.complete(-1, 999)
    assert (stamped.metadata(0, 100, 1, 1).offset, stamped.metadata(0, 100, 1, 1).timestamp) == (-1, 999)


async def test_ends_once() -> None:
    """Waiters are notified once. A cancelled waiter changes nothing, and a second completion is a bug."""
    batch = batch_of(1)
    waiters = [asyncio.ensure_future(batch.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    batch.fail(DeliveryTimeout("late"))
    await waiters[1]
    assert batch.state is BatchState.DONE
    with pytest.raises(AssertionError, match="ended twice"):
        batch.complete(0, -1)


async def test_waiting_for_all_waits_for_the_parts() -> None:
    """A split batch is done when its parts are."""
    batch = batch_of(2)
    batch.data(NO_STATE)
    waiter = asyncio.ensure_future(batch.wait_all())
    await asyncio.sleep(0)
    one, two = batch.split()
    one.complete(0, -1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiter.done()
    two.complete(1, -1)
    await waiter


def test_repr() -> None:
    """The repr shows the state."""
    assert repr(batch_of(2)) == "<ProducerBatch t-3, 2 records, OPEN, attempt 0>"
