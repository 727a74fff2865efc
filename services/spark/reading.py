"""An application's tables as DataFrames: closed windows, late records, live windows, and all of them merged.

All tables are read as of one version of `state`, so that a window is either closed or live, and never both. Rows that a
compaction appended to `closed` and `late` before it wrote `state` are left out. The newest progress row describes how a
store's windows were made: its kind, gap, size and aggregations.

`corrected` merges on read. A window consists of rows: its closed or live row, and one row for each late record that
missed it. Spark's own functions merge the rows' states, and Python workers the sets of `CollectSet`. A window of one
row stays unchanged. With a gap of 10, the closed session [0, 8], a late record at 15 and the live session [24, 30]
are one session, [0, 30].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.settings import SparkSettings, hadoop_uri
from penstock.services.spark.spark_session import pickled_by_value, spark_session
from penstock.services.spark.spark_sql import SQL_TYPES, empty, quoted, results, snapshot, sql_columns
from penstock.services.spark.table_columns import CLOSED, LATE, TIME_MS_MAX, rows_schema, state_schema
from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.common.lake.location import lake_root
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.changelog.format import (
    WINDOWED,
    AggregationSchema,
    Progress,
    StoreSchema,
    decode_progress,
)

CORRECTABLE = {
    "count": "Count",
    "sum": "Sum",
    "min": "Min",
    "max": "Max",
    "mean": "Mean",
    "count_distinct": "CountDistinct",
    "collect_set": "CollectSet",
}
"""The aggregations that `corrected` merges, with their names in the public API."""
_OWN = frozenset((Latest.function,))  # kept by the operator beside the user's aggregations
_KINDS = frozenset(("session", "tumbling", "hopping"))
_WINDOWS, _LATE = 0, 1  # the order in which a window's rows are merged


class Coverage(NamedTuple):
    """How far `state` covers one partition: the next changelog offset, the topic's id and the newest commit's progress.

    Closed windows that end before the highest `expired_ms` of all partitions are deleted, or will be soon.
    """

    offset: int
    topic_id: str | None
    progress: Progress
    expired_ms: int


class Tables:
    """An application's tables, as of one version of `state`."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        """`folder` is the application's folder as Spark names it. Raises ConfigError if it has no table `state`."""
        self._spark = spark
        self._folder = folder
        state = snapshot(spark, f"{folder}/state")
        if state is None:
            raise ConfigError(
                f"{folder}/state: there is no such table: lake and application must be the aggregator's, and a "
                "compaction must have run"
            )
        self._state = state
        self.covered = _read_coverage(state)
        newest = max(self.covered.values(), key=lambda covered: covered.progress.wall_ms, default=None)
        self.stores: tuple[StoreSchema, ...] = () if newest is None else newest.progress.stores

    def store(self, name: str | None) -> StoreSchema:
        """Return the store of that name, or without a name the only windowed store.

        Raises ConfigError, which names the windowed stores, if there is no such store.
        """
        windowed = [store for store in self.stores if store.kind in WINDOWED]
        if name is None and len(windowed) == 1:
            return windowed[0]
        for store in self.stores:
            if store.name == name:
                return store
        names = ", ".join(store.name for store in windowed) or "none"
        if name is None:
            raise ConfigError(f"store: which one? {self._folder} has the windowed stores {names}")
        raise ConfigError(f"store: there is no {name!r} in {self._folder}, which has the windowed stores {names}")

    def frames(self) -> dict[str, DataFrame]:
        """Return all tables of windowed stores: `closed/<store>`, `late/<store>` and `live/<store>`."""
        found = {}
        for store in self.stores:
            if store.kind in WINDOWED:
                found[f"closed/{store.name}"] = self.closed(store)
                found[f"late/{store.name}"] = self.late(store)
                found[f"live/{store.name}"] = self.live(store)
        return found

    def closed(self, store: StoreSchema) -> DataFrame:
        """Return the store's closed windows that `state` covers, with the columns of the table."""
        return self._read_table(CLOSED, store)

    def late(self, store: StoreSchema) -> DataFrame:
        """Return the store's late records that `state` covers, with the columns of the table."""
        return self._read_table(LATE, store)

    def live(self, store: StoreSchema) -> DataFrame:
        """Return the store's live windows: the key, window_start, window_end, the results, state, partition."""
        key = F.col("key").cast("string").alias("key") if store.key == "string" else F.col("key").alias("key_bytes")
        if store.name in self._state.columns:
            # Select the newest row of each window by a join on its offset, because a sort would move all states.
            windows = self._state.filter((F.col("row") == "window") & (F.col("store") == store.name))
            newest = windows.groupBy("partition", "key", "start_ms").agg(F.max("changelog_offset").alias("newest"))
            newest = newest.select("partition", F.col("newest").alias("changelog_offset"))
            rows = windows.join(newest, ["partition", "changelog_offset"], "left_semi").filter("live")
        else:
            rows = empty(self._spark, sql_columns(state_schema([store])))
        rows = rows.withColumn("state", F.col(quoted(store.name)))
        rows = rows.withColumn("state", _widen_state(rows, store))
        bounds = (_timestamp_column("start_ms").alias("window_start"), _timestamp_column("end_ms").alias("window_end"))
        return rows.select(key, *bounds, *results(store).values(), "state", "partition")

    def _read_table(self, kind: str, store: StoreSchema) -> DataFrame:
        rows = snapshot(self._spark, f"{self._folder}/{kind}/{store.name}")
        schema = rows_schema(kind, store)
        if rows is None:
            rows = empty(self._spark, sql_columns(schema))
        else:
            topics = {partition: covered.topic_id for partition, covered in self.covered.items()}
            is_of_topic = F.col("topic_id").eqNullSafe(by_partition(topics, "string"))
            offsets = {partition: covered.offset for partition, covered in self.covered.items()}
            # Rows of an earlier changelog topic are covered: offsets of the current topic do not apply to them.
            rows = rows.filter(~is_of_topic | (F.col("changelog_offset") < by_partition(offsets, "bigint")))
        rows = rows.withColumn("state", _widen_state(rows, store))
        names = [name for name in schema.names if name != "state"]
        names.insert(names.index("partition"), "state")
        # An aggregation that was added later may have no column yet.
        computed = {name: column for name, column in results(store).items() if name not in rows.columns}
        return rows.select(*(computed.get(name, F.col(quoted(name))) for name in names))


@contextmanager
def session(settings: SparkSettings | None = None, lake: str | None = None) -> Iterator[SparkSession]:
    """Yields a Spark session that reads Delta tables and stops it at the end. `settings` default to a local Spark.

    Pass the `lake` if it is on S3, so that Spark loads the connector. Raises ConfigError without Java or the
    connectors' jars, SparkFailed if Spark does not start.
    """
    uris = () if lake is None else (hadoop_uri(lake_root(lake)),)
    with spark_session(settings or SparkSettings(), "penstock.spark", *uris) as spark:
        yield spark


def closed(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Return a store's closed windows, one row each.

    Columns: `key` (text, or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation,
    `closed_at` (stream time), `state`, `partition`, `changelog_offset`, `topic_id`. Raises ConfigError if the store or
    the lake does not exist.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.closed(found.store(store))


def late(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Return a store's late records, one row each, with the results of that record alone.

    A result is null if the aggregation rejected the record. Columns: `key` (or `key_bytes`), `event_time`, `missed`
    (the starts of the windows that the record missed), a column of results for each aggregation, `source_offset`,
    `state`, `partition`, `changelog_offset`, `topic_id`. Raises the errors of `closed`.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.late(found.store(store))


def live(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Return a store's windows that were not closed when the newest compaction read the changelog.

    Columns: `key` (or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation, `state`,
    `partition`. Raises the errors of `closed`.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.live(found.store(store))


def corrected(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Return a store's windows as if no record had been late: closed and live windows with the late records merged in.

    Sessions within the gap of each other are joined. The states of tumbling and hopping windows are added up, in the
    order in which the records came. Windows that retention deleted, wholly or possibly in part, are left out. The
    columns are those of `live`.

    Merges Count, Sum, Min, Max, Mean, CountDistinct and CollectSet. Raises ConfigError for sliding windows, for other
    aggregations and for a store without windows, and the errors of `closed`.
    """
    found = _open_lake_tables(spark, lake, application)
    schema = found.store(store)
    if (reason := uncorrectable(schema)) is not None:
        raise ConfigError(f"store {store!r}: late records cannot be merged: {reason}")
    rows = _rows_of_windows(found, schema)
    if schema.kind == "session":
        rows = _cluster_sessions(rows, schema.gap_ms)
    return _drop_expired_windows(
        _merge_window_rows(rows, schema), schema, max(one.expired_ms for one in found.covered.values())
    )


def _drop_expired_windows(windows: DataFrame, store: StoreSchema, expired_ms: int) -> DataFrame:
    """Return the windows of which no row was deleted.

    A window whose closed row was deleted would otherwise consist of its late records alone.
    """
    if expired_ms < 0:
        return windows
    if store.kind == "session":
        return windows.filter(F.unix_millis("window_start") >= expired_ms + store.gap_ms)
    return windows.filter(F.unix_millis("window_end") >= expired_ms)


def uncorrectable(store: StoreSchema) -> str | None:
    """Return why late records cannot be merged into this store's windows. Return None if they can."""
    if store.kind not in WINDOWED:
        return f"it has no windows ({store.kind})"
    if store.kind not in _KINDS:
        return f"which {store.kind} windows there are depends on every record, and not only on the windows' states"
    if others := [f"{a.name} ({a.function})" for a in store.aggregations if a.function not in {*CORRECTABLE, *_OWN}]:
        return f"{', '.join(others)}: only {', '.join(CORRECTABLE.values())} can be merged on read"
    return None


def by_partition(values: Mapping[int, Any], type_: str) -> SparkColumn:
    """Return the value of the partition that the column `partition` names; null for a partition without a value.

    It is one literal for any number of partitions, because Spark cannot plan a CASE of thousands of branches.
    """
    listed = [values.get(partition) for partition in range(max(values, default=-1) + 1)]
    return F.get(F.from_json(F.lit(json.dumps(listed)), f"array<{type_}>"), F.col("partition"))


def _open_lake_tables(spark: SparkSession, lake: str, application: str) -> Tables:
    return Tables(spark, f"{hadoop_uri(lake_root(lake))}/{application}")


def _read_coverage(state: DataFrame) -> dict[int, Coverage]:
    """Return the newest progress row by partition. Raises SchemaMismatch if the table is not Penstock's."""
    columns = ("row", "partition", "changelog_offset", "topic_id", "progress", "expired_ms")
    if missing := set(columns) - set(state.columns):
        raise SchemaMismatch(f"the lake's table `state` has no column {', '.join(sorted(missing))}: not Penstock's")
    found: dict[int, Coverage] = {}
    rows = state.filter("row = 'progress'").select(*columns[1:]).collect()
    for row in sorted(rows, key=lambda row: (row.partition, row.changelog_offset)):
        progress = decode_progress(row.progress.encode())
        found[row.partition] = Coverage(row.changelog_offset, row.topic_id, progress, row.expired_ms)
    return found


def _widen_state(rows: DataFrame, store: StoreSchema) -> SparkColumn:
    """Return `state` with all fields that the store has now. A later aggregation's fields are null in older rows."""
    struct: Any = rows.schema["state"].dataType
    known = set(struct.fieldNames())
    own = F.col("state")
    fields = [
        (own[c.name] if c.name in known else F.lit(None).cast(SQL_TYPES[c.type])).alias(c.name)
        for c in store.state_columns()
    ]
    return F.when(own.isNotNull(), F.struct(*fields))


def _timestamp_column(name: str) -> SparkColumn:
    """Return a column of milliseconds as a timestamp; null beyond the year 9999."""
    return F.when(F.col(name) <= TIME_MS_MAX, F.timestamp_millis(F.col(name)))


def _rows_of_windows(found: Tables, store: StoreSchema) -> DataFrame:
    """Return the rows that windows consist of: `key`, `start`, `end`, `state`, `partition`, `merge_order`."""
    key = "key" if store.key == "string" else "key_bytes"
    windows = found.closed(store).select(key, "window_start", "window_end", "state", "partition")
    windows = windows.unionByName(found.live(store).select(*windows.columns)).toDF(key, *_BOUNDS, "state", "partition")
    windows = windows.withColumn(
        "merge_order", F.struct(F.lit(_WINDOWS).alias("rank"), F.unix_millis("start").alias("at"))
    )
    missed = found.late(store).filter("state IS NOT NULL")
    missed = missed.withColumn(
        "merge_order", F.struct(F.lit(_LATE).alias("rank"), F.col("changelog_offset").alias("at"))
    )
    if store.kind == "session":
        missed = missed.withColumns({"start": F.col("event_time"), "end": F.col("event_time")})
    else:
        missed = missed.withColumn("start", F.explode("missed"))
        missed = missed.withColumn("end", F.timestamp_millis(F.unix_millis("start") + store.size_ms))
    return windows.unionByName(missed.select(*windows.columns))


_BOUNDS = ("start", "end")


def _cluster_sessions(rows: DataFrame, gap_ms: int) -> DataFrame:
    """Return rows of sessions with the start of their merged session, in the column `session`.

    A row joins the session of the rows before it if it begins within the gap of their latest end.
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
    """Return one row for each window. An aggregation is null if an older row of the window lacks it."""
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
            merged = merged.mapInArrow(merge_sets(limits), schema)
    names = [
        F.col(f"m{i}_{name}").alias(f"{a.name}_{name}") for i, a in enumerate(store.aggregations) for name, _ in a.state
    ]
    whole = merged.withColumn("state", F.struct(*names))
    return whole.select(key, "window_start", "window_end", *results(store).values(), "state", "partition")


_SET = "collect_set"


def _merged_state_columns(aggregation: AggregationSchema) -> list[tuple[str, SparkColumn]]:
    """Return, for each state column of an aggregation, its name and the expression that merges it over rows."""

    def state_column(name: str) -> SparkColumn:
        return F.col("state")[f"{aggregation.name}_{name}"]

    def null_if_incomplete(name: str, merged: SparkColumn) -> tuple[str, SparkColumn]:
        return name, F.when(F.count(state_column(name)) == F.count(F.lit(1)), merged)

    def values_in_merge_order(name: str) -> SparkColumn:
        """The column's values in the order in which rows are merged, with the state's count of values."""
        one = F.struct("merge_order", state_column(name).alias("value"), state_column("n").alias("n"))
        return F.array_sort(F.collect_list(one))

    function = aggregation.function
    if function == "count":
        return [null_if_incomplete("n", F.sum(state_column("n")))]
    if function == "latest":
        return [null_if_incomplete("ms", F.max(state_column("ms")))]
    if function == "count_distinct":
        one = F.count(F.lit(1)) == 1  # a single sketch keeps more of the order of values than a union does
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
    else:  # add in the order of the stream: sums of floats depend on it
        values = F.transform(F.filter(values_in_merge_order(name), lambda one: one["n"] > 0), lambda one: one["value"])
        nothing = F.lit(None).cast("double")
        number = F.reduce(values, nothing, lambda sum_, one: F.coalesce(sum_ + one, one))
    return [
        null_if_incomplete(name, F.coalesce(number, F.lit(0).cast(SQL_TYPES[type_]))),
        null_if_incomplete("n", F.sum(state_column("n"))),
    ]


def union(sets: Sequence[bytes], limit: int) -> bytes:
    """Return the first `limit` distinct values of several states of CollectSet, which are JSON arrays.

    Values are equal if their JSON is equal, whatever the order of an object's fields. The text of a value is kept.

    >>> union([b'[1,{"a":1,"b":2}]', b'[{"b":2,"a":1},"x",1]'], 3)
    b'[1,{"a":1,"b":2},"x"]'
    """
    found: dict[bytes, bytes] = {}
    for values in sets:
        for value in msgspec.json.decode(values, type=list[msgspec.Raw]):
            identity = msgspec.json.encode(msgspec.json.decode(value), order="deterministic")
            found.setdefault(identity, bytes(value))
    return b"[" + b",".join(list(found.values())[:limit]) + b"]"


def merge_sets(limits: Mapping[str, int]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for mapInArrow that merges each list of states in the columns of `limits` into one state.

    A list holds the states in order, as structs with a `value`. The function runs in Spark's Python workers and is
    pickled by value: the workers need pyarrow and msgspec, but not Penstock.
    """

    def merge_set_states(states: Sequence[Mapping[str, Any]] | None, limit: int) -> bytes | None:
        if states is None:
            return None
        return states[0]["value"] if len(states) == 1 else union([state["value"] for state in states], limit)

    def merge_sets_of_batches(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = [
                pa.array(
                    [merge_set_states(states, limits[name]) for states in batch.column(name).to_pylist()], pa.binary()
                )
                if name in limits
                else batch.column(name)
                for name in batch.schema.names
            ]
            yield pa.record_batch(columns, names=batch.schema.names)

    return merge_sets_of_batches
