"""A job as a child process that never outlives the aggregator, SIGKILL included.

Between us and the job stands a keeper (shared.common.keeper), which watches a pipe that only we hold open. When the
pipe closes, because we stopped the job or because we are gone, the job gets SIGTERM, and after a limit its whole group
gets SIGKILL. The process is a plain `Popen`, watched by a thread: asyncio's own sends SIGKILL to its child when a loop
closes, and a keeper that is killed keeps nothing.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shared.common import keeper

_KEEPER_COMMAND = (sys.executable, "-I", "-S", keeper.__file__)


class JobEnd(NamedTuple):
    """How a job ended: its exit status (128 + n for a death by signal n), and all that it printed."""

    status: int
    out: bytes
    err: bytes


class Job:
    """One command, started by being made. Raises OSError where not even the keeper can be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stop_timeout_ms: int) -> None:
        ours, self._lifeline = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [*_KEEPER_COMMAND, "--limit-ms", str(stop_timeout_ms), "--", *command],
                stdin=ours,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                process_group=0,  # a terminal's Ctrl-C is for us; we tell the job
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(ours)
        self._end = asyncio.ensure_future(asyncio.to_thread(self._wait))

    async def end(self) -> JobEnd:
        """Wait for the job's end; to be cancelled does the job no harm."""
        return await asyncio.shield(self._end)

    async def stop(self) -> JobEnd:
        """End the job: SIGTERM now, SIGKILL to what is left of it after the limit. Safe to call twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return await self.end()

    def _wait(self) -> JobEnd:
        out, err = self._keeper.communicate()
        return JobEnd(self._keeper.returncode, out, err)
