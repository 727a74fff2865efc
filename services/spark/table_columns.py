"""The columns of an application's Delta tables: `state`, `closed/<store>` and `late/<store>`.

A compaction only appends rows; rewrites and retention remove them. `state` is a log-structured snapshot: a window
(partition, store, key and start) may have several rows, and the row with the highest changelog offset is valid. `live`
is false if the window is gone. For each partition in which it finds something new, a compaction also appends one
progress row to `state`. So live rows and progress change in one commit.

The columns are defined here as Arrow schemas; Spark SQL's columns are derived from them (`spark_sql.sql_columns`). The
second half converts times, states and typed results to Arrow arrays. Only sketches become Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.shared.common.arrow_arrays import ARROW_TYPES, binary_array
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

TIMESTAMP = pa.timestamp("us", "UTC")
DAY_MS = 86_400_000
# The end of the year 9999 is the last time that the timestamps of all engines can hold.
TIMESTAMP_MS_MAX = 253_402_300_799_999
# A millisecond has this many microseconds.
MICROSECONDS = 1_000
RESULT_TYPES = {"int64": pa.int64(), "float64": pa.float64(), "json": pa.string()}

STATE = "state"
CLOSED = "closed"
LATE = "late"
INDEXED = {
    STATE: ("start_ms", "changelog_offset"),
    CLOSED: ("window_start", "window_end", "partition", "changelog_offset"),
    LATE: ("event_time", "partition", "changelog_offset"),
}
"""The columns whose bounds are kept for each file. Readers use them to skip files."""
PROGRESS = pa.schema(
    [
        *(("row", pa.string()), ("partition", pa.int32()), ("changelog_offset", pa.int64()), ("epoch", pa.int32())),
        *(("progress", pa.string()), ("topic_id", pa.string())),
        *(("appended", pa.string()), ("rewritten_rows", pa.int64()), ("added_rows", pa.int64())),
        *(("added_files", pa.int32()), ("expired_ms", pa.int64())),
    ]
)
"""The columns of a progress row.

- `changelog_offset`: the covered offset, which is the next offset to read.
- `appended`: JSON, by table its last changelog offset of this partition.
- `rewritten_rows`: the number of window rows that the last rewrite left, or the first compaction wrote.
- `added_rows`: the number of rows added since then.
- `added_files`: the number of compactions that wrote to the partition since then.
- `expired_ms`: closed windows that end before the highest value of all partitions are deleted, or will be soon.
"""


def state_type(store: StoreSchema) -> pa.DataType:
    """Return the struct of a store's state columns."""
    return pa.struct([(column.name, ARROW_TYPES[column.type]) for column in store.state_columns()])


def state_schema(stores: Iterable[StoreSchema]) -> pa.Schema:
    """Return the columns of the table `state`."""
    head = [("row", pa.string()), ("partition", pa.int32()), ("store", pa.string()), ("key", pa.binary())]
    head += [("start_ms", pa.int64()), ("end_ms", pa.int64())]
    own = [(store.name, state_type(store)) for store in stores]
    tail = [("live", pa.bool_()), *((f.name, f.type) for f in PROGRESS if f.name not in ("row", "partition"))]
    return pa.schema([*head, *own, *tail])


def rows_schema(kind: str, store: StoreSchema) -> pa.Schema:
    """Return the columns of `closed/<store>` or `late/<store>`."""
    key = ("key", pa.string()) if store.key == "string" else ("key_bytes", pa.binary())
    own = [(a.name, RESULT_TYPES[a.result]) for a in store.shown_aggregations()]
    tail = [("partition", pa.int32()), ("changelog_offset", pa.int64()), ("topic_id", pa.string())]
    state = ("state", state_type(store))
    if kind == CLOSED:
        times = [("window_start", TIMESTAMP), ("window_end", TIMESTAMP)]
        return pa.schema([key, *times, *own, ("closed_at", TIMESTAMP), state, *tail])
    times = [("event_time", TIMESTAMP), ("missed", pa.list_(TIMESTAMP))]
    return pa.schema([key, *times, *own, state, ("source_offset", pa.int64()), *tail])


# --- Arrow arrays ---


def lake_time_column(times_ms: Any) -> pa.Array:
    """Return times in ms as a timestamp column of a Delta table; null for negative times and from the year 10000 on.

    >>> [str(time) for time in lake_time_column(np.array([0, 10**18]))]
    ['1970-01-01 00:00:00+00:00', 'None']
    """
    beyond = (times_ms < 0) | (times_ms > TIMESTAMP_MS_MAX)
    micros = np.where(beyond, 0, times_ms) * MICROSECONDS
    return pa.array(micros, pa.int64(), mask=beyond if beyond.any() else None).cast(TIMESTAMP)


def lake_state_column(codec: StateCodec, states: PackedBytes) -> pa.StructArray:
    """Return a store's encoded states as an Arrow column for a lake table, with a struct of state columns for each.

    Raises CorruptRecord for the first invalid state. The message has the reason, but not which state it is.
    """
    columns = [
        binary_array(column) if isinstance(column, PackedBytes) else pa.array(column)
        for column in codec.packed_columns(states)
    ]
    return pa.StructArray.from_arrays(columns, names=[column.name for column in codec.columns])


def lake_result_columns(store: StoreSchema, states: pa.StructArray) -> dict[str, pa.Array]:
    """Return the result columns of a store's Delta table, by aggregation.

    A result is null if the state is null, lacks the aggregation, or has no value for it.
    """
    found = {}
    for aggregation in store.shown_aggregations():
        columns = {name: pc.struct_field(states, f"{aggregation.name}_{name}") for name, _ in aggregation.state}
        found[aggregation.name] = _result_column(aggregation, columns).cast(RESULT_TYPES[aggregation.result])
    return found


def _result_column(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
    match aggregation.function:
        case "count":
            return state["n"]
        case "sum" | "min" | "max" as function:
            return _results_or_null(pc.greater(state["n"], 0), state[function])
        case "mean":
            some = pc.greater(state["n"], 0)
            total, n = (state[name].cast(pa.float64(), safe=False) for name in ("sum", "n"))
            return _results_or_null(some, pc.divide(total, pc.if_else(some, n, 1.0)))
        case "first" | "last" if aggregation.result != "json":
            return _results_or_null(pc.greater_equal(state["at_ms"], 0), state["value"])
        case "count_distinct":
            return pa.array([_estimate_distinct_count(sketch) for sketch in state["hll"].to_pylist()], pa.int64())
        case "aggregate" | "collect_list" | "collect_set" | "quantiles" | "first" | "last":
            text = state["json"].cast(pa.string())
            return _results_or_null(pc.greater(pc.binary_length(text), 0), text)
    raise SchemaMismatch(
        f"aggregation {aggregation.name!r}: this release does not know the function {aggregation.function!r}"
    )


def _results_or_null(condition: Any, values: Any) -> Any:
    return pc.if_else(condition, values, pa.scalar(None, values.type))


def _estimate_distinct_count(sketch: bytes | None) -> int | None:
    return None if not sketch else round(datasketches.hll_sketch.deserialize(sketch).get_estimate())
