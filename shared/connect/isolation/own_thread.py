"""Code that may block, on a thread of its own (an edge)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs blocking work on a thread of its own. The end of the process does not wait for the thread."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as e:  # any error: the caller gets it
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))
