"""The lifecycle of a service: settings, `startup`, `main_loop`, `shutdown`, and the signals that end it.

SIGTERM or SIGINT cancels `main_loop` and runs `shutdown`. The two share the limit `shutdown_timeout_ms`, after which
`run` returns. The process then waits at most EXIT_GRACE_MS for tasks and `asyncio.to_thread` calls that have not ended.
A SIGINT during the shutdown ends the process at once. The exit status is 0 if the work is done or a requested shutdown
succeeded. It is 1 after an error, also if the limit passed. It is 2 after an error that only other settings fix
(ConfigError: a port in use, a missing file). A StartFailed error has its own exit status.

A Penstock error is logged as one line. An unexpected error is logged with its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from penstock.services.exit_status import ExitStatus, exit_status_of
from penstock.shared.common.errors import ConfigError, IllegalState, PenstockError
from penstock.shared.common.event_loop import contained_runner, run_contained
from penstock.shared.common.log import configure, get_logger
from penstock.shared.common.settings import DaemonSettings, load_settings_or_exit

log = get_logger(__name__)

EXIT_GRACE_MS = 1_000
"""A thread cannot be cancelled, and its read of an object store may take minutes. Less than a stack's KILL_GRACE_MS."""


class Daemon(Protocol):
    """A service that `run` can drive."""

    async def startup(self) -> None:
        """Prepare the work, for example listen for HTTP requests. An error is logged and ends the process."""
        ...

    async def main_loop(self) -> None:
        """Work until cancelled. A return means that the work is done."""
        ...

    async def shutdown(self) -> None:
        """Finish or give back the work in flight. It is also called after a failed `startup`."""
        ...


S = TypeVar("S", bound=DaemonSettings)


def serve(
    program: str,
    settings_class: type[S],
    make: Callable[[S], Daemon],
    arguments: Sequence[str],
    *,
    limit_ms: Callable[[S], int] | None = None,
) -> int:
    """Load the settings, set up the log, run a daemon to its end, and return the exit status.

    `make` is called within the event loop. `limit_ms` returns the shutdown's limit, by default `shutdown_timeout_ms`.
    Raises SystemExit(2) if the settings cannot be loaded, and returns 2 if `make` raises ConfigError. Both errors are
    printed.
    """
    settings = load_settings_or_exit(settings_class, arguments, program)
    configure(settings.log, program.split()[-1])

    async def run_daemon() -> int:
        return await run(make(settings), limit_ms(settings) if limit_ms else settings.shutdown_timeout_ms)

    try:
        return run_process(run_daemon())
    except ConfigError as e:
        # `make` raised the error, so nothing has started yet.
        print(f"{program}: {e}", file=sys.stderr)
        return ExitStatus.WRONG_SETTING


def run_process(work: Coroutine[Any, Any, int]) -> int:
    """Run a process's work in an event loop and return its result, the exit status.

    SystemExit in another asyncio task does not end the process (see `run_contained`). If tasks or `asyncio.to_thread`
    calls have not ended EXIT_GRACE_MS after the work, ends the process with the exit status.
    """
    with contained_runner() as runner:
        status = run_contained(runner, work)
        # What follows waits for threads and for tasks that ignore their cancellation.
        leaving = threading.Timer(EXIT_GRACE_MS / 1000, _leave, [status])
        leaving.daemon = True
        leaving.start()
    leaving.cancel()
    return status


def _leave(status: int) -> None:
    log.warning("threads or tasks have not ended: the process exits without them", after_ms=EXIT_GRACE_MS)
    # `os._exit` drops what is buffered, such as lines that a sink connector printed for committed records.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            # The stream may be closed, or a pipe that nobody reads.
            stream.flush()
    os._exit(status)


def require_running(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """If one of a daemon's background tasks has ended, log its name and raise its error.

    The tasks must run as long as the daemon does. So IllegalState is raised if a task has returned, was cancelled or
    ended with an error that is not an Exception.
    """
    for task in tasks:
        if not task.done():
            continue
        error = None if task.cancelled() else task.exception()
        log.error("a background task has ended", task=task.get_name())
        if isinstance(error, Exception):
            raise error
        raise IllegalState(f"the background task {task.get_name()!r} has ended unexpectedly") from error


async def run(daemon: Daemon, shutdown_timeout_ms: int) -> int:
    """Run a daemon to its end and return the exit status."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            log.info("shutting down", signal=number.name)
            stop.set()
        elif number == signal.SIGINT:
            log.warning("interrupted during the shutdown: leaving at once")
            os._exit(ExitStatus.INTERRUPTED)
        # Further SIGTERMs change nothing: systemd sends one to each process of a service, and a parent stops its
        # children as well.

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    status: int = ExitStatus.OK
    work = asyncio.ensure_future(_start_and_work(daemon))
    stopped = asyncio.ensure_future(stop.wait())
    # 1. Work until the work ends or a signal comes.
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    # 2. End the work.
    stopped.cancel()
    work.cancel()
    deadline = loop.time() + shutdown_timeout_ms / 1000
    await asyncio.wait({work}, timeout=shutdown_timeout_ms / 1000)
    # 3. There are four cases of how it ended:
    #    - It did not end within the limit.
    #    - It returned or raised, before or after a signal.
    #    - A signal cancelled it, as requested.
    #    - It was cancelled without a signal.
    try:
        if not work.done():
            log.error("the main loop did not end within the limit", shutdown_timeout_ms=shutdown_timeout_ms)
            status = ExitStatus.FAILED
        elif not work.cancelled():
            work.result()
        elif not stop.is_set():
            raise IllegalState("the main loop was cancelled unexpectedly")
    except Exception as e:
        status = _log_errors(e)
    # 4. Shut down in the rest of the time. If the work failed, its exit status is kept.
    try:
        async with asyncio.timeout_at(deadline):
            await daemon.shutdown()
    except TimeoutError:
        log.error("shutdown took longer than its limit", shutdown_timeout_ms=shutdown_timeout_ms)
        status = status or ExitStatus.FAILED
    except PenstockError as e:
        log.error("shutdown failed", error=type(e).__name__, reason=str(e))
        status = status or ExitStatus.FAILED
    except Exception:
        log.exception("shutdown failed")
        status = status or ExitStatus.FAILED
    return status


async def _start_and_work(daemon: Daemon) -> None:
    await daemon.startup()
    await daemon.main_loop()


def _log_errors(error: Exception) -> int:
    """Log the errors that ended the work, and return the exit status."""
    leaves = list(leaf_exceptions(error))
    for e in leaves:
        if isinstance(e, PenstockError):
            log.error("failed", error=type(e).__name__, reason=str(e))
        else:
            log.error("failed", exc_info=e)
    statuses = {exit_status_of(e) for e in leaves}
    return statuses.pop() if len(statuses) == 1 else ExitStatus.FAILED


def leaf_exceptions(error: Exception) -> Iterator[Exception]:
    """Yield the errors of nested exception groups in order, or the single error."""
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from leaf_exceptions(one)
    else:
        yield error
