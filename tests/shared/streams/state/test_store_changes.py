"""The stores of rows and of joins: their reads, and the changes that a commit writes."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.streams.state.join_store import HEAP_SPARE, JoinStore
from penstock.shared.streams.state.key_value_store import KeysByHash, KeyValueStore


def test_rows_by_key() -> None:
    """A row is set, replaced and deleted. None also deletes, and a missing row is None."""
    store = KeyValueStore("s")
    store.put("a", 1)
    store.put("b", 2)
    store.put("a", 3)
    assert (store.get("a"), dict(store.items()), len(store), store.touched) == (3, {"a": 3, "b": 2}, 2, True)
    store.put("a", None)
    store.delete("c")
    assert (store.get("a"), store.rows_of("a"), repr(store.rows_of("b"))) == (None, [], "[TableRow('b': 2)]")
    assert repr(store) == "KeyValueStore('s', 1 rows, 1 dirty)"


@pytest.mark.parametrize("key", [None, 7, ("a",), [1]])
def test_a_key_is_text_or_bytes(key: Any) -> None:
    """A key that is neither text nor bytes raises DataError, in every call."""
    store = KeyValueStore[Any, Any]("s")
    for call in (lambda: store.put(key, 1), lambda: store.put(key, None), partial(store.get, key),
                 partial(store.delete, key), partial(store.rows_of, key)):  # fmt: skip
        with pytest.raises(DataError, match=r"store 's'.*key"):
            call()


@pytest.mark.parametrize(("text_keys", "own", "other"), [(True, "ü", "ü".encode()), (False, "ü".encode(), "ü")])
def test_a_text_and_its_bytes_are_one_key(text_keys: bool, own: str | bytes, other: str | bytes) -> None:
    """The changelog has one key for both, so the store has one row, whose key has the store's type."""
    store = KeyValueStore[Any, int]("s", text_keys=text_keys)
    store.put(own, 1)
    store.put(other, 2)
    assert (list(store.items()), store.get(own), store.get(other)) == ([(own, 2)], 2, 2)
    assert [row.key for row in store.changes().live] == [own]
    assert [row.key for row in store.rows_of(other)] == [own]
    store.delete(other)
    assert len(store) == 0


def test_bytes_that_are_no_text_are_no_key_of_text() -> None:
    """They cannot be put into a store of text keys, whose restore would fail. There is no such row."""
    store = KeyValueStore[Any, int]("s")
    with pytest.raises(DataError, match=r"store 's'.*UTF-8"):
        store.put(b"\xff", 1)
    with pytest.raises(DataError, match=r"store 's'.*UTF-8"):
        store.put(b"\xff", None)
    store.delete(b"\xff")
    assert (store.get(b"\xff"), len(store)) == (None, 0)
    raw = KeyValueStore[Any, int]("s", text_keys=False)
    raw.put(b"\xff", 1)
    assert raw.get(b"\xff") == 1


def test_keys_with_one_hash_are_not_hashed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such keys are easily made, also by others. They are found by their hash, like keys whose hashes differ."""
    hashed = []

    def key_hash(raw: bytes) -> int:
        hashed.append(raw)
        return 7 if raw.startswith(b"same") else len(raw)

    monkeypatch.setattr("penstock.shared.streams.state.key_value_store.key_hash", key_hash)
    keys = KeysByHash()
    added = [f"same{i}" for i in range(2_000)] + ["x" * (1 + i % 20) + f"{i:03}" for i in range(900)]
    for key in added:
        keys.add(key)
    assert len(hashed) < 10 * len(added)
    for key in added[::2]:
        keys.remove(key)
    kept = added[1::2]
    assert sorted(keys.between(7, 9)) == sorted(key for key in kept if 7 <= key_hash(key.encode()) <= 9)


def test_a_row_deleted_before_its_first_commit_needs_no_tombstone() -> None:
    """A row that was set and deleted within a commit leaves nothing. A written row leaves a tombstone."""
    store = KeyValueStore("s")
    store.put("a", 1)
    store.delete("a")
    assert store.changes() == ([], [])
    store.put("a", 1)
    store.committed()
    store.delete("a")
    store.put("a", 2)
    store.delete("a")
    assert store.changes().deleted == [("a", 0)]


operations = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "commit"]), st.sampled_from("ab"), st.integers(0, 9)), max_size=30
)


@given(operations)
def test_the_changelog_holds_what_a_store_of_rows_holds(steps: list[tuple[str, str, int]]) -> None:
    """Tombstones, then live rows of each commit, loaded into another store, give the same rows."""
    store, restored = KeyValueStore("s"), KeyValueStore("s")
    for operation, key, value in [*steps, ("commit", "", 0)]:
        if operation == "put":
            store.put(key, value)
        elif operation == "delete":
            store.delete(key)
        else:
            for gone, start in store.changes().deleted:
                restored.unload(gone, start)
            for row in store.changes().live:
                restored.load(row.key, row.start, row.end, row.states)
            store.committed()
    assert dict(store.items()) == dict(restored.items())
    assert [row.key for row in store.rows()] == list(dict(store.items()))
    assert restored.changes() == ([], [])


def test_an_evicted_row_is_no_change() -> None:
    """Evicting a row is not a change. Changed and deleted keys are dirty."""
    store = KeyValueStore("s")
    store.load("a", 0, 0, [1])
    store.put("b", 2)
    assert (store.dirty_keys(), store.evict("a"), store.evict("a"), store.get("a")) == ({"b"}, 1, 0, None)
    store.committed()
    store.delete("b")
    assert store.dirty_keys() == {"b"}


def test_only_put_changes_a_row() -> None:
    """Callers may change values that they put or got: the store has its own copy."""
    store, row = KeyValueStore("s"), {"n": [1]}
    store.put("a", row)
    row["n"].append(2)
    store.get("a")["n"].append(3)
    next(store.items())[1]["n"].append(4)
    assert store.get("a") == {"n": [1]}


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
    store.put("a", 1, 2, [1])
    store.take_before(3)
    assert written(store) == ([], [("b", 0), ("a", 10), ("a", 0), ("a", 5)])
    store.take_before(16)
    store.put("a", 5, 15, [1])
    assert sorted(store.changes().deleted) == [("a", 0), ("b", 0)]
    store.take_before(16)
    assert [sorted(rows) for rows in written(store)] == [[("a", 0), ("a", 5), ("b", 0)], []]


join_operations = st.lists(
    st.tuples(st.sampled_from(["put", "take", "commit"]), st.sampled_from("ab"), st.integers(0, 9)),
    max_size=40,
)


@given(join_operations)
def test_the_changelog_holds_what_a_store_of_joins_holds(steps: list[tuple[str, str, int]]) -> None:
    """Deletions, then live rows of every commit, applied in order, give the store's live rows."""
    store: JoinStore = JoinStore("s")
    log: dict[Any, Any] = {}
    for number, (operation, key, start) in enumerate([*steps, ("commit", "", 0)]):
        if operation == "put":
            store.put(key, start, start + 3, [number])
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


class Value:
    """A value of a joined record."""


def test_restored_removals_free_the_memory() -> None:
    """A standby adds and removes rows for weeks, and never closes one. Few of the removed rows stay in memory."""
    store = filled()
    in_memory = weakref.WeakSet[Value]()
    for start in range(20, 5 * HEAP_SPARE):
        value = Value()
        in_memory.add(value)
        store.load("a", start, start + 10, [value])
        store.unload("a", start)
    del value
    assert (len(store), len(in_memory) <= HEAP_SPARE + 2 * len(store)) == (4, True)
    assert [row.start for row in store.take_before(10**6)] == [0, 0, 5, 10]
