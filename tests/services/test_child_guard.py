"""The guard, run as the process that it is."""

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

from penstock.services import child_guard

LIMIT_SECONDS = 20
READY = "echo ready >$PIPE;"  # by now the shell has set its traps


@contextmanager
def kept(script: str, *options: str, pass_fds: tuple[int, ...] = ()) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A guard of a shell that runs `script`; yields it and a pipe that the shell and its children hold, `$PIPE`."""
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
    """What comes next on the pipe; empty at its end, that is when nobody holds its other end any more."""
    assert select.select([fd], [], [], LIMIT_SECONDS)[0], "nothing came in time"
    return os.read(fd, 4096)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_exit_status_is_the_childs(script: str, status: int) -> None:
    """The guard ends with the child's status, 128 + n for a signal."""
    with kept(script) as (process, _):
        assert process.wait(LIMIT_SECONDS) == status


def test_child_gets_sigterm_when_the_parents_pipe_closes() -> None:
    """The end of standard input is the parent's end; the child may still tidy up."""
    with kept(f"trap 'echo tidied >$PIPE; exit 3' TERM; {READY} while :; do sleep 0.05; done") as (process, pipe):
        assert read(pipe) == b"ready\n"
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert read(pipe) == b"tidied\n"
        assert process.wait(LIMIT_SECONDS) == 3


def test_sigterm_to_the_guard_ends_the_child() -> None:
    """A service manager that stops the guard stops what it keeps."""
    with kept(f"{READY} exec sleep 1000") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
        assert read(pipe) == b""


def test_stubborn_child_and_its_children_are_killed_after_the_limit() -> None:
    """A child that ignores SIGTERM, and what it started, get SIGKILL; the pipe's end proves that all are gone."""
    script = f"trap '' TERM; sleep 1000 & {READY} while :; do sleep 1000; done"
    with kept(script, "--limit-ms", "50") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGKILL
        assert read(pipe) == b""


def test_what_the_child_left_behind_is_swept_away() -> None:
    """A child that ends by itself does not leave processes of its group running."""
    with kept(f"sleep 1000 & {READY} exit 0") as (process, pipe):
        assert read(pipe) == b"ready\n"
        assert process.wait(LIMIT_SECONDS) == 0
        assert read(pipe) == b""


def test_stopped_child_is_woken_to_end() -> None:
    """SIGTERM reaches a child that was frozen, since SIGCONT follows it."""
    with kept(f"trap 'exit 4' TERM; {READY} kill -STOP $$; while :; do sleep 0.05; done") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 4


def test_ctrl_c_is_the_parents_to_decide() -> None:
    """SIGINT to the guard changes nothing."""
    with kept(f"trap 'exit 5' TERM; {READY} while :; do sleep 0.05; done") as (process, pipe):
        assert read(pipe) == b"ready\n"
        process.send_signal(signal.SIGINT)
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 5


def test_report_and_log_go_their_own_ways(tmp_path: Path) -> None:
    """With a log, the child's output is in it; the report is on its own descriptor, which the child does not hold."""
    log, report = tmp_path / "log", tmp_path / "report"
    fd = os.open(report, os.O_WRONLY | os.O_CREAT)
    script = f"echo out; echo err >&2; test ! -e /dev/fd/{fd} || exit 3; exit 2"
    options = ("--log", str(log), "--report-fd", str(fd))
    with kept(script, *options, pass_fds=(fd,)) as (process, _):
        assert process.wait(LIMIT_SECONDS) == 2
    os.close(fd)
    assert log.read_text() == "out\nerr\n"
    started, exited = report.read_text().splitlines()
    assert started.startswith("started ")
    assert exited == "exited 2"


@pytest.mark.parametrize("arguments", [[], ["--"], ["--limit-ms", "soon", "--", "true"], ["true"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    """A command line that is not understood starts nothing."""
    with pytest.raises(SystemExit, match="usage: child_guard"):
        child_guard.main(arguments)
