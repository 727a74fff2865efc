"""Buffer memory: a bound in bytes, first come first served, and a limit for partitions without progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.buffer_pool import BufferPool, HeldUpShare
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import HELD_UP_MS
from penstock.shared.common.errors import BufferExhausted
from penstock.shared.common.records import TopicPartition
from tests.shared.clients.producer.harness import INVALID_RECORD, NOT_ENOUGH_REPLICAS, A, B, C, Harness


async def test_waiters_are_served_in_order() -> None:
    """Waiters are served in order: a small request does not overtake a large one."""
    memory = BufferPool(100)
    assert memory.try_acquire(90)
    served: list[str] = []

    async def take(name: str, size: int) -> None:
        await memory.acquire(size, 5_000)
        served.append(name)

    tasks = [asyncio.ensure_future(take("large", 60)), asyncio.ensure_future(take("small", 5))]
    await asyncio.sleep(0)
    assert not memory.try_acquire(1)
    assert served == []
    memory.release(90)
    await asyncio.gather(*tasks)
    assert served == ["large", "small"]
    assert memory.available == 35


async def test_exhausted() -> None:
    """A wait that times out raises BufferExhausted and leaves no waiter."""
    memory = BufferPool(100)
    assert memory.try_acquire(100)
    with pytest.raises(BufferExhausted, match="buffer_memory=100"):
        await memory.acquire(1, 0)
    memory.release(100)
    assert (memory.available, memory.waiting) == (100, 0)


async def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    """Cancelling the first waiter, which needs too much, lets the second take the free memory."""
    memory = BufferPool(100)
    assert memory.try_acquire(90)
    large = asyncio.ensure_future(memory.acquire(50, 5_000))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(memory.acquire(10, 5_000))
    await asyncio.sleep(0)
    large.cancel()
    await small
    assert memory.available == 0


async def test_cancelled_in_the_moment_it_is_granted() -> None:
    """A waiter that is cancelled after its memory was granted releases it."""
    memory = BufferPool(10)
    assert memory.try_acquire(10)
    waiter = asyncio.ensure_future(memory.acquire(10, 5_000))
    await asyncio.sleep(0)
    memory.release(10)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert memory.available == 10


@given(st.lists(st.integers(1, 40), max_size=30))
def test_bytes_are_conserved(sizes: list[int]) -> None:
    """Allocated and released bytes add up."""
    memory = BufferPool(100)
    taken = [size for size in sizes if memory.try_acquire(size)]
    assert memory.available == 100 - sum(taken)
    for size in taken:
        memory.release(size)
    assert memory.available == 100


async def test_bytes_released_together() -> None:
    """Within the block no waiter is served. At its end all that fit are served in order."""
    memory = BufferPool(100)
    assert memory.try_acquire(100)
    waiters = [asyncio.ensure_future(memory.acquire(size, 5_000)) for size in (70, 20, 30)]
    await asyncio.sleep(0)
    with memory.together():
        for _ in range(10):
            memory.release(10)
        assert (memory.available, memory.waiting) == (100, 3)
    assert (memory.available, memory.waiting) == (10, 1)
    await asyncio.gather(*waiters[:2])
    memory.release(70)
    await waiters[2]
    assert repr(memory) == "<BufferPool 50 of 100 bytes free, 0 waiting>"


async def test_releasing_too_much_is_a_bug() -> None:
    """Releasing more bytes than were allocated raises an error."""
    memory = BufferPool(10)
    with pytest.raises(AssertionError, match="more bytes given back"):
        memory.release(1)


BATCH = 200
LIMIT = 5
"""So many batches may be held up: the buffer has room for ten."""


class Table:
    """A harness with one record to a batch, and the share on top of it."""

    def __init__(self) -> None:
        self.core = Harness(batch_size=BATCH, buffer_memory=2 * LIMIT * BATCH, delivery_timeout_ms=10**6)
        self.core.now_ms = 50
        self.core.warm_up(A, B, C)
        self.share = HeldUpShare(self.core.accumulator, self.core.memory, lambda: self.core.now_ms)

    def fill(self, tp: TopicPartition, batches: int) -> None:
        for _ in range(batches):
            self.core.send(tp, b"x" * 100)

    def fail(self, tp: TopicPartition, batches: int, *, failed: int = 1) -> None:
        """Sends n batches of a partition. The first ones are rejected, and the others wait behind them."""
        self.fill(tp, failed)
        for batch in self.core.turn():
            self.core.respond(batch, NOT_ENOUGH_REPLICAS)
        self.fill(tp, batches - failed)

    def head(self, tp: TopicPartition) -> ProducerBatch:
        """Return the partition's first batch, in flight again."""
        return next(batch for batch in self.core.after_backoff() if batch.tp == tp)

    def must_wait(self, tp: TopicPartition) -> bool:
        return self.share.must_wait(self.core.accumulator.queue(tp), BATCH)

    def wait(self, tp: TopicPartition, timeout_ms: float = 10_000) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.share.wait(self.core.accumulator.queue(tp), BATCH, timeout_ms))


def test_a_partition_with_progress_may_use_the_whole_buffer() -> None:
    """A partition whose batches are acknowledged may fill the buffer."""
    table = Table()
    table.fill(A, 2)
    table.core.respond(table.core.turn()[0])
    table.fill(A, 8)
    assert not table.must_wait(A)


def test_a_partition_of_which_nothing_is_known() -> None:
    """A burst may exceed the share only after its first batch is acknowledged."""
    table = Table()
    table.fill(A, LIMIT)
    assert not table.must_wait(A), "as many may be in flight"
    table.fill(A, 1)
    assert table.must_wait(A)
    assert not table.must_wait(B)
    table.core.respond(table.core.turn()[0])
    table.fill(A, 4)
    assert not table.must_wait(A)


def test_an_acknowledged_later_batch_is_progress() -> None:
    """If a later batch is acknowledged before the first, the partition may fill the buffer."""
    table = Table()
    table.fill(A, LIMIT)
    table.core.respond(table.core.turn()[1])
    table.fill(A, LIMIT)
    table.core.turn()
    assert not table.must_wait(A)


def test_a_batch_that_was_queued_before_the_acknowledgement_is_no_sign() -> None:
    """After an acknowledgement, batches from before it may be queued in front of later ones."""
    table = Table()
    table.fill(A, LIMIT + 1)
    for batch in table.core.turn():
        table.core.respond(batch)
    table.fill(A, LIMIT)
    assert not table.must_wait(A)


def test_a_rejected_batch_is_no_progress() -> None:
    """A rejected batch is not progress: later records may not exceed the share."""
    table = Table()
    table.fill(A, 1)
    table.core.respond(table.core.turn()[0], INVALID_RECORD)
    table.fill(A, LIMIT)
    assert not table.must_wait(A)
    table.fill(A, 1)
    assert table.must_wait(A)


def test_a_share_for_one() -> None:
    """A retried partition may use at most half of the buffer. Others are not limited."""
    table = Table()
    table.fail(A, LIMIT - 1)
    assert not table.must_wait(A)
    table.fill(A, 1)
    assert table.must_wait(A)
    assert not table.must_wait(B)
    assert repr(table.share) == "<HeldUpShare 1000 of 1000 bytes, 0 waiting>"


def test_a_share_for_all() -> None:
    """Two retried partitions share one half."""
    table = Table()
    table.fail(A, 3)
    assert not table.must_wait(A)
    table.fail(B, 2)
    assert table.must_wait(A)
    assert table.must_wait(B)
    table.fill(C, 5)
    assert not table.must_wait(C)


def test_a_partition_without_anything_is_free() -> None:
    """A partition without buffered records never waits, however much the others use."""
    table = Table()
    table.fail(A, LIMIT)
    assert not table.must_wait(B)


def test_a_dead_node_with_many_partitions() -> None:
    """All partitions of an unreachable node share one half, also those without buffered records, until the node is
    back."""
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


def test_a_single_partition_may_use_the_whole_buffer() -> None:
    """A single partition blocks no other, so it may use the whole buffer."""
    core = Harness(batch_size=BATCH, buffer_memory=10 * BATCH)
    share = HeldUpShare(core.accumulator, core.memory, lambda: 0)
    for _ in range(9):
        core.send(A, b"x" * 100)
    core.respond(core.turn_one(), NOT_ENOUGH_REPLICAS)
    assert not share.must_wait(core.accumulator.queue(A), BATCH)


def dead(core: Harness) -> None:
    core.down = {2}


def leaderless(core: Harness) -> None:
    core.leaders[A] = None


@pytest.mark.parametrize("fault", [dead, leaderless])
def test_a_partition_that_cannot_be_reached(fault: Callable[[Harness], None]) -> None:
    """An unreachable partition is detected at once, and cleared when a batch is sent again."""
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
    """A node with all requests in flight or a throttle counts as unreachable after a moment."""
    table = Table()
    table.core.busy = {1}
    table.fill(A, LIMIT)
    table.core.turn()
    assert not table.must_wait(A)
    table.core.after(HELD_UP_MS)
    assert not table.must_wait(A)
    table.core.after(1)
    assert table.must_wait(A)


def test_a_partition_whose_node_is_silent() -> None:
    """A partition with a batch in flight for long counts as stuck until the response. The time before it was sent does
    not count."""
    table = Table()
    core = table.core
    table.fill(A, LIMIT)
    first = core.after(1)[0]
    core.now_ms += HELD_UP_MS
    assert not table.must_wait(A)
    core.now_ms += 1
    assert table.must_wait(A)
    core.respond(first)
    assert not table.must_wait(A)


def test_the_oldest_batch_in_flight_shows_that_a_node_is_silent() -> None:
    """A later request does not change how long the first has been without a response."""
    table = Table()
    table.fill(A, 1)
    table.core.turn()
    table.core.now_ms += HELD_UP_MS
    table.fill(A, LIMIT - 1)
    table.core.turn()
    assert not table.must_wait(A)
    table.core.now_ms += 1
    assert table.must_wait(A)


async def soon() -> None:
    """Lets runnable tasks continue."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_served_in_order_as_room_comes() -> None:
    """Released memory serves the longest waiter first, and no more waiters than fit."""
    table = Table()
    table.fail(A, 3, failed=2)
    table.fail(B, 2)
    first, second, third = table.wait(B), table.wait(A), table.wait(B)
    await soon()
    assert (first.done(), table.share.waiting) == (False, 3)
    table.core.respond(table.head(A), INVALID_RECORD)
    assert table.share.waiting == 2
    await soon()
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    second.cancel()
    third.cancel()


async def test_a_partition_with_progress_again_stops_waiting() -> None:
    """A partition stops waiting once it makes progress, whatever other waiters precede it."""
    table = Table()
    table.fail(A, LIMIT)
    table.fail(B, 2)
    bad, recovered = table.wait(A), table.wait(B)
    await soon()
    table.core.respond(table.head(B))
    await soon()
    assert (bad.done(), recovered.done()) == (False, True)
    bad.cancel()


async def test_waiting_requests_are_served_in_order() -> None:
    """While a send of a partition waits, later ones wait too, even if they would fit."""
    table = Table()
    table.fail(A, LIMIT)
    waiting = table.wait(A)
    await soon()
    table.core.respond(table.head(A))
    assert table.share.waiting == 0
    assert not table.must_wait(A)
    await waiting
    table.core.completion.fail_all(BufferExhausted("over"), out=True)
    table.fail(A, LIMIT - 1)
    small = asyncio.ensure_future(table.share.wait(table.core.accumulator.queue(A), 10 * BATCH, 10_000))
    await soon()
    assert table.must_wait(A), "there would be room for one batch"
    small.cancel()
    await soon()
    assert not table.must_wait(A)


async def test_a_send_waits_behind_one_that_began_while_the_leader_was_unreachable() -> None:
    """While a send of a partition without memory waits, later ones wait too, even if the leader is reachable again."""
    table = Table()
    away = {A}
    table.share = HeldUpShare(table.core.accumulator, table.core.memory, lambda: table.core.now_ms, away.__contains__)
    table.fail(B, LIMIT)
    assert table.must_wait(A)
    waiting = table.wait(A)
    await soon()
    away.clear()
    assert table.must_wait(A)
    table.core.respond(table.head(B))
    assert not table.must_wait(A)
    await waiting


async def test_sends_that_wait_for_memory_count_for_their_partition() -> None:
    """If the buffer is full, the sends that wait for memory count as what their partition holds. Otherwise they would
    together get all of it once it is free."""
    table = Table()
    table.fail(A, 1)
    table.fill(B, 2)
    table.core.respond(table.core.turn()[0])
    table.fill(B, 2 * LIMIT - 2)
    assert table.core.memory.available == 0
    queue = table.core.accumulator.queue(A)
    waiting = []
    while not table.must_wait(A):
        waiting.append(asyncio.ensure_future(table.share.acquire(queue, BATCH, 10_000)))
        await soon()
        assert len(waiting) < 2 * LIMIT
    assert len(waiting) == LIMIT - 1
    assert table.core.memory.waiting == LIMIT - 1
    in_share = table.wait(A)
    await soon()
    waiting[0].cancel()
    await soon()
    assert in_share.done(), "the cancelled request belongs to the share no longer"
    for one in waiting:
        one.cancel()
    await soon()
    assert queue.held == BATCH


async def test_waited_for_too_long() -> None:
    """The error states the partition's problem, and no waiter is left."""
    table = Table()
    table.fail(A, LIMIT)
    message = r"t-0: .*50%.*buffer_memory=2000.*NOT_ENOUGH_REPLICAS"
    with pytest.raises(BufferExhausted, match=message):
        await table.wait(A, timeout_ms=0)
    assert table.share.waiting == 0


async def test_cancelled_in_the_moment_it_is_served() -> None:
    """Its memory goes to the next waiter."""
    table = Table()
    table.fail(A, 3, failed=2)
    table.fail(B, 2)
    first, second = table.wait(B), table.wait(A)
    await soon()
    table.core.respond(table.head(A), INVALID_RECORD)
    assert table.share.waiting == 1
    first.cancel()
    await soon()
    assert first.cancelled()
    assert second.done()
