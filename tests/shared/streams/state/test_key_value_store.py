"""The store of a table's rows: its reads, and the changes that a commit writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.streams.state.key_value_store import KeyValueStore


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


def test_what_no_commit_has_written_needs_no_tombstone() -> None:
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
def test_the_changelog_holds_what_the_store_holds(steps: list[tuple[str, str, int]]) -> None:
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
