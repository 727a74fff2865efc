"""What the herder is asked to do, one after another in its own loop (an edge).

Whoever asks awaits the answer; the loop takes what is due, in the order in which it became due. A command may be put
back until later (`delay_ms`), for a retry.

The queue is closed with the herder: what waits then, and what comes after, ends in IllegalState.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import IllegalState
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.herder.errors import RequestTimedOut

T = TypeVar("T")

REQUEST_TIMEOUT_MS = 90_000
"""As Kafka Connect's REST: after this, who asked is told that it takes too long."""
HEALTH_MS = 10_000
"""How long the loop may take to come to a request before the worker counts as unwell."""
COMMANDS_MAX = 10_000
"""Commands that wait; beyond it new ones are refused."""


@dataclass(order=True)
class _Command:
    due_ms: int
    number: int
    run: Callable[[], Awaitable[Any]] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class CommandQueue:
    """The commands that wait; `wake` is called when one comes."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._heap: list[_Command] = []
        self._numbers = itertools.count()
        self._closed = False

    def __repr__(self) -> str:
        return f"<CommandQueue of {len(self._heap)}{', closed' if self._closed else ''}>"

    def __len__(self) -> int:
        return len(self._heap)

    async def ask(self, run: Callable[[], Awaitable[T]], timeout_ms: int = REQUEST_TIMEOUT_MS) -> T:
        """Have the loop run it, and give what came of it; RequestTimedOut, IllegalState when closed."""
        done = self.put(run)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await done
        except TimeoutError:
            raise RequestTimedOut("Request timed out: the worker is busy with a rebalance or an earlier one") from None

    async def is_attended(self) -> bool:
        """Whether the loop comes to what it is asked, within HEALTH_MS."""

        async def nothing() -> None: ...

        try:
            await self.ask(nothing, HEALTH_MS)
        except (ConnectError, IllegalState):
            return False
        return True

    def put(self, run: Callable[[], Awaitable[T]], delay_ms: int = 0) -> asyncio.Future[T]:
        """Have the loop run it, not before `delay_ms` have passed; the future has what came of it."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._closed or len(self._heap) >= COMMANDS_MAX:
            done.set_exception(
                IllegalState("the worker is shutting down" if self._closed else "too many requests wait")
            )
        else:
            due_ms = self._clock.monotonic_ms() + delay_ms
            heapq.heappush(self._heap, _Command(due_ms, next(self._numbers), run, done))
            self._wake()
        return done

    def wait_ms(self) -> int | None:
        """How long until one is due, 0 when one is; None while there is none."""
        return max(0, self._heap[0].due_ms - self._clock.monotonic_ms()) if self._heap else None

    async def run_due(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run all that is due, or until `until` holds after one of them."""
        now_ms = self._clock.monotonic_ms()
        while self._heap and self._heap[0].due_ms <= now_ms and not until():
            command = heapq.heappop(self._heap)
            if not command.done.done():  # whoever asked may have gone
                await _run(command)

    def close(self) -> None:
        """Refuse what waits and what comes."""
        self._closed = True
        waiting, self._heap = self._heap, []
        for command in waiting:
            if not command.done.done():
                command.done.set_exception(IllegalState("the worker is shutting down"))
                command.done.exception()  # nobody may be waiting


async def _run(command: _Command) -> None:
    try:
        result = await command.run()
    except asyncio.CancelledError:
        if not command.done.done():
            command.done.set_exception(IllegalState("the worker is shutting down"))
            command.done.exception()
        raise
    except Exception as e:  # whoever asked is told
        if not command.done.done():
            command.done.set_exception(e)
            command.done.exception()
    else:
        if not command.done.done():
            command.done.set_result(result)
