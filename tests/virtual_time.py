"""An event loop whose time jumps to the next timer when no callback is ready.

Tests of timeouts and backoffs take no time on it, and see exact times.

>>> async def wait() -> float:
...     await let_pass(3_600)
...     return asyncio.get_running_loop().time()
>>> run(wait())
3600.0
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClock:
    """The running loop's time as a `penstock.shared.common.clock.Clock`."""

    def now_ms(self) -> int:
        return self.monotonic_ms()

    def monotonic_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)


class _Skipping(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


async def let_pass(seconds: float) -> None:
    """Return after `seconds`, after all timers before that time."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits only for events of this process. Time begins at 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
