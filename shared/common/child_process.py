"""A child process for asyncio that ends when this process ends.

A guard (child_guard.py) runs between this process and the child. It watches a pipe that only this process holds open.
`pid` and `kill` refer to the child, never to the guard, and so does `returncode` unless the guard itself was killed.
The guard is started with `subprocess.Popen`, not with asyncio: when a loop closes, asyncio sends SIGKILL to its
processes, and a killed guard cannot end the child.

The child's output goes to a log file, or to pipes that are read here, or to this process's own output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from penstock.shared.common import child_guard
from penstock.shared.common.errors import ConfigError, FatalError

LOG_TAIL_LINES = 20
# This is enough for LOG_TAIL_LINES long lines, and limits what one error reads.
LOG_TAIL_BYTES = 65_536
# A longer log is moved aside when a child starts. Only one old log is kept.
LOG_MAX_BYTES = 10 * 1024 * 1024
# At most this much is kept of the end of each piped output.
OUTPUT_BYTES_MAX = 256 * 1024
# SIGKILL takes effect at once unless the kernel holds the process in uninterruptible I/O.
KILL_WAIT_MS = 10_000
_READ_BYTES = 65_536
_GUARD_COMMAND = (sys.executable, "-I", "-S", child_guard.__file__)


class ChildDied(FatalError):
    """A child process ended unexpectedly, or is not running.

    After an end the message has the exit status and, if known, the last output.
    """


class ChildProcess:
    """One command as a child. Create it with `start`, and use it only from the loop that started it."""

    def __init__(self, name: str, guard: subprocess.Popen[bytes], report: IO[bytes], log_file: Path | None) -> None:
        self.name = name
        self.log_file = log_file
        self.output = b""
        """The end of the child's standard output, if `start` was given `on_line`; complete after `wait`."""
        self.error_output = b""
        """Likewise, of its standard error."""
        self._log_start = log_file.stat().st_size if log_file is not None and log_file.exists() else 0
        self._guard = guard
        self._pid: int | None = None
        self._returncode: int | None = None
        self._not_started: int | None = None
        self._outputs: list[_OutputPipe] = []
        self._error_lines: _LineSplitter | None = None
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._read_report(report)

    def __repr__(self) -> str:
        state = "running" if self._returncode is None else f"ended, {describe_exit_status(self._returncode)}"
        return f"<ChildProcess {self.name} pid={self._pid} {state}>"

    @classmethod
    async def start(
        cls,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        log_file: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        orphan_limit_ms: int = child_guard.DEFAULT_LIMIT_MS,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start `command`. The child's output goes to one of three destinations:

        1. If `log_file` is given, all output is appended to that file.
        2. If `on_line` is given, it is called with each line of standard error. The attributes `output` and
           `error_output` keep the end of standard output and standard error.
        3. If both are None, the child shares this process's output.

        `log_file` and `on_line` cannot both be given.

        After this process has ended, the child's guard (`child_guard`) sends the child SIGTERM. It sends the child's
        group SIGKILL once the child has ended, or after `orphan_limit_ms`. The child inherits `pass_fds`. Raises
        ConfigError if the command cannot be started or the log cannot be written.
        """
        assert log_file is None or on_line is None
        words = [os.fspath(word) for word in command]
        name = name or Path(words[0]).name
        output = subprocess.PIPE if on_line is not None else None
        try:
            read_end, write_end = os.pipe()
        except OSError as e:
            raise ConfigError(f"{name} cannot be started: {words[0]}: {e.strerror}") from None
        report = os.fdopen(read_end, "rb", buffering=0)
        options = ["--limit-ms", str(orphan_limit_ms), "--report-fd", str(write_end)]
        try:
            if log_file is not None:
                log_file = _absolute_path(log_file)
                options += ["--log", str(log_file)]
                _rotate_log_file(log_file)
            guard = _popen_child([*_GUARD_COMMAND, *options, "--", *words], env, cwd, (*pass_fds, write_end), output)
        except OSError as e:
            report.close()
            raise ConfigError(f"{name} cannot be started: {e.filename or log_file or words[0]}: {e.strerror}") from None
        finally:
            os.close(write_end)
        child = cls(name, guard, report, log_file)
        if on_line is not None:
            child._read_output(on_line)
        try:
            await child._started.wait()
        except asyncio.CancelledError:
            # The guard ends its child.
            guard.terminate()
            await child.wait()
            raise
        if child._not_started is not None:
            raise ConfigError(f"{name} cannot be started: {words[0]}: {os.strerror(child._not_started)}")
        return child

    @property
    def pid(self) -> int | None:
        """The id of the child's process and process group; None if the guard ended before it reported the id."""
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
        """Send the child SIGTERM. If it has not ended after `timeout_ms`, send its whole group SIGKILL.

        Returns `returncode`. Raises TimeoutError if the child has not ended KILL_WAIT_MS later. Safe to call twice.
        """
        self.send_signal(signal.SIGTERM)
        # A paused child would not see the SIGTERM.
        self.send_signal(signal.SIGCONT)
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
        """Send a signal to the child, or to its whole group. Does nothing if it has ended or `pid` is None."""
        if self._returncode is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._pid, number)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> list[str]:
        """Return the last lines that were appended to the log file since the child's start."""
        return [] if self.log_file is None else tail(self.log_file, lines, start=self._log_start)

    def died(self) -> ChildDied:
        """Return the error for an unexpected end."""
        is_known = self.log_file is not None or bool(self._outputs)
        piped = (self.error_output or self.output).decode(errors="replace").splitlines()
        last = " without any output" if is_known else ""
        if output := self.log_tail() or piped[-LOG_TAIL_LINES:]:
            last = ": its last output was\n  " + "\n  ".join(output)
        return ChildDied(f"{self.name} ended, {describe_exit_status(self._returncode or 0)}{last}")

    def _read_report(self, pipe: IO[bytes]) -> None:
        lines = _LineSplitter(self._on_report)

        def on_readable() -> None:
            if data := os.read(pipe.fileno(), _READ_BYTES):
                lines.add(data)
                return
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
            self._on_guard_ended()

        asyncio.get_running_loop().add_reader(pipe.fileno(), on_readable)

    def _read_output(self, on_line: Callable[[str], None]) -> None:
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        lines = _LineSplitter(lambda line: on_line(line.decode(errors="replace").rstrip()))

        def on_output(data: bytes) -> None:
            self.output = (self.output + data)[-OUTPUT_BYTES_MAX:]

        def on_error_output(data: bytes) -> None:
            self.error_output = (self.error_output + data)[-OUTPUT_BYTES_MAX:]
            lines.add(data)

        self._error_lines = lines
        self._outputs = [_OutputPipe(self._guard.stdout, on_output), _OutputPipe(self._guard.stderr, on_error_output)]

    def _on_guard_ended(self) -> None:
        """Note the end of the guard, and so of the child. If the guard was killed, kill the child."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        status = self._guard.wait()
        if self._returncode is None:
            # The guard itself was killed: its child must not outlive it. If the guard had not reported the id yet, the
            # child cannot be killed.
            self.kill()
            self._returncode = status
        for output in self._outputs:
            output.finish()
        if self._error_lines is not None:
            self._error_lines.finish()
        self._started.set()
        self._ended.set()

    def _on_report(self, line: bytes) -> None:
        word, value = line.decode().split()
        if word == "started":
            self._pid = int(value)
            self._started.set()
        elif word == "exited":
            # `wait` ends a moment later, with the guard: until then it holds what the child had inherited.
            self._returncode = int(value)
        elif word == "failed":
            self._not_started = int(value)
            self._returncode = child_guard.NOT_STARTED


class _OutputPipe:
    """Calls `on_bytes` with the bytes that arrive in a pipe."""

    def __init__(self, pipe: IO[bytes], on_bytes: Callable[[bytes], None]) -> None:
        self._pipe = pipe
        self._on_bytes = on_bytes
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read_pipe)

    def finish(self) -> None:
        """Read the rest of the output and close the pipe.

        This does not wait for the pipe's end: a process that left the child's group may still hold the pipe open.
        """
        while self._read_pipe():
            pass
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _read_pipe(self) -> bool:
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._on_bytes(data)
        else:
            self._loop.remove_reader(self._pipe.fileno())
        return bool(data)


class _LineSplitter:
    """Splits bytes into lines, without their ends. Of a very long line only the end is kept."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data)[-OUTPUT_BYTES_MAX:].split(b"\n")
        for line in lines:
            self._on_line(line)

    def finish(self) -> None:
        """Call `on_line` with the last line, if it has no end."""
        if self._rest:
            self._on_line(self._rest)


def describe_exit_status(status: int) -> str:
    """Return the exit status of a child process in words.

    >>> describe_exit_status(1), describe_exit_status(-9)
    ('exit status 1', 'killed by SIGKILL')
    """
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def tail(file: Path, lines: int, *, start: int = 0) -> list[str]:
    """Return the last `lines` lines of a file after byte `start`. At most the last LOG_TAIL_BYTES are read.

    Returns no lines if the file cannot be read.
    """
    try:
        with file.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(start if start <= size else 0, size - LOG_TAIL_BYTES))
            return f.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _popen_child(
    command: list[str], env: Mapping[str, str] | None, cwd: Path | None, pass_fds: Sequence[int], output: int | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        bufsize=0,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        process_group=0,  # a terminal's Ctrl-C reaches only this process, which stops the child
    )


def _absolute_path(file: Path) -> Path:
    # The guard may run in another folder than this process.
    return file.absolute()


def _rotate_log_file(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    if log_file.exists() and log_file.stat().st_size > LOG_MAX_BYTES:
        log_file.replace(log_file.with_name(f"{log_file.name}.1"))
    with log_file.open("ab"):
        pass
