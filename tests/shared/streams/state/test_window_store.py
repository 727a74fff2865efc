"""The store of windows of fixed size: what is found, what is closed, and what a commit writes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.state.window_store import InMemoryWindowStore


def written(store: InMemoryWindowStore) -> tuple[list[Any], list[Any], list[Any]]:
    """Finals, deleted and live rows of one commit, each by key and start; then the commit."""
    changes = store.changes()
    found = [(f.key, f.start) for f in changes.finals], changes.deleted, [(w.key, w.start) for w in changes.live]
    store.committed()
    return found


def filled(**options: Any) -> InMemoryWindowStore:
    store = InMemoryWindowStore("s", **options)
    for key, start in (("b", 0), ("a", 10), ("a", 0), ("a", 5)):
        store.put(key, start, start + 10, [start])
    return store


def test_fetch_by_start_and_range() -> None:
    """A window is found by its key and start, and a key's windows by a range of starts, both bounds inclusive."""
    store = filled()
    assert (store.fetch("a", 5), store.fetch("a", 6), store.fetch("c", 0)) == (store.rows_of("a")[1], None, None)
    assert [w.start for w in store.fetch_range("a", 0, 5)] == [0, 5]
    assert [w.start for w in store.fetch_range("a", 1, 9)] == [5]
    assert list(store.fetch_range("c", 0, 9)) == []
    assert (len(store), len(list(store.rows()))) == (4, 4)


def test_put_changes_what_is_there() -> None:
    """A second put of a window replaces its states, and is one live row."""
    store = filled()
    store.put("a", 5, 15, ["new"])
    assert [w.states for w in store.rows_of("a")] == [[0], ["new"], [10]]
    assert len(written(store)[2]) == 4


def test_close_once_in_order_of_start_and_key() -> None:
    """Closing takes what ends before the limit, once, and writes finals without tombstones."""
    store = filled()
    assert written(store)[0] == []
    assert [(c.key, c.start, c.closed_at) for c in store.close_before(15, 99)] == [("a", 0, 99), ("b", 0, 99)]
    assert store.close_before(15, 99) == []
    assert written(store) == ([("a", 0), ("b", 0)], [], [])
    assert len(store) == 2


def test_came_and_went_within_a_commit() -> None:
    """What no commit has written needs no tombstone; what one has needs one, also where it came back and went again."""
    store = filled()
    store.remove("a", 5)
    store.remove("a", 6)
    assert written(store) == ([], [], [("b", 0), ("a", 10), ("a", 0)])
    store.remove("a", 10)
    store.put("a", 10, 20, [1])
    assert store.changes().deleted == []
    store.remove("a", 10)
    assert written(store) == ([], [("a", 10)], [])


def test_kept_windows_are_written_again_after_their_final() -> None:
    """With `keeps_closed` a final is followed by the live row, and expiry writes a tombstone."""
    store = filled(keeps_closed=True)
    written(store)
    assert len(store.close_before(15, 99)) == 2
    assert written(store) == ([("a", 0), ("b", 0)], [], [("b", 0), ("a", 0)])
    assert (len(store), store.close_before(15, 99)) == (4, [])
    store.expire_before(0)
    assert written(store) == ([], [], [])
    store.expire_before(1)
    assert written(store) == ([], [("b", 0), ("a", 0)], [])


def test_a_restore_knows_what_was_closed() -> None:
    """After a load, windows before the limit are closed and kept; they are not closed again."""
    store = InMemoryWindowStore("s", keeps_closed=True)
    for start in (0, 5, 10):
        store.load("a", start, start + 10, [start])
    store.unload("a", 5)
    store.unload("a", 7)
    store.mark_closed_before(20)
    assert [c.start for c in store.close_before(21, 99)] == [10]
    assert "Window('a', 0..10, [0], closed)" in map(repr, store.rows())
    assert repr(store) == "InMemoryWindowStore('s', 2 live, 1 dirty, 1 finals)"


operations = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "close", "commit"]), st.sampled_from("ab"), st.integers(0, 9)),
    max_size=40,
)


@given(operations)
def test_the_changelog_holds_what_the_store_holds(steps: list[tuple[str, str, int]]) -> None:
    """Finals and tombstones, then live rows of every commit, applied in order, give the store's live rows."""
    store, log, finals, closed = InMemoryWindowStore("s"), {}, 0, 0
    for number, (operation, key, start) in enumerate([*steps, ("commit", "", 0)]):
        if operation == "put":
            store.put(key, start, start + 3, [number])
        elif operation == "remove":
            store.remove(key, start)
        elif operation == "close":
            closed += len(store.close_before(start, number))
        else:
            changes = store.changes()
            for at in [*((f.key, f.start) for f in changes.finals), *changes.deleted]:
                log.pop(at, None)
            log |= {(w.key, w.start): w.states for w in changes.live}
            finals += len(changes.finals)
            store.committed()
    assert log == {(w.key, w.start): w.states for w in store.rows()}
    assert finals == closed


def test_an_evicted_key_leaves_nothing_behind() -> None:
    """A key that somebody else keeps is gone, also from what is to be closed; dirty keys are named, also of finals."""
    store = filled()
    assert store.dirty_keys() == {"a", "b"}
    store.committed()
    assert (store.dirty_keys(), store.evict("a"), store.evict("a"), len(store)) == (set(), 3, 0, 1)
    assert [c.key for c in store.close_before(99, 99)] == ["b"]
    assert store.dirty_keys() == {"b"}
