"""The changes of a changelog's tail that are kept for a query of windows."""

from __future__ import annotations

import pytest

from penstock.services.aggregator import changelog_tail
from penstock.services.aggregator.changelog_tail import TailChanges
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.changelog_reader import Change
from penstock.shared.streams.changelog.format import DELETED, FINAL, LIVE
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

STORE = StoreSchema(
    *("s", "session", "string", 10, 5, "on_close", "in", None, None, None),
    (AggregationSchema.of("n", Count()),),
)
ONE = StateCodec(STORE.state_columns()).pack([1])


def change(operation: bytes, start: int, end: int = 0, key: bytes = b"k", store: str = "s") -> Change:
    return Change(operation, store, key, start, end, b"" if operation == DELETED else ONE, STORE)


def kept(*changes: Change, reach: tuple[int, int] = (100, 200), keys: KeyRange | None = None) -> list[tuple[str, int]]:
    """The kind and end of the kept changes."""
    own = TailChanges(keys or KeyRange.of(), reach, "s")
    for one in changes:
        own.keep(one)
    names = {LIVE: "live", FINAL: "final", DELETED: "deleted"}
    return [(names[kept_change.operation], kept_change.end) for kept_change in own]


def test_the_newest_change_of_each_window_is_kept() -> None:
    """Only the newest change of a window is kept.

    A closed window is not open, and windows with one start may be closed with several ends.
    """
    assert kept(*(change(LIVE, 90, 90 + i) for i in range(50))) == [("live", 139)]
    assert kept(change(LIVE, 90, 120), change(FINAL, 90, 120)) == [("final", 120)]
    closed_twice = (change(FINAL, 90, 120), change(LIVE, 90, 130), change(FINAL, 90, 140), change(LIVE, 90, 150))
    assert kept(*closed_twice) == [("final", 120), ("final", 140), ("live", 150)]
    assert kept(change(LIVE, 90, 120), change(DELETED, 90)) == [("deleted", 0)]
    assert kept(change(LIVE, 90, 120), change(LIVE, 90, 120, b"other")) == [("live", 120)] * 2


def test_changes_outside_the_query_are_not_kept() -> None:
    """Windows outside the queried times, other keys and other stores are not kept."""
    assert kept(change(LIVE, 90, 99), change(FINAL, 90, 99), change(LIVE, 201, 250), change(DELETED, 201)) == []
    assert kept(change(LIVE, 200, 250), change(FINAL, 90, 100)) == [("live", 250), ("final", 100)]
    assert kept(change(LIVE, 100, 110, store="t")) == []
    assert kept(change(LIVE, 100, 110), change(LIVE, 100, 120, b"j"), keys=KeyRange.of("k")) == [("live", 110)]


def test_a_busy_key_can_be_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to windows, not to changes; above it the query is a ConfigError, and a
    shorter time has fewer windows.
    """
    monkeypatch.setattr(changelog_tail, "CHANGES_MAX", 3)
    grown = [change(LIVE, start, start + i) for start in (100, 120, 140) for i in range(9)]
    assert len(kept(*grown)) == 3
    old = [change(FINAL, start, start + 5) for start in range(90)]
    assert len(kept(*old, *grown)) == 3
    with pytest.raises(ConfigError, match="over 3 windows"):
        kept(*grown, change(LIVE, 160, 170))
    assert len(kept(*grown, change(LIVE, 160, 170), reach=(100, 150))) == 3
