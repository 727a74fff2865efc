"""The memory that records hold until they are acknowledged (Java: `BufferPool`), and its distribution among partitions.

`BufferPool` hands out `buffer_memory` bytes in the order of the requests.

`HeldUpShare` limits the partitions that make no progress: together they may use at most half of the buffer. The other
half is left for the partitions that make progress, so that a dead node cannot stop them. While the limit is reached,
sends to partitions without progress wait. A partition that holds no memory may take a first batch, unless its leader is
known to be unreachable: a dead node may have a thousand partitions, and each would get a batch. The waiting sends of
one partition are served in the order in which they came. A partition that makes progress again does not wait for the
others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.shared.clients.producer.record_accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.common.errors import BufferExhausted
from penstock.shared.common.records import TopicPartition

HELD_UP_SHARE = 0.5
"""The share of `buffer_memory` that all partitions without progress may use together."""


class BufferPool:
    """A pool of `size` bytes. A request waits in a queue if too few bytes are free; no later request overtakes it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.available = size
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._gathering = False
        self.on_freed: Callable[[], None] | None = None
        """Called after bytes were released and the waiting requests were served."""

    def __repr__(self) -> str:
        return f"<BufferPool {self.available} of {self.size} bytes free, {len(self._waiters)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_acquire(self, size: int) -> bool:
        """Take `size` bytes if they are free and no request waits. Returns whether it took them."""
        # Free bytes are not enough: small requests would overtake a large one that waits, and could starve it.
        if self._waiters or size > self.available:
            return False
        self.available -= size
        return True

    async def acquire(self, size: int, timeout_ms: float) -> None:
        """Take `size` bytes, and wait for them if necessary. Raises BufferExhausted once `timeout_ms` has passed."""
        if self.try_acquire(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (future, size)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(max(0.0, timeout_ms) / 1000):
                await future
        except BaseException as e:
            # The wait timed out or was cancelled. There are two cases.
            # 1. The bytes were granted in the same step of the event loop: return them, or they are lost for ever.
            if future.done() and not future.cancelled():
                self.release(size)
            # 2. The entry still waits. If it was the first and too large, it has held up smaller ones: serve them now.
            elif entry in self._waiters:
                self._waiters.remove(entry)
                self._grant_waiting_requests()
            if isinstance(e, TimeoutError):
                raise BufferExhausted(
                    f"no {size} of buffer_memory={self.size} bytes became free within max_block_ms "
                    f"({self.available} free, {len(self._waiters)} more waiting)"
                ) from None
            raise

    def release(self, size: int) -> None:
        """Return bytes to the pool; the requests that have waited longest are served first."""
        self.available += size
        assert self.available <= self.size, "more bytes given back than taken"
        self._grant_waiting_requests()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Serve the waiters once at the end of the block, with all bytes released in it."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self._grant_waiting_requests()

    def _grant_waiting_requests(self) -> None:
        if self._gathering:
            return
        while self._waiters:
            future, size = self._waiters[0]
            # A future that is done belongs to a cancelled waiter that has not run yet: drop it without bytes.
            if not future.done():
                if size > self.available:
                    break
                self.available -= size
                future.set_result(None)
            self._waiters.popleft()
        if self.on_freed is not None:
            self.on_freed()


class _Waiter(NamedTuple):
    future: asyncio.Future[None]
    queue: PartitionQueue
    size: int


class HeldUpShare:
    """Partitions without progress may together use about HELD_UP_SHARE of the buffer memory. Beyond that, sends to them
    wait.

    The module describes the exceptions. There is no limit if the topics sent to have only one partition in all.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        memory: BufferPool,
        now_ms: Callable[[], int],
        is_away: Callable[[TopicPartition], bool] = lambda tp: False,
    ) -> None:
        """`is_away` returns whether a partition's leader is unreachable. Such a partition counts as without progress,
        even if it holds no memory."""
        self._accumulator = accumulator
        self._memory = memory
        self._now_ms = now_ms
        self._is_away = is_away
        self._limit = int(memory.size * HELD_UP_SHARE)
        self._waiters: deque[_Waiter] = deque()
        self._granted = 0
        memory.on_freed = self._serve_waiting_requests

    def __repr__(self) -> str:
        held = self._accumulator.held_up_bytes(self._now_ms())
        return f"<HeldUpShare {held} of {self._limit} bytes, {len(self._waiters)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def must_wait(self, queue: PartitionQueue, size: int) -> bool:
        """Whether a request for `size` more bytes of a partition must wait."""
        # A later send must not overtake: its records would be written before those of the waiting one.
        if any(waiter.queue is queue for waiter in self._waiters):
            return True
        # There must be another partition to leave memory to. A partition that holds nothing may try its broker, unless
        # that is known to be away.
        if self._accumulator.partitions == 1 or not (queue.held or self._is_away(queue.tp)):
            return False
        return self._exceeds_share(queue, size, self._now_ms())

    def _exceeds_share(self, queue: PartitionQueue, size: int, now_ms: int) -> bool:
        # Every new batch comes through here. While all partitions together are below the limit, none is examined.
        used = self._memory.size - self._memory.available
        if not self._memory.waiting and used + self._granted + size <= self._limit:
            return False
        if not (queue.is_held_up(now_ms) or self._is_away(queue.tp)):
            return False
        return self._accumulator.held_up_bytes(now_ms) + self._granted + size > self._limit

    async def wait(self, queue: PartitionQueue, size: int, timeout_ms: float) -> None:
        """Wait until the caller may request `size` bytes for `queue` from the pool.

        Raises BufferExhausted once `timeout_ms` has passed.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), queue, size)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(max(0.0, timeout_ms) / 1000):
                await waiter.future
        except BaseException as e:
            # As in `BufferPool.acquire`: a grant that came too late must be returned.
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.future.cancelled():
                self._granted -= size
                self._serve_waiting_requests()
            if not isinstance(e, TimeoutError):
                raise
            retried = queue.retried()
            why = f": {retried.last_error}" if retried is not None and retried.last_error is not None else ""
            raise BufferExhausted(
                f"{queue.tp}: makes no progress, and partitions without progress hold {HELD_UP_SHARE:.0%} of "
                f"buffer_memory={self._memory.size}; nothing became free within max_block_ms{why}"
            ) from None
        # The caller requests the bytes from the pool now.
        self._granted -= size

    async def acquire(self, queue: PartitionQueue, size: int, timeout_ms: float) -> None:
        """Acquire `size` bytes for `queue` from the pool. While the request waits there, they count as held by the
        partition.

        The caller opens a batch at once, which counts them again. Raises the errors of `BufferPool.acquire`.
        """
        queue.held += size
        try:
            await self._memory.acquire(size, timeout_ms)
        except BaseException:
            queue.held -= size
            self._serve_waiting_requests()
            raise
        queue.held -= size

    def _serve_waiting_requests(self) -> None:
        if not self._waiters:
            return
        now_ms = self._now_ms()
        still = deque[_Waiter]()
        # A partition that must go on waiting does not hold up the others, but its own later requests stay behind it.
        passed_over: set[PartitionQueue] = set()
        for waiter in self._waiters:
            future, queue, size = waiter
            if future.done():
                continue
            if queue in passed_over or self._exceeds_share(queue, size, now_ms):
                passed_over.add(queue)
                still.append(waiter)
            else:
                self._granted += size
                future.set_result(None)
        self._waiters = still
