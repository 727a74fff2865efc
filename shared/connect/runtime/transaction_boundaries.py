"""Where an exactly-once source task's transactions end: after each poll, by time, or where the task says.

>>> boundaries = IntervalBoundary(1_000, now_ms=0)
>>> boundaries.after_batch(999), boundaries.after_batch(1_000), boundaries.after_batch(1_500)
(<Ending.NOT: 'not'>, <Ending.COMMIT: 'commit'>, <Ending.NOT: 'not'>)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from penstock.shared.connect.record import SourceRecord


class Ending(Enum):
    """Whether a transaction ends here."""

    NOT = "not"
    COMMIT = "commit"
    ABORT = "abort"


class TransactionBoundary(Protocol):
    def after_record(self, record: SourceRecord) -> Ending:
        """The record was sent or dropped."""
        ...

    def after_batch(self, now_ms: int) -> Ending:
        """Everything that a poll returned was sent or dropped."""
        ...

    def at_end(self, *, is_whole: bool) -> Ending:
        """The task pauses or stops; `is_whole`: nothing is left to send of what a poll returned."""
        ...


class PollBoundary:
    """One transaction for each batch."""

    def after_record(self, record: SourceRecord) -> Ending:
        return Ending.NOT

    def after_batch(self, now_ms: int) -> Ending:
        return Ending.COMMIT

    def at_end(self, *, is_whole: bool) -> Ending:
        return Ending.COMMIT


class IntervalBoundary:
    """One transaction for each interval."""

    def __init__(self, interval_ms: int, now_ms: int) -> None:
        self._interval_ms, self._last_ms = interval_ms, now_ms

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
    """Where the connector's task says; also the context that it says it to.

    A record is meant by its identity: say it of the very record that `poll` returns.
    """

    def __init__(self) -> None:
        self._after_batch = Ending.NOT
        self._after: dict[int, tuple[SourceRecord, Ending]] = {}

    def commit_transaction(self, record: SourceRecord | None = None) -> None:
        self._say(Ending.COMMIT, record)

    def abort_transaction(self, record: SourceRecord | None = None) -> None:
        self._say(Ending.ABORT, record)

    def _say(self, ending: Ending, record: SourceRecord | None) -> None:
        if record is None:
            self._after_batch = ending
        else:
            self._after[id(record)] = (record, ending)

    def after_record(self, record: SourceRecord) -> Ending:
        said = self._after.pop(id(record), None)
        return said[1] if said is not None and said[0] is record else Ending.NOT

    def after_batch(self, now_ms: int) -> Ending:
        ending, self._after_batch = self._after_batch, Ending.NOT
        return ending

    def at_end(self, *, is_whole: bool) -> Ending:
        return self.after_batch(0) if is_whole else Ending.NOT


def boundary_of(kind: str, interval_ms: Callable[[], int], now_ms: int) -> TransactionBoundary:
    """The boundary that `transaction.boundary` names."""
    if kind == "connector":
        return ConnectorBoundary()
    return IntervalBoundary(interval_ms(), now_ms) if kind == "interval" else PollBoundary()
