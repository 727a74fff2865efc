"""Partitions that make no progress share half of the buffer; those that do are not stopped by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.shared.clients.producer.buffer_pool import HeldUpShare
from penstock.shared.clients.producer.producer_batch import Batch
from penstock.shared.clients.producer.record_accumulator import HELD_UP_MS
from penstock.shared.common.errors import BufferExhausted, IllegalState
from penstock.shared.common.records import TopicPartition
from tests.shared.clients.producer.harness import INVALID_RECORD, NOT_ENOUGH_REPLICAS, A, B, C, Harness

BATCH = 200
LIMIT = 5
"""So many batches may be held up: the buffer has room for ten."""


class Table:
    """A harness with one record to a batch, and the share over it."""

    def __init__(self) -> None:
        self.core = Harness(batch_size=BATCH, buffer_memory=2 * LIMIT * BATCH, delivery_timeout_ms=10**6)
        self.core.warm_up(A, B, C)
        self.share = HeldUpShare(self.core.accumulator, self.core.memory, lambda: self.core.now_ms)

    def fill(self, tp: TopicPartition, batches: int) -> None:
        for _ in range(batches):
            self.core.send(tp, b"x" * 100)

    def refuse(self, tp: TopicPartition, batches: int, *, refused: int = 1) -> None:
        """So many batches of a partition, of which the first are refused, and the others wait behind them."""
        self.fill(tp, refused)
        for batch in self.core.turn():
            self.core.answer(batch, NOT_ENOUGH_REPLICAS)
        self.fill(tp, batches - refused)

    def head(self, tp: TopicPartition) -> Batch:
        """The partition's first batch, on its way again."""
        return next(batch for batch in self.core.after_backoff() if batch.tp == tp)

    def must_wait(self, tp: TopicPartition) -> bool:
        return self.share.must_wait(self.core.accumulator.queue(tp), BATCH)

    def wait(self, tp: TopicPartition, timeout_ms: float = 10_000) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.share.wait(self.core.accumulator.queue(tp), BATCH, timeout_ms))


def test_what_gets_on_may_have_all() -> None:
    """A full buffer says nothing against a partition whose batches come and go."""
    table = Table()
    table.fill(A, 2)
    table.core.answer(table.core.turn()[0])
    table.fill(A, 8)
    assert not table.must_wait(A)


def test_a_partition_of_which_nothing_is_known() -> None:
    """What comes in all at once may have more than the share only when the first of it is acknowledged."""
    table = Table()
    table.fill(A, LIMIT)
    assert not table.must_wait(A), "as many may be in flight"
    table.fill(A, 1)
    assert table.must_wait(A)
    assert not table.must_wait(B)
    table.core.answer(table.core.turn()[0])
    table.fill(A, 4)
    assert not table.must_wait(A)


def test_a_refused_batch_is_no_progress() -> None:
    """What comes in after it may not have more than the share either."""
    table = Table()
    table.fill(A, 1)
    table.core.answer(table.core.turn()[0], INVALID_RECORD)
    table.fill(A, LIMIT)
    assert not table.must_wait(A)
    table.fill(A, 1)
    assert table.must_wait(A)


def test_a_share_for_one() -> None:
    """A retried partition may hold half of the buffer and no more; the others are free."""
    table = Table()
    table.refuse(A, LIMIT - 1)
    assert not table.must_wait(A)
    table.fill(A, 1)
    assert table.must_wait(A)
    assert not table.must_wait(B)
    assert repr(table.share) == "<HeldUpShare 1000 of 1000 bytes, 0 waiting>"


def test_a_share_for_all() -> None:
    """Two retried partitions have one share together."""
    table = Table()
    table.refuse(A, 3)
    assert not table.must_wait(A)
    table.refuse(B, 2)
    assert table.must_wait(A)
    assert table.must_wait(B)
    table.fill(C, 5)
    assert not table.must_wait(C)


def test_a_partition_without_anything_is_free() -> None:
    """What holds nothing cannot be held up, however much the others hold."""
    table = Table()
    table.refuse(A, LIMIT)
    assert not table.must_wait(B)


def test_a_dead_node_with_many_partitions() -> None:
    """Its partitions have one share together, also those of which nothing is buffered yet; it ends with the node's."""
    core = Harness(batch_size=BATCH, buffer_memory=2 * LIMIT * BATCH, delivery_timeout_ms=10**6)
    many = [TopicPartition("many", partition) for partition in range(1_000)]
    core.leaders |= dict.fromkeys(many, 7)
    core.warm_up(A)
    core.down, away = {7}, True
    share = HeldUpShare(core.accumulator, core.memory, lambda: core.now_ms, lambda tp: away and tp in core.leaders)
    taken = 0
    for tp in many:
        if not share.must_wait(core.accumulator.queue(tp), BATCH):
            core.send(tp, b"x" * 100)
            core.turn()
            taken += 1
    assert taken == LIMIT
    away = False
    assert not share.must_wait(core.accumulator.queue(A), BATCH)


def test_where_there_is_one_partition_alone() -> None:
    """There is nobody to be stopped: the whole buffer is its own."""
    core = Harness(batch_size=BATCH, buffer_memory=10 * BATCH)
    share = HeldUpShare(core.accumulator, core.memory, lambda: 0)
    for _ in range(9):
        core.send(A, b"x" * 100)
    core.answer(core.turn_one(), NOT_ENOUGH_REPLICAS)
    assert not share.must_wait(core.accumulator.queue(A), BATCH)


def dead(core: Harness) -> None:
    core.down = {2}


def leaderless(core: Harness) -> None:
    core.leaders[A] = None


@pytest.mark.parametrize("fault", [dead, leaderless])
def test_a_partition_that_cannot_be_reached(fault: Callable[[Harness], None]) -> None:
    """It is known at once, and over as soon as a batch goes out again."""
    table = Table()
    core = table.core
    core.leaders[A] = 2
    fault(core)
    table.fill(A, LIMIT)
    assert not table.must_wait(A), "not before a turn has found out"
    core.turn()
    assert table.must_wait(A)
    core.down, core.leaders[A] = set(), 1
    core.turn()
    assert not table.must_wait(A)


def test_a_partition_whose_node_takes_no_more() -> None:
    """Its node's requests are all out, or it asked for a rest: after a moment that is as good as out of reach."""
    table = Table()
    table.core.busy = {1}
    table.fill(A, LIMIT)
    table.core.turn()
    table.core.after(HELD_UP_MS)
    assert not table.must_wait(A)
    table.core.after(1)
    assert table.must_wait(A)


def test_a_partition_whose_node_is_silent() -> None:
    """So is one whose batch has been out for long, until it is answered."""
    table = Table()
    core = table.core
    table.fill(A, LIMIT)
    first = core.turn()[0]
    core.now_ms += HELD_UP_MS
    assert not table.must_wait(A)
    core.now_ms += 1
    assert table.must_wait(A)
    core.answer(first)
    assert not table.must_wait(A)


async def soon() -> None:
    """Let those go on who may."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_served_in_order_as_room_comes() -> None:
    """What was given back lets in the one that waits longest, and no more than there is room for."""
    table = Table()
    table.refuse(A, 3, refused=2)
    table.refuse(B, 2)
    first, second, third = table.wait(B), table.wait(A), table.wait(B)
    await soon()
    assert (first.done(), table.share.waiting) == (False, 3)
    table.core.answer(table.head(A), INVALID_RECORD)
    assert table.share.waiting == 2
    await soon()
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    second.cancel()
    third.cancel()


async def test_what_gets_on_again_is_not_held_up_by_the_others() -> None:
    """The wait of a partition ends with its trouble, whoever else waits before it."""
    table = Table()
    table.refuse(A, LIMIT)
    table.refuse(B, 2)
    bad, mended = table.wait(A), table.wait(B)
    await soon()
    table.core.answer(table.head(B))
    await soon()
    assert (bad.done(), mended.done()) == (False, True)
    bad.cancel()


async def test_nobody_overtakes() -> None:
    """While a send of a partition waits, a later one waits as well, though there would be room for it."""
    table = Table()
    table.refuse(A, LIMIT)
    waiting = table.wait(A)
    await soon()
    table.core.answer(table.head(A))
    assert table.share.waiting == 0
    assert not table.must_wait(A)
    await waiting
    table.core.completion.fail_all(BufferExhausted("over"), out=True)
    table.refuse(A, LIMIT - 1)
    small = asyncio.ensure_future(table.share.wait(table.core.accumulator.queue(A), 10 * BATCH, 10_000))
    await soon()
    assert table.must_wait(A), "there would be room for one batch"
    small.cancel()
    await soon()
    assert not table.must_wait(A)


async def test_waited_for_too_long() -> None:
    """The error says what is the matter with the partition, and nobody is left behind."""
    table = Table()
    table.refuse(A, LIMIT)
    said = r"t-0: does not get on, .* 50% of buffer_memory=2000.*NOT_ENOUGH_REPLICAS"
    with pytest.raises(BufferExhausted, match=said):
        await table.wait(A, timeout_ms=0)
    assert table.share.waiting == 0


async def test_cancelled_in_the_moment_it_is_served() -> None:
    """Its room goes to the next one."""
    table = Table()
    table.refuse(A, 3, refused=2)
    table.refuse(B, 2)
    first, second = table.wait(B), table.wait(A)
    await soon()
    table.core.answer(table.head(A), INVALID_RECORD)
    assert table.share.waiting == 1
    first.cancel()
    await soon()
    assert first.cancelled()
    assert second.done()


async def test_closed() -> None:
    """Whoever waits hears that the producer is closed."""
    table = Table()
    table.refuse(A, LIMIT)
    waiting = table.wait(A)
    await soon()
    table.share.close()
    with pytest.raises(IllegalState, match="closed"):
        await waiting
