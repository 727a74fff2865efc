"""The waits of one task's conversions: seen from outside, said in the log, and ended where the task stops or pauses.

A registry that is down may have a conversion tried again for ever (`errors.retry.timeout=-1`). The task is RUNNING all
the while: that it gets nowhere is told by `since_ms`, and by a line in the log now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.shared.common.log import get_logger
from penstock.shared.connect.config_provider import unmasked
from penstock.shared.connect.errors import said_of

log = get_logger(__name__)

T = TypeVar("T")

CHECK_MS = 100
"""How often it is looked, during a wait, whether the task is to stop or pause."""
SAY_MS = 10_000
"""How often the log says that a conversion is still tried again."""


class Interrupted(Exception):  # no error: the way out of a conversion
    """The task is to stop or to pause: the record at hand is as if it had not been touched."""


class RetryWaits:
    """Of one task; a task that has them says by `is_over` when to give a wait up."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._said_ms: int | None = None
        self.since_ms: int | None = None
        """Since when one operation on one record has been waiting, monotonic; None while none is."""
        self.is_over: Callable[[], bool] = lambda: False
        self.mask: Callable[[str], str] = unmasked

    def __repr__(self) -> str:
        return f"<RetryWaits of {self._task}, {'none' if self.since_ms is None else f'since {self.since_ms} ms'}>"

    def begin(self, now_ms: int) -> None:
        """An operation cannot be done at once."""
        self.since_ms, self._said_ms = now_ms, None

    def end(self) -> None:
        """It is done, or has failed for good."""
        self.since_ms = None

    def failed(self, what: str, error: Exception, now_ms: int) -> None:
        """It will be tried again: say so, the first time and every `SAY_MS`."""
        if self._said_ms is None or now_ms - self._said_ms >= SAY_MS:
            self._said_ms = now_ms
            for_ms = 0 if self.since_ms is None else now_ms - self.since_ms
            log.warning(
                "conversion is tried again", task=self._task, stage=what, error=self.mask(said_of(error)), for_ms=for_ms
            )

    async def wait_for(self, what: Awaitable[T]) -> T:
        """Await something; raises Interrupted, and cancels it, where the task is to stop or pause meanwhile."""
        doing = asyncio.ensure_future(what)
        try:
            while not doing.done():
                if self.is_over():
                    raise Interrupted
                await asyncio.wait((doing,), timeout=CHECK_MS / 1000)
            return doing.result()
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.wait((doing,))
