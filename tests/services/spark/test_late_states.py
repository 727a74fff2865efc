"""Late records as windows of one, and windows made one, without Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from penstock.services.spark import bodies
from penstock.services.spark import late_states as states
from penstock.services.spark.bodies import TIME_MS_MAX, StoreLayout
from penstock.services.spark.late_states import Places, aggregation_of, late_states, merged_states, uncorrectable
from penstock.services.spark.session import travelling
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations import Aggregate, Count, CountDistinct, Max, Mean, Min, Sum
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.collecting import CollectList, CollectSet, First, Last
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.quantiles import Quantiles


class Numbers(TypedDict):
    """A value of which the number's type is known."""

    x: float


ALL: dict[str, Any] = {
    "latest": Latest(),
    "n": Count(),
    "total": Sum("x"),
    "mean": Mean("x"),
    "least": Min("x"),
    "most": Max("x"),
    "places": CountDistinct("place"),
    "first": First("place"),
    "last": Last("place"),
    "first_x": First("x").bind(Numbers),
    "list": CollectList("place", 3),
    "set": CollectSet("place"),
    "quantiles": Quantiles("x", (0.25, 0.75)),
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
    numbers = {
        "life": 0,
        "late_partition": 0,
        "late_offset": 5,
        "source_offset": 6,
        "closed_ms": 90,
        "timestamp_ms": timestamp_ms,
    }
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
    (out,) = late_states(schemas, layout, Places("t", {0: 9, 1: 7}))(iter([batch(rows, timestamp_ms)]))
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
    assert reasons[3] == "it does not say which source record it was"
    assert "no key" in reasons[4]


def test_a_late_record_of_no_source_record_has_a_reason() -> None:
    """A partition or an offset that the source does not have would be waited for until the end of time."""
    places = Places("t", {0: 9, 1: None}, own={0: 5})
    asked = [(7, 5), (-1, -1), (0, 9), (0, -1), (1, 900), (0, 8)]
    assert [places.refusal(*source, (0, 5)) for source in asked] == [
        "it says t-7, which there is not",
        "it says t--1, which there is not",
        "it says t-0 at offset 9, which ends at 9",
        "it says t-0 at offset -1, which ends at 9",
        None,
        None,
    ]
    assert places.refusal(0, 9, (0, 4)) is None  # a backfill's: it names a row of a file
    (row,) = taken([(7, b"k", None)], SCHEMAS[1:2])
    assert (row["state"], row["reason"]) == (None, "it says t-7, which there is not")


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
        ({"aggregations": (AggregationSchema("l", "collect_list", "x", (), "json"),)}, "limits or ranks of l"),
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


def columns_of(records: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """The state of a window of these records (value, time) in their order, as the stream has it."""
    found: dict[str, Any] = {}
    for (name, aggregation), schema in zip(ALL.items(), SCHEMAS, strict=True):
        state = aggregation.initial()
        for fields, timestamp_ms in records:
            state = aggregation.add_at(state, fields, timestamp_ms)
        found |= zip((f"{name}_{column}" for column, _ in schema.state), aggregation.to_columns(state), strict=True)
    return found


RECORDS = [
    ({"x": x, "place": place}, at) for x, place, at in ((2.5, "b", 7), (1.0, "a", 3), (9.5, "c", 9), (4.0, "a", 9))
]


def merging() -> tuple[Any, Any]:
    """What a worker is given to make one window of four records' states, and the batch that it gets."""
    layout = StoreLayout(0, "s", tuple(store().state_columns()))
    each = [{"is_late": True, "state": columns_of([record])} for record in RECORDS]
    kind = pa.list_(pa.struct([("is_late", pa.bool_()), ("state", layout.struct())]))
    given = pa.record_batch({"key": pa.array([b"k"]), "states": pa.array([each], kind)})
    return merged_states(SCHEMAS, layout, ["key"]), given


def test_merged_states_are_the_streams_own() -> None:
    """Windows of one record each, made one in the order in which they came, are the window of all of them."""
    merge, given = merging()
    (out,) = merge(iter([given]))
    (row,) = out.to_pylist()
    expected = columns_of(RECORDS)
    sketch = row["merged"].pop("places_hll")
    assert CountDistinct("place").from_columns([sketch]).get_estimate() == pytest.approx(3, abs=0.01)
    del expected["places_hll"]  # the same sketch in another form
    kll = {row["merged"].pop("quantiles_kll"), expected.pop("quantiles_kll")}
    assert all(Quantiles("x").from_columns([one]).n == 4 for one in kll)
    assert row == {"key": b"k", "merged": expected}
    assert expected["list_json"] == b'["b","a","c"]'


def test_an_aggregation_that_a_state_does_not_have_stays_unknown() -> None:
    """What was added since a window was closed is null in it, and no late record's alone says what it is of all."""
    layout = StoreLayout(0, "s", tuple(store(SCHEMAS[1:3]).state_columns()))
    kind = pa.list_(pa.struct([("state", layout.struct())]))
    late = {"n_n": 1, "total_sum": 5.0, "total_n": 1}
    each = [{"state": {"n_n": 2, "total_sum": None, "total_n": None}}, {"state": late}]
    given = pa.record_batch({"states": pa.array([each], kind)})
    (out,) = merged_states(SCHEMAS[1:3], layout, [])(iter([given]))
    assert out.to_pylist() == [{"merged": {"n_n": 3, "total_sum": None, "total_n": None}}]


WORKER = """
import pathlib, pickle, sys
import pyarrow as pa
sys.path[:] = [p for p in sys.path if not (pathlib.Path(p) / "penstock").is_dir()]
try:
    import penstock
except ImportError:
    run, given = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    (out,) = run(iter([given]))
    assert out.to_pylist()[0]["merged"]["n_n"] == 4
    print("merged")
"""


def test_workers_need_no_penstock(tmp_path: Path) -> None:
    """What is handed to them has the stream's own classes with it: a process that has none of ours runs it."""
    with travelling(bodies, states, *states.TRAVELS):
        (tmp_path / "job").write_bytes(cloudpickle.dumps(merging()))
    line = [sys.executable, "-c", WORKER, str(tmp_path / "job")]
    done = subprocess.run(line, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "merged\n", done.stderr
