"""Cancels the close of a client at each turn of the event loop, and waits until all its tasks have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Close = Callable[[], Coroutine[Any, Any, None]]


async def cancel_close_at_each_turn(start: Callable[[], Awaitable[Close]], *, again: bool, step: int = 1) -> int:
    """Cancels a close at its first turn, that of the next client `step` turns later, and so on, up to its last turn.

    `start` starts a client and returns its `close`. With `again`, a close is cancelled at all later turns too, as anyio
    does. After each cancelled close all tasks of the client must end, and a second close must return. Returns the
    number of clients whose close was cancelled.
    """
    before = asyncio.all_tasks()
    cancelled = 0
    while True:
        close = await start()
        closing = asyncio.create_task(close())
        for _ in range(1 + cancelled * step):
            await asyncio.sleep(0)
        is_cancelled = closing.cancel()
        while again and not closing.done():
            await asyncio.sleep(0)
            closing.cancel()
        await asyncio.wait({closing})
        async with asyncio.timeout(10):
            # The broker's tasks end when they see the end of their sockets.
            while left := asyncio.all_tasks() - before:
                await asyncio.wait(left)
            await close()
        if not is_cancelled:
            return cancelled
        cancelled += 1
