"""What is in the stores, as plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.aggregator.live_state import describe_stores, live_windows
from shared.streams.state.session_store import InMemorySessionStore, Session


def tasks() -> dict[int, Any]:
    """Two partitions with sessions of three keys, and a third that is being restored."""
    held: dict[int, Any] = {2: SimpleNamespace(task=None)}
    for partition, keys in ((0, [b"ann", b"bob"]), (1, [b"anna"])):
        store = InMemorySessionStore("sessions")
        for i, key in enumerate(keys):
            store.put(Session(key, i * 10, i * 10 + 5 + partition, [i, {"x": b"y"}]))
        held[partition] = SimpleNamespace(task=SimpleNamespace(stores={"sessions": store}))
    return held


def test_stores_are_counted_by_partition() -> None:
    """A task that is being restored has none yet."""
    assert describe_stores(tasks()) == [{"store": "sessions", "rows": {"0": 2, "1": 1}, "total": 3}]


def test_windows_end_last_first_and_are_found_by_key() -> None:
    """Over all partitions, up to the limit; another store has none."""
    assert [w["key"] for w in live_windows(tasks(), None, "", 10)] == ["bob", "anna", "ann"]
    assert [w["key"] for w in live_windows(tasks(), "sessions", "an", 10)] == ["anna", "ann"]
    assert [w["key"] for w in live_windows(tasks(), None, "", 1)] == ["bob"]
    assert live_windows(tasks(), "other", "", 10) == []
    (row,) = live_windows(tasks(), None, "bob", 10)
    assert (row["partition"], row["start_ms"], row["end_ms"], row["states"]) == (0, 10, 15, [1, {"x": "y"}])
