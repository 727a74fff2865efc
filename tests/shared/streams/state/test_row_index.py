"""Rows by key and start, against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.state.growing import GrowingColumns
from penstock.shared.streams.state.row_index import NEVER, NONE, SLOTS_PER_ROW, RowIndex

Place = tuple[int, int]
places = st.tuples(st.integers(0, 40), st.one_of(st.integers(0, 60), st.integers(0, 2**62)))
plans = st.lists(st.tuples(st.sampled_from(["many", "one", "gone"]), st.sets(places, min_size=1)), max_size=30)


@given(plans)
def test_as_a_dict(plan: list[tuple[str, set[Place]]]) -> None:
    """Whatever was added, singly or many at once, and went since, and however often rows are used again."""
    table = GrowingColumns({"key": "int32", "start": "int64"})
    index, known = RowIndex(table), dict[Place, int]()
    for what, some in plan:
        if what == "gone":
            for place in some & known.keys():
                row = known.pop(place)
                table.arrays["start"][row] = NEVER
                table.free(row)
            continue
        new = sorted(some - known.keys())
        rows = table.allocate_many(len(new))
        if new:
            table.arrays["key"][rows], table.arrays["start"][rows] = np.array(new).T
        known |= zip(new, rows.tolist(), strict=True)
        if what == "many":
            index.add(rows)
        else:
            for row in rows.tolist():
                index.add_one(row)
        asked = sorted(some | known.keys() | {(1, 1), (99, 0)})
        expected = [known.get(place, NONE) for place in asked]
        assert index.find(*np.array(asked).T).tolist() == expected
        assert [index.find_one(*place) for place in asked] == expected


def test_it_stays_small_and_finds_all_however_much_comes_and_goes() -> None:
    """A million rows that came and went leave a table for those that there are, and no search is long."""
    table = GrowingColumns({"key": "int32", "start": "int64"})
    index, alive = RowIndex(table), []
    for start in range(0, 200 * 60_000, 60_000):
        rows = table.allocate_many(5_000)
        table.arrays["key"][rows], table.arrays["start"][rows] = np.arange(5_000), start
        index.add(rows)
        alive.append((rows, start))
        if len(alive) > 4:
            gone, _ = alive.pop(0)
            table.arrays["start"][gone] = NEVER
            table.free_many(gone)
    for rows, start in alive:
        assert (index.find(np.arange(5_000), np.full(5_000, start)) == rows).all()
    assert (index.find(np.arange(5_000), np.full(5_000, 60_000)) == NONE).all()
    assert index.bytes <= 25_000 * SLOTS_PER_ROW * 2 * 4
    assert repr(index).startswith(f"<RowIndex of {index.bytes // 4} slots, ")
