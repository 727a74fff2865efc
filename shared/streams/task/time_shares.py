"""The time that a sub-topology of a task may use in one turn of its worker, and the number of records in one run.

The worker measures the time (`runtime.turn_time`), because code in `task` never reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

HasTime = Callable[[], bool]
"""Returns whether there is time for another record; once False, it stays False."""

RUN_RECORDS_FIRST = 1_000
RUN_RECORDS_MIN = 32
RUN_RECORDS_MAX = 64_000
RUN_GROWTH = 4


def always_has_time() -> bool:
    """Return True: for a run that has no limited share of time."""
    return True


class TimeShare(Protocol):
    """One share of a turn's time. It lasts `ms` from its creation."""

    ms: int

    def is_left(self) -> bool:
        """Return whether there is time for another record."""
        ...

    def used_ms(self) -> int:
        """Return the time since the share was created, in ms."""
        ...


class TimeShares(Protocol):
    """The time of one turn, shared by all sub-topologies that have records."""

    def share(self) -> TimeShare:
        """Return the next share of the remaining time."""
        ...


class RunLength:
    """The maximum number of records in the next run.

    A kernel cannot leave a batch midway, so its length is chosen before. It follows from the cost of the previous run,
    and grows as long as runs are cheap.

    >>> length = RunLength()
    >>> length.adapt(1_000, 400, share_ms=100)
    >>> length.records_max
    250
    """

    def __init__(self) -> None:
        self.records_max = RUN_RECORDS_FIRST

    def adapt(self, records: int, ms: int, share_ms: int) -> None:
        """Adapt to a run of this many records that took `ms` of a share's time."""
        # The run took too long: the next may have as many records as would have taken one share. This run may have had
        # fewer than the maximum.
        if ms > share_ms:
            self.records_max = max(RUN_RECORDS_MIN, min(records, self.records_max) * share_ms // ms)
        # A shorter run says nothing about the cost of a longer one.
        elif records >= self.records_max and ms * RUN_GROWTH <= share_ms:
            self.records_max = min(RUN_RECORDS_MAX, self.records_max * RUN_GROWTH)
