"""Results from the columns of states. A result without values is null, and so is a result that a state lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.services.spark.table_columns import lake_result_columns, state_type
from penstock.shared.streams.aggregations.aggregation import (
    Aggregate,
    Aggregation,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Sum,
)
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.quantiles import Quantiles
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.topology import Topology


class Visit(msgspec.Struct):
    """A value with type annotations, from which aggregations know which numbers are integers."""

    x: float | None = None
    i: int = 0
    place: str | None = None


ALL: dict[str, Aggregation[Any]] = {
    "count": Count(),
    "sum": Sum("x"),
    "whole": Sum("i"),
    "least": Min("x"),
    "most": Max("x"),
    "mean": Mean("x"),
    "places": CountDistinct("place"),
    "quantiles": Quantiles("x", [0, 1]),
    "listed": CollectList("place"),
    "first": First("x"),
    "last": Last("place"),
    "own": Aggregate(dict, lambda state, value: {**state, "n": value.i}, lambda a, b: a | b),
}
OF_X = ("sum", "least", "most", "mean", "quantiles", "first")


def topology(aggregations: dict[str, Aggregation[Any]]) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream("source", value=Visit).group_by_key().tumbling_window(100)
    windows.aggregate("s", **aggregations).on_close().to("out")
    return builder.build()


def state_of(own: StoreBuilder, values: Sequence[Visit], at_ms: int) -> dict[str, Any]:
    """The state of a window with these values, all at that time, as a row of the struct."""
    columns: list[Any] = []
    for aggregation in own.aggregations:
        state = aggregation.initial()
        for value in values:
            state = aggregation.add_at(state, value, at_ms)
        columns += aggregation.to_columns(state)
    names = [column.name for column in own.schema.state_columns()]
    return dict(zip(names, columns, strict=True))


def of(
    aggregations: dict[str, Aggregation[Any]],
    *windows: Sequence[Visit] | None,
    lacking: str | None = None,
    at_ms: int = 5,
) -> dict[str, list[Any]]:
    """The results of windows with these values.

    The state of a None window is null, and all windows lack that aggregation.
    """
    own = topology(aggregations).stores["s"]
    columns_of_it = [c.name for c in own.schema.state_columns() if lacking and c.name.startswith(f"{lacking}_")]
    without = dict.fromkeys(columns_of_it)
    rows = [None if values is None else state_of(own, values, at_ms) | without for values in windows]
    columns = lake_result_columns(own.schema, pa.array(rows, state_type(own.schema)))
    return {name: column.to_pylist() for name, column in columns.items()}


def test_results_are_the_aggregations_own() -> None:
    """Each result is the same as the stream's, and null for a null state."""
    values = [Visit(2.5, 3, "mill"), Visit(-1.0, 4, "quay")]
    found = of(ALL, values, None)
    assert {name: column[0] for name, column in found.items()} == {
        "count": 2,
        "sum": 1.5,
        "whole": 7,
        "least": -1.0,
        "most": 2.5,
        "mean": 0.75,
        "places": 2,
        "quantiles": "[-1.0,2.5]",
        "listed": '["mill","quay"]',
        "first": 2.5,
        "last": '"quay"',
        "own": '{"n":4}',
    }
    assert all(column[1] is None for column in found.values())
    assert "latest_ms" not in found  # a tumbling window's operator keeps it for itself


def test_windows_without_a_value_have_no_result() -> None:
    """Records with a null field are counted, and add nothing to sums, minima, maxima and means."""
    found = of({name: ALL[name] for name in ("count", *OF_X)}, [Visit()])
    assert found.pop("count") == [1]
    assert found == {name: [None] for name in OF_X}
    assert of({"first": First("x"), "last": Last("place")}, []) == {"first": [None], "last": [None]}


def test_the_first_record_may_be_of_the_first_millisecond() -> None:
    """The time 0 is a valid time."""
    assert of({"first": First("x")}, [Visit(2.5)], at_ms=0) == {"first": [2.5]}


@pytest.mark.parametrize("name", [name for name in ALL if name != "count"])
def test_an_aggregation_that_was_appended_later_is_null(name: str) -> None:
    """An older state lacks its columns. The other aggregations keep their results."""
    assert of({"count": ALL["count"], name: ALL[name]}, [Visit(1.0, 2, "mill")], lacking=name) == {
        "count": [1],
        name: [None],
    }
