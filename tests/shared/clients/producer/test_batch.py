"""A batch of records: what fits, its bytes, and how its futures are settled."""

from __future__ import annotations

import asyncio

import pytest

from shared.clients.connection import COMPRESSION, read_batches
from shared.clients.producer.batch import Batch, BatchState, ProducerState
from shared.common.errors import DeliveryTimeout
from shared.common.records import RecordMetadata, TopicPartition

TP = TopicPartition("t", 3)


def batch_of(count: int, compression: str = "none") -> Batch:
    batch = Batch(TP, 16_384, COMPRESSION[compression], False, 0)
    for i in range(count):
        assert batch.append(b"k", b"%d" % i, [], 100 + i)
    return batch


@pytest.mark.parametrize("compression", list(COMPRESSION))
def test_a_new_producer_state_is_written_over_the_old(compression: str) -> None:
    """Stamped again, a sealed batch carries the new id, epoch and sequence, a right checksum and the same records."""
    batch = batch_of(3, compression)
    batch.data(ProducerState(5, 1, 70))
    (found,) = read_batches(batch.data(ProducerState(9, 2, 0)))
    assert (found.producer_id, found.producer_epoch, found.base_sequence) == (9, 2, 0)
    assert found.validate_crc()
    assert [r.value for r in found] == [b"0", b"1", b"2"]


def test_the_same_state_gives_the_same_bytes() -> None:
    """A retry sends what was sent before."""
    batch = batch_of(2)
    state = ProducerState(5, 1, 70)
    assert batch.data(state) is batch.data(state)


def test_full() -> None:
    """A batch takes one record of any size, and no second one beyond batch_size."""
    batch = Batch(TP, 100, 0, False, 0)
    assert batch.append(None, b"x" * 500, [], 0)
    assert not batch.append(None, b"x", [], 0)
    assert batch.count == 1


async def test_metadata() -> None:
    """A record's offset is the batch's plus its index; its timestamp is its own unless the log's is given."""
    batch = batch_of(2)
    batch.complete(40, -1)
    assert batch.metadata(1) == RecordMetadata("t", 3, 41, 101, 1, 1)
    stamped = batch_of(1)
    stamped.complete(-1, 999)
    assert (stamped.metadata(0).offset, stamped.metadata(0).timestamp) == (-1, 999)


async def test_ends_once() -> None:
    """Waiters hear of the end; a cancelled waiter changes nothing; a second end is a bug."""
    batch = batch_of(1)
    waiters = [asyncio.ensure_future(batch.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    batch.fail(DeliveryTimeout("late"))
    await waiters[1]
    assert batch.state is BatchState.DONE
    with pytest.raises(AssertionError, match="ended twice"):
        batch.complete(0, -1)
