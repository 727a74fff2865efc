"""The wait of a source task between two reads. Each poll waits for at most POLL_WAIT_MAX_MS of it."""

from __future__ import annotations

import asyncio

POLL_WAIT_MAX_MS = 1_000
"""The longest wait in one `poll` of a source task. A pause, and the end of a transaction by time, take effect only when
`poll` returns."""


class PollWait:
    """The rest of the wait before the next read, in ms. It begins at 0."""

    def __init__(self) -> None:
        self.left_ms = 0

    def __repr__(self) -> str:
        return f"<PollWait {self.left_ms} ms>"

    async def passed(self) -> bool:
        """Wait for at most POLL_WAIT_MAX_MS. Returns whether the whole wait has passed."""
        wait_ms = min(self.left_ms, POLL_WAIT_MAX_MS)
        await asyncio.sleep(wait_ms / 1000)
        self.left_ms -= wait_ms
        return self.left_ms <= 0
