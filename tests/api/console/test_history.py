"""The history that the charts show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.console.history import History, point


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(2, 20))
def test_it_is_bounded_in_order_and_keeps_its_beginning(steps: list[int], points_max: int) -> None:
    """The history never exceeds its limit of points, is ordered by time and keeps its first point."""
    history, at_ms = History(every_ms=100, points_max=points_max), 0
    for step in steps:
        at_ms += step
        history.add({"now_ms": at_ms})
        times = [p["at_ms"] for p in history.points]
        assert len(times) <= points_max
        assert times == sorted(set(times))
        assert times[0] == steps[0]


def test_a_point_summarizes_an_overview() -> None:
    """A point has the lag of all groups, and None for unknown values."""
    overview = {"now_ms": 7, "ingest": {"records_per_second": 2.0}, "groups": [{"lag": 3}, {"lag": 4}]}
    taken = point(overview)
    assert (taken["at_ms"], taken["records_per_second"], taken["lag"], taken["state_rows"]) == (7, 2.0, 7, None)
