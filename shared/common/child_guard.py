"""The guard of a child process: it runs one command, and ends it when the parent ends.

`python child_guard.py [--limit-ms N] [--log FILE] [--report-fd FD] -- COMMAND …` starts the
command in a process group of its own. The guard watches the child and its own standard input, a pipe whose other end
the parent holds open. When the pipe closes (the parent has ended, even by SIGKILL), or when the guard gets SIGTERM, it
sends the child SIGTERM. After that, it sends the whole group SIGKILL every `--limit-ms` until the child has ended.
Whenever the child ends, it sends the group a last SIGKILL. The guard's exit status is the child's (128 + n if signal n
ended the child).

With `--log`, the child's output is appended to that file; otherwise the child inherits the guard's standard output and
error. The guard writes two lines to the descriptor `--report-fd`: `started PID`, and then `exited STATUS` (negative for
a signal). If the command cannot be started, it writes only `failed ERRNO`. Other descriptors that the guard inherits
are passed to the child, so a file lock on one is held until the child ends.

The guard is run as a file and imports only a few modules of the standard library, so its start takes only a few
milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

DEFAULT_LIMIT_MS = 10_000
_USAGE = "usage: child_guard [--limit-ms N] [--log FILE] [--report-fd FD] -- COMMAND …"
# A shell returns this status for a command that it cannot find.
NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    """Run one command and end it when the parent ends. The module describes arguments and exit status."""
    limit_ms, log, report_fd, command = _parse_arguments(arguments)
    if report_fd is not None:
        # The child must not inherit this pipe: the pipe's end tells the parent that the guard has ended.
        os.set_inheritable(report_fd, False)
    wakeup = _wake_on_signals()
    try:
        pid = _spawn_child(command, log)
    except OSError as e:
        _report_to_parent(report_fd, f"failed {e.errno}")
        print(f"{command[0]}: {e.strerror}", file=sys.stderr)
        return NOT_STARTED
    _report_to_parent(report_fd, f"started {pid}")
    status = _watch_child(pid, wakeup, limit_ms)
    _signal_group(pid, signal.SIGKILL)
    _report_to_parent(report_fd, f"exited {status}")
    return status if status >= 0 else 128 - status


_stop_requested = False


def _wake_on_signals() -> int:
    """A descriptor that becomes readable on SIGCHLD or SIGTERM, so that one select() waits for everything."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, _on_sigterm)
    # A terminal's Ctrl-C reaches the parent too, and the parent decides what happens to the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reader


def _on_sigterm(*_: object) -> None:
    global _stop_requested
    _stop_requested = True


def _spawn_child(command: list[str], log: str | None) -> int:
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if log is not None:
        actions.append((os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        actions.append((os.POSIX_SPAWN_DUP2, 1, 2))
    python_ignores = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=actions,
        setpgroup=0,
        setsigmask=[],
        setsigdef=[*python_ignores, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    )


def _watch_child(pid: int, wakeup: int, limit_ms: int) -> int:
    """Wait for the child's end, and return its status. End the child when the parent has ended, or on SIGTERM."""
    kill_at: float | None = None
    watched = [wakeup, 0]
    while True:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        stopping = _stop_requested or 0 not in watched
        if stopping and kill_at is None:
            kill_at = now + limit_ms / 1000
            _signal_child(pid, signal.SIGTERM)
            # A stopped child would never see the SIGTERM.
            _signal_child(pid, signal.SIGCONT)
        elif kill_at is not None and now >= kill_at:
            _signal_group(pid, signal.SIGKILL)
            kill_at = now + limit_ms / 1000
        readable, _, _ = select.select(watched, [], [], None if kill_at is None else max(kill_at - now, 0))
        if wakeup in readable:
            os.read(wakeup, 4096)
        if 0 in readable and not os.read(0, 4096):
            watched.remove(0)


def _signal_child(pid: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _signal_group(pid: int, number: int) -> None:
    try:  # noqa: SIM105
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # macOS returns EPERM for a group of zombies.
        pass


def _report_to_parent(report_fd: int | None, line: str) -> None:
    if report_fd is None:
        return
    try:  # noqa: SIM105
        os.write(report_fd, f"{line}\n".encode())
    except OSError:
        # Nobody reads the report any more. The guard does its work all the same.
        pass


def _parse_arguments(arguments: list[str]) -> tuple[int, str | None, int | None, list[str]]:
    limit_ms = DEFAULT_LIMIT_MS
    log = None
    report_fd = None
    rest = list(arguments)
    while rest and rest[0] != "--":
        option = rest.pop(0)
        if option == "--limit-ms" and rest and rest[0].isdigit():
            limit_ms = int(rest.pop(0))
        elif option == "--log" and rest:
            log = rest.pop(0)
        elif option == "--report-fd" and rest and rest[0].isdigit():
            report_fd = int(rest.pop(0))
        else:
            raise SystemExit(f"child_guard: {option}: {_USAGE}")
    if len(rest) < 2:
        raise SystemExit(f"child_guard: {_USAGE}")
    return limit_ms, log, report_fd, rest[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
