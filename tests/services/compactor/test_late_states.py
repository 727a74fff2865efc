"""Late records as windows of one, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from services.compactor.bodies import TIME_MS_MAX, StoreLayout
from services.compactor.late_states import aggregation_of, late_states, uncorrectable
from shared.common.errors import ConfigError
from shared.streams.aggregations import Aggregate, Count, CountDistinct, Max, Mean, Min, Sum
from shared.streams.changelog_format import AggregationSchema, StoreSchema
from shared.streams.latest import Latest

ALL: dict[str, Any] = {
    "latest": Latest(),
    "n": Count(),
    "total": Sum("x"),
    "mean": Mean("x"),
    "least": Min("x"),
    "most": Max("x"),
    "places": CountDistinct("place"),
}
SCHEMAS = tuple(AggregationSchema.of(name, aggregation) for name, aggregation in ALL.items())
OWN = Aggregate(lambda: 0, lambda state, value: state, lambda a, b: a)


def store(aggregations: tuple[AggregationSchema, ...] = SCHEMAS, **more: Any) -> StoreSchema:
    told: dict[str, Any] = {"name": "s", "kind": "session", "key": "string", "gap_ms": 10, "grace_ms": 0}
    told |= {"emit": "on_close", "source": "t", "results": None, "late": "t-late", "dead_letters": None}
    return StoreSchema(**(told | {"aggregations": aggregations} | more))


def batch(rows: list[tuple[int | None, bytes | None, bytes | None]], timestamp_ms: int) -> Any:
    """Late records by source partition, key and value, all at one time."""
    count = len(rows)
    numbers = {"late_partition": 0, "late_offset": 5, "source_offset": 6, "closed_ms": 90, "timestamp_ms": timestamp_ms}
    columns: dict[str, Any] = {name: pa.array([n] * count, pa.int64()) for name, n in numbers.items()}
    partitions, keys, values = zip(*rows, strict=True)
    columns |= {"partition": pa.array(partitions, pa.int32()), "key": pa.array(keys, pa.binary())}
    return pa.record_batch(columns | {"value": pa.array(values, pa.binary())})


def taken(
    rows: list[tuple[int | None, bytes | None, bytes | None]],
    schemas: tuple[AggregationSchema, ...],
    timestamp_ms: int = 70,
) -> Any:
    layout = StoreLayout(0, "s", tuple(store(schemas).state_columns()))
    (out,) = late_states(schemas, layout)(iter([batch(rows, timestamp_ms)]))
    return out.to_pylist()


def test_states_are_the_streams_own() -> None:
    """A late record's state is what the aggregations make of it alone, column by column."""
    (row,) = taken([(1, b"k", b'{"x": 2.5, "place": "oslo"}')], SCHEMAS)
    expected = []
    for aggregation in ALL.values():
        state = aggregation.add_at(aggregation.initial(), {"x": 2.5, "place": "oslo"}, 70)
        expected += aggregation.to_columns(state)
    assert list(row["state"].values()) == expected
    assert (row["reason"], row["partition"], row["source_offset"]) == (None, 1, 6)


def test_what_an_aggregation_refuses_has_a_reason() -> None:
    """A value that does not fit, no JSON, no coordinates, no key: each has a reason, and the others their states."""
    good, bad = b'{"x": 1, "place": "a"}', b'{"x": "one", "place": "a"}'
    found = taken([(0, b"k", good), (0, b"k", bad), (0, b"k", b"{"), (None, b"k", good), (0, None, good)], SCHEMAS)
    assert [row["state"] is None for row in found] == [False, True, True, True, True]
    reasons = [row["reason"] for row in found]
    assert reasons[0] is None
    assert "'one' is not a number" in reasons[1]
    assert "no JSON" in reasons[2]
    assert reasons[3] == reasons[4] == "it does not say which source record it was"


def test_a_time_that_no_timestamp_can_say_has_a_reason() -> None:
    """A late record of the year 10000 can be put into no closed window; one of the year 9999 can."""
    (last,) = taken([(0, b"k", None)], SCHEMAS[1:2], TIME_MS_MAX)
    (beyond,) = taken([(0, b"k", None)], SCHEMAS[1:2], TIME_MS_MAX + 1)
    assert (last["state"], beyond["state"]) == ({"n_n": 1}, None)
    assert f"can say its time, {TIME_MS_MAX + 1} ms" in beyond["reason"]


def test_counting_needs_no_value() -> None:
    """Where nothing but records is counted, their values are not looked at."""
    assert [row["state"] for row in taken([(0, b"k", b"{"), (0, b"k", None)], SCHEMAS[1:2])] == [{"n_n": 1}] * 2


def test_integers_stay_integers() -> None:
    """A sum over an integer field refuses what is none, as the stream does."""
    whole = (AggregationSchema("total", "sum", "x", (("sum", "int64"), ("n", "int64")), "int64"),)
    found = taken([(0, b"k", b'{"x": 3}'), (0, b"k", b'{"x": 3.5}')], whole)
    assert [row["state"] for row in found] == [{"total_sum": 3, "total_n": 1}, None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sliding"}, "sliding"),
        ({"upstream": ("flat_map-1",)}, "flat_map-1 stands before its window"),
        ({"aggregations": (*SCHEMAS, AggregationSchema.of("own", OWN))}, "own (aggregate)"),
        ({"aggregations": (AggregationSchema("d", "sum", "x", (), "float64", verbatim=False),)}, "fields of d"),
    ],
)
def test_what_cannot_be_corrected_is_named(changes: dict[str, Any], said: str) -> None:
    """Sliding windows, nodes before the window, a user's own aggregates and renamed fields are refused by name."""
    assert uncorrectable(store()) is None
    reason = uncorrectable(store(**changes))
    assert reason is not None
    assert said in reason


def test_a_users_own_aggregate_is_refused() -> None:
    """Nobody but the topology has a user's functions."""
    with pytest.raises(ConfigError, match="own"):
        aggregation_of(AggregationSchema.of("own", OWN))
