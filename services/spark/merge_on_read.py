"""Merge on read: closed and open windows with their late records merged in, for `penstock.spark.corrected`.

Two kinds of rows are merged to a window: its closed or open window, and one row for each late record that missed it.
Spark's own functions merge the rows' states; Python workers merge the sets of `CollectSet`. A window with only one row
stays unchanged. Example: with a gap of 10, the closed session [0, 8], a late record at 15 and the open session [24, 30]
become one session, [0, 30].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.lake_tables import LakeTables
from penstock.services.spark.spark_session import pickled_by_value
from penstock.services.spark.spark_sql import SQL_TYPES, quoted, result_expressions
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

MERGEABLE = {
    "count": "Count",
    "sum": "Sum",
    "min": "Min",
    "max": "Max",
    "mean": "Mean",
    "count_distinct": "CountDistinct",
    "collect_set": "CollectSet",
}
"""The aggregations that can be merged on read, with their names in the public API."""
# Operators keep these aggregations beside the user's. They can be merged too.
_OWN = frozenset((Latest.function,))
_KINDS = frozenset(("session", "tumbling", "hopping"))
# The order in which a window's rows are merged.
_WINDOWS = 0
_LATE = 1
_BOUNDS = ("start", "end")
_SET = "collect_set"


def merged_windows(tables: LakeTables, store: StoreSchema) -> DataFrame:
    """Return a store's closed and open windows with the late records merged in.

    Windows that retention deleted, wholly or possibly in part, are left out. The columns are those of `live`. Raises
    ConfigError if the store's late records cannot be merged.
    """
    if (reason := unmergeable_reason(store)) is not None:
        raise ConfigError(f"store {store.name!r}: late records cannot be merged: {reason}")
    rows = _rows_of_windows(tables, store)
    if store.kind == "session":
        rows = _assign_merged_sessions(rows, store.gap_ms)
    merged = _merge_window_rows(rows, store)
    return _drop_expired_windows(merged, store, max(one.expired_ms for one in tables.covered.values()))


def unmergeable_reason(store: StoreSchema) -> str | None:
    """Return why late records cannot be merged on read into this store's windows. Return None if they can."""
    if store.kind not in _KINDS:
        return f"which {store.kind} windows there are depends on every record, and not only on the windows' states"
    if others := [f"{a.name} ({a.function})" for a in store.aggregations if a.function not in {*MERGEABLE, *_OWN}]:
        return f"{', '.join(others)}: only {', '.join(MERGEABLE.values())} can be merged on read"
    return None


def _drop_expired_windows(windows: DataFrame, store: StoreSchema, expired_ms: int) -> DataFrame:
    """Return the merged windows without those of which retention may have deleted a row.

    A window whose closed row was deleted would otherwise consist of its late records alone.
    """
    if expired_ms < 0:
        return windows
    if store.kind == "session":
        return windows.filter(F.unix_millis("window_start") >= expired_ms + store.gap_ms)
    return windows.filter(F.unix_millis("window_end") >= expired_ms)


def _rows_of_windows(tables: LakeTables, store: StoreSchema) -> DataFrame:
    """Return the rows that are merged to windows: the key, `start`, `end`, `state`, `partition`, `merge_order`."""
    key = "key" if store.key == "string" else "key_bytes"
    windows = tables.closed(store).select(key, "window_start", "window_end", "state", "partition")
    windows = windows.unionByName(tables.live(store).select(*windows.columns)).toDF(key, *_BOUNDS, "state", "partition")
    windows = windows.withColumn(
        "merge_order", F.struct(F.lit(_WINDOWS).alias("rank"), F.unix_millis("start").alias("at"))
    )
    missed = tables.late(store).filter("state IS NOT NULL")
    missed = missed.withColumn(
        "merge_order", F.struct(F.lit(_LATE).alias("rank"), F.col("changelog_offset").alias("at"))
    )
    if store.kind == "session":
        missed = missed.withColumns({"start": F.col("event_time"), "end": F.col("event_time")})
    else:
        missed = missed.withColumn("start", F.explode("missed"))
        missed = missed.withColumn("end", F.timestamp_millis(F.unix_millis("start") + store.size_ms))
    return windows.unionByName(missed.select(*windows.columns))


def _assign_merged_sessions(rows: DataFrame, gap_ms: int) -> DataFrame:
    """Return the rows to merge with the start of their merged session, in the column `session`.

    A row belongs to the same session as its key's rows before it if it starts at most `gap_ms` after their latest end.
    """
    key = rows.columns[0]
    own = SparkWindow.partitionBy("partition", key).orderBy("start", "end")
    before = own.rowsBetween(SparkWindow.unboundedPreceding, -1)
    reached = F.max(F.unix_millis("end")).over(before)
    begins = F.coalesce(F.unix_millis("start") > reached + gap_ms, F.lit(True))
    marked = rows.withColumn("begins", F.when(begins, F.col("start")))
    first = F.max("begins").over(own.rowsBetween(SparkWindow.unboundedPreceding, 0))
    return marked.withColumn("session", first).drop("begins")


def _merge_window_rows(rows: DataFrame, store: StoreSchema) -> DataFrame:
    """Merge the rows of each window to one row. An aggregation is null if one of the window's rows lacks it."""
    key = rows.columns[0]
    fields = [
        (a, column.alias(f"m{i}_{n}"))
        for i, a in enumerate(store.aggregations)
        for n, column in _merged_state_columns(a)
    ]
    bounds = [F.min("start").alias("window_start"), F.max("end").alias("window_end")]
    own = F.col("session" if store.kind == "session" else "start").alias("own")
    merged = rows.groupBy("partition", key, own).agg(*bounds, *(column for _, column in fields))
    if limits := {f"m{i}_json": int(a.parameters[0]) for i, a in enumerate(store.aggregations) if a.function == _SET}:
        with pickled_by_value(sys.modules[__name__]):
            types = [(f.name, f.dataType.simpleString()) for f in merged.schema.fields]
            schema = ", ".join(f"{quoted(n)} {'binary' if n in limits else type_}" for n, type_ in types)
            merged = merged.mapInArrow(merge_set_columns(limits), schema)
    names = [
        F.col(f"m{i}_{name}").alias(f"{a.name}_{name}") for i, a in enumerate(store.aggregations) for name, _ in a.state
    ]
    whole = merged.withColumn("state", F.struct(*names))
    return whole.select(key, "window_start", "window_end", *result_expressions(store).values(), "state", "partition")


def _merged_state_columns(aggregation: AggregationSchema) -> list[tuple[str, SparkColumn]]:
    """Return, for each state column of an aggregation, its name and the expression that merges it over rows.

    The sets of a CollectSet are only collected; `merge_set_columns` merges them.
    """

    def state_column(name: str) -> SparkColumn:
        return F.col("state")[f"{aggregation.name}_{name}"]

    def null_if_incomplete(name: str, merged: SparkColumn) -> tuple[str, SparkColumn]:
        return name, F.when(F.count(state_column(name)) == F.count(F.lit(1)), merged)

    def values_in_merge_order(name: str) -> SparkColumn:
        """Return a state column's values, each with its count, in the order in which merge on read takes the rows."""
        one = F.struct("merge_order", state_column(name).alias("value"), state_column("n").alias("n"))
        return F.array_sort(F.collect_list(one))

    function = aggregation.function
    if function == "count":
        return [null_if_incomplete("n", F.sum(state_column("n")))]
    if function == "latest":
        return [null_if_incomplete("ms", F.max(state_column("ms")))]
    if function == "count_distinct":
        # A single sketch stays unchanged: its estimate uses the order of its values, which a union loses.
        one = F.count(F.lit(1)) == 1
        return [
            null_if_incomplete(
                "hll", F.when(one, F.first(state_column("hll"))).otherwise(F.hll_union_agg(state_column("hll")))
            )
        ]
    if function == _SET:
        return [
            null_if_incomplete("json", values_in_merge_order("json")),
            null_if_incomplete("n", F.sum(state_column("n"))),
        ]
    name, type_ = aggregation.state[0]
    value = F.when(state_column("n") > 0, state_column(name))
    if function in ("min", "max"):
        number = {"min": F.min, "max": F.max}[function](value)
    elif type_ == "int64":
        number = F.sum(value)
    else:
        # Add in merge order, because a sum of floats depends on the order.
        values = F.transform(F.filter(values_in_merge_order(name), lambda one: one["n"] > 0), lambda one: one["value"])
        nothing = F.lit(None).cast("double")
        number = F.reduce(values, nothing, lambda sum_, one: F.coalesce(sum_ + one, one))
    return [
        null_if_incomplete(name, F.coalesce(number, F.lit(0).cast(SQL_TYPES[type_]))),
        null_if_incomplete("n", F.sum(state_column("n"))),
    ]


def merge_set_states(states: Sequence[bytes], limit: int) -> bytes:
    """Merge on read the states of a CollectSet, which are JSON arrays: return their first `limit` distinct values.

    Values are equal if their JSON is equal, whatever the order of an object's fields. The text of a value is kept.

    >>> merge_set_states([b'[1,{"a":1,"b":2}]', b'[{"b":2,"a":1},"x",1]'], 3)
    b'[1,{"a":1,"b":2},"x"]'
    """
    found: dict[bytes, bytes] = {}
    for state in states:
        for value in msgspec.json.decode(state, type=list[msgspec.Raw]):
            identity = msgspec.json.encode(msgspec.json.decode(value), order="deterministic")
            found.setdefault(identity, bytes(value))
    return b"[" + b",".join(list(found.values())[:limit]) + b"]"


def merge_set_columns(limits: Mapping[str, int]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for mapInArrow that merges each list of CollectSet's states in the columns of `limits` into one
    state.

    A list has the states in order, as structs with a `value`. The function is pickled by value: Spark's Python workers
    need pyarrow and msgspec, but not Penstock.
    """

    def merge_listed_states(listed: Sequence[Mapping[str, Any]] | None, limit: int) -> bytes | None:
        if listed is None:
            return None
        return listed[0]["value"] if len(listed) == 1 else merge_set_states([one["value"] for one in listed], limit)

    def merge_batches(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = [
                pa.array(
                    [merge_listed_states(listed, limits[name]) for listed in batch.column(name).to_pylist()],
                    pa.binary(),
                )
                if name in limits
                else batch.column(name)
                for name in batch.schema.names
            ]
            yield pa.record_batch(columns, names=batch.schema.names)

    return merge_batches
