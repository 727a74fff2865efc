"""The worker's end of a process that runs a task or a connector (an edge).

The worker starts the process, exchanges messages with it, and ends or kills it. The process is a child with one end of
a socket pair. It ends when the other end is closed, and so with the worker too. A process that ends without a message
(killed, out of memory, a crash of the interpreter) is an error with its exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.errors import ConfigError, ConnectError, DataError
from penstock.shared.connect.herder.settings import DistributedConfig, StandaloneConfig
from penstock.shared.connect.isolation.messages import LINE_BYTES_MAX, Message, pack, unpack
from penstock.shared.connect.runtime.worker_config import ISOLATION, WorkerConfig

log = get_logger(__name__)

END_MS = 5_000
"""How long a process may take to end after its task or connector has ended."""


class ProcessEnded(ConnectError):
    """A process has ended unexpectedly, or was ended while a question was open."""


def runs_apart(props: Mapping[str, str], config: WorkerConfig) -> bool:
    """Returns whether a connector and its tasks have processes of their own. Raises ConfigError if the value is
    invalid."""
    where = props.get(ISOLATION) or config[ISOLATION]
    if where not in ("asyncio", "process"):
        raise ConfigError(f"Invalid value {where} for configuration {ISOLATION}: String must be asyncio or process")
    return bool(where == "process")


class Processes:
    """Makes the processes of one worker, with their first message and the levels of their loggers."""

    def __init__(self, config: WorkerConfig, log_settings: LogSettings | None = None) -> None:
        self._config, self._log = config, log_settings or LogSettings()
        self._levels: dict[str, str] = {}
        self._made: weakref.WeakSet[ChildProcess] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Processes, {len(self._made)} made>"

    def set_level(self, name: str, level: str) -> None:
        """Sets a logger's level in every process, also in future ones."""
        self._levels.pop(name, None)
        self._levels[name] = level
        for process in list(self._made):
            process.say({"level": [name, level]})

    def make(self, module: str, whose: str) -> ChildProcess:
        """Returns a process, not yet started, that runs a module for a task or a connector."""
        made = ChildProcess(module, whose, self._first)
        self._made.add(made)
        return made

    def _first(self) -> Message:
        kinds = {DistributedConfig: "distributed", StandaloneConfig: "standalone"}
        return {
            "worker": self._config.props,
            "config": kinds.get(type(self._config), "worker"),
            "log": {"level": self._log.level, "format": self._log.format},
            "levels": list(self._levels.items()),
        }


class ChildProcess:
    """One process. `first` returns the first message of every process."""

    def __init__(self, module: str, whose: str, first: Callable[[], Message]) -> None:
        self._module, self._whose, self._first = module, whose, first
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    def __repr__(self) -> str:
        return f"<ChildProcess of {self._whose}, pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process' id, or None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self, more: Mapping[str, Any]) -> None:
        """Starts the process, and sends it its first message with `more`."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, env=environment,
            )  # fmt: skip
            log.info("a process was started", of=self._whose, pid=self._process.pid)
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        except BaseException:
            ours.close()  # a process that was started finds the socket closed and ends
            raise
        finally:
            theirs.close()
        self.say({**self._first(), **more})

    def say(self, message: Message) -> None:
        """Sends a message. Does nothing if the process has not started or has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def hear(self) -> Message:
        """Returns the next message. Raises ProcessEnded if there is no more, or if it is invalid."""
        try:
            if line := await self._reader.readline():
                return unpack(line)
        except (ConnectionError, ValueError, DataError) as e:
            log.warning("a process cannot be heard", of=self._whose, pid=self.pid, reason=str(e))
        status = await self._ended_within(END_MS)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise ProcessEnded(f"the process of {self._whose} (pid {self.pid}) {how}")

    async def end(self, timeout_ms: int = END_MS) -> None:
        """Closes the link. Kills the process if it still runs after `timeout_ms`."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            await self._ended_within(timeout_ms)

    async def _ended_within(self, timeout_ms: int) -> int:
        """Returns the process' exit status. Kills the process if it still runs after `timeout_ms`."""
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                return await process.wait()
        log.warning("a process is killed", of=self._whose, pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
