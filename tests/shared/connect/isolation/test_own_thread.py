"""Work on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.shared.connect.isolation.own_thread import in_thread


async def test_work_on_a_thread_gives_what_it_gives_or_raises() -> None:
    """An error is the caller's."""
    assert await in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_work_that_blocks_holds_up_nothing() -> None:
    """Nor who gives it up."""
    going = threading.Event()
    waiting = asyncio.ensure_future(in_thread(lambda: going.wait(60)))
    assert await in_thread(lambda: 3) == 3
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    going.set()
