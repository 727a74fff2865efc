"""The store of a join: its lookups, its expiry and the changes that a commit writes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.state.join_store import JoinStore


def written(store: JoinStore) -> tuple[list[Any], list[Any]]:
    """Commits and returns the deleted and live rows of the commit, by key and start."""
    changes = store.changes()
    found = changes.deleted, [(row.key, row.start) for row in changes.live]
    store.committed()
    return found


def filled() -> JoinStore:
    store = JoinStore("s")
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
    assert len(written(store)[1]) == 4


def test_taken_once_in_order_of_start_and_key() -> None:
    """Rows that end before the limit are removed once. If a commit has written a row, the next one deletes it."""
    store = filled()
    assert len(written(store)[1]) == 4
    assert [(row.key, row.start) for row in store.take_before(15)] == [("a", 0), ("b", 0)]
    assert store.take_before(15) == []
    assert sorted(written(store)[0]) == [("a", 0), ("b", 0)]
    assert len(store) == 2


def test_came_and_went_within_a_commit() -> None:
    """A row that no commit has written needs no tombstone. A written row needs one, also if it returned and was removed
    again."""
    store = filled()
    store.remove("a", 5)
    store.remove("a", 6)
    assert written(store) == ([], [("b", 0), ("a", 10), ("a", 0)])
    store.remove("a", 10)
    store.put("a", 10, 20, [1])
    assert store.changes().deleted == []
    store.remove("a", 10)
    assert written(store) == ([("a", 10)], [])


operations = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "take", "commit"]), st.sampled_from("ab"), st.integers(0, 9)),
    max_size=40,
)


@given(operations)
def test_the_changelog_holds_what_the_store_holds(steps: list[tuple[str, str, int]]) -> None:
    """Deletions, then live rows of every commit, applied in order, give the store's live rows."""
    store: JoinStore = JoinStore("s")
    log: dict[Any, Any] = {}
    for number, (operation, key, start) in enumerate([*steps, ("commit", "", 0)]):
        if operation == "put":
            store.put(key, start, start + 3, [number])
        elif operation == "remove":
            store.remove(key, start)
        elif operation == "take":
            store.take_before(start)
        else:
            changes = store.changes()
            for at in changes.deleted:
                log.pop(at, None)
            log |= {(w.key, w.start): w.states for w in changes.live}
            store.committed()
    assert log == {(w.key, w.start): w.states for w in store.rows()}


def test_an_evicted_key_leaves_nothing_behind() -> None:
    """An evicted key is removed, also from the rows to expire. Changed keys are dirty."""
    store = filled()
    assert store.dirty_keys() == {"a", "b"}
    store.committed()
    assert (store.dirty_keys(), store.evict("a"), store.evict("a"), len(store)) == (set(), 3, 0, 1)
    assert [row.key for row in store.take_before(99)] == ["b"]
    assert store.dirty_keys() == {"b"}
