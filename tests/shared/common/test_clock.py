"""The system clock, and the manual clock for tests."""

from __future__ import annotations

import pytest

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.testing.manual_clock import ManualClock

MS_2020, MS_2200 = 1_577_836_800_000, 7_258_118_400_000


def test_units_are_ms() -> None:
    """The system's clock is a whole number of milliseconds since the epoch."""
    assert MS_2020 < SYSTEM_CLOCK.now_ms() < MS_2200
    assert isinstance(SYSTEM_CLOCK.now_ms(), int)


def test_monotonic_never_goes_back() -> None:
    """Monotonic readings never decrease."""
    readings = [SYSTEM_CLOCK.monotonic_ms() for _ in range(100)]
    assert readings == sorted(readings)
    assert isinstance(readings[0], int)


def test_both_clocks_are_clocks() -> None:
    """The system's and the manual clock have the same interface."""
    clocks: list[Clock] = [SYSTEM_CLOCK, ManualClock(MS_2020 + 1)]
    assert all(clock.now_ms() > MS_2020 and clock.monotonic_ms() >= 0 for clock in clocks)


def test_both_readings_of_the_manual_clock_move_together() -> None:
    """Wall clock and monotonic time advance by the same, the latter from 0."""
    clock = ManualClock(1_000)
    clock.advance(0)
    clock.advance(7)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_007, 7)


def test_the_manual_clock_never_goes_back() -> None:
    """Moving the clock back is a ValueError, and the clock is unchanged."""
    clock = ManualClock(5)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
    assert clock.now_ms() == 5
