"""Divides the time of one turn of a worker into shares: how long each sub-topology processes records.

A turn runs in the event loop that also sends the group's heartbeats and writes commits. So processing takes about
`PROCESSING_MS_MAX`, however many records were fetched. It takes longer if single records or runs of columns take
longer than their sub-topology's share. The remaining records stay in the tasks' inputs for the next turn. The time
is divided equally among the sub-topologies that have records. Time that one does not use goes to those after it. Each
may process at least one run, so none waits forever behind slow others.

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

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.shared.common.clock import Clock
from penstock.shared.streams.task.inputs import log_blocked_heartbeats

PROCESSING_MS_MAX = 100
"""The processing time of one turn, for which heartbeats, commits and punctuations wait. Slow single runs exceed it."""


class TurnTimeShare:
    """A share of the worker's turn, measured by a clock; implements `time_shares.TimeShare`."""

    def __init__(self, clock: Clock, ms: int) -> None:
        self._monotonic_ms = clock.monotonic_ms
        self.ms = ms
        self._start_ms = clock.monotonic_ms()
        self._end_ms = self._start_ms + ms

    def is_left(self) -> bool:
        """Return whether this share of the turn has time for another record."""
        return self._monotonic_ms() < self._end_ms

    def used_ms(self) -> int:
        """Return the time of the turn since this share began, in ms."""
        return self._monotonic_ms() - self._start_ms


class TurnTime:
    """Divides the turn's time into shares."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_ms = 0
        self._sharers = 1
        self._least_ms = PROCESSING_MS_MAX

    def begin(self, sharers: int) -> None:
        """Begin a turn whose time is shared by this number of sub-topologies, those that have records."""
        self._end_ms = self._clock.monotonic_ms() + PROCESSING_MS_MAX
        self._sharers = max(1, sharers)
        self._least_ms = max(1, PROCESSING_MS_MAX // self._sharers)

    def share(self) -> TurnTimeShare:
        """Return the next share of the remaining time: at least an equal share of the whole."""
        left_ms = (self._end_ms - self._clock.monotonic_ms()) // max(1, self._sharers)
        self._sharers -= 1
        return TurnTimeShare(self._clock, max(self._least_ms, left_ms))


@contextmanager
def log_if_blocking(step: str, clock: Clock, blocking_ms_max: float) -> Iterator[None]:
    """Measure the block as one step, and log the step if it takes longer than `blocking_ms_max`, even if it raises."""
    began_ms = clock.monotonic_ms()
    try:
        yield
    finally:
        if (ms := clock.monotonic_ms() - began_ms) > blocking_ms_max:
            log_blocked_heartbeats(step, ms)
