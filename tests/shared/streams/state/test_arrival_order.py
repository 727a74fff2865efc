"""Of which keys a batch merges sessions, against sessions that are made record by record."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.state.arrival_order import merging_keys
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.session_store import InMemorySessionStore, Session

GAP = 10
record = st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 120))


@settings(max_examples=400)
@given(st.lists(record, max_size=6), st.lists(record, min_size=2, max_size=8) | st.just([]))
def test_as_one_by_one(before: list[tuple[bytes, int]], batch: list[tuple[bytes, int]]) -> None:
    """A key is named if, and only if, one of its records finds two sessions, stored ones or of the batch."""
    store = ColumnSessionStore("s", StateColumns([Count()]), gap_ms=GAP, text_keys=False)
    model = InMemorySessionStore("s")
    for key, at in before:
        for one in (store, model):
            take(one, key, at)
    codes, times = np.array([store.code_of(key) for key, _ in batch], np.int64), np.array([at for _, at in batch])
    order = np.lexsort((times, codes)) if batch else codes
    found = merging_keys(store, codes[order], times[order] if batch else codes, order, GAP)
    expected = {key for key, at in batch if take(model, key, at)}
    assert set(store.raw_keys(found)) == expected


def take(store: ColumnSessionStore | InMemorySessionStore, key: bytes, at: int) -> bool:
    """One record; whether it found two sessions."""
    found = store.find(key, at - GAP, at + GAP)
    for other in found[1:]:
        store.remove(other)
    if found:
        store.extend(found[0], min(at, found[0].start), max(at, found[-1].end), [1])
    else:
        store.put(Session(key, at, at, [1]))
    return len(found) > 1
