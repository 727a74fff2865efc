"""The requests to a herder, executed one after another in its loop.

A caller awaits the result of its command. The loop runs the commands that are due, in the order in which they became
due. A command may be delayed (`delay_ms`), for a retry.

The queue is closed with the herder. Then waiting and later commands raise IllegalState.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import IllegalState
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.herder.errors import RequestTimedOut

T = TypeVar("T")

REQUEST_TIMEOUT_MS = 90_000
"""After this time a request ends in a timeout, as in Kafka Connect's REST."""
HEALTH_MS = 10_000
"""How long the loop may take to reach a request before the worker counts as unhealthy."""
COMMANDS_MAX = 10_000
"""The maximum number of waiting commands. Beyond it new ones are rejected."""


@asynccontextmanager
async def request_timeout(message: str, timeout_ms: int = REQUEST_TIMEOUT_MS) -> AsyncIterator[None]:
    """Raises RequestTimedOut with the message after the timeout. A TimeoutError of the body, such as a connector's own,
    is raised as it is."""
    limit = asyncio.timeout(timeout_ms / 1000)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise RequestTimedOut(message) from None
        raise


@dataclass(order=True)
class _Command:
    due_ms: int
    number: int
    run: Callable[[], Awaitable[Any]] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class CommandQueue:
    """The waiting commands. `wake` is called when a command arrives."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._heap: list[_Command] = []
        self._numbers = itertools.count()
        self._closed = False

    def __repr__(self) -> str:
        return f"<CommandQueue of {len(self._heap)}{', closed' if self._closed else ''}>"

    def __len__(self) -> int:
        return len(self._heap)

    async def execute(self, run: Callable[[], Awaitable[T]], timeout_ms: int = REQUEST_TIMEOUT_MS) -> T:
        """Run a command in the loop and return its result. Raises RequestTimedOut, or IllegalState if the queue is
        closed or full."""
        done = self.put(run)
        async with request_timeout(
            "Request timed out: the worker is busy with a rebalance or an earlier request", timeout_ms
        ):
            return await done

    async def is_attended(self) -> bool:
        """Return whether the loop reaches a request within HEALTH_MS."""

        async def do_nothing() -> None: ...

        try:
            await self.execute(do_nothing, HEALTH_MS)
        except (ConnectError, IllegalState):
            return False
        return True

    def put(self, run: Callable[[], Awaitable[T]], delay_ms: int = 0) -> asyncio.Future[T]:
        """Add a command, which the loop runs after `delay_ms`. Returns a future of its result.

        The future raises IllegalState if the queue is closed or full.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # The limit bounds the memory if the loop is busy for long, for example with a rebalance.
        if self._closed or len(self._heap) >= COMMANDS_MAX:
            done.set_exception(
                IllegalState("the worker is shutting down" if self._closed else "too many requests wait")
            )
            # If no caller waits, asyncio would log that the exception was never retrieved.
            done.exception()
        else:
            due_ms = self._clock.monotonic_ms() + delay_ms
            heapq.heappush(self._heap, _Command(due_ms, next(self._numbers), run, done))
            self._wake()
        return done

    def wait_ms(self) -> int | None:
        """Return the ms until a command is due, 0 if one is due, or None if there is none."""
        return max(0, self._heap[0].due_ms - self._clock.monotonic_ms()) if self._heap else None

    async def run_due(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run all commands that are due and not cancelled.

        Stops as soon as `until` returns True, which is called before each command.
        """
        now_ms = self._clock.monotonic_ms()
        while self._heap and self._heap[0].due_ms <= now_ms and not until():
            command = heapq.heappop(self._heap)
            # A command is skipped if its caller has timed out.
            if not command.done.done():
                await _run_command(command)

    def close(self) -> None:
        """Reject waiting and later commands."""
        self._closed = True
        waiting = self._heap
        self._heap = []
        for command in waiting:
            if not command.done.done():
                command.done.set_exception(IllegalState("the worker is shutting down"))
                # If no caller waits, asyncio would log that the exception was never retrieved.
                command.done.exception()


async def _run_command(command: _Command) -> None:
    try:
        result = await command.run()
    except asyncio.CancelledError:
        if not command.done.done():
            command.done.set_exception(IllegalState("the worker is shutting down"))
            command.done.exception()
        raise
    except Exception as e:
        if not command.done.done():
            command.done.set_exception(e)
            command.done.exception()
    else:
        if not command.done.done():
            command.done.set_result(result)
