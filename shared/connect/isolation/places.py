"""Where a connector's own code runs: in the worker's event loop, or in one of its own on a thread of its own (an edge).

A connector is little code that waits: a thread is enough for one that blocks to hold up nothing else, where its tasks
have processes. One that does not end is abandoned with its thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Place(Protocol):
    """Where code runs."""

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make something to wait for there, and wait for it."""
        ...

    def back(self, tell: Callable[[], None]) -> None:
        """From there: have the worker's loop do something."""
        ...

    def close(self) -> None:
        """Nothing more will be called."""
        ...


class Here:
    """The worker's event loop."""

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        return await make()

    def back(self, tell: Callable[[], None]) -> None:
        tell()

    def close(self) -> None:
        """There is nothing to close."""


class OwnThread:
    """An event loop on a thread of its own, from the first call on. Made in the worker's loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._home = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<OwnThread {self._name}>"

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Nobody waits for it at the end: it may be in a call that never returns.
            threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()

        async def made() -> T:
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), self._loop))

    def back(self, tell: Callable[[], None]) -> None:
        if not self._home.is_closed():
            self._home.call_soon_threadsafe(tell)

    def close(self) -> None:
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.call_soon_threadsafe(loop.stop)


async def in_thread(work: Callable[[], T]) -> T:
    """Run what may block on a thread of its own; nobody waits for it at the end of the process."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as e:  # whatever it is: who waits gets it
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
    finally:
        loop.close()
