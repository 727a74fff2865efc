"""The life of a service: `startup`, `main_loop`, `shutdown`, and the signals that end it.

SIGTERM or SIGINT cancels `main_loop` and runs `shutdown`; both together have `shutdown_timeout_ms`, after which `run`
returns. A second signal ends the process at once. Exit status: 0 after a shutdown that was asked for, 1 after an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Protocol

from shared.common.errors import IllegalState, PenstockError
from shared.common.log import get_logger

log = get_logger(__name__)

FORCED_EXIT = 130


class Daemon(Protocol):
    """A service that `run` can drive."""

    async def startup(self) -> None:
        """Connect to everything that is needed; an error here ends the process with its message."""
        ...

    async def main_loop(self) -> None:
        """Work until cancelled; returning means that the work is done."""
        ...

    async def shutdown(self) -> None:
        """Finish or give back what is in flight; called also after a failed `startup`."""
        ...


async def run(daemon: Daemon, shutdown_timeout_ms: int) -> int:
    """Drive a daemon to its end and return the exit status."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second signal: leaving at once", signal=number.name)
            os._exit(FORCED_EXIT)
        log.info("shutting down", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    status = 0
    work = asyncio.ensure_future(_start_and_work(daemon))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    work.cancel()
    deadline = loop.time() + shutdown_timeout_ms / 1000
    await asyncio.wait({work}, timeout=shutdown_timeout_ms / 1000)
    try:
        if not work.done():
            log.error("the main loop did not end within the limit", shutdown_timeout_ms=shutdown_timeout_ms)
            status = 1
        elif not work.cancelled():
            work.result()
        elif not stop.is_set():
            raise IllegalState("the work was cancelled, though nobody asked for the end")
    except PenstockError as e:
        log.error("failed", error=type(e).__name__, reason=str(e))
        status = 1
    except Exception:
        log.exception("failed")
        status = 1
    try:
        async with asyncio.timeout_at(deadline):
            await daemon.shutdown()
    except TimeoutError:
        log.error("shutdown took longer than its limit", shutdown_timeout_ms=shutdown_timeout_ms)
        status = 1
    except Exception:
        log.exception("shutdown failed")
        status = 1
    return status


async def _start_and_work(daemon: Daemon) -> None:
    await daemon.startup()
    await daemon.main_loop()
