"""Where a connector's code runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.connect.isolation.places import Here, OwnThread, in_thread


async def named() -> str:
    return threading.current_thread().name


async def test_code_runs_in_its_place_and_its_errors_come_back() -> None:
    """Here in the caller's thread; apart on a thread of its own, the same one for every call."""
    assert await Here().call(named) == threading.current_thread().name
    place = OwnThread("apart")
    assert [await place.call(named) for _ in range(2)] == ["apart", "apart"]

    async def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await place.call(failing)
    place.close()


async def test_what_is_told_from_there_is_done_in_the_workers_loop() -> None:
    """A connector's request comes from its own thread, and changes what the worker has in the worker's."""
    place, told = OwnThread("apart"), asyncio.Event()
    seen: list[str] = []

    def tell() -> None:
        seen.append(threading.current_thread().name)
        told.set()

    async def ask() -> None:
        place.back(tell)

    await place.call(ask)
    await told.wait()
    assert seen == [threading.current_thread().name]
    place.close()


async def test_a_call_that_is_given_up_is_cancelled_there() -> None:
    """What waits there ends; what comes after the end of the place is its own."""
    place, ended = OwnThread("apart"), threading.Event()

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.ensure_future(place.call(waiting))
    await place.call(named)
    call.cancel()
    assert await in_thread(lambda: ended.wait(60))
    place.close()


async def test_work_on_a_thread_gives_what_it_gives_or_raises() -> None:
    """An error is the caller's."""
    assert await in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
