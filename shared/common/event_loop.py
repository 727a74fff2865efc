"""Runs a coroutine in an event loop whose other tasks may raise SystemExit, as those of a connector."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.shared.common.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")


def run_contained(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the runner's event loop, and return its result.

    SystemExit in another asyncio task, such as one that a connector has created, does not end the event loop: it is an
    error of that task.
    """
    loop = runner.get_loop()
    running = loop.create_task(work)
    while not running.done():
        try:
            loop.run_until_complete(running)
        except SystemExit as e:
            # asyncio keeps it as the task's error, and also raises it out of the event loop.
            log.warning("SystemExit in an asyncio task", error=str(e))
    return running.result()


@contextmanager
def contained_runner() -> Iterator[asyncio.Runner]:
    """Yield a runner for `run_contained`. At the exit, SystemExit in a task that is cancelled is contained as well."""
    with asyncio.Runner() as runner:
        try:
            yield runner
        finally:
            # The runner's exit cancels the tasks too, but raises a SystemExit of one of them.
            run_contained(runner, _cancel_other_tasks())


async def _cancel_other_tasks() -> None:
    """Cancel all other tasks of the event loop, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
