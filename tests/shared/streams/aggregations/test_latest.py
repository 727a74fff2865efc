"""The latest timestamp of a window is merged and kept."""

from __future__ import annotations

from penstock.shared.streams.aggregations.latest import Latest


def test_the_latest_timestamp_is_merged_and_kept() -> None:
    """The highest timestamp is the same whatever the order, and survives the changelog."""
    latest = Latest()
    state = latest.merge(latest.add_at(latest.initial(), None, 5), latest.add_at(7, None, 3))
    assert latest.result(latest.from_columns(latest.to_columns(latest.add(state, None)))) == 7
