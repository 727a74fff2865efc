"""Runs long work in an event loop of a separate thread, so it does not block the caller's loop between two awaits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work`, or raise its error. It opens its own connections and is cancelled with the caller.

    >>> async def three():
    ...     return 3
    >>> asyncio.run(in_own_loop(three))
    3
    """
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work()

    thread = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(run()))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
        raise
