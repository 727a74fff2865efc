"""Closing by the batch: what goes, and in which order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.state.column_close import close_at_once, close_due
from penstock.shared.streams.state.column_window_store import ColumnWindowStore
from penstock.shared.streams.state.window_store import InMemoryWindowStore

starts = st.integers(0, 3).map(lambda n: n * 10)
keys = st.text("ab\x00\u00e9\U0001f600", max_size=3)


@given(st.sets(st.tuples(keys, starts), max_size=40), st.booleans())
def test_of_equal_bounds_in_order_of_the_keys(windows: set[tuple[str, int]], at_once: bool) -> None:
    """Both ways give what a store of objects does, in its order."""
    store = ColumnWindowStore("s", StateColumns([Count()]), size_ms=10, advance_ms=10, text_keys=True)
    objects = InMemoryWindowStore("s")
    for key, start in windows:
        for each in (store, objects):
            each.put(key, start, start + 10, [start])
    if at_once:
        closed = close_at_once(store, store.wheel.due(31), 31, 31)
    else:
        closed = close_due(store, 31, lambda ends: np.full(len(ends), 31))
    expected = [(w.key, w.start, w.end, w.closed_at, w.states[0]) for w in objects.close_before(31, 31)]
    found = [] if closed is None else [(raw.decode(), *rest) for raw, *rest in closed.tuples(closed=True)]
    assert found == expected
    assert len(store) == len(objects)
