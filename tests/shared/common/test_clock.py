"""The clock that edges read."""

from __future__ import annotations

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.testing.manual_clock import ManualClock

MS_2020, MS_2200 = 1_577_836_800_000, 7_258_118_400_000


def test_units_are_ms() -> None:
    """The system's clock is in milliseconds since the epoch, as whole numbers."""
    assert MS_2020 < SYSTEM_CLOCK.now_ms() < MS_2200
    assert isinstance(SYSTEM_CLOCK.now_ms(), int)


def test_monotonic_never_goes_back() -> None:
    """Readings for durations only rise."""
    readings = [SYSTEM_CLOCK.monotonic_ms() for _ in range(100)]
    assert readings == sorted(readings)
    assert isinstance(readings[0], int)


def test_both_clocks_are_clocks() -> None:
    """The manual clock stands in wherever the system's does."""
    clocks: list[Clock] = [SYSTEM_CLOCK, ManualClock(MS_2020 + 1)]
    assert all(clock.now_ms() > MS_2020 and clock.monotonic_ms() >= 0 for clock in clocks)
