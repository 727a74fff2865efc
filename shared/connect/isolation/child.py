"""The child's side of a process of its own: the common base for tasks and connectors (an edge).

The worker starts it as `python -m MODULE FD`, where FD is its end of a socket pair. A thread reads the worker's
messages, so that the end of the worker is noticed even if code blocks. The code then has its graceful time, and the
process ends. The process ignores SIGINT and SIGTERM: signals to the process group are the worker's to handle.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import BinaryIO, NoReturn

from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.log import configure
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.herder.loggers import Loggers
from penstock.shared.connect.herder.settings import DistributedConfig, StandaloneConfig
from penstock.shared.connect.isolation.messages import Message, pack, unpack
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.worker_config import WorkerConfig

ORPHANED = 70
"""The exit status of a process whose worker has ended and whose task or connector did not end."""


class Link:
    """The process' end of the socket pair."""

    def __init__(self, connection: socket.socket, lines: BinaryIO) -> None:
        self._connection, self._lines = connection, lines
        self._lock = threading.Lock()

    def say(self, message: Message) -> None:
        """Sends a message to the worker. Does nothing if the worker has ended."""
        try:
            with self._lock:
                self._connection.sendall(pack(message))
        except OSError:
            return

    def read(self, on_message: Callable[[Message], None], on_end: Callable[[], None], grace_ms: int) -> None:
        """Reads messages on a thread until the worker ends. The thread then waits `grace_ms` and ends the process."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            for line in self._lines:
                loop.call_soon_threadsafe(on_message, unpack(line))
            try:
                loop.call_soon_threadsafe(on_end)
            except RuntimeError:  # the loop is closed: the process is ending
                return
            time.sleep(grace_ms / 1000)
            os._exit(ORPHANED)

        threading.Thread(target=run, name="worker", daemon=True).start()


def config_of(start: Message, plugins: Plugins) -> WorkerConfig:
    """Returns the worker's settings, of its kind."""
    props = start["worker"]
    if start["config"] == "distributed":
        return DistributedConfig(props)
    return StandaloneConfig(props) if start["config"] == "standalone" else WorkerConfig(props, resolve=plugins.any_kind)


def loggers_of(start: Message) -> Loggers:
    """Returns the process' loggers, at the worker's levels."""
    loggers = Loggers(SYSTEM_CLOCK)
    for name, level in start["levels"]:
        loggers.set_level(name, level)
    return loggers


def run(drive: Callable[[Message, Link], Awaitable[None]]) -> NoReturn:
    """Runs the process, from the first message on to its end."""
    for own in (signal.SIGINT, signal.SIGTERM):
        signal.signal(own, signal.SIG_IGN)
    status = 0
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines = connection.makefile("rb")
    if first := lines.readline():
        start = unpack(first)
        configure(LogSettings.model_validate(start["log"]), "connect")
        asyncio.run(_driven(drive, start, Link(connection, lines)))
    else:  # the worker has ended already
        status = ORPHANED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not by an ordinary end, which the thread that reads would delay


async def _driven(drive: Callable[[Message, Link], Awaitable[None]], start: Message, link: Link) -> None:
    await drive(start, link)
