"""Keeps a child process of a service running: it is started again after it ends, unless its settings are invalid."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from penstock.services.exit_status import ExitStatus
from penstock.shared.common.backoff import ExponentialBackoff, RestartBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

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

    If `restart` raises OSError or ConfigError, it is called again after the next pause.
    """
    pauses = RestartBackoff(backoff)
    while True:
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        status = await wait()
        if status == ExitStatus.WRONG_SETTING:
            raise ConfigError(f"{name} cannot run with these settings: {reason()}")
        pause_ms = pauses.wait_ms(SYSTEM_CLOCK.monotonic_ms() - started_ms)
        on_end(status, pause_ms)
        while True:
            await asyncio.sleep(pause_ms / 1_000)
            try:
                await restart()
                break
            # The child was started before, so the reason may be temporary, such as a lack of memory.
            except (OSError, ConfigError) as e:
                pause_ms = pauses.wait_ms(0)
                log.error("restart failed: trying again", child=name, reason=str(e), in_ms=pause_ms)
