"""What no column holds, grids of stream time and crashes, in the midst of columns of any kind of window."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.streams.windowed_aggregate import Emit
from tests.shared.streams.columns_beside_records import (
    Piped,
    Windowed,
    batches,
    below,
    emits,
    hopping,
    inputs,
    pair_of,
    require_equal,
    schedule,
    sessions,
    sizes,
    topology,
)

graces = st.sampled_from([0, 7, 30])
windows = st.one_of(
    st.builds(sessions, st.sampled_from([1, 10, 20]), graces),
    st.builds(hopping, st.just(20), st.sampled_from([20, 7, 5]), graces),
)


@settings(max_examples=200)
@given(windows, inputs(with_odd=True), sizes, emits, below, st.data())
def test_odd_records_grids_and_crashes(
    windowed: Windowed, records: list[Piped], parts: list[int], emit: Emit, below: str, data: st.DataObject
) -> None:
    """What cannot be taken as a column, a grid of stream time in the midst and a crash change nothing of that."""
    interval = data.draw(st.sampled_from([None, 7, 50]))
    columns_min = data.draw(st.sampled_from([1, 4]))
    drivers: list[tuple[Any, list[Any]]] = []
    for driver in pair_of(topology(windowed, emit, below=below), columns_min):
        drivers.append((driver, []))
        schedule(driver, interval, drivers[-1][1])
    for batch in batches(records, parts):
        crash = data.draw(st.integers(0, 5)) == 0
        for driver, seen in drivers:
            driver.pipe_columns("in", batch)
            if crash:
                seen.clear()
                driver.crash(torn_entries=2)
                driver.restore()
                schedule(driver, interval, seen)
            driver.commit()
        require_equal(drivers[0][0], drivers[1][0])
        assert drivers[0][1] == drivers[1][1]
