"""Records into windows by the batch, against one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count, Min
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.state import window_merge
from penstock.shared.streams.state.column_window_store import ColumnWindowStore
from penstock.shared.streams.state.window_merge import take_into_windows

SIZE_MS, ADVANCE_MS = 30, 10

Taken = tuple[int, int, int, int]
"""Key, first window, how many more, and the number; the time is the number's."""
taken = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 4), st.integers(-50, 50))


def windows_after(batches: list[list[Taken]]) -> dict[tuple[str, int], list[object]]:
    """Each window's states after these batches, and that of their rows those are dirty that were touched."""
    columns = StateColumns.of([Latest(), Count(), Min("x").bind(dict)])
    assert columns is not None
    store = ColumnWindowStore("s", columns, size_ms=SIZE_MS, advance_ms=ADVANCE_MS, text_keys=True)
    for batch in batches:
        keys, first, more, numbers = (np.array(column) for column in zip(*batch, strict=True))
        codes = np.array([store.code_of(b"%d" % key) for key in keys.tolist()])
        states = columns.take([{"x": x} for x in numbers.tolist()], numbers + 100)
        take_into_windows(store, codes, first, first + more, states)
        touched = {(f"{k}", n * ADVANCE_MS) for k, f, m, _ in batch for n in range(f, f + m + 1)}
        assert {(w.key, w.start) for w in store.changes().live} == touched
        store.committed()
    assert all(w.end == w.start + SIZE_MS for w in store.rows())
    assert len({(w.key, w.start) for w in store.rows()}) == len(store)
    return {(w.key, w.start): w.states for w in store.rows()}


@pytest.mark.parametrize("at_once", [1, 7, 1 << 18])
@given(st.lists(st.lists(taken, min_size=1, max_size=30), min_size=1, max_size=4))
def test_each_window_has_the_records_that_are_in_it(at_once: int, batches: list[list[Taken]]) -> None:
    """However records lie over windows, and however many pairs of both are in memory at a time."""
    expected: dict[tuple[str, int], list[int]] = {}
    for key, first, more, number in (one for batch in batches for one in batch):
        for window in range(first, first + more + 1):
            expected.setdefault((f"{key}", window * ADVANCE_MS), []).append(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_merge, "PAIRS_AT_ONCE", at_once)
        found = windows_after(batches)
    assert found == {w: [max(ns) + 100, len(ns), (float(min(ns)), len(ns))] for w, ns in expected.items()}
