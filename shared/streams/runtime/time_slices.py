"""How long one turn of a worker processes records before it yields.

A turn runs in the loop that also sends the group's heartbeats, writes commits and moves the wall clock on. So it takes
about `PROCESSING_MS_MAX` of work, however many records were fetched and whatever users' functions cost; what is left
stays with the task's inputs for the next turn. The time is dealt out in equal shares to all who have records, and what
one leaves over is for those after it. Everyone takes at least one run, so nobody waits for ever behind slow others.

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
"""Whether there is time for another record; once it says no, it goes on saying so."""

PROCESSING_MS_MAX = 100
"""Of work in one turn; the longest that a heartbeat, a commit or a punctuation waits for records that are slow."""
RUN_RECORDS_FIRST = 1_000
RUN_RECORDS_MIN = 32
RUN_RECORDS_MAX = 64_000
RUN_GROWTH = 4


def always() -> bool:
    """There is time."""
    return True


class Share:
    """One part's time in one turn: `ms` from when it was dealt out. Once it is used up it stays so."""

    def __init__(self, clock: Clock, ms: int) -> None:
        self._monotonic_ms, self.ms = clock.monotonic_ms, ms
        self._start_ms = clock.monotonic_ms()
        self._end_ms = self._start_ms + ms

    def is_left(self) -> bool:
        """Whether there is time for another record."""
        return self._monotonic_ms() < self._end_ms

    def used_ms(self) -> int:
        """How much time has passed since it was dealt out."""
        return self._monotonic_ms() - self._start_ms


class TurnTime:
    """Deals out the turn's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._end_ms, self._sharers, self._least_ms = clock, 0, 1, PROCESSING_MS_MAX

    def begin(self, sharers: int) -> None:
        """A turn begins in which so many want a share."""
        self._end_ms, self._sharers = self._clock.monotonic_ms() + PROCESSING_MS_MAX, max(1, sharers)
        self._least_ms = max(1, PROCESSING_MS_MAX // self._sharers)

    def share(self) -> Share:
        """The next one's part of what is left, and never less than an equal part of the whole."""
        left_ms = (self._end_ms - self._clock.monotonic_ms()) // max(1, self._sharers)
        self._sharers -= 1
        return Share(self._clock, max(self._least_ms, left_ms))


class RunLength:
    """How many records the next run may have: a batch that is taken as columns cannot be left halfway.

    What the run before cost says it; it grows while runs are cheap.

    >>> length = RunLength()
    >>> length.took(1_000, 400, share_ms=100), length.records_max
    (None, 250)
    """

    def __init__(self) -> None:
        self.records_max = RUN_RECORDS_FIRST

    def took(self, records: int, ms: int, share_ms: int) -> None:
        """A run of so many records took so long, of a share's time."""
        if ms > share_ms:
            self.records_max = max(RUN_RECORDS_MIN, min(records, self.records_max) * share_ms // ms)
        elif records >= self.records_max and ms * RUN_GROWTH <= share_ms:
            self.records_max = min(RUN_RECORDS_MAX, self.records_max * RUN_GROWTH)
