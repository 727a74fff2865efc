"""Work in a separate event loop does not block its caller, and is cancelled with it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.services.aggregator.window_search import run_search_in_thread
from penstock.shared.common.errors import KafkaTimeout

WAIT_S = 20


async def test_blocking_work_does_not_block_the_caller() -> None:
    """The caller's loop continues while the work blocks its own loop."""
    has_begun, may_end = threading.Event(), threading.Event()

    async def work() -> bool:
        has_begun.set()
        return may_end.wait(WAIT_S)

    async def beside() -> None:
        await asyncio.to_thread(has_begun.wait, WAIT_S)
        may_end.set()

    task = asyncio.create_task(beside())
    assert await run_search_in_thread(work)
    await task


async def test_an_error_is_raised_to_the_caller() -> None:
    """An error is raised to the caller unchanged."""

    async def work() -> None:
        raise KafkaTimeout("no response")

    with pytest.raises(KafkaTimeout, match="no response"):
        await run_search_in_thread(work)


async def test_work_is_cancelled_with_its_caller() -> None:
    """A cancelled caller cancels the work, whose clean-up runs."""
    has_begun, has_ended = threading.Event(), threading.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    task = asyncio.create_task(run_search_in_thread(work))
    await asyncio.to_thread(has_begun.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(has_ended.wait, WAIT_S)
