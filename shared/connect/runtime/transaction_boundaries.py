"""The ends of an exactly-once source task's transactions: after each poll, by time, or as the task requests.

>>> boundaries = IntervalBoundary(1_000, now_ms=0)
>>> boundaries.after_batch(999), boundaries.after_batch(1_000), boundaries.after_batch(1_500)
(<Ending.NOT: 'not'>, <Ending.COMMIT: 'commit'>, <Ending.NOT: 'not'>)
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from penstock.shared.connect.record import SourceRecord


class Ending(Enum):
    """Whether and how a transaction ends."""

    NOT = "not"
    COMMIT = "commit"
    ABORT = "abort"


class TransactionBoundary(Protocol):
    def after_record(self, record: SourceRecord) -> Ending:
        """Return the ending after a record was sent or dropped."""
        ...

    def after_batch(self, now_ms: int) -> Ending:
        """Return the ending after a poll, when all its records, if there are any, were sent or dropped."""
        ...

    def at_end(self, *, is_whole: bool) -> Ending:
        """Return how the transaction ends at a pause or stop.

        After `Ending.NOT` it stays open during a pause, and is aborted at a stop. `is_whole` is True if all records of
        the last poll were sent or dropped."""
        ...


class IntervalBoundary:
    """Ends the transaction after a poll if the interval is over, and at a pause or stop. An interval of 0 ms is over
    after each poll."""

    def __init__(self, interval_ms: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._last_ms = now_ms

    def after_record(self, record: SourceRecord) -> Ending:
        return Ending.NOT

    def after_batch(self, now_ms: int) -> Ending:
        if now_ms - self._last_ms < self._interval_ms:
            return Ending.NOT
        self._last_ms = now_ms
        return Ending.COMMIT

    def at_end(self, *, is_whole: bool) -> Ending:
        return Ending.COMMIT


class ConnectorBoundary:
    """Ends transactions where the connector's task requests it. It is also the context that the task calls for that.

    Records are compared by identity: pass the same object that `poll` returns.
    """

    def __init__(self) -> None:
        self._after_batch = Ending.NOT
        self._after: dict[int, tuple[SourceRecord, Ending]] = {}

    def commit_transaction(self, record: SourceRecord | None = None) -> None:
        self._request_transaction_end(Ending.COMMIT, record)

    def abort_transaction(self, record: SourceRecord | None = None) -> None:
        self._request_transaction_end(Ending.ABORT, record)

    def _request_transaction_end(self, ending: Ending, record: SourceRecord | None) -> None:
        if record is None:
            self._after_batch = ending
        else:
            self._after[id(record)] = (record, ending)

    def after_record(self, record: SourceRecord) -> Ending:
        defined = self._after.pop(id(record), None)
        return defined[1] if defined is not None and defined[0] is record else Ending.NOT

    def after_batch(self, now_ms: int) -> Ending:
        ending = self._after_batch
        self._after_batch = Ending.NOT
        return ending

    def at_end(self, *, is_whole: bool) -> Ending:
        # A request for the whole batch counts only if all its records were sent.
        return self.after_batch(0) if is_whole else Ending.NOT


def boundary_of(kind: str, interval_ms: int, now_ms: int) -> TransactionBoundary:
    """Return the boundary that `transaction.boundary` names."""
    if kind == "connector":
        return ConnectorBoundary()
    return IntervalBoundary(interval_ms if kind == "interval" else 0, now_ms)
