"""Time slices: how long one turn of a worker processes records before it yields.

A turn runs in the event loop that also sends the group's heartbeats, writes commits and advances the wall clock. So it
takes about `PROCESSING_MS_MAX`, however many records were fetched and whatever users' functions cost. The rest stays in
the task's inputs for the next turn. The time is divided equally among all who have records, and time that one leaves
goes to those after it. Each takes at least one run, so none waits forever behind slow others.

>>> from penstock.shared.testing.manual_clock import ManualClock
>>> clock = ManualClock()
>>> turn = TurnTime(clock)
>>> turn.begin(2)
>>> first = turn.share()
>>> clock.advance(49)
>>> first.is_left(), turn.share().ms
(True, 51)
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.common.clock import Clock

HasTime = Callable[[], bool]
"""Returns whether there is time for another record; once False, it stays False."""

PROCESSING_MS_MAX = 100
"""The work in one turn: the longest that a heartbeat, a commit or a punctuation waits for slow records."""
RUN_RECORDS_FIRST = 1_000
RUN_RECORDS_MIN = 32
RUN_RECORDS_MAX = 64_000
RUN_GROWTH = 4


def always_has_time() -> bool:
    """Return True."""
    return True


class TimeShare:
    """One share of a turn's time: `ms` from its creation. Once it is used up it stays so."""

    def __init__(self, clock: Clock, ms: int) -> None:
        self._monotonic_ms = clock.monotonic_ms
        self.ms = ms
        self._start_ms = clock.monotonic_ms()
        self._end_ms = self._start_ms + ms

    def is_left(self) -> bool:
        """Return whether there is time for another record."""
        return self._monotonic_ms() < self._end_ms

    def used_ms(self) -> int:
        """Return the time since the share was created."""
        return self._monotonic_ms() - self._start_ms


class TurnTime:
    """Divides the turn's time into shares."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_ms = 0
        self._sharers = 1
        self._least_ms = PROCESSING_MS_MAX

    def begin(self, sharers: int) -> None:
        """Begin a turn that is shared by `sharers`."""
        self._end_ms = self._clock.monotonic_ms() + PROCESSING_MS_MAX
        self._sharers = max(1, sharers)
        self._least_ms = max(1, PROCESSING_MS_MAX // self._sharers)

    def share(self) -> TimeShare:
        """Return the next share of the remaining time: at least an equal share of the whole."""
        left_ms = (self._end_ms - self._clock.monotonic_ms()) // max(1, self._sharers)
        self._sharers -= 1
        return TimeShare(self._clock, max(self._least_ms, left_ms))


class RunLength:
    """The maximum number of records in the next run, because a batch of columns cannot be left midway.

    It follows from the cost of the previous run, and grows while runs are cheap.

    >>> length = RunLength()
    >>> length.adapt(1_000, 400, share_ms=100), length.records_max
    (None, 250)
    """

    def __init__(self) -> None:
        self.records_max = RUN_RECORDS_FIRST

    def adapt(self, records: int, ms: int, share_ms: int) -> None:
        """Adapt to a run of this many records that took `ms` of a share's time."""
        # Too long: as many as would have taken one share. The run may have been shorter than the maximum.
        if ms > share_ms:
            self.records_max = max(RUN_RECORDS_MIN, min(records, self.records_max) * share_ms // ms)
        # A shorter run says nothing about the cost of a longer one.
        elif records >= self.records_max and ms * RUN_GROWTH <= share_ms:
            self.records_max = min(RUN_RECORDS_MAX, self.records_max * RUN_GROWTH)
