"""The bytes that records may hold until they are acknowledged, handed out in the order they were asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.shared.common.errors import BufferExhausted, IllegalState


class BufferMemory:
    """`size` bytes; who finds too few free waits in a queue, and nobody overtakes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.available = size
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._gathering = False
        self.on_freed: Callable[[], None] | None = None
        """Told after bytes were given back and those who wait for them were served."""

    def __repr__(self) -> str:
        return f"<BufferMemory {self.available} of {self.size} bytes free, {len(self._waiters)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_acquire(self, size: int) -> bool:
        """Take `size` bytes if they are free and nobody waits."""
        if self._waiters or size > self.available:
            return False
        self.available -= size
        return True

    async def acquire(self, size: int, timeout_ms: float) -> None:
        """Take `size` bytes; BufferExhausted once `timeout_ms` has passed."""
        if self.try_acquire(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (future, size)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(max(0.0, timeout_ms) / 1000):
                await future
        except BaseException as e:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(size)  # granted in the very moment the waiter was given up
            elif entry in self._waiters:
                self._waiters.remove(entry)
                self._grant()
            if isinstance(e, TimeoutError):
                raise BufferExhausted(
                    f"no {size} of buffer_memory={self.size} bytes became free within max_block_ms "
                    f"({self.available} free, {len(self._waiters)} more waiting)"
                ) from None
            raise

    def release(self, size: int) -> None:
        """Give bytes back; the longest waiting are served first."""
        self.available += size
        assert self.available <= self.size, "more bytes given back than taken"
        self._grant()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Serve the waiters once at the end of the block, with all that was given back in it."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self._grant()

    def close(self) -> None:
        """Fail whoever waits with IllegalState."""
        while self._waiters:
            future, _ = self._waiters.popleft()
            if not future.done():
                future.set_exception(IllegalState("the producer was closed while a send waited for buffer memory"))

    def _grant(self) -> None:
        if self._gathering:
            return
        while self._waiters:
            future, size = self._waiters[0]
            if not future.done():
                if size > self.available:
                    break
                self.available -= size
                future.set_result(None)
            self._waiters.popleft()
        if self.on_freed is not None:
            self.on_freed()
