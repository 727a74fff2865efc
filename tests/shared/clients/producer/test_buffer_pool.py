"""Buffer memory: a bound in bytes, first come first served."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.common.errors import BufferExhausted, IllegalState


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


async def test_close_fails_the_waiters() -> None:
    """`close` fails a waiting send with a clear error."""
    memory = BufferPool(10)
    assert memory.try_acquire(10)
    waiter = asyncio.ensure_future(memory.acquire(1, 5_000))
    await asyncio.sleep(0)
    memory.close()
    with pytest.raises(IllegalState, match="waited for buffer memory"):
        await waiter


@given(st.lists(st.integers(1, 40), max_size=30))
def test_bytes_are_conserved(sizes: list[int]) -> None:
    """Allocated and released bytes add up."""
    memory = BufferPool(100)
    taken = [size for size in sizes if memory.try_acquire(size)]
    assert memory.available == 100 - sum(taken)
    for size in taken:
        memory.release(size)
    assert memory.available == 100


async def test_bytes_given_back_together() -> None:
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
