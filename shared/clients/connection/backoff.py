"""How long a call waits before it is made again: longer each time, from `retry_backoff_ms` up to a bound.

A coordinator that still completes the last transaction is done within a few milliseconds, so that the first request of
the next one need not wait as long as for a broker in trouble. That wait has its own, shorter course:

    100, 200, 400, 800, 1000, 1000, ...    any passing refusal
    5, 10, 20, 20, ...                     ConcurrentTransactions, where `soon` is asked for
"""

from __future__ import annotations

from penstock.shared.common.errors import ConcurrentTransactions, RetriableError

BACKOFF_MAX_MS = 1_000
"""Retries of one call back off exponentially from `retry_backoff_ms` up to this."""

SOON_MS = 5
SOON_MAX_MS = 20
"""What Java's producer waits each time while the last transaction is being completed."""


class Backoff:
    """The waits of one call; `soon` where it opens a transaction."""

    def __init__(self, retry_backoff_ms: float, *, soon: bool = False) -> None:
        self._next_ms = float(retry_backoff_ms)
        self._soon_max_ms = min(SOON_MAX_MS, self._next_ms)
        self._soon_ms = min(SOON_MS, self._next_ms)
        self._soon = soon

    def __repr__(self) -> str:
        return f"<Backoff {self._next_ms:.0f} ms>"

    def after(self, error: RetriableError) -> float:
        """How many ms to wait after a refusal."""
        if self._soon and isinstance(error, ConcurrentTransactions):
            wait_ms, self._soon_ms = self._soon_ms, min(self._soon_ms * 2, self._soon_max_ms)
            return wait_ms
        wait_ms, self._next_ms = self._next_ms, min(self._next_ms * 2, BACKOFF_MAX_MS)
        return wait_ms
