"""The kinds of windows: what each is, and the times that say when it takes a record and when it closes.

Sessions: all records of a key of which each lies within `gap_ms` of another. One closes when stream time has passed its
end by more than gap and grace. With a gap of 10 and no grace, records at 0, 8 and 25 of one key: 8 extends the session
[0, 0] to [0, 8]; 25 lies 17 after its end, so it starts [25, 25], and since the close time is now 25 - 0 - 10 = 15 > 8,
[0, 8] is closed. A record at 12 comes too late (12 < 15); one at 16 does not, it merges into [16, 25].

Tumbling and hopping windows: fixed spans that begin at multiples of the advance. A record is in every window that began
less than `size_ms` before it; the end of a window is not in it. With a size of 10 and an advance of 5, a record at 12
is in [5, 15) and [10, 20); the first start is 0, so one at 3 is in [0, 10) alone. A window closes when stream time has
reached its end and the grace. A record that is too late for some of its windows counts in the others; it is late when
it is too late for all.

Sliding windows: both bounds are in the window. One ends at each record, and one starts just after each, where that
holds something.

Sources of the semantics: KStreamSessionWindowAggregate, KStreamWindowAggregate and KStreamSlidingWindowAggregate.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.windows.window_table import Kind, Rule

WINDOWS_MAX = 10_000  # that one record is in: each is a write


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """The inactivity gap and the grace period in ms."""

    gap_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.gap_ms < 1:
            raise ConfigError(f"session gap must be at least 1 ms, got {self.gap_ms}")
        if self.grace_ms < 0:
            raise ConfigError(f"session grace must not be negative, got {self.grace_ms}")

    @property
    def rule(self) -> Rule:
        """What the kernel is told."""
        return Rule("session", self.gap_ms, self.grace_ms)

    @property
    def reach_ms(self) -> int:
        """How much later than a record a bound of its windows may lie, and be closed."""
        return self.gap_ms + self.grace_ms

    @property
    def results_before_ms(self) -> int:
        """How far before the close time the timestamp of a result still to come may lie."""
        return 0


@dataclass(frozen=True, slots=True)
class TimeWindows:
    """Size, advance (the size itself: tumbling) and grace period in ms."""

    size_ms: int
    advance_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.size_ms < 1:
            raise ConfigError(f"window size must be at least 1 ms, got {self.size_ms}")
        if not 1 <= self.advance_ms <= self.size_ms:
            raise ConfigError(f"window advance must be from 1 ms to the size {self.size_ms}, got {self.advance_ms}")
        if self.size_ms > self.advance_ms * WINDOWS_MAX:
            raise ConfigError(
                f"a record would be in more than {WINDOWS_MAX} windows: size {self.size_ms}, advance {self.advance_ms}"
            )
        if self.grace_ms < 0:
            raise ConfigError(f"window grace must not be negative, got {self.grace_ms}")

    @property
    def rule(self) -> Rule:
        """What the kernel is told."""
        kind: Kind = "tumbling" if self.size_ms == self.advance_ms else "hopping"
        return Rule(kind, self.size_ms, self.grace_ms, self.advance_ms)

    @property
    def reach_ms(self) -> int:
        """As that of sessions."""
        return self.size_ms

    @property
    def results_before_ms(self) -> int:
        """As that of sessions: a result has the time of its window's latest record, which may be its first moment."""
        return self.size_ms


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """The greatest time difference of two records in a window, and the grace period, in ms."""

    difference_ms: int
    grace_ms: int

    def __post_init__(self) -> None:
        if self.difference_ms < 0:
            raise ConfigError(f"window time difference must not be negative, got {self.difference_ms}")
        if self.grace_ms < 0:
            raise ConfigError(f"window grace must not be negative, got {self.grace_ms}")

    @property
    def rule(self) -> Rule:
        """What the kernel is told."""
        return Rule("sliding", self.difference_ms, self.grace_ms)

    @property
    def reach_ms(self) -> int:
        """As that of sessions: a window may start just after a record."""
        return self.difference_ms + 1

    @property
    def results_before_ms(self) -> int:
        """As that of sessions."""
        return self.difference_ms


@dataclass(frozen=True, slots=True)
class NoWindows:
    """One row a key, which takes every record and is never closed."""

    reach_ms = 0
    results_before_ms = 0

    @property
    def rule(self) -> Rule:
        """What the kernel is told."""
        return Rule("table")


WindowKind = SessionWindows | TimeWindows | SlidingWindows
