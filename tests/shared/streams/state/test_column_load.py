"""Sessions restored by the batch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count, Max, Sum
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.state.column_load import load_many
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.column_window_store import ColumnWindowStore

GAP_MS = 10


class Whole(msgspec.Struct):
    """A value of an int64."""

    n: int


Row = tuple[bytes, int, int, int]
"""Key, start, end, count."""


def new_store() -> ColumnSessionStore:
    columns = StateColumns.of([Count(), Max("x").bind(dict)])
    assert columns is not None
    return ColumnSessionStore("s", columns, gap_ms=GAP_MS, text_keys=True)


@st.composite
def snapshots(draw: st.DrawFn) -> list[Row]:
    """Sessions of few keys in any order; those of a key lie more than the gap apart, as live ones do."""
    rows: list[Row] = []
    for key in draw(st.sets(st.sampled_from([b"a", b"b", b"c", "ü".encode()]))):
        at = 0
        for length, distance in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(GAP_MS + 1, 50)), max_size=5)):
            rows.append((key, at, at + length, length + 1))
            at += length + distance
    return draw(st.permutations(rows))


def seen(store: ColumnSessionStore) -> list[Any]:
    """All that a task can ask of the store: rows by key and in order, what closes when, and what a commit writes."""
    rows = sorted((s.key, s.start, s.end, s.states) for s in store.rows())
    chains = {key: [(s.start, s.end) for s in store.rows_of(key)] for key in ("a", "b", "c", "ü")}
    closed = [[(c.key, c.start, c.end, c.states) for c in store.close_before(t, t)] for t in range(0, 400, 7)]
    return [len(store), rows, chains, closed, store.changes()]


@given(snapshots(), st.integers(0, 6))
def test_a_batch_is_the_same_as_its_rows_one_by_one(rows: list[Row], cut: int) -> None:
    """However a snapshot is cut into batches, the store is that of `load` row by row."""
    one, many = new_store(), new_store()
    for key, start, end, count in rows:
        one.load(key.decode(), start, end, [count, (float(count), 1)])
    for part in (rows[:cut], rows[cut:]):
        keys = [row[0] for row in part]
        starts, ends, counts = (np.array([row[i] for row in part], np.int64) for i in (1, 2, 3))
        load_many(many, keys, starts, ends, [counts, counts.astype(float), np.ones(len(part), np.int64)])
    assert seen(many) == seen(one)


@given(st.sets(st.tuples(st.sampled_from(["a", "b", "ü"]), st.integers(0, 20)), min_size=1), st.integers(0, 6))
def test_windows_of_fixed_size_too(places: set[tuple[str, int]], cut: int) -> None:
    """They are found by key and start, and closed, as those that came row by row."""
    one, many = (
        ColumnWindowStore("w", new_store().columns, size_ms=25, advance_ms=10, text_keys=True) for _ in range(2)
    )
    rows = [(key.encode(), number * 10, number * 10 + 25, number + 1) for key, number in places]
    for key, start, end, count in rows:
        one.load(key.decode(), start, end, [count, (float(count), 1)])
    for part in (rows[:cut], rows[cut:]):
        starts, ends, counts = (np.array([row[i] for row in part], np.int64) for i in (1, 2, 3))
        states = [counts, counts.astype(float), np.ones(len(part), np.int64)]
        load_many(many, [row[0] for row in part], starts, ends, states)
    seen = []
    for store in (one, many):
        found = [(w.start, w.states) for key, start, _, _ in rows if (w := store.fetch(key, start)) is not None]
        closed = [[(c.key, c.start, c.end, c.states) for c in store.close_before(t, t)] for t in range(0, 300, 7)]
        seen.append([found, closed, len(store), store.changes()])
        assert len(found) == len(rows)
    assert seen[0] == seen[1]


def test_keys_that_were_forgotten_give_their_numbers_back() -> None:
    """A number that is free again goes to a new key, and the key's name with it."""
    store = new_store()
    ones = np.ones(2, np.int64)
    load_many(store, [b"a", b"b"], ones, ones, [ones, ones.astype(float), ones])
    store.close_before(99, 99)
    store.committed()
    store.key_table.free(store.codes.pop(b"a"))
    load_many(store, [b"x", b"y"], ones, ones, [ones, ones.astype(float), ones])
    assert sorted(s.key for s in store.rows()) == ["x", "y"]
    assert len(store.names) == store.key_table.used


def test_how_large_sums_are_is_known_of_what_was_restored() -> None:
    """By key, of all its sessions or of its largest window; no more is stored of one than `sum_max`."""
    columns = StateColumns([Sum("n").bind(Whole)])
    states: list[Any] = [np.array([-5, 3, 4]), np.ones(3, np.int64)]
    session_store = ColumnSessionStore("s", columns, gap_ms=GAP_MS, text_keys=True)
    window_store = ColumnWindowStore("s", columns, size_ms=10, advance_ms=10, text_keys=True)
    for store, expected in ((session_store, [8, 4]), (window_store, [5, 4])):
        load_many(store, [b"a", b"a", b"b"], np.array([0, 50, 0]), np.array([10, 60, 10]), list(states))
        assert store.magnitudes().tolist() == expected
        assert store.sum_max >= max(expected)
        store.load("b", 70, 80, [(-9, 1)])
        assert store.magnitudes().tolist()[1] == (13 if store is session_store else 9)
        assert store.sum_max >= 13
        store.close_before(61, 100)
        assert store.magnitudes().tolist() == [0, 9]
