"""The benchmark of sessions: what it asks for, and what it measures without a broker."""

from __future__ import annotations

from bench import sessions


def test_what_is_asked_for_is_measured() -> None:
    """Every ratio is one of contestants."""
    assert {name for *names, _ in sessions.WANTED for name in names} <= set(sessions.CONTESTANTS)


def test_live_sessions_take_little_memory() -> None:
    """A live session with a count and a mean takes no more than what is asked for."""
    assert 100 < sessions.bytes_per_session(100_000) <= sessions.SESSION_BYTES_MAX


def test_a_latency_counts_at_the_rate_that_was_asked_for() -> None:
    """Soon enough is not enough where fewer records were sent, nor the rate where results come late."""
    held = {"p99_ms": 250.0, "offered_per_second": 9_800.0}
    assert sessions.latency_holds(held)
    assert not sessions.latency_holds(held | {"offered_per_second": 9_799.0})
    assert not sessions.latency_holds(held | {"p99_ms": 250.1})
