"""The manual clock for tests."""

from __future__ import annotations

import pytest

from penstock.shared.testing.manual_clock import ManualClock


def test_both_readings_move_together() -> None:
    """Wall clock and monotonic time advance by the same, the latter from 0."""
    clock = ManualClock(1_000)
    clock.advance(0)
    clock.advance(7)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_007, 7)


def test_never_goes_back() -> None:
    """Moving the clock back is a ValueError, and the clock is unchanged."""
    clock = ManualClock(5)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
    assert clock.now_ms() == 5
