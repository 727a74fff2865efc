"""The column store one window at a time, against the store of objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count, Max
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.state import column_store
from penstock.shared.streams.state.column_window_store import ColumnWindowStore
from penstock.shared.streams.state.window_store import InMemoryWindowStore, WindowChanges

SIZE, ADVANCE = 25, 10

Live = dict[tuple[Any, int], tuple[int, Any]]


def store_of(*, text_keys: bool = True) -> ColumnWindowStore:
    columns = StateColumns([Latest(), Count(), Max("ms").bind(dict)])
    return ColumnWindowStore("w", columns, size_ms=SIZE, advance_ms=ADVANCE, text_keys=text_keys)


def replay(changes: WindowChanges, log: Live) -> None:
    """What a reader of the changelog does with one commit."""
    for at in [(final.key, final.start) for final in changes.finals] + changes.deleted:
        log.pop(at, None)
    for window in changes.live:
        log[window.key, window.start] = (window.end, window.states)


def take(store: ColumnWindowStore | InMemoryWindowStore, key: str, start: int) -> None:
    """One record, as the operator takes it."""
    window = store.fetch(key, start)
    count = 1 if window is None else window.states[1] + 1
    store.put(key, start, start + SIZE, [start + count, count, (float(count), count)])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from("abc"), st.integers(0, 30)),
        st.tuples(st.just("close"), st.just(""), st.integers(0, 40)),
        st.tuples(st.sampled_from(["commit", "restore", "unload"]), st.sampled_from("abc"), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(steps)
def test_equal_to_the_store_of_objects(plan: list[tuple[str, str, int]]) -> None:
    """Found, closed and live windows are those of the other store, and so is what a reader makes of the changelog."""
    stores: list[Any] = [store_of(), InMemoryWindowStore("w")]
    logs: list[Live] = [{}, {}]
    limit = 0
    for what, key, number in plan:
        if what == "take":
            for store in stores:
                store.touched = False
                take(store, key, (limit // ADVANCE + number) * ADVANCE)
                assert store.touched
        elif what == "close":
            limit += number
            closed = [store.close_before(limit, limit + 5) for store in stores]
            assert closed[0] == closed[1]
            assert {stores[0].fetch(final.key, final.start) for final in closed[0]} <= {None}
        elif what == "unload":
            for store, log in zip(stores, logs, strict=True):
                replay(store.changes(), log)
                store.committed()
                store.unload(key, number * ADVANCE)
                log.pop((key, number * ADVANCE), None)
        else:
            for store, log in zip(stores, logs, strict=True):
                replay(store.changes(), log)
                store.committed()
            assert logs[0] == logs[1]
            if what == "restore":
                stores[0] = store_of()
                for (own, start), (end, states) in logs[1].items():
                    stores[0].load(own, start, end, states)
        ours, theirs = (sorted((w.key, w.start, w.end, w.states) for w in store.rows()) for store in stores)
        assert ours == theirs
        assert len(stores[0]) == len(ours)
        for own in "abc":
            assert [w.start for w in stores[0].rows_of(own)] == [w.start for w in stores[1].rows_of(own)]
        assert sorted((w.key, w.start) for w in stores[0].rows_of_many(["a", "x", "c"])) == [
            (w.key, w.start) for own in "ac" for w in stores[1].rows_of(own)
        ]


def test_keys_are_forgotten_with_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many keys that have no window any more the store keeps no more than it says, and their numbers are reused."""
    monkeypatch.setattr(column_store, "IDLE_KEYS_MIN", 10)
    store = store_of()
    for turn in range(20):
        for number in range(10):
            take(store, f"{turn}-{number}", turn * 100)
        store.close_before(turn * 100 + 50, turn * 100 + 50)
        store.committed()
    assert len(store.codes) <= 31
    assert (store.key_table.used <= 40, store.table.used <= 20) == (True, True)
    assert list(store.rows()) == store.rows_of("0-0") == []
    assert repr(store) == f"ColumnWindowStore('w', 0 live, {len(store.codes) - 1} keys)"


def test_keys_are_text_or_bytes_as_the_stream_has_them() -> None:
    """A store of text gives text back, one of bytes gives bytes, and what is no key finds nothing."""
    for text_keys, key in ((True, "ä"), (False, b"\xff\x00")):
        store = store_of(text_keys=text_keys)
        store.put(key, 10, 35, [1, 1, (0.0, 1)])
        assert [w.key for w in store.rows()] == [key]
        assert store.fetch(7, 10) is store.fetch("\ud800", 10) is store.fetch(key, 20) is None


def test_what_is_fetched_is_a_copy() -> None:
    """A window as handed out does not change what the store has until it is put back."""
    store = store_of()
    take(store, "a", 10)
    window = store.fetch("a", 10)
    assert window is not None
    window.states[1] = 99
    assert [w.states[1] for w in store.rows()] == [1]
