"""The wait before another attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.backoff import ExponentialBackoff

INITIAL_MS, MAX_MS = 50, 1_000


def test_waits_grow_to_the_limit_and_stay_there() -> None:
    """Each wait is twice the one before it up to the limit, and no number of failures overflows."""
    backoff = ExponentialBackoff(INITIAL_MS, MAX_MS)
    assert [backoff.wait_ms(n) for n in range(7)] == pytest.approx([0, 50, 100, 200, 400, 800, 1_000])
    assert backoff.wait_ms(100_000) == pytest.approx(MAX_MS)


def test_the_multiplier_is_the_growth() -> None:
    """A wait grows by the multiplier, and not at all with a multiplier of one."""
    assert ExponentialBackoff(10, 10_000, multiplier=3).wait_ms(4) == pytest.approx(270)
    assert ExponentialBackoff(10, 10_000, multiplier=1).wait_ms(500) == 10


@pytest.mark.parametrize(("initial_ms", "max_ms", "wait_ms"), [(0, 100, 0), (500, 100, 100), (7, 7, 7)])
def test_limits_at_or_below_the_first_wait(initial_ms: int, max_ms: int, wait_ms: int) -> None:
    """Without a first wait there is none, and a limit below the first wait applies to it."""
    backoff = ExponentialBackoff(initial_ms, max_ms)
    assert [backoff.wait_ms(1), backoff.wait_ms(9)] == [wait_ms, wait_ms]


@given(initial_ms=st.integers(101, 300), failures=st.integers(1, 50), random=st.floats(0, 1))
def test_a_limit_below_the_first_wait_has_no_jitter(initial_ms: int, failures: int, random: float) -> None:
    """Every wait is then the limit (KIP-580)."""
    assert ExponentialBackoff(initial_ms, 100, jitter=0.2).wait_ms(failures, random) == 100


@pytest.mark.parametrize("failures", [1, 2, 50])
def test_equal_waits_have_jitter(failures: int) -> None:
    """If the first wait is the limit, or the multiplier is 1, the waits are still spread."""
    for backoff in (
        ExponentialBackoff(100, 100, jitter=0.2),
        ExponentialBackoff(100, 1_000, multiplier=1, jitter=0.2),
        ExponentialBackoff(100, 100, multiplier=1, jitter=0.2),
    ):
        waits = [backoff.wait_ms(failures, random) for random in (0, 0.25, 0.5, 1)]
        assert waits == pytest.approx([80, 90, 100, min(120, backoff.max_ms)])


@given(failures=st.integers(1, 5_000), random=st.floats(0, 1))
def test_jitter_spreads_both_ways_below_the_limit(failures: int, random: float) -> None:
    """The wait is within the jitter's share of the one without jitter, and never above the limit."""
    plain = ExponentialBackoff(INITIAL_MS, MAX_MS).wait_ms(failures)
    wait_ms = ExponentialBackoff(INITIAL_MS, MAX_MS, jitter=0.2).wait_ms(failures, random)
    assert 0.8 * plain - 1e-6 <= wait_ms <= min(1.2 * plain + 1e-6, MAX_MS)
    assert ExponentialBackoff(INITIAL_MS, MAX_MS, jitter=0.2).wait_ms(2, random=1.0) == pytest.approx(120)
