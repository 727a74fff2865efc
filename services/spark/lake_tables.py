"""An application's tables in the lake as DataFrames of Spark: closed windows, late records and open windows.

All tables are read as of one version of `state`, so that a window is either closed or open, and never both. Rows that a
compaction appended to `closed` and `late` before it wrote `state` are left out. The newest progress row describes how a
store's windows were made: its kind, gap, size and aggregations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.spark_session import jvm
from penstock.services.spark.spark_sql import SQL_TYPES, by_partition, empty, quoted, result_expressions, sql_columns
from penstock.services.spark.table_columns import CLOSED, LATE, TIMESTAMP_MS_MAX, rows_schema, state_schema
from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.streams.changelog.format import Progress, decode_progress
from penstock.shared.streams.changelog.store_schema import WINDOWED, StoreSchema


class Coverage(NamedTuple):
    """How far `state` covers one partition of the changelog topic with the id `topic_id`."""

    offset: int
    """The first changelog offset that `state` does not cover."""
    topic_id: str | None
    progress: Progress
    """The progress of the newest covered commit."""
    expired_ms: int
    """Closed windows that end before the highest `expired_ms` of all partitions have expired: retention has deleted
    them or will delete them.
    """


class LakeTables:
    """An application's tables in the lake, as DataFrames of one version of `state`."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        """`folder` is the application's folder, as `hadoop_uri` returns it.

        Raises ConfigError if it has no table `state`, SchemaMismatch if that table is not Penstock's.
        """
        self._spark = spark
        self._folder = folder
        state = read_lake_table(spark, f"{folder}/state")
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
        """Return the store of that name, which need not be windowed. Without a name, return the only windowed store.

        Raises ConfigError if no store has that name, or if there is no name and not exactly one windowed store. The
        error names the windowed stores.
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

    def windowed_store(self, name: str) -> StoreSchema:
        """Return the windowed store of that name.

        Raises ConfigError if no store has that name, or if the store has no windows.
        """
        store = self.store(name)
        if store.kind not in WINDOWED:
            raise ConfigError(f"store: {name!r} in {self._folder} has no windows ({store.kind})")
        return store

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
        """Return the store's open windows: the key, window_start, window_end, the results, state, partition.

        The table `state` may still have rows of sliding windows that have closed. These rows are left out.
        """
        key = F.col("key").cast("string").alias("key") if store.key == "string" else F.col("key").alias("key_bytes")
        if store.name in self._state.columns:
            # Select the newest row of each window by a join on its offset, because a sort would move all states.
            windows = self._state.filter((F.col("row") == "window") & (F.col("store") == store.name))
            newest = windows.groupBy("partition", "key", "start_ms").agg(F.max("changelog_offset").alias("newest"))
            newest = newest.select("partition", F.col("newest").alias("changelog_offset"))
            rows = windows.join(newest, ["partition", "changelog_offset"], "left_semi").filter("live")
            open_from_ms = {p: covered.progress.open_from_ms(store) for p, covered in self.covered.items()}
            rows = rows.filter(F.col("end_ms") >= by_partition(open_from_ms, "bigint"))
        else:
            rows = empty(self._spark, sql_columns(state_schema([store])))
        rows = rows.withColumn("state", F.col(quoted(store.name)))
        rows = rows.withColumn("state", _widen_state(rows, store))
        bounds = (_timestamp_column("start_ms").alias("window_start"), _timestamp_column("end_ms").alias("window_end"))
        return rows.select(key, *bounds, *result_expressions(store).values(), "state", "partition")

    def _read_table(self, kind: str, store: StoreSchema) -> DataFrame:
        rows = read_lake_table(self._spark, f"{self._folder}/{kind}/{store.name}")
        schema = rows_schema(kind, store)
        if rows is None:
            rows = empty(self._spark, sql_columns(schema))
        else:
            topics = {partition: covered.topic_id for partition, covered in self.covered.items()}
            is_of_topic = F.col("topic_id").eqNullSafe(by_partition(topics, "string"))
            covered_offset = by_partition({p: covered.offset for p, covered in self.covered.items()}, "bigint")
            # Rows of an earlier changelog topic are covered: offsets of the current topic do not apply to them. No row
            # is covered of a partition that `state` does not have yet.
            is_covered = ~is_of_topic | (F.col("changelog_offset") < covered_offset)
            rows = rows.filter(covered_offset.isNotNull() & is_covered)
        rows = rows.withColumn("state", _widen_state(rows, store))
        names = [name for name in schema.names if name != "state"]
        names.insert(names.index("partition"), "state")
        # An aggregation that was added later may have no column yet.
        computed = {name: column for name, column in result_expressions(store).items() if name not in rows.columns}
        return rows.select(*(computed.get(name, F.col(quoted(name))) for name in names))


def read_lake_table(spark: SparkSession, path: str) -> DataFrame | None:
    """Return one table of `LakeTables`, fixed at its newest version; None if there is no table.

    All reads of the result see this version, even if the table is written meanwhile. Without a fixed version, every
    Spark action would read the version that is then the newest.
    """
    java: Any = jvm(spark)
    if not java.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, path):
        return None
    none = java.scala.Option.empty()
    log = java.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)
    return spark.read.format("delta").option("versionAsOf", log.update(False, none, none).version()).load(path)


def _read_coverage(state: DataFrame) -> dict[int, Coverage]:
    """Return each partition's Coverage for `LakeTables`, from the DataFrame of the table `state`.

    Raises SchemaMismatch if the table is not Penstock's.
    """
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
    """Return the column `state` of a DataFrame of `LakeTables`, with all fields that the store has now.

    The fields of an aggregation that was added later are null in older rows.
    """
    struct: Any = rows.schema["state"].dataType
    known = set(struct.fieldNames())
    own = F.col("state")
    fields = [
        (own[c.name] if c.name in known else F.lit(None).cast(SQL_TYPES[c.type])).alias(c.name)
        for c in store.state_columns()
    ]
    return F.when(own.isNotNull(), F.struct(*fields))


def _timestamp_column(name: str) -> SparkColumn:
    """Return a column of `state`, which has ms since the epoch, as a timestamp; null beyond the year 9999."""
    return F.when(F.col(name) <= TIMESTAMP_MS_MAX, F.timestamp_millis(F.col(name)))
