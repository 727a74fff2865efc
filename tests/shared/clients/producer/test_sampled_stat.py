"""Rates, averages and maxima of the last while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.sampled_stat import ELAPSED_MS_MIN, SampledStat


def test_nothing_recorded() -> None:
    """All figures are 0, and stay so."""
    samples = SampledStat(1_000, 2)
    assert (samples.average(5), samples.highest(5), samples.per_second(5)) == (0, 0, 0)
    assert repr(samples) == "<SampledStat 0 values>"


def test_a_rate_needs_some_time() -> None:
    """Ten records in the first ms are not ten thousand a second."""
    samples = SampledStat(30_000, 2)
    samples.record(10, 1)
    assert samples.per_second(2) == 10 * 1_000 / ELAPSED_MS_MIN
    assert samples.per_second(5_001) == 2


def test_old_windows_are_forgotten_whole() -> None:
    """Average and maximum leave out values of expired windows."""
    samples = SampledStat(100, 2)
    samples.record(9, 0)
    samples.record(1, 150)
    assert (samples.average(199), samples.highest(199)) == (5, 9)
    assert (samples.average(200), samples.highest(200)) == (1, 1)
    assert samples.average(350) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1_000)), max_size=200), st.integers(1, 4))
def test_figures_are_those_of_recent_values(steps: list[tuple[int, int]], windows: int) -> None:
    """Figures include all values of the last `windows - 1` windows, and no value older than `windows` windows."""
    samples, now_ms, seen = SampledStat(100, windows), 0, list[tuple[int, int]]()
    for after_ms, value in steps:
        now_ms += after_ms
        samples.record(value, now_ms)
        seen.append((now_ms, value))
        recent = [v for at, v in seen if now_ms - at < 100 * (windows - 1)]
        possible = [v for at, v in seen if now_ms - at < 100 * windows]
        assert max(recent, default=0) <= samples.highest(now_ms) <= max(possible)
        total = samples.per_second(now_ms) * max(now_ms - samples._windows[0].start_ms, ELAPSED_MS_MIN) / 1_000
        assert sum(recent) - 1e-6 <= total <= sum(possible) + 1e-6
