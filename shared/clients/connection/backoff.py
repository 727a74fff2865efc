"""The backoff between the attempts of a call: it grows from `retry_backoff_ms` up to a limit.

A coordinator that is still completing the last transaction is done within a few milliseconds. So the first request of
the next transaction uses a shorter backoff than a request to a broker in trouble:

        100, 200, 400, 800, 1000, 1000, ...    any retriable error
        5, 10, 20, 20, ...                     ConcurrentTransactions, with `soon`
"""

from __future__ import annotations

from penstock.shared.common.errors import ConcurrentTransactions, RetriableError

BACKOFF_MAX_MS = 1_000
"""Retries of one call back off exponentially from `retry_backoff_ms` up to this."""

SOON_MS = 5
SOON_MAX_MS = 20
"""The wait of Java's producer between attempts while the last transaction is being completed."""


class Backoff:
    """The backoff of one call; `soon` if the call opens a transaction."""

    def __init__(self, retry_backoff_ms: float, *, soon: bool = False) -> None:
        self._next_ms = float(retry_backoff_ms)
        self._soon_max_ms = min(SOON_MAX_MS, self._next_ms)
        self._soon_ms = min(SOON_MS, self._next_ms)
        self._soon = soon

    def __repr__(self) -> str:
        return f"<Backoff {self._next_ms:.0f} ms>"

    def after(self, error: RetriableError) -> float:
        """Return the ms to wait after a retriable error."""
        if self._soon and isinstance(error, ConcurrentTransactions):
            wait_ms, self._soon_ms = self._soon_ms, min(self._soon_ms * 2, self._soon_max_ms)
            return wait_ms
        wait_ms, self._next_ms = self._next_ms, min(self._next_ms * 2, BACKOFF_MAX_MS)
        return wait_ms
