"""ChildProcess, with real children."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.shared.common import child_process
from penstock.shared.common.child_process import LOG_MAX_BYTES, OUTPUT_BYTES_MAX, ChildProcess, tail
from penstock.shared.common.errors import ConfigError

LIMIT_SECONDS = 20
LIMIT_MS = LIMIT_SECONDS * 1000
KILLED_AT_ONCE = (sys.executable, "-I", "-S", "-c", "import os; os.kill(os.getpid(), 9)")


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    """Limit the time of each test."""
    async with asyncio.timeout(LIMIT_SECONDS * 2):
        yield


async def shell(script: str, tmp_path: Path) -> ChildProcess:
    return await ChildProcess.start(["sh", "-c", script], log_file=tmp_path / "log")


async def test_output_goes_to_the_log_and_the_status_is_returned(tmp_path: Path) -> None:
    """The child's output is in the log file, and `wait` returns its exit status."""
    child = await shell("echo out; echo err >&2; exit 7", tmp_path)
    assert await child.wait() == 7
    assert child.log_tail() == ["out", "err"]
    assert "exit status 7" in repr(child)


async def test_pid_is_the_childs_own(tmp_path: Path) -> None:
    """`pid` is the command's, not the guard's."""
    child = await shell("echo $$", tmp_path)
    await child.wait()
    assert child.log_tail() == [str(child.pid)]


async def test_environment_and_folder_are_given(tmp_path: Path) -> None:
    """The child has the given environment and working folder."""
    command = [
        sys.executable,
        "-c",
        "import os; print(os.environ['MARK'], os.path.samefile(os.getcwd(), os.environ['HERE']))",
    ]
    child = await ChildProcess.start(
        command, log_file=tmp_path / "log", env={"MARK": "a b", "HERE": str(tmp_path)}, cwd=tmp_path
    )
    assert await child.wait() == 0
    assert child.log_tail() == ["a b True"]


async def test_kill_sends_sigkill_to_the_child(tmp_path: Path) -> None:
    """A killed child does not clean up, and its status is SIGKILL."""
    child = await shell("trap 'echo tidied' TERM EXIT; while :; do sleep 0.05; done", tmp_path)
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    assert child.log_tail() == []


async def test_terminate_lets_the_child_tidy_up(tmp_path: Path) -> None:
    """SIGTERM comes first, so the child can clean up, and a second call is harmless."""
    child = await ChildProcess.start(
        [sys.executable, "-c", "import signal, sys; signal.sigwait([signal.SIGTERM]); print('tidied'); sys.exit(3)"],
        log_file=tmp_path / "log",
    )
    status = await child.terminate(LIMIT_MS)
    assert status in (3, -signal.SIGTERM)  # The signal may arrive before Python waits for it.
    assert await child.terminate(LIMIT_MS) == status


async def test_terminate_kills_after_its_limit(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed after the limit."""
    child = await shell("trap '' TERM; echo deaf; while :; do sleep 0.05; done", tmp_path)
    async with asyncio.timeout(LIMIT_MS / 1000):
        while child.log_tail() != ["deaf"]:  # noqa: ASYNC110 - the child writes this when it is ready
            await asyncio.sleep(0)
    assert await child.terminate(0) == -signal.SIGKILL


async def test_killed_guard_leaves_no_child(tmp_path: Path) -> None:
    """If the guard is killed, the child is ended without it."""
    child = await shell("exec sleep 1000", tmp_path)
    os.kill(child._guard.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        await _until_gone(child.pid)


async def test_a_guard_that_is_killed_at_once_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the guard is killed before it has reported the process id, there is none, and the child counts as ended."""
    monkeypatch.setattr(child_process, "_GUARD_COMMAND", KILLED_AT_ONCE)
    child = await ChildProcess.start(["sleep", "1000"])
    assert (child.pid, await child.wait()) == (None, -signal.SIGKILL)
    child.kill()


async def test_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A missing command is a ConfigError with its name."""
    with pytest.raises(ConfigError, match="no-such-command: No such file"):
        await ChildProcess.start(["no-such-command"], log_file=tmp_path / "log")


@pytest.mark.parametrize("free", range(4))
async def test_too_few_file_descriptors_are_an_error_with_the_command(free: int) -> None:
    """The command is named, whichever of its pipes cannot be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_descriptor = os.dup(0)
    os.close(next_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor + free, limits[1]))
    try:
        with pytest.raises(ConfigError, match="sleep cannot be started: sleep: Too many open files"):
            await ChildProcess.start(["sleep", "9"], on_line=print)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A log that cannot be written is a ConfigError with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"sh .*: .*file"):
        await ChildProcess.start(["sh"], log_file=tmp_path / "file" / "log")


async def test_an_early_exit_shows_the_last_output_of_this_run(tmp_path: Path) -> None:
    """The error of an ended child has the status and this run's last lines, not an earlier run's."""
    (tmp_path / "log").write_text("an earlier run\n")
    child = await shell("echo cannot go on; exit 1", tmp_path)
    await child.wait()
    assert str(child.died()) == "sh ended, exit status 1: its last output was\n  cannot go on"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo partly; echo cannot go on >&2", ": its last output was\n  cannot go on"),
        ("echo partly", ": its last output was\n  partly"),
        ("true", " without any output"),
    ],
)
async def test_died_has_the_last_piped_lines(script: str, message: str) -> None:
    """The error of a child with pipes has the end of its standard error, or else of its standard output."""
    child = await ChildProcess.start(["sh", "-c", f"{script}; exit 1"], on_line=lambda line: None)
    await child.wait()
    assert str(child.died()) == f"sh ended, exit status 1{message}"


async def test_died_does_not_know_a_shared_output() -> None:
    """The error of a child that shares this process's output does not mention output."""
    child = await ChildProcess.start(["sh", "-c", "echo cannot go on; exit 1"])
    await child.wait()
    assert str(child.died()) == "sh ended, exit status 1"


async def test_long_log_is_moved_aside(tmp_path: Path) -> None:
    """A log over its limit is replaced, and one old log is kept."""
    with (tmp_path / "log").open("wb") as f:
        f.truncate(LOG_MAX_BYTES + 1)
    child = await shell("echo new", tmp_path)
    await child.wait()
    assert (tmp_path / "log").read_text() == "new\n"
    assert (tmp_path / "log.1").stat().st_size == LOG_MAX_BYTES + 1


async def test_cancelled_start_leaves_no_child(tmp_path: Path) -> None:
    """A cancelled start ends the child."""
    reader, writer = os.pipe()
    starting = asyncio.ensure_future(
        ChildProcess.start(["sleep", "1000"], log_file=tmp_path / "log", pass_fds=(writer,))
    )
    await asyncio.tasks.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


async def test_tail_is_bounded_and_survives_a_missing_file(tmp_path: Path) -> None:
    """Only the last lines are read, and a missing log has none."""
    (tmp_path / "log").write_text("".join(f"{i}\n" for i in range(100_000)))
    assert tail(tmp_path / "log", 2) == ["99998", "99999"]
    assert tail(tmp_path / "missing", 2) == []


async def _until_gone(pid: int) -> None:
    """Raise ProcessLookupError once the process is gone; its new parent reaps it at some time."""
    for _ in range(LIMIT_MS):
        os.kill(pid, 0)
        await asyncio.tasks.sleep(0.001)


async def test_piped_output_comes_line_by_line() -> None:
    """Lines of standard error are passed as they arrive, and both outputs are complete once the child has ended."""
    lines: list[str] = []
    child = await ChildProcess.start(["sh", "-c", "echo one >&2; echo result; printf two >&2"], on_line=lines.append)
    assert await child.wait() == 0
    assert (lines, child.output, child.error_output) == (["one", "two"], b"result\n", b"one\ntwo")
    assert child.log_tail() == []


async def test_of_much_output_the_end_is_kept() -> None:
    """Output is limited to its end, with and without line ends."""
    script = f"yes | head -c {3 * OUTPUT_BYTES_MAX}; yes | tr -d '\\n' | head -c {3 * OUTPUT_BYTES_MAX} >&2; echo end"
    child = await ChildProcess.start(["sh", "-c", script], on_line=lambda line: None)
    assert await child.wait() == 0
    assert len(child.output) == len(child.error_output) == OUTPUT_BYTES_MAX
    assert child.output.endswith(b"y\nend\n")


async def test_a_stubborn_child_with_pipes_is_killed() -> None:
    """A child that ignores SIGTERM is killed with its group, and a second stop is harmless."""
    started = asyncio.Event()
    script = "trap '' TERM; echo ready >&2; while :; do sleep 1000; done"
    child = await ChildProcess.start(["sh", "-c", script], on_line=lambda line: started.set())
    await started.wait()
    assert [await child.terminate(50), await child.terminate(50)] == [-signal.SIGKILL] * 2


async def test_a_killed_guard_leaves_no_child_that_holds_pipes() -> None:
    """If the guard is killed, a child that keeps its output open is ended too."""
    started, (reader, writer) = asyncio.Event(), os.pipe()
    command = ["sh", "-c", "echo ready >&2; exec sleep 1000"]
    child = await ChildProcess.start(command, on_line=lambda line: started.set(), pass_fds=(writer,))
    os.close(writer)
    await started.wait()
    os.kill(child._guard.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(os.read, reader, 1) == b""
    os.close(reader)


async def test_a_process_outside_of_the_group_does_not_delay_the_end() -> None:
    """A process that left the group and keeps the pipe open does not delay the child's end."""
    script = (
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(5)\nelse:\n    print('out'); sys.exit(3)"
    )
    child = await ChildProcess.start([sys.executable, "-c", script], on_line=lambda line: None)
    async with asyncio.timeout(4):
        assert await child.wait() == 3
    assert child.output == b"out\n"
