"""Sources that use the vectorized executor have the same results as without it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.shared.streams.aggregations.aggregation import Aggregate, Count
from penstock.shared.streams.dsl.builder import Stream, StreamsBuilder
from penstock.shared.streams.windows.window_rule import Emit
from tests.shared.streams.batches_beside_records import (
    BELOW,
    Piped,
    Windowed,
    driver_of,
    hopping,
    pair_of,
    path_of,
    pipe_all,
    results,
    sessions,
    sliding,
    topology,
)

KINDS: dict[str, Windowed] = {
    "session": sessions(10, 0),
    "tumbling": hopping(10, 10, 0),
    "hopping": hopping(10, 4, 0),
    "sliding": sliding(10, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_between_or_beside_is_taken_record_by_record(kind: str) -> None:
    """A source is processed record by record if a flat_map is between it and its windows, if it has a second child, or
    if its aggregation runs user functions."""
    own = Aggregate(int, lambda state, value: state + 1, lambda a, b: a + b)
    for how in ("between", "beside", "own functions"):
        builder = StreamsBuilder()
        stream = builder.stream("in")
        if how == "beside":
            stream.to("copy")
        if how == "between":
            stream = stream.flat_map_values(lambda value: [value])
        aggregation = own if how == "own functions" else Count()
        KINDS[kind](stream.group_by_key()).aggregate("s", result=aggregation).on_close().to("out")
        assert driver_of(builder.build(), 1).task.vectorized_executors == {}


BETWEEN: dict[str, Callable[[Stream], Stream]] = {
    "filter": lambda stream: stream.filter(lambda record: True),
    "three": lambda stream: stream.filter_not(lambda record: False).map_values(lambda value: value).peek(print),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_functions_of_single_records_may_stand_between(between: str) -> None:
    """Functions of single records, like filter and map_values, keep the vectorized executor, unless the stream also has
    a second child."""
    for is_beside in (False, True):
        builder = StreamsBuilder()
        stream = BETWEEN[between](builder.stream("in"))
        if is_beside:
            stream.to("copy")
        KINDS["session"](stream.group_by_key()).aggregate("s", result=Count()).on_close().to("out")
        assert ("in" in driver_of(builder.build(), 1).task.vectorized_executors) == (not is_beside)


@pytest.mark.parametrize("below", sorted(BELOW))
@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("kind", KINDS)
def test_who_sees_the_time_is_given_each_window_at_its_moment(kind: str, emit: Emit, below: str) -> None:
    """With on_close() and a processor below, records are processed singly, so that the processor sees each window at
    its close time."""
    drivers = pair_of(topology(KINDS[kind], emit, below=below))
    assert (path_of(drivers[0]) is None) == (emit == "on_close" and below.startswith("processor"))
    pipe_all(drivers, [Piped(b"a", b'{"n":1}', at) for at in range(1, 400, 25)])
    of_columns, of_records = (results(driver) for driver in drivers)
    assert of_columns == of_records
    if emit == "on_close" and below == "processor":
        moments = [msgspec.json.decode(value or b"")[-1] for key, value, _ in of_records if key == b"a"]
        assert set(moments) == set(range(26, 400, 25))
        assert [key for key, _, _ in of_records if key == b"tick"]
