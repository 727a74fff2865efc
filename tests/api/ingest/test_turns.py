"""Who may hand events over, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from penstock.api.ingest import turns as module
from penstock.api.ingest.turns import FREE, GRANT_DELAY_ITERATIONS, REQUEUE_BYTES, Turns

LOOPS = 3 * GRANT_DELAY_ITERATIONS
"""Turns of the event loop in which everything that can happen has happened."""


async def settled() -> None:
    for _ in range(LOOPS):
        await asyncio.sleep(0)


class Request:
    """One that wants `batches` turns and gives each back after it has noted its name."""

    def __init__(self, turns: Turns, name: str, log: list[str], batches: int = 3) -> None:
        self.place, self.name, self.log, self.batches = turns.enqueue(), name, log, batches

    async def run(self) -> None:
        for _ in range(self.batches):
            with await self.place.turn(0):
                self.log.append(self.name)
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # its client's next bytes
            await asyncio.sleep(0)


async def test_those_that_came_first_end_first() -> None:
    """With one turn the requests are served one after the other, in whichever order they ask for it."""
    turns, log = Turns(1, 1_000), list[str]()
    requests = [Request(turns, name, log) for name in "abcd"]
    async with asyncio.TaskGroup() as tasks:
        for request in reversed(requests):
            tasks.create_task(request.run())
    assert "".join(log) == "aaabbbcccddd"
    assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"


async def test_so_many_go_on_at_once() -> None:
    """With two turns the first two share them, and the rest waits."""
    turns, log = Turns(2, 1_000), list[str]()
    async with asyncio.TaskGroup() as tasks:
        for name in "abcd":
            tasks.create_task(Request(turns, name, log, batches=20).run())
    assert set(log[:38]) == {"a", "b"}
    assert set(log[-38:]) == {"c", "d"}


async def test_a_request_that_waits_for_its_client_keeps_its_place_and_no_turn() -> None:
    """The others go on without it, and when its bytes come it is the next."""
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


async def test_a_turn_that_is_held_for_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for Kafka must not keep all others waiting; giving it back twice frees one turn."""
    monkeypatch.setattr(module, "TURN_TIMEOUT_MS", 5)
    turns = Turns(1, 1_000)
    with await turns.enqueue().turn(0), await turns.enqueue().turn(0):
        pass
    assert repr(turns) == "Turns(free=1, waiting=0, in_flight=0)"


async def test_a_body_without_end_goes_to_the_back_now_and_then() -> None:
    """After each REQUEUE_BYTES the requests that wait come before it."""
    turns, log = Turns(1, 1_000), list[str]()
    endless = turns.enqueue()

    async def take(name: str, place: module.Place, body_bytes: int) -> None:
        with await place.turn(body_bytes):
            log.append(name)

    other = turns.enqueue()
    with await turns.enqueue().turn(0):
        tasks = [asyncio.ensure_future(take("other", other, 0))]
        tasks.append(asyncio.ensure_future(take("endless", endless, REQUEUE_BYTES)))
        await settled()
    await asyncio.gather(*tasks)
    with await turns.enqueue().turn(0):
        tasks = [asyncio.ensure_future(take("endless", endless, REQUEUE_BYTES + 1))]
        tasks.append(asyncio.ensure_future(take("other", other, 0)))
        await settled()
    await asyncio.gather(*tasks)
    assert log == ["endless", "other", "other", "endless"]


async def test_a_request_that_is_cancelled_takes_no_turn_with_it() -> None:
    """While it waits, and in the moment in which it is granted one."""
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


async def test_a_small_requests_records_do_not_count() -> None:
    """It has no turn, so it neither waits nor lets others wait."""
    FREE.count_in_flight(1_000_000, asyncio.get_running_loop().create_future())
    with FREE:
        pass
    (await Turns(1, 1).enqueue().turn(0)).release()
