"""A job as a child process that never outlives the aggregator, even after SIGKILL.

A keeper (penstock.shared.common.keeper) runs between this process and the job. It watches a pipe that only this process
holds open. When the pipe closes, because the job is stopped or this process has ended, the job gets SIGTERM. After a
limit its whole group gets SIGKILL. The process is a plain `Popen`, watched by a thread. asyncio's own sends SIGKILL to
its child when a loop closes, and a killed keeper cannot stop its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.shared.common import keeper

ERROR_BYTES_MAX = 256 * 1024  # of the end of a job's standard error that are kept
_KEEPER_COMMAND = (sys.executable, "-I", "-S", keeper.__file__)


def start_kept(
    command: Sequence[str], environment: Mapping[str, str], stop_timeout_ms: int, *, output: int | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command under a keeper, which ends the command when this process ends.

    Returns the keeper's process and this process's end of the pipe. Closing it stops the command. `output` is passed
    to Popen. Raises OSError if the keeper cannot be started.
    """
    ours, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            [*_KEEPER_COMMAND, "--limit-ms", str(stop_timeout_ms), "--", *command],
            stdin=ours,
            stdout=output,
            stderr=output,
            env=environment,
            process_group=0,  # a terminal's Ctrl-C reaches only this process, which stops the child
        )
    except OSError:
        os.close(lifeline)
        raise
    finally:
        os.close(ours)
    return process, lifeline


class JobEnd(NamedTuple):
    """The end of a job: its exit status (128 + n after signal n), and its output."""

    status: int
    out: bytes
    err: bytes


class Job:
    """One command. The constructor starts it, and raises OSError if the keeper cannot be started.

    `on_line` is called on the loop with each line of standard error as it arrives, which reports progress.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stop_timeout_ms: int,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._keeper, self._lifeline = start_kept(command, environment, stop_timeout_ms, output=subprocess.PIPE)
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.ensure_future(asyncio.to_thread(self._wait))

    async def end(self) -> JobEnd:
        """Wait for the job's end. Cancelling the wait does not affect the job."""
        return await asyncio.shield(self._end)

    async def stop(self) -> JobEnd:
        """End the job: SIGTERM now, SIGKILL to its group after the limit. Safe to call twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return await self.end()

    def _wait(self) -> JobEnd:
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(self._keeper.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        err = b""
        for line in self._keeper.stderr:
            err = (err + line)[-ERROR_BYTES_MAX:]
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._on_line, line.decode(errors="replace").rstrip())
        reader.join()
        return JobEnd(self._keeper.wait(), said[0], err)
