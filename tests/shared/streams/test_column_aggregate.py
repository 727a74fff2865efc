"""Results that were handed on by the batch: which they are, and what a window behind a window makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count, Sum
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windowed_aggregate import Emit, WindowedAggregate
from tests.shared.streams.columns_beside_records import (
    RECORDS_ONLY,
    RESULTS,
    Piped,
    Windowed,
    batches,
    driver_of,
    hopping,
    inputs,
    pair_of,
    require_equal,
    sessions,
    sizes,
    topology,
)

windows = st.sampled_from([sessions(10, 0), sessions(20, 7), hopping(20, 20, 0), hopping(20, 7, 5)])


def cascade(first: Windowed, emit: Emit, second: Windowed) -> Topology:
    """Windows of all keys together, of the results of windows by key."""
    builder = StreamsBuilder()
    table = first(builder.stream("in", value=bytes).group_by_key()).aggregate("s", count=Count())
    results = table.on_close() if emit == "on_close" else table.on_update()
    again = results.map_values(lambda v: {"n": v.results["count"] if v else 0}).key_by(lambda r: "all", name="again")
    second(again.group_by_key()).aggregate("second", count=Count(), total=Sum("n")).on_close().to(RESULTS)
    return builder.build()


def taken(driver: Any, batch: list[Piped]) -> tuple[list[Any], int]:
    """The second windows' results after a batch, and how many of the first windows' came too late for one of them."""
    before = driver.metrics()
    driver.pipe_columns("in", batch)
    driver.commit()
    driver.commit()
    read = [(r.key, r.value, r.timestamp) for r in driver.read(RESULTS)]
    after = driver.metrics()
    return read, sum(after[what] - before[what] for what in ("late_records", "missed_windows"))


@settings(max_examples=100)
@given(windows, windows, inputs(), sizes)
def test_a_window_downstream_of_what_was_closed(
    first: Windowed, second: Windowed, records: list[Piped], parts: list[int]
) -> None:
    """Results on close come one by one in the same order, so that it makes the same of them."""
    columns, singly = pair_of(cascade(first, "on_close", second))
    for batch in batches(records, parts):
        assert taken(columns, batch) == taken(singly, batch)


@settings(max_examples=100)
@given(windows, windows, inputs(), sizes)
def test_a_window_downstream_of_updates(
    first: Windowed, second: Windowed, records: list[Piped], parts: list[int]
) -> None:
    """Of the results of one commit none is too late for it that would not be record by record."""
    columns, singly = pair_of(cascade(first, "on_update", second))
    for batch in batches(records, parts):
        assert taken(columns, batch)[1] <= taken(singly, batch)[1]


@settings(max_examples=100)
@given(windows, inputs(), sizes)
def test_a_patient_window_downstream_of_updates(first: Windowed, records: list[Piped], parts: list[int]) -> None:
    """Where none comes too late either way, it makes the same of them."""
    columns, singly = pair_of(cascade(first, "on_update", hopping(20, 20, 10_000)))
    for batch in [*batches(records, parts), [Piped(b"a", b"", 50_000)]]:
        assert taken(columns, batch) == taken(singly, batch)


@pytest.mark.parametrize("first", [hopping(3_600_000, 3_600_000, 0), sessions(600_000, 0)])
def test_a_day_caught_up_in_a_few_commits_is_not_late_downstream(first: Windowed) -> None:
    """Windows that were closed within a commit are handed on before those that are newer and live."""
    driver = driver_of(cascade(first, "on_update", hopping(3_600_000, 3_600_000, 300_000)), 1)
    for start in range(0, 24, 6):
        times = [hour * 3_600_000 + minute * 60_000 for hour in range(start, start + 6) for minute in range(50)]
        assert taken(driver, [Piped(b"k%d" % (time // 60_000 % 60), b"", time) for time in times])[1] == 0
    assert driver.metrics()["late_records"] == 0


KINDS: dict[str, Windowed] = {"session": sessions(10, 5), "tumbling": hopping(10, 10, 5), "hopping": hopping(10, 4, 5)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_alone_knows_what_has_changed(kind: str) -> None:
    """Also where records are taken one by one: nothing is kept beside it, and a commit forwards what it would have."""
    by_columns, by_records = pair_of(topology(KINDS[kind], "on_update"), columns_min=RECORDS_ONLY)
    for first in (0, 40):
        for driver in (by_columns, by_records):
            driver.pipe_columns("in", [Piped(b"a", b'{"n":1}', first + at) for at in (3, 9, 1, 30, 33)])
            (operator,) = driver.task.operators()
            assert isinstance(operator, WindowedAggregate)
            assert (operator._updates == {}) == (driver is by_columns)
            driver.commit()
        require_equal(by_columns, by_records)
