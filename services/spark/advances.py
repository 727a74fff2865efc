"""The table `advances`: when a task's time was moved on without a record, for an audit of what that closed.

Each commit after such an advance says in its progress record at which source offsets it happened and what each
operator's time was then (`streams.idle_timeout_ms`). A snapshot keeps the newest progress record alone, so a run puts
what it read of advances into a table of their own: a row a partition, store and position (the offset of the source's
next record), with the time of the last advance there. What is moved on while nothing comes stays one row, and there are
never more rows than source records.

They are facts of the changelog, merged before the run counts: a run that is begun again merges the same ones, which
changes nothing, and what `state` covers is always there. Of the stores those are kept that an audit takes.

`from_ms` and `total_ms` say by how much the partition's time had been moved on altogether before and after: where a
partition's rows do not add up to what its progress record says, some are missing. With 5 ms kept of 12:

>>> missing({0: 12, 1: 3}, {0: 5, 1: 3, 2: 1})
{0: 7}
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.services.spark.bodies import ENVELOPE_BYTES
from penstock.shared.streams.changelog.format import WINDOWED, Progress, StoreSchema

SPENT_MAX = 1_000  # of a partition's rows that lie before all source records: more become one
_SCHEMA = "partition INT, store STRING, position BIGINT, time_ms BIGINT, from_ms BIGINT, total_ms BIGINT"
_PLACE = ("partition", "store", "position")
_TIMES = "MAP<STRING, BIGINT>"
_IDLE = f"advances ARRAY<STRUCT<sources: {_TIMES}, operator_times_ms: {_TIMES}, ms: BIGINT, total_ms: BIGINT>>"
_NEW = "penstock_advances"


def path_of(folder: str) -> str:
    """Where an application's advances are."""
    return f"{folder}/advances"


def has_time_of_its_own(store: StoreSchema) -> bool:
    """Whether a store's time moves with its source alone, and so by an advance: an audit takes no other."""
    return store.kind in WINDOWED and not store.upstream


def said(progress: DataFrame, stores: tuple[StoreSchema, ...]) -> DataFrame:
    """The advances (_SCHEMA) that progress records (partition, value) tell of, one for each place."""
    sources = {store.name: store.source for store in stores if has_time_of_its_own(store)}
    body = F.substring("value", ENVELOPE_BYTES + 1, 2**31 - 1).cast("string")
    idle = F.from_json(F.get_json_object(body, "$.idle"), _IDLE)
    each = progress.select("partition", F.explode(idle["advances"]).alias("a"))
    times = each.select("partition", "a", F.explode("a.operator_times_ms").alias("store", "time_ms"))
    known = F.create_map(*(F.lit(text) for pair in [("", ""), *sources.items()] for text in pair))
    rows = times.withColumn("source", F.try_element_at(known, F.col("store"))).filter("source IS NOT NULL")
    position = F.coalesce(F.try_element_at("a.sources", F.col("source")), F.lit(0)).alias("position")
    total = F.col("a.total_ms").alias("total_ms")
    before = (F.col("a.total_ms") - F.col("a.ms")).alias("from_ms")
    return once_a_place(rows.select("partition", "store", position, "time_ms", before, total))


def once_a_place(rows: DataFrame) -> DataFrame:
    """Of advances at the same position the last, which goes on from where the first of them did."""
    bounds = (F.max("time_ms").alias("time_ms"), F.min("from_ms").alias("from_ms"), F.max("total_ms").alias("total_ms"))
    return rows.groupBy(*_PLACE).agg(*bounds)


def keep(spark: SparkSession, folder: str, new: DataFrame | None) -> None:
    """Put advances into the table below `folder`, unless they are there; nothing to put makes no table."""
    if new is None or new.isEmpty():
        return
    path = path_of(folder)
    if not tables.exists(spark, path):
        tables.create(spark, path, _SCHEMA, "partition")
    new.createOrReplaceTempView(_NEW)
    same = " AND ".join(f"t.{name} = s.{name}" for name in _PLACE)
    spark.sql(
        f"MERGE INTO {tables.delta(path)} t USING {_NEW} s ON {same} "
        "WHEN MATCHED AND s.total_ms > t.total_ms THEN UPDATE SET t.time_ms = s.time_ms, t.total_ms = s.total_ms "
        "WHEN NOT MATCHED THEN INSERT *"
    )


def kept(spark: SparkSession, folder: str) -> DataFrame:
    """What the table below `folder` has (_SCHEMA); nothing where there is none."""
    path = path_of(folder)
    return spark.table(tables.delta(path)) if tables.exists(spark, path) else spark.createDataFrame([], _SCHEMA)


def moved_on_ms(progress: Mapping[int, Progress]) -> dict[int, int]:
    """By how much the time of partitions was ever moved on; only those of which it was."""
    return {p: one.idle.total_ms for p, one in sorted(progress.items()) if one.idle is not UNSET}


def missing(moved_on: Mapping[int, int], known: Mapping[int, int]) -> dict[int, int]:
    """The partitions of which fewer advances are known than there were, each with the ms that are missing."""
    return {p: ms - known.get(p, 0) for p, ms in moved_on.items() if known.get(p, 0) < ms}


def spent(rows: DataFrame, first: Mapping[int, int]) -> DataFrame:
    """A store's rows at or before the `first` offset that its source still has, by partition; the last says all.

    Columns of _PLACE, `from_ms` of the first of them, and `is_last`; none of partitions with no more than SPENT_MAX.
    """
    before = rows.filter(F.col("position") <= tables.by_partition(first, other=-1))
    of = before.groupBy("partition").agg(
        F.max("position").alias("last"), F.min("from_ms").alias("from_ms"), F.count(F.lit(1)).alias("rows")
    )
    of = of.filter(F.col("rows") > SPENT_MAX).drop("rows")
    both = before.drop("from_ms").join(of, "partition").withColumn("is_last", F.col("position") == F.col("last"))
    return both.select(*_PLACE, "from_ms", "is_last")


def forget(spark: SparkSession, folder: str, store: str, first: Mapping[int, int]) -> None:
    """Make one row of those that lie before all records which a store's source still has, where they are many."""
    old = spent(kept(spark, folder).filter(F.col("store") == store), first)
    if old.isEmpty():
        return
    old.createOrReplaceTempView(_NEW)
    same = " AND ".join(f"t.{name} = s.{name}" for name in _PLACE)
    spark.sql(
        f"MERGE INTO {tables.delta(path_of(folder))} t USING {_NEW} s ON {same} "
        "WHEN MATCHED AND s.is_last THEN UPDATE SET t.from_ms = s.from_ms WHEN MATCHED THEN DELETE"
    )
