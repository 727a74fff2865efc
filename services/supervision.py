"""Keeps a child process of a service running: it is started again after it ends, unless its settings are invalid."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from penstock.services.exit_status import ExitStatus
from penstock.shared.common.backoff import ExponentialBackoff, RestartBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError

RESTART_BACKOFF = ExponentialBackoff(1_000, 60_000)
"""The pauses between restarts of one child."""


async def keep_running(
    name: str,
    wait: Callable[[], Awaitable[int]],
    restart: Callable[[], Awaitable[object]],
    *,
    on_end: Callable[[int, int], None],
    reason: Callable[[], str],
    backoff: ExponentialBackoff = RESTART_BACKOFF,
) -> NoReturn:
    """Call `restart` each time a child process ends, after a pause (see `RestartBackoff`).

    `wait` returns the child's exit status when it ends. `on_end` takes the exit status and the pause in ms. If the exit
    status is ExitStatus.WRONG_SETTING, raises ConfigError with the text that `reason` returns.
    """
    pauses = RestartBackoff(backoff)
    while True:
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        status = await wait()
        if status == ExitStatus.WRONG_SETTING:
            raise ConfigError(f"{name} cannot run with these settings: {reason()}")
        pause_ms = pauses.wait_ms(SYSTEM_CLOCK.monotonic_ms() - started_ms)
        on_end(status, pause_ms)
        await asyncio.sleep(pause_ms / 1_000)
        await restart()
