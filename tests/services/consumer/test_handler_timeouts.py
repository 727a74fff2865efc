"""The time limit that all calls of a handler share."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.consumer.handler_timeouts import CallLimits


async def after(seconds: float) -> None:
    """Wait like a handler that hangs or that ends within its limit."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    await event.wait()


async def limited(limits: CallLimits, seconds: float) -> bool:
    """Make a call of this duration and return whether its limit expired."""
    task = asyncio.current_task()
    assert task is not None
    limits.begin(task)
    try:
        await after(seconds)
    except asyncio.CancelledError:
        return limits.end(task)
    return limits.end(task)


async def test_each_call_has_its_own_limit() -> None:
    """One timer ends each call when its own limit expires, and no call that ended before."""
    limits = CallLimits(30)
    first, short = asyncio.create_task(limited(limits, 60)), asyncio.create_task(limited(limits, 0))
    await after(0.015)
    began = asyncio.get_running_loop().time()
    second = asyncio.create_task(limited(limits, 60))
    assert await asyncio.gather(first, short, second) == [True, False, True]
    assert asyncio.get_running_loop().time() - began >= 0.028
    assert repr(limits) == "CallLimits(30 ms, 0 calls)"


async def test_a_call_within_the_limit_is_not_cancelled() -> None:
    """A call that ended in time is not cancelled, and the next call has a timer again."""
    limits = CallLimits(5)
    assert await limited(limits, 0) is False
    await after(0.01)
    assert await limited(limits, 60) is True


async def test_a_call_that_ignores_its_cancellation_is_cancelled_again() -> None:
    """A call that swallows its cancellation is cancelled again, and no cancellation remains when it ends."""
    limits = CallLimits(5)
    task = asyncio.current_task()
    assert task is not None
    limits.begin(task)
    for _ in range(3):
        with pytest.raises(asyncio.CancelledError):
            await after(60)
    assert task.cancelling() == 3
    assert limits.end(task)
    assert task.cancelling() == 0
    assert await limited(limits, 0) is False


async def test_the_limit_leaves_no_cancellation_behind() -> None:
    """A task that the limit cancelled may wait again, while a cancellation by another caller stays in force."""
    limits, counts = CallLimits(5), []

    async def calls() -> None:
        task = asyncio.current_task()
        assert task is not None
        assert await limited(limits, 60)
        counts.append(task.cancelling())
        limits.begin(task)
        try:
            await after(60)
        finally:
            task.cancel()
            assert limits.end(task)
            counts.append(task.cancelling())

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(calls())
    assert counts == [0, 1]
