"""An application's tables as DataFrames: closed windows, late records, live windows, and all of them merged.

All of them are read as of one version of `state`, so that a window is either closed or live, and never both: what a run
appended to `closed` and `late` before it wrote `state` is left out. How a store's windows were made (its kind, gap and
size, its aggregations) is read from the newest progress row.

`corrected` merges on read. A window is made of rows: the closed or live one, and one for each late record that missed
it. Merged are the states, by Spark's own functions; a window of one row stays as it is. With a gap of 10, the closed
session [0, 8], a late record at 15 and the live session [24, 30] are one session, [0, 30].
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
from penstock.services.spark.sql import SQL_TYPES, empty, quoted, results, snapshot, sql_columns
from penstock.services.spark.tables import CLOSED, LATE, TIME_MS_MAX, rows_schema, state_schema
from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.common.lake_place import lake_root
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
"""The aggregations that `corrected` merges, by the names that users know them by."""
_OWN = frozenset((Latest.function,))  # kept by the operator beside the user's aggregations
_KINDS = frozenset(("session", "tumbling", "hopping"))
_WINDOWS, _LATE = 0, 1  # the order in which a window's rows are merged


class Coverage(NamedTuple):
    """How far `state` covers one partition: the next changelog offset, the topic's id and the newest commit.

    Closed windows that end before `expired_ms` of any partition are deleted, or about to be.
    """

    offset: int
    topic_id: str | None
    progress: Progress
    expired_ms: int


class Tables:
    """An application's tables, as of one version of `state`."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        """`folder` is the application's folder as Spark names it. ConfigError if there is no table `state` in it."""
        self._spark, self._folder = spark, folder
        state = snapshot(spark, f"{folder}/state")
        if state is None:
            raise ConfigError(
                f"{folder}/state: there is no such table: lake and application must be the aggregator's, and a "
                "compaction must have run"
            )
        self._state = state
        self.covered = _covered(state)
        newest = max(self.covered.values(), key=lambda covered: covered.progress.wall_ms, default=None)
        self.stores: tuple[StoreSchema, ...] = () if newest is None else newest.progress.stores

    def store(self, name: str | None) -> StoreSchema:
        """The windowed store of that name, or the only one. ConfigError names the stores if there is no such."""
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
        """All tables of stores that have windows: `closed/<store>`, `late/<store>` and `live/<store>`."""
        found = {}
        for store in self.stores:
            if store.kind in WINDOWED:
                found[f"closed/{store.name}"] = self.closed(store)
                found[f"late/{store.name}"] = self.late(store)
                found[f"live/{store.name}"] = self.live(store)
        return found

    def closed(self, store: StoreSchema) -> DataFrame:
        """The store's closed windows that `state` covers, with the columns of the table."""
        return self._read(CLOSED, store)

    def late(self, store: StoreSchema) -> DataFrame:
        """The store's late records that `state` covers, with the columns of the table."""
        return self._read(LATE, store)

    def live(self, store: StoreSchema) -> DataFrame:
        """The store's live windows: the key, window_start, window_end, the results, state, partition."""
        key = F.col("key").cast("string").alias("key") if store.key == "string" else F.col("key").alias("key_bytes")
        if store.name in self._state.columns:
            # Of each window the newest row: a join on its offset, since sorting would carry all states.
            windows = self._state.filter((F.col("row") == "window") & (F.col("store") == store.name))
            newest = windows.groupBy("partition", "key", "start_ms").agg(F.max("changelog_offset").alias("newest"))
            newest = newest.select("partition", F.col("newest").alias("changelog_offset"))
            rows = windows.join(newest, ["partition", "changelog_offset"], "left_semi").filter("live")
        else:
            rows = empty(self._spark, sql_columns(state_schema([store])))
        rows = rows.withColumn("state", F.col(quoted(store.name)))
        rows = rows.withColumn("state", _widened(rows, store))
        bounds = (_time("start_ms").alias("window_start"), _time("end_ms").alias("window_end"))
        return rows.select(key, *bounds, *results(store).values(), "state", "partition")

    def _read(self, kind: str, store: StoreSchema) -> DataFrame:
        rows, schema = snapshot(self._spark, f"{self._folder}/{kind}/{store.name}"), rows_schema(kind, store)
        if rows is None:
            rows = empty(self._spark, sql_columns(schema))
        else:
            topics = {partition: covered.topic_id for partition, covered in self.covered.items()}
            is_of_topic = F.col("topic_id").eqNullSafe(by_partition(topics, "string"))
            offsets = {partition: covered.offset for partition, covered in self.covered.items()}
            # Rows of an earlier changelog topic are covered: offsets of another topic say nothing about them.
            rows = rows.filter(~is_of_topic | (F.col("changelog_offset") < by_partition(offsets, "bigint")))
        rows = rows.withColumn("state", _widened(rows, store))
        names = [name for name in schema.names if name != "state"]
        names.insert(names.index("partition"), "state")
        # An aggregation that was added later may have no column yet.
        computed = {name: column for name, column in results(store).items() if name not in rows.columns}
        return rows.select(*(computed.get(name, F.col(quoted(name))) for name in names))


@contextmanager
def session(settings: SparkSettings | None = None, lake: str | None = None) -> Iterator[SparkSession]:
    """A Spark session that reads Delta tables, stopped at the end; `settings` default to Spark on this machine.

    Name the `lake` if it is on S3: Spark then loads the connector. Raises ConfigError without Java or the connectors'
    jars, SparkFailed if Spark does not start.
    """
    uris = () if lake is None else (hadoop_uri(lake_root(lake)),)
    with spark_session(settings or SparkSettings(), "penstock.spark", *uris) as spark:
        yield spark


def closed(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """A store's closed windows, one row each.

    Columns: `key` (text, or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation,
    `closed_at` (stream time), `state`, `partition`, `changelog_offset`, `topic_id`. ConfigError for a store or a lake
    that does not exist.
    """
    found = _tables(spark, lake, application)
    return found.closed(found.store(store))


def late(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """A store's late records, one row each, with results of that record alone; null if an aggregation refused it.

    Columns: `key` (or `key_bytes`), `event_time`, `missed` (the starts of the windows that it missed), a column of
    results for each aggregation, `source_offset`, `state`, `partition`, `changelog_offset`, `topic_id`. Errors as
    `closed`.
    """
    found = _tables(spark, lake, application)
    return found.late(found.store(store))


def live(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """A store's windows that were not closed when the newest compaction read the changelog.

    Columns: `key` (or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation, `state`,
    `partition`. Errors as `closed`.
    """
    found = _tables(spark, lake, application)
    return found.live(found.store(store))


def corrected(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """A store's windows as if no record had been late: closed and live windows with the late records merged in.

    Sessions are joined by the gap. Tumbling and hopping windows are added up, in the order in which records came.
    Columns as of `live`. Takes Count, Sum, Min, Max, Mean, CountDistinct and CollectSet; ConfigError names anything
    else: sliding windows, other aggregations, a store that has no windows. Other errors as `closed`. Windows that
    retention deleted, or may have deleted a part of, are left out.
    """
    found = _tables(spark, lake, application)
    schema = found.store(store)
    if (reason := uncorrectable(schema)) is not None:
        raise ConfigError(f"store {store!r}: late records cannot be merged: {reason}")
    rows = _rows(found, schema)
    if schema.kind == "session":
        rows = _clustered(rows, schema.gap_ms)
    return _kept(_merged(rows, schema), schema, max(one.expired_ms for one in found.covered.values()))


def _kept(windows: DataFrame, store: StoreSchema, expired_ms: int) -> DataFrame:
    """Windows of which nothing was deleted: of one whose closed row is gone, late records alone would be left."""
    if expired_ms < 0:
        return windows
    if store.kind == "session":
        return windows.filter(F.unix_millis("window_start") >= expired_ms + store.gap_ms)
    return windows.filter(F.unix_millis("window_end") >= expired_ms)


def uncorrectable(store: StoreSchema) -> str | None:
    """Why late records cannot be merged into this store's windows; None if they can."""
    if store.kind not in WINDOWED:
        return f"it has no windows ({store.kind})"
    if store.kind not in _KINDS:
        return f"which {store.kind} windows there are depends on every record, and not only on the windows' states"
    if others := [f"{a.name} ({a.function})" for a in store.aggregations if a.function not in {*CORRECTABLE, *_OWN}]:
        return f"{', '.join(others)}: only {', '.join(CORRECTABLE.values())} can be merged on read"
    return None


def by_partition(values: Mapping[int, Any], type_: str) -> SparkColumn:
    """The value of the partition that the column `partition` names; null if there is none.

    One literal for any number of partitions: Spark cannot plan a CASE of thousands.
    """
    listed = [values.get(partition) for partition in range(max(values, default=-1) + 1)]
    return F.get(F.from_json(F.lit(json.dumps(listed)), f"array<{type_}>"), F.col("partition"))


def _tables(spark: SparkSession, lake: str, application: str) -> Tables:
    return Tables(spark, f"{hadoop_uri(lake_root(lake))}/{application}")


def _covered(state: DataFrame) -> dict[int, Coverage]:
    """By partition its newest progress row. SchemaMismatch if the table is not one of Penstock's."""
    columns = ("row", "partition", "changelog_offset", "topic_id", "progress", "expired_ms")
    if missing := set(columns) - set(state.columns):
        raise SchemaMismatch(f"the lake's table `state` has no column {', '.join(sorted(missing))}: not Penstock's")
    found: dict[int, Coverage] = {}
    rows = state.filter("row = 'progress'").select(*columns[1:]).collect()
    for row in sorted(rows, key=lambda row: (row.partition, row.changelog_offset)):
        progress = decode_progress(row.progress.encode())
        found[row.partition] = Coverage(row.changelog_offset, row.topic_id, progress, row.expired_ms)
    return found


def _widened(rows: DataFrame, store: StoreSchema) -> SparkColumn:
    """`state` with all fields that the store has now: an aggregation that was appended later is null in older rows."""
    there: Any = rows.schema["state"].dataType
    known, own = set(there.fieldNames()), F.col("state")
    fields = [
        (own[c.name] if c.name in known else F.lit(None).cast(SQL_TYPES[c.type])).alias(c.name)
        for c in store.state_columns()
    ]
    return F.when(own.isNotNull(), F.struct(*fields))


def _time(name: str) -> SparkColumn:
    """Milliseconds as a timestamp; null beyond the year 9999."""
    return F.when(F.col(name) <= TIME_MS_MAX, F.timestamp_millis(F.col(name)))


def _rows(found: Tables, store: StoreSchema) -> DataFrame:
    """What windows are made of: `key`, `start`, `end`, `state`, `partition`, and `place`, the order of merging."""
    key = "key" if store.key == "string" else "key_bytes"
    windows = found.closed(store).select(key, "window_start", "window_end", "state", "partition")
    windows = windows.unionByName(found.live(store).select(*windows.columns)).toDF(key, *_BOUNDS, "state", "partition")
    windows = windows.withColumn("place", F.struct(F.lit(_WINDOWS).alias("rank"), F.unix_millis("start").alias("at")))
    missed = found.late(store).filter("state IS NOT NULL")
    missed = missed.withColumn("place", F.struct(F.lit(_LATE).alias("rank"), F.col("changelog_offset").alias("at")))
    if store.kind == "session":
        missed = missed.withColumns({"start": F.col("event_time"), "end": F.col("event_time")})
    else:
        missed = missed.withColumn("start", F.explode("missed"))
        missed = missed.withColumn("end", F.timestamp_millis(F.unix_millis("start") + store.size_ms))
    return windows.unionByName(missed.select(*windows.columns))


_BOUNDS = ("start", "end")


def _clustered(rows: DataFrame, gap_ms: int) -> DataFrame:
    """Rows of sessions with the start of the session that they make: a row within the gap of one before it joins it."""
    key = rows.columns[0]
    own = SparkWindow.partitionBy("partition", key).orderBy("start", "end")
    before = own.rowsBetween(SparkWindow.unboundedPreceding, -1)
    reached = F.max(F.unix_millis("end")).over(before)
    begins = F.coalesce(F.unix_millis("start") > reached + gap_ms, F.lit(True))
    marked = rows.withColumn("begins", F.when(begins, F.col("start")))
    first = F.max("begins").over(own.rowsBetween(SparkWindow.unboundedPreceding, 0))
    return marked.withColumn("session", first).drop("begins")


def _merged(rows: DataFrame, store: StoreSchema) -> DataFrame:
    """One row a window. An aggregation that one of its rows does not have, being of an earlier time, is null."""
    key = rows.columns[0]
    fields = [(a, column.alias(f"m{i}_{n}")) for i, a in enumerate(store.aggregations) for n, column in _merge(a)]
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


def _merge(aggregation: AggregationSchema) -> list[tuple[str, SparkColumn]]:
    """By name of the state's column what merges it over a window's rows."""

    def of(name: str) -> SparkColumn:
        return F.col("state")[f"{aggregation.name}_{name}"]

    def known(name: str, merged: SparkColumn) -> tuple[str, SparkColumn]:
        return name, F.when(F.count(of(name)) == F.count(F.lit(1)), merged)

    def in_order(name: str) -> SparkColumn:
        """The column's values in the order in which rows are merged, with the state's count of values."""
        one = F.struct("place", of(name).alias("value"), of("n").alias("n"))
        return F.array_sort(F.collect_list(one))

    function = aggregation.function
    if function == "count":
        return [known("n", F.sum(of("n")))]
    if function == "latest":
        return [known("ms", F.max(of("ms")))]
    if function == "count_distinct":
        one = F.count(F.lit(1)) == 1  # its sketch knows more of the order of values than a union does
        return [known("hll", F.when(one, F.first(of("hll"))).otherwise(F.hll_union_agg(of("hll"))))]
    if function == _SET:
        return [known("json", in_order("json")), known("n", F.sum(of("n")))]
    name, type_ = aggregation.state[0]
    value = F.when(of("n") > 0, of(name))
    if function in ("min", "max"):
        number = {"min": F.min, "max": F.max}[function](value)
    elif type_ == "int64":
        number = F.sum(value)
    else:  # in order, as the stream adds: sums of floats depend on it
        values = F.transform(F.filter(in_order(name), lambda one: one["n"] > 0), lambda one: one["value"])
        nothing = F.lit(None).cast("double")
        number = F.reduce(values, nothing, lambda sum_, one: F.coalesce(sum_ + one, one))
    return [known(name, F.coalesce(number, F.lit(0).cast(SQL_TYPES[type_]))), known("n", F.sum(of("n")))]


def union(sets: Sequence[bytes], limit: int) -> bytes:
    """The first `limit` distinct values of several states of CollectSet, which are JSON arrays.

    Values are equal if their JSON is, whatever the order of an object's fields. The text of a value is kept.

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
    """For mapInArrow: columns that are lists of states in order (structs with a `value`) become one state each.

    Runs in Spark's Python workers, which need pyarrow and msgspec, but not Penstock: the function is pickled by value.
    """

    def merge(states: Sequence[Mapping[str, Any]] | None, limit: int) -> bytes | None:
        if states is None:
            return None
        return states[0]["value"] if len(states) == 1 else union([state["value"] for state in states], limit)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = [
                pa.array([merge(states, limits[name]) for states in batch.column(name).to_pylist()], pa.binary())
                if name in limits
                else batch.column(name)
                for name in batch.schema.names
            ]
            yield pa.record_batch(columns, names=batch.schema.names)

    return run
