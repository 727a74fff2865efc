"""The definition of windows: their kind, and the times at which they take a record and close.

Sessions: a session has records of one key, with gaps of at most `gap_ms`. It closes when stream time has passed
its end by more than gap and grace. Example: a gap of 10, no grace, records of one key at 0, 8 and 25. The record at 8
extends the session [0, 0] to [0, 8]. The record at 25 is 17 after that end, so it starts the session [25, 25]. The
close time (stream time - grace - gap) is now 25 - 0 - 10 = 15 > 8, so [0, 8] is closed. A record at 12 is late
(12 < 15). A record at 16 extends [25, 25] to [16, 25].

Tumbling and hopping windows: fixed spans that begin at multiples of the advance. A window's end is not in the window. A
record is in every window that began less than `size_ms` before it. Example: a size of 10, an advance of 5. A record at
12 is in [5, 15) and [10, 20). A record at 3 is only in [0, 10), because the first window begins at 0. A window closes
when stream time reaches its end plus the grace. A record is added to those of its windows that are not closed. It is
late if all of them are closed.

Sliding windows: both bounds are in the window. For each record, one window ends at its timestamp. If that one would
begin below 0, the window that begins at 0 replaces it. Another window starts 1 ms after the record, if that window
contains a record.

Sources of the semantics: KStreamSessionWindowAggregate, KStreamWindowAggregate and KStreamSlidingWindowAggregate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Int64Array

WindowKind = Literal["session", "tumbling", "hopping", "sliding", "table"]
"""A table has one row a key, which takes every record and never closes."""

Emit = Literal["on_close", "on_update"]
"""When a window's result is forwarded: once it has closed, or when it has changed."""

# A record may be in at most this many windows, because each of them costs a write.
WINDOWS_MAX = 10_000
BUCKETS_PER_PATIENCE = 512
"""The timer wheel's buckets for a window's span, grace and retention together; it has twice as many in all."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """The definition of windows, with times in ms: `span_ms` is the gap, the size or the difference."""

    kind: WindowKind
    span_ms: int = 0
    grace_ms: int = 0
    advance_ms: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for times that windows of this kind cannot have."""
        if self.kind == "session" and self.span_ms < 1:
            raise ConfigError(f"session gap must be at least 1 ms, got {self.span_ms}")
        if self.kind == "sliding" and self.span_ms < 0:
            raise ConfigError(f"window time difference must not be negative, got {self.span_ms}")
        if self.kind in ("tumbling", "hopping"):
            if self.span_ms < 1:
                raise ConfigError(f"window size must be at least 1 ms, got {self.span_ms}")
            if not 1 <= self.advance_ms <= self.span_ms:
                raise ConfigError(f"window advance must be from 1 ms to the size {self.span_ms}, got {self.advance_ms}")
            if self.span_ms > self.advance_ms * WINDOWS_MAX:
                definition = f"size {self.span_ms}, advance {self.advance_ms}"
                raise ConfigError(f"a record would be in more than {WINDOWS_MAX} windows: {definition}")
        if self.grace_ms < 0:
            raise ConfigError(f"{self.kind} grace must not be negative, got {self.grace_ms}")

    @property
    def reach_ms(self) -> int:
        """The ms that must be left between a record's timestamp and 2**63 - 1, so that its windows' times fit."""
        if self.kind == "session":
            return self.span_ms + self.grace_ms
        # A sliding window may start 1 ms after a record.
        return self.span_ms + 1 if self.kind == "sliding" else self.span_ms

    @property
    def results_before_ms(self) -> int:
        """By how many ms, at most, the timestamp of an open window's result is below the close time."""
        # A result has the timestamp of its window's latest record, which may be at the window's start. A session's
        # result has the session's end, so it is never below the close time.
        return 0 if self.kind == "session" else self.span_ms

    @property
    def gap_ms(self) -> int:
        """The gap of a session; 0 for other windows."""
        return self.span_ms if self.kind == "session" else 0

    @property
    def size_ms(self) -> int:
        """The size of a window, or a sliding window's time difference; 0 for a session."""
        return 0 if self.kind == "session" else self.span_ms

    @property
    def bounds(self) -> int:
        """The number of cells of a row that are bounds."""
        return 4 if self.kind == "session" else 2

    @property
    def skips_null_values(self) -> bool:
        """Whether a record without a value is skipped, as one without a key is."""
        # KStreamAggregate and KStreamSlidingWindowAggregate skip it. KStreamWindowAggregate and
        # KStreamSessionWindowAggregate aggregate it.
        return self.kind in ("table", "sliding")

    @property
    def retains(self) -> bool:
        """Whether closed windows are retained, because new windows may begin with a copy of their states."""
        return self.kind == "sliding"

    @property
    def retained_ms(self) -> int:
        """How long a closed window is retained."""
        # KStreamSlidingWindowAggregate looks back by twice the difference for a window with whose numbers a new one
        # begins.
        return 2 * self.span_ms if self.retains else 0

    @property
    def bucket_ms(self) -> int:
        """The width of the timer wheel's buckets."""
        return max(1, (self.span_ms + self.grace_ms + self.retained_ms) // BUCKETS_PER_PATIENCE)

    @property
    def waits_ms(self) -> int:
        """How far the close time is behind stream time."""
        # KStreamSessionWindowAggregate subtracts the gap too, because a session can grow until the gap has passed.
        return self.grace_ms + (self.span_ms if self.kind == "session" else 0)

    @property
    def last_ms(self) -> int:
        """How much later than a row's END its window ends: tumbling and hopping windows end after their last moment."""
        return 1 if self.kind in {"tumbling", "hopping"} else 0

    @property
    def rows_per_record(self) -> int:
        """The maximum number of rows that one record needs."""
        return 4 + (self.span_ms // self.advance_ms if self.advance_ms else 0)

    def missed_windows(self, times: Int64Array, close_times_ms: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each record the start of the first window that it missed, and the number of missed windows.

        For sessions the missed window is a session of this record alone. For sliding windows it is the window that ends
        at the record's timestamp, or the one that begins at 0 if that window would begin below 0.

        >>> hopping = WindowRule("hopping", span_ms=10, advance_ms=5)
        >>> [found.tolist() for found in hopping.missed_windows(np.array([12, 12]), np.array([17, 30]))]
        [[5, 5], [1, 2]]
        """
        if self.kind == "session":
            return times, np.ones(len(times), np.int64)
        if self.kind == "sliding":
            return np.maximum(times - self.span_ms, 0), np.ones(len(times), np.int64)
        size = self.span_ms
        advance = self.advance_ms
        first = np.maximum(times - size + advance, 0) // advance
        last = np.minimum(times // advance, (close_times_ms - size) // advance)
        return first * advance, last - first + 1


def hopping_windows(size_ms: int, advance_ms: int, grace_ms: int) -> WindowRule:
    """Return the rule of windows of one size that begin every `advance_ms`; if that is the size, they are tumbling."""
    return WindowRule("tumbling" if size_ms == advance_ms else "hopping", size_ms, grace_ms, advance_ms)
