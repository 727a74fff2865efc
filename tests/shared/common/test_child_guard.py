"""The guard of a child process, run as a process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.shared.common import child_guard

LIMIT_SECONDS = 20
READY = "echo ready >$PIPE;"  # Once this is printed, the shell has set its traps.


@contextmanager
def guarded_shell(
    script: str, *options: str, pass_fds: tuple[int, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a guard of a shell that runs `script`; yields it and a pipe that the shell and its children hold, `$PIPE`."""
    reader, writer = os.pipe()
    words = ["sh", "-c", script.replace("$PIPE", f"/dev/fd/{writer}")]
    command = [sys.executable, "-I", "-S", child_guard.__file__, *options, "--", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(writer, *pass_fds))
    os.close(writer)
    try:
        yield process, reader
    finally:
        process.kill()
        process.communicate()
        os.close(reader)


def read(fd: int) -> bytes:
    """The next data on the pipe, or nothing once all holders of its other end have ended."""
    assert select.select([fd], [], [], LIMIT_SECONDS)[0], "nothing came in time"
    return os.read(fd, 4096)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_exit_status_is_the_childs(script: str, status: int) -> None:
    """The guard ends with the child's status, or 128 + n for a signal."""
    with guarded_shell(script) as (process, _):
        assert process.wait(LIMIT_SECONDS) == status


def test_child_gets_sigterm_when_the_parents_pipe_closes() -> None:
    """The child receives SIGTERM when standard input ends with the parent, and may still clean up."""
    with guarded_shell(f"trap 'echo tidied >$PIPE; exit 3' TERM; {READY} while :; do sleep 0.05; done") as (
        process,
        pipe,
    ):
        assert read(pipe) == b"ready\n"
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert read(pipe) == b"tidied\n"
        assert process.wait(LIMIT_SECONDS) == 3


def test_sigterm_to_the_guard_ends_the_child() -> None:
    """A SIGTERM to the guard ends the child."""
    with guarded_shell(f"{READY} exec sleep 1000") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
        assert read(pipe) == b""


def test_stubborn_child_and_its_children_are_killed_after_the_limit() -> None:
    """A child that ignores SIGTERM is killed with its children after the limit."""
    script = f"trap '' TERM; sleep 1000 & {READY} while :; do sleep 1000; done"
    with guarded_shell(script, "--limit-ms", "50") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGKILL
        assert read(pipe) == b""


def test_remaining_processes_of_the_child_are_killed() -> None:
    """When a child exits without a signal, the other processes of its group are killed."""
    with guarded_shell(f"sleep 1000 & {READY} exit 0") as (process, pipe):
        assert read(pipe) == b"ready\n"
        assert process.wait(LIMIT_SECONDS) == 0
        assert read(pipe) == b""


def test_a_stopped_child_is_continued_to_end() -> None:
    """A stopped child receives SIGCONT after SIGTERM, and ends."""
    with guarded_shell(f"trap 'exit 4' TERM; {READY} kill -STOP $$; while :; do sleep 0.05; done") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 4


def test_the_guard_ignores_sigint() -> None:
    """A SIGINT to the guard changes nothing, since the parent handles it."""
    with guarded_shell(f"trap 'exit 5' TERM; {READY} while :; do sleep 0.05; done") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.send_signal(signal.SIGINT)
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 5


def test_report_and_log_are_separate(tmp_path: Path) -> None:
    """The child's output is in the log, and the report is on its own descriptor, which the child does not have."""
    log, report = tmp_path / "log", tmp_path / "report"
    fd = os.open(report, os.O_WRONLY | os.O_CREAT)
    script = f"echo out; echo err >&2; test ! -e /dev/fd/{fd} || exit 3; exit 2"
    options = ("--log", str(log), "--report-fd", str(fd))
    with guarded_shell(script, *options, pass_fds=(fd,)) as (process, _):
        assert process.wait(LIMIT_SECONDS) == 2
    os.close(fd)
    assert log.read_text() == "out\nerr\n"
    started, exited = report.read_text().splitlines()
    assert started.startswith("started ")
    assert exited == "exited 2"


@pytest.mark.parametrize("arguments", [[], ["--"], ["--limit-ms", "soon", "--", "true"], ["true"]])
def test_invalid_arguments_are_rejected(arguments: list[str]) -> None:
    """An invalid command line starts nothing."""
    with pytest.raises(SystemExit, match="usage: child_guard"):
        child_guard.main(arguments)
