"""The worker's end of a connector's process: starts the process, sends commands, and closes or kills it.

The process is a `ChildProcess` with one end of a socket pair. It exits when the worker closes the other end, or ends.
If a process exits unexpectedly (killed, out of memory, a crash of the interpreter), its exit status is reported as an
error.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.shared.common.child_process import ChildProcess, describe_exit_status
from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.isolation.messages import LINE_BYTES_MAX, Message, error_of, pack, unpack

log = get_logger(__name__)

CHILD = """
from penstock.shared.common.gc_tuning import collector_off

with collector_off():
    from penstock.shared.connect.isolation.child import main
main()
"""
END_MS = 5_000
"""How long a process may take to end after its socket was closed."""


class ConnectorProcessEnded(ConnectError):
    """The process of a connector has ended."""


class ConnectorProcess:
    """One process for one connector, which starts at once."""

    def __init__(
        self,
        connector: str,
        first: Message,
        orphan_limit_ms: int,
        on_event: Callable[[Message], None] = lambda _event: None,
        on_end: Callable[[ConnectorProcessEnded], None] = lambda _error: None,
    ) -> None:
        """`first` is the first message to the process. `on_end` is called with the error if the process cannot be
        started, or exits before `close`.

        `orphan_limit_ms` is how long the process may take to end after this worker has ended. After that its guard
        process (`child_guard`) kills it.
        """
        self._connector = connector
        self._orphan_limit_ms = orphan_limit_ms
        self._on_event = on_event
        self._on_end = on_end
        self._process: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = [first]
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._error: ConnectorProcessEnded | None = None
        self._is_closed = False
        self._is_killed = False
        self._running = asyncio.create_task(self._supervise_process(), name=f"process of {connector}")

    def __repr__(self) -> str:
        return f"<ConnectorProcess of {self._connector}, pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process' id; None before it is started, or if its guard ended before it reported the id."""
        return None if self._process is None else self._process.pid

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command without a wait for its response."""
        if self._writer is None:
            # The process is still starting.
            self._unsent.append(dict(command))
        elif not self._writer.is_closing():
            self._writer.write(pack(command))

    async def request(self, command: Mapping[str, Any]) -> Any:
        """Send a command and return its result. Raises the error of the command, or ConnectorProcessEnded."""
        if self._error is not None:
            raise self._error
        self._number += 1
        number = self._number
        response = asyncio.get_running_loop().create_future()
        self._pending[number] = response
        try:
            self.send({"correlation_id": number, **command})
            return await response
        finally:
            del self._pending[number]

    async def close(self) -> None:
        """Close the socket and wait for the process to exit. After END_MS the process is killed."""
        self._is_closed = True
        self._end_pending(ConnectorProcessEnded(f"the process of connector {self._connector} was stopped"))
        if self._writer is not None:
            self._writer.close()
        await asyncio.wait([self._running])

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._is_killed = True
        self._kill_process()
        await asyncio.wait([self._running])

    async def _supervise_process(self) -> None:
        try:
            process, reader, writer = await self._start_process()
            receiving = asyncio.create_task(self._receive_messages(reader))
            ending = asyncio.create_task(process.wait())
            await asyncio.wait([receiving, ending], return_when=asyncio.FIRST_COMPLETED)
            # It may take some time from the end of the link to the end of the process. A process that has ended leaves
            # the link open if it has forked another one.
            await asyncio.wait([receiving, ending], timeout=END_MS / 1000)
            receiving.cancel()
            writer.close()
            self._kill_process()
            status = await ending
            pid = "" if process.pid is None else f" (pid {process.pid})"
            ended = f"the process of connector {self._connector}{pid} ended, {describe_exit_status(status)}"
            error = ConnectorProcessEnded(ended)
        except (OSError, ConfigError) as e:
            error = ConnectorProcessEnded(f"the process of connector {self._connector} cannot be started: {e}")
        self._end_pending(error)
        if not self._is_closed:
            self._on_end(error)

    async def _start_process(self) -> tuple[ChildProcess, asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            process = await ChildProcess.start(
                [sys.executable, "-c", CHILD, str(theirs.fileno())],
                name=f"connector {self._connector}",
                env=environment,
                orphan_limit_ms=self._orphan_limit_ms,
                pass_fds=(theirs.fileno(),),
            )
            self._process = process
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        except BaseException:
            # A process that was started finds the socket closed and ends.
            ours.close()
            raise
        finally:
            theirs.close()
        if process.pid is not None:
            log.info("a process was started", connector=self._connector, pid=process.pid)
        writer.write(b"".join(pack(message) for message in self._unsent))
        self._writer = writer
        # `kill` or `close` may have been called while the process started.
        if self._is_killed:
            self._kill_process()
        elif self._is_closed:
            writer.close()
        return process, reader, writer

    async def _receive_messages(self, reader: asyncio.StreamReader) -> None:
        """Take messages until there are no more, or one is invalid."""
        try:
            while line := await reader.readline():
                message = unpack(line)
                if "correlation_id" not in message:
                    self._on_event(message)
                elif (response := self._pending.get(message["correlation_id"])) is not None and not response.done():
                    if "error" in message:
                        response.set_exception(error_of(message))
                    else:
                        response.set_result(message["value"])
        except (ConnectionError, ValueError, DataError) as e:
            log.warning("messages of a process cannot be read", connector=self._connector, pid=self.pid, reason=str(e))

    def _end_pending(self, error: ConnectorProcessEnded) -> None:
        """Fail all pending requests, and later ones, with the error."""
        self._error = self._error or error
        for response in self._pending.values():
            if not response.done():
                response.set_exception(self._error)

    def _kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()
