"""The vectorized executor equals record-by-record processing, with invalid records, schedules and crashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.records import Columns
from penstock.shared.streams.windows.window_rule import Emit
from tests.property_tests import examples
from tests.shared.streams.batches_beside_records import (
    Piped,
    Windowed,
    batches,
    below,
    emits,
    hopping,
    inputs,
    pair_of,
    pipe_all,
    require_equal,
    schedule,
    sessions,
    sizes,
    sliding,
    topology,
)

graces = st.sampled_from([0, 7, 30])
windows = st.one_of(
    st.builds(sessions, st.sampled_from([1, 10, 20]), graces),
    st.builds(hopping, st.just(20), st.sampled_from([20, 7, 5]), graces),
    st.builds(sliding, st.sampled_from([0, 10, 20]), graces),
)


@settings(max_examples=examples(200))
@given(windows, inputs(with_odd=True), sizes, emits, below, st.data())
def test_odd_records_grids_and_crashes(
    windowed: Windowed, records: list[Piped], parts: list[int], emit: Emit, below: str, data: st.DataObject
) -> None:
    """Results equal those of single records, with invalid records, stream-time schedules and crashes among the
    batches."""
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


large = st.sampled_from([0, 1, -1, 2**59, -(2**60), 3 * 2**59, 2**61, 2**62, 2**63 - 1, -(2**63)])


@settings(max_examples=examples(200))
@given(windows, inputs(), st.lists(large, min_size=1, max_size=90), sizes)
def test_sums_that_leave_64_bits(
    windowed: Windowed, records: list[Piped], numbers: list[int], parts: list[int]
) -> None:
    """A record whose sum would exceed 64 bits is rejected in a batch as it is in record-by-record processing."""
    drivers = pair_of(topology(windowed, "on_update"))
    values = [b'{"n":%d}' % numbers[index % len(numbers)] for index in range(len(records))]
    piped = [Piped(key, value, at) for (key, _, at), value in zip(records, values, strict=True)]
    for batch in batches(piped, parts):
        pipe_all(drivers, batch)
        require_equal(*drivers)


def test_sessions_that_a_batch_joins_are_added_up_before_it_is_taken() -> None:
    """If a batch merges seven sessions, the record whose merged sum would exceed 64 bits is rejected."""
    drivers = pair_of(topology(sessions(10, 1_000), "on_update"))
    for n in range(7):
        pipe_all(drivers, [Piped(b"a", b'{"n":%d}' % 1_500_000_000_000_000_000, n * 20)])
    pipe_all(drivers, [Piped(b"a", b'{"n":0}', n * 20 + 10) for n in range(7)])
    require_equal(*drivers)
    assert drivers[0].task.metrics.dead_letters_total == 1


@pytest.mark.parametrize("windowed", [sessions(10, 0), hopping(10, 10, 0)])
def test_large_numbers_of_many_keys_are_taken_as_columns(windowed: Windowed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers of many keys stay in the vectorized executor, and closed windows do not count. Single records are
    processed only if a sum may exceed 64 bits."""
    by_columns, by_records = pair_of(topology(windowed, "on_close"))
    singly: list[int] = []
    take_records = by_columns.task.take_records
    monkeypatch.setattr(by_columns.task, "take_records", lambda part: (singly.append(len(part)), take_records(part)))
    for round_ in range(8):
        batch = [Piped(b"k%d" % n, b'{"n":%d}' % 2**59, round_ * 100 + n % 3) for n in range(60)]
        pipe_all((by_columns, by_records), [*batch, *batch[:20]])
        require_equal(by_columns, by_records)
    assert singly == []
    pipe_all((by_columns, by_records), batch[:1] * 18)
    require_equal(by_columns, by_records)
    assert singly == [1] * singly.count(1) != []


def test_large_sums_that_were_restored_are_known() -> None:
    """Restored sums count towards the 64-bit limit."""
    made = topology(sessions(10, 1_000), "on_update")
    drivers = pair_of(made)
    pipe_all(drivers, [Piped(b"a", b'{"n":%d}' % (2**61 + 2**60), at) for at in (0, 20, 40)])
    for driver in drivers:
        driver.crash()
        driver.restore()
    pipe_all(drivers, [Piped(b"a", b'{"n":0}', at) for at in (10, 30)])
    require_equal(*drivers)
    assert drivers[0].task.metrics.dead_letters_total == 1


@pytest.mark.parametrize("windowed", [sessions(10, 1_000), hopping(20, 5, 1_000), sliding(10, 1_000)])
def test_a_batch_is_left_where_it_is_cut_once_there_is_no_time(windowed: Windowed) -> None:
    """Without time left, a batch stops before and after a single record and where a schedule is due. The next turn
    continues from there."""
    cut, whole = pair_of(topology(windowed, "on_update"))
    for driver in (cut, whole):
        schedule(driver, 100, [])
    piped = [Piped(b"ab"[n % 2 : n % 2 + 1], b'{"n":%d}' % n, n * 3) for n in range(100)]
    for odd in (10, 11, 70):
        piped[odd] = Piped(b"a", b"{", 0)
    keys, values, times = (list(column) for column in zip(*piped, strict=True))
    columns = Columns("in", 0, keys, values, np.array(times), np.arange(len(piped)))
    stops = []
    while cut.task.sources.get("in", 0) < len(piped):
        cut.task.process(columns[cut.task.sources.get("in", 0) :], 0, lambda: False)
        stops.append(cut.task.sources["in"])
        assert cut.task.metrics.records_total == stops[-1]
    assert stops == [1, 10, 11, 12, 35, 68, 70, 71, 100]
    whole.pipe_columns("in", piped)
    for driver in (cut, whole):
        driver.commit()
    require_equal(cut, whole)
