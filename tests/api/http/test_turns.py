"""The turns of bulk requests, and their order."""

from __future__ import annotations

import asyncio

import pytest

from penstock.api.http import turns as module
from penstock.api.http.turns import FREE, GRANT_DELAY_ITERATIONS, REQUEUE_BYTES, Turns

LOOPS = 3 * GRANT_DELAY_ITERATIONS
"""The number of event loop iterations after which nothing more happens."""


async def settled() -> None:
    for _ in range(LOOPS):
        await asyncio.sleep(0)


class Request:
    """A request of `batches` turns, which logs its name at each turn."""

    def __init__(self, turns: Turns, name: str, log: list[str], batches: int = 3) -> None:
        self.entry = turns.enqueue()
        self.name = name
        self.log = log
        self.batches = batches

    async def run(self) -> None:
        for _ in range(self.batches):
            with await self.entry.turn(0):
                self.log.append(self.name)
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # its client's next bytes
            await asyncio.sleep(0)


async def test_requests_are_served_in_the_order_of_arrival() -> None:
    """With one turn the requests are served one after the other, in whatever order they request it."""
    turns, log = Turns(1, 1_000), list[str]()
    requests = [Request(turns, name, log) for name in "abcd"]
    async with asyncio.TaskGroup() as tasks:
        for request in reversed(requests):
            tasks.create_task(request.run())
    assert "".join(log) == "aaabbbcccddd"
    assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"


async def test_at_once_requests_have_a_turn() -> None:
    """With two turns the first two requests alternate, and the others wait."""
    turns, log = Turns(2, 1_000), list[str]()
    async with asyncio.TaskGroup() as tasks:
        for name in "abcd":
            tasks.create_task(Request(turns, name, log, batches=20).run())
    assert set(log[:38]) == {"a", "b"}
    assert set(log[-38:]) == {"c", "d"}


async def test_a_request_that_waits_for_its_client_stays_in_the_queue() -> None:
    """A request that waits for its client holds no turn, and is next when it has data again."""
    turns, log = Turns(1, 1_000), list[str]()
    slow, others = turns.enqueue(), [Request(turns, name, log, batches=50) for name in "xyz"]
    async with asyncio.TaskGroup() as tasks:
        for request in others:
            tasks.create_task(request.run())
        await settled()
        assert log
        assert set(log) == {"x"}
        served = len(log)
        with await slow.turn(0):
            assert len(log) <= served + 1


async def test_a_turn_is_released_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for Kafka does not delay all others. A turn that is released twice frees one turn."""
    monkeypatch.setattr(module, "TURN_TIMEOUT_MS", 5)
    turns = Turns(1, 1_000)
    with await turns.enqueue().turn(0), await turns.enqueue().turn(0):
        pass
    assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"


async def test_an_endless_body_moves_to_the_end_of_the_queue() -> None:
    """After each REQUEUE_BYTES the waiting requests are served before it."""
    turns, log = Turns(1, 1_000), list[str]()
    endless = turns.enqueue()

    async def serve(name: str, entry: module.QueueEntry, body_bytes: int) -> None:
        with await entry.turn(body_bytes):
            log.append(name)

    other = turns.enqueue()
    with await turns.enqueue().turn(0):
        tasks = [asyncio.ensure_future(serve("other", other, 0))]
        tasks.append(asyncio.ensure_future(serve("endless", endless, REQUEUE_BYTES)))
        await settled()
    await asyncio.gather(*tasks)
    with await turns.enqueue().turn(0):
        tasks = [asyncio.ensure_future(serve("endless", endless, REQUEUE_BYTES + 1))]
        tasks.append(asyncio.ensure_future(serve("other", other, 0)))
        await settled()
    await asyncio.gather(*tasks)
    assert log == ["endless", "other", "other", "endless"]


async def test_a_cancelled_request_loses_no_turn() -> None:
    """A request that is cancelled while it waits or after its turn was granted loses no turn."""
    turns = Turns(1, 1_000)
    first = await turns.enqueue().turn(0)
    waiting = [asyncio.ensure_future(turns.enqueue().turn(0)) for _ in range(2)]
    await settled()
    waiting[0].cancel()
    await settled()
    first.release()
    for _ in range(GRANT_DELAY_ITERATIONS + 1):  # granted, and not yet run
        await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    with await turns.enqueue().turn(0):
        assert repr(turns) == "Turns(free=0, waiting=0, in_flight=0)"
    assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"


async def test_no_turn_is_granted_while_too_many_records_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records count until their outcomes are known, or for TURN_TIMEOUT_MS. So a stuck partition stops no others."""
    turns, outcomes = Turns(2, 10), asyncio.get_running_loop().create_future()
    with await turns.enqueue().turn(0) as turn:
        turn.count_in_flight(10, outcomes)
    waiting = asyncio.ensure_future(turns.enqueue().turn(0))
    await settled()
    assert (repr(turns), waiting.done()) == ("Turns(free=2, waiting=1, in_flight=10)", False)
    outcomes.set_result([])
    (await waiting).release()
    monkeypatch.setattr(module, "TURN_TIMEOUT_MS", 5)
    stuck = asyncio.get_running_loop().create_future()
    with await turns.enqueue().turn(0) as turn:
        turn.count_in_flight(1_000, stuck)
    with await turns.enqueue().turn(0):
        assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"
    stuck.set_result([])
    await settled()
    assert repr(turns) == "Turns(free=2, waiting=0, in_flight=0)"


async def test_records_of_small_requests_are_not_counted() -> None:
    """A small request needs no turn, so that its records count nowhere."""
    outcomes = asyncio.get_running_loop().create_future()
    turns = Turns(1, 1)
    with FREE:
        FREE.count_in_flight(1_000_000, outcomes)
        async with asyncio.timeout(10):
            (await turns.enqueue().turn(0)).release()
    assert (repr(turns), outcomes.done()) == ("Turns(free=1, waiting=0, in_flight=0)", False)
