"""A child process that ends when this one does, for asyncio.

A keeper (keeper.py) runs between this process and the command. It watches a pipe that only this process holds open.
`pid`, `returncode` and `kill` refer to the real child, never to the keeper. `subprocess.Popen` is used instead of
asyncio's own: asyncio's transport sends SIGKILL to its process when a loop closes, and a killed keeper cannot stop its
child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from penstock.shared.common import keeper
from penstock.shared.common.errors import ConfigError, FatalError, IllegalState

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 65_536  # enough for twenty long lines, and a bound on what one error reads
LOG_MAX_BYTES = 10 * 1024 * 1024  # a longer log of earlier runs is moved aside (one is kept) when a child starts
KILL_WAIT_MS = 10_000  # SIGKILL takes effect at once unless the kernel holds the process in uninterruptible I/O
_KEEPER_COMMAND = (sys.executable, "-I", "-S", keeper.__file__)


class ChildDied(FatalError):
    """A child process ended unexpectedly. The message has its status and last output."""


class ChildProcess:
    """One command as a child. Create it with `start`, and use it only from the loop that started it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        self._keeper = process
        self._pid: int | None = None
        self._returncode: int | None = None
        self._not_started: int | None = None
        self._report = b""
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        state = "running" if self._returncode is None else f"ended, {describe_status(self._returncode)}"
        return f"<ChildProcess {self.name} pid={self._pid} {state}>"

    @classmethod
    async def start(
        cls,
        command: Sequence[str | os.PathLike[str]],
        *,
        log_file: Path,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        orphan_limit_ms: int = keeper.DEFAULT_LIMIT_MS,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start `command`, its output appended to `log_file`.

        `orphan_limit_ms` is how long the child may take to end after this process has ended. The child inherits
        `pass_fds`. Raises ConfigError if the command cannot be started or the log cannot be written.
        """
        words = [os.fspath(word) for word in command]
        name = name or Path(words[0]).name
        log_file = _absolute(log_file)
        options = ["--limit-ms", str(orphan_limit_ms), "--log", str(log_file), "--"]
        try:
            _make_room(log_file)
            process = _popen([*_KEEPER_COMMAND, *options, *words], env, cwd, pass_fds)
        except OSError as e:
            raise ConfigError(f"{name} cannot be started: {e.filename or log_file}: {e.strerror}") from None
        child = cls(name, process, log_file)
        child._listen()
        try:
            await child._started.wait()
        except asyncio.CancelledError:
            process.terminate()  # the keeper, which ends its child
            await child.wait()
            raise
        if child._not_started is not None:
            raise ConfigError(f"{name} cannot be started: {words[0]}: {os.strerror(child._not_started)}")
        return child

    @property
    def pid(self) -> int:
        """The real child's process id, which is also its process group. Raises IllegalState if it was not started."""
        if self._pid is None:
            raise IllegalState(f"{self.name} was not started")
        return self._pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that ended it."""
        return self._returncode

    async def wait(self) -> int:
        """Wait for the child's end. Returns `returncode`."""
        await self._ended.wait()
        assert self._returncode is not None
        return self._returncode

    async def terminate(self, timeout_ms: int) -> int:
        """Send SIGTERM, and SIGKILL to the group after `timeout_ms`. Returns `returncode`. Safe to call twice."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # a paused child would not see the SIGTERM
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self.wait()
        except TimeoutError:
            self.kill()
        async with asyncio.timeout(KILL_WAIT_MS / 1000):
            return await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the child and its group, at once."""
        self.send_signal(signal.SIGKILL, group=True)

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the child, or to its whole group. Does nothing if it has ended."""
        if self._returncode is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._pid, number)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> list[str]:
        """Return the last lines that this run wrote."""
        return tail(self.log_file, lines, start=self._log_start)

    def died(self) -> ChildDied:
        """Return the error for an unexpected end."""
        said = self.log_tail()
        last = ": its last output was\n  " + "\n  ".join(said) if said else " without any output"
        return ChildDied(f"{self.name} ended, {describe_status(self._returncode or 0)}{last}")

    def _listen(self) -> None:
        assert self._keeper.stdout is not None
        os.set_blocking(self._keeper.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._keeper.stdout.fileno(), self._on_report)

    def _on_report(self) -> None:
        assert self._keeper.stdout is not None
        assert self._keeper.stdin is not None
        data = os.read(self._keeper.stdout.fileno(), 4096)
        *lines, self._report = (self._report + data).split(b"\n")
        for line in lines:
            self._on_line(line.decode())
        if data:
            return
        asyncio.get_running_loop().remove_reader(self._keeper.stdout.fileno())
        self._keeper.stdout.close()
        self._keeper.stdin.close()
        status = self._keeper.wait()
        if self._returncode is None:
            # The keeper itself was killed: its child must not outlive it.
            self.kill()
            self._returncode = status
        self._started.set()
        self._ended.set()

    def _on_line(self, line: str) -> None:
        word, value = line.split()
        if word == "started":
            self._pid = int(value)
            self._started.set()
        elif word == "exited":
            # `wait` ends a moment later, with the keeper: until then it holds what the child had inherited.
            self._returncode = int(value)
        elif word == "failed":
            self._not_started = int(value)
            self._returncode = keeper.NOT_STARTED


def describe_status(status: int) -> str:
    """Return an exit status in words.

    >>> describe_status(1), describe_status(-9)
    ('exit status 1', 'killed by SIGKILL')
    """
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def tail(file: Path, lines: int, *, start: int = 0) -> list[str]:
    """Return the last `lines` lines of a file from byte `start` on; none if it cannot be read."""
    try:
        with file.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(start if start <= size else 0, size - LOG_TAIL_BYTES))
            return f.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _popen(
    command: list[str], env: Mapping[str, str] | None, cwd: Path | None, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        process_group=0,  # a terminal's Ctrl-C reaches only this process, which stops the child
    )


def _absolute(file: Path) -> Path:
    # The keeper may run in another folder than this process.
    return file.absolute()


def _make_room(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    if log_file.exists() and log_file.stat().st_size > LOG_MAX_BYTES:
        log_file.replace(log_file.with_name(f"{log_file.name}.1"))
    with log_file.open("ab"):
        pass
