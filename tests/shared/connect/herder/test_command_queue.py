"""What the herder is asked runs in its loop, in order, and whoever asked hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.shared.common.errors import IllegalState
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.herder.command_queue import CommandQueue
from penstock.shared.connect.herder.errors import RequestTimedOut
from penstock.shared.testing.manual_clock import ManualClock


def noting(ran: list[int], number: int) -> Callable[[], Awaitable[int]]:
    async def run() -> int:
        ran.append(number)
        return number

    return run


async def test_commands_run_in_the_order_they_are_due() -> None:
    """At once in the order they came; one that is put back when its time is there."""
    clock, ran, woken = ManualClock(), list[int](), list[int]()
    queue = CommandQueue(clock, lambda: woken.append(1))
    later = queue.put(noting(ran, 3), delay_ms=100)
    futures = [queue.put(noting(ran, n)) for n in (1, 2)]
    assert (len(woken), queue.wait_ms()) == (3, 0)
    await queue.run_due()
    assert ran == [1, 2]
    assert [await done for done in futures] == [1, 2]
    assert queue.wait_ms() == 100
    clock.advance(100)
    await queue.run_due()
    assert await later == 3
    assert queue.wait_ms() is None


async def test_errors_reach_who_asked() -> None:
    """A command that raises ends itself, and the next one runs."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)

    async def refuse() -> None:
        raise BadRequest("no")

    asked = asyncio.ensure_future(queue.ask(refuse))
    await asyncio.sleep(0)
    queue.put(noting(ran, 1))
    await queue.run_due()
    with pytest.raises(BadRequest):
        await asked
    assert ran == [1]


async def test_a_queue_is_left_when_something_else_comes_first() -> None:
    """After each command the loop may turn to a rebalance; the rest waits."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)
    for n in (1, 2):
        queue.put(noting(ran, n))
    await queue.run_due(until=lambda: bool(ran))
    assert ran == [1]
    assert len(queue) == 1


async def test_who_waits_too_long_is_told() -> None:
    """The command of somebody who has gone is not run any more."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)
    with pytest.raises(RequestTimedOut):
        await queue.ask(noting(ran, 1), timeout_ms=1)
    await queue.run_due()
    assert ran == []


async def test_a_closed_queue_refuses() -> None:
    """What waits and what comes ends in IllegalState."""
    queue = CommandQueue(ManualClock(), lambda: None)
    waiting = queue.put(noting([], 1))
    queue.close()
    for done in (waiting, queue.put(noting([], 2))):
        with pytest.raises(IllegalState):
            await done


async def test_a_queue_is_attended_while_its_loop_runs() -> None:
    """A loop that comes to requests is well; one that has ended is not."""
    queue = CommandQueue(ManualClock(), lambda: None)
    asked = asyncio.ensure_future(queue.is_attended())
    await asyncio.sleep(0)
    await queue.run_due()
    assert await asked
    queue.close()
    assert not await queue.is_attended()
