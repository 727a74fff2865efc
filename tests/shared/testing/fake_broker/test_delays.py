"""Responses that arrive later, and the timers that they wait for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.timers import Timers


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 30)))
def test_timers_run_in_order(dues: list[int], nows: list[int]) -> None:
    """Due timers run once, ordered by due time, and none runs early."""
    timers, happened = Timers(), []
    for due in dues:
        timers.at(due, lambda now, due=due: happened.append((due, now)))  # type: ignore[misc]
    for now in sorted(nows):
        timers.run(now)
        assert sorted(due for due, _ in happened) == sorted(due for due in dues if due <= now)
    assert happened == sorted(happened)
    assert all(due <= now for due, now in happened)


def test_a_cancelled_timer_does_not_run() -> None:
    """A cancelled timer does not run and is not waited for."""
    timers, happened = Timers(), []
    first = timers.at(1, happened.append)
    timers.at(2, happened.append)
    first.cancel()
    assert timers.next_ms == 2
    timers.run(5)
    assert happened == [5]
    assert timers.next_ms is None


def test_a_timer_can_set_another_one() -> None:
    """A timer that is set by a timer and is due runs in the same turn."""
    timers, happened = Timers(), []
    timers.at(1, lambda now: timers.at(now, happened.append))  # type: ignore[arg-type, return-value]
    timers.run(1)
    assert happened == [1]


def test_a_response_comes_once() -> None:
    """Only the first response counts, for callbacks added before and after it."""
    later, seen = DelayedResponse(), []
    later.then(seen.append)
    later.complete(1)
    later.complete(2)
    later.then(seen.append)
    assert seen == [1, 1]
    assert repr(later) == "DelayedResponse(1)"
