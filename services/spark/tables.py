"""The Delta tables of an application: `state`, and `closed/<store>` with typed results.

`state` has one row a live window and one row a changelog partition (its covered offset and progress), so that what is
live and how far it goes change in one commit. Progress rows have the store "", no bytes as key, and start 0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import delta_log
from penstock.services.spark.bodies import TIME_MS_MAX, StoreLayout
from penstock.services.spark.rules import RULE, Place
from penstock.services.spark.runs import RESTORE, RUN, Version, is_down_to, versions
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.lake_names import CLOSED_COLUMNS, STATE_HEAD, STATE_TAIL

SQL_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "binary": "BINARY"}
HISTORY_VERSIONS_MAX = 100  # looked at first for a run; where there are only others' and upkeep's, all are
LATE_VERSIONS_MAX = 10_000  # looked at for corrections that `state` lacks: a minute's work, and years of runs
INDEXED_COLUMNS = 32  # whose bounds Delta keeps by itself


def quoted(name: str) -> str:
    """A name as Spark SQL takes any name."""
    return "`" + name.replace("`", "``") + "`"


def delta(path: str) -> str:
    """A table by its path, in Spark SQL."""
    return f"delta.{quoted(path)}"


def by_partition(numbers: Mapping[int, int], column: str = "partition", other: int | None = 0) -> SparkColumn:
    """The number of the partition that a column names, `other` where it has none.

    One literal, however many partitions there are: a CASE of thousands is more than Spark can plan, and in a map each
    row would search. Kafka counts partitions from 0, so the array has few gaps.
    """
    places = [numbers.get(partition) for partition in range(max(numbers, default=-1) + 1)]
    found = F.get(F.from_json(F.lit(json.dumps(places)), "array<bigint>"), F.col(column))
    return F.coalesce(found, F.lit(other).cast("bigint"))


def exists(spark: SparkSession, path: str) -> bool:
    """Whether there is a Delta table at `path`."""
    return bool(spark._jvm.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, path))


def struct_type(layout: StoreLayout) -> str:
    """The store's struct column as a SQL type."""
    return f"STRUCT<{', '.join(f'{quoted(name)}: {SQL_TYPES[type_]}' for name, type_ in layout.columns)}>"


def create(spark: SparkSession, path: str, schema: str, partition: str | None = None, **properties: str) -> None:
    """Make a table without rows, where there is none but perhaps an empty folder for its log.

    SQL's CREATE TABLE takes such a folder, which a crash or a removed lake leaves, for a table. Of two jobs that make
    one at once, the second has a conflict or appends nothing.
    """
    writer = spark.createDataFrame([], schema).write.format("delta").mode("append").options(**properties)
    (writer if partition is None else writer.partitionBy(partition)).save(path)


def ensure_state(spark: SparkSession, path: str, layouts: tuple[StoreLayout, ...]) -> None:
    """Create `state`, or give it columns for new stores and aggregations. SchemaMismatch where a type has changed."""
    columns = [*STATE_HEAD, *((layout.name, struct_type(layout)) for layout in layouts), *STATE_TAIL]
    if not exists(spark, path):
        listed = ", ".join(f"{quoted(name)} {type_}" for name, type_ in columns)
        create(spark, path, listed, "partition", **{"delta.enableDeletionVectors": "true"})
        return
    present = {f.name: f.dataType for f in spark.table(delta(path)).schema.fields}
    for layout in layouts:
        if layout.name not in present:
            spark.sql(f"ALTER TABLE {delta(path)} ADD COLUMNS ({quoted(layout.name)} {struct_type(layout)})")
        else:
            _ensure_fields(spark, path, layout, present[layout.name])


def _ensure_fields(spark: SparkSession, path: str, layout: StoreLayout, present: Any) -> None:
    """Give a store's struct the fields that it lacks; SchemaMismatch where one has another type."""
    types = {f.name: f.dataType.simpleString().upper() for f in present.fields}
    for name, type_ in layout.columns:
        wanted = SQL_TYPES[type_]
        if types.setdefault(name, wanted) != wanted:
            raise SchemaMismatch(
                f"store {layout.name!r} of the table {path}: {name} is {types[name]}, the changelog's is {wanted}"
            )
    had = {f.name for f in present.fields}
    if new := [f"{quoted(layout.name)}.{quoted(n)} {SQL_TYPES[t]}" for n, t in layout.columns if n not in had]:
        spark.sql(f"ALTER TABLE {delta(path)} ADD COLUMNS ({', '.join(new)})")


def in_table_order(spark: SparkSession, path: str, rows: DataFrame, layouts: tuple[StoreLayout, ...]) -> DataFrame:
    """`rows` with each store's fields in the order that the table has them: there, new ones come last."""
    schema = spark.table(delta(path)).schema
    for layout in layouts:
        there: Any = schema[layout.name].dataType
        known = {name for name, _ in layout.columns}
        if there.fieldNames() != [name for name, _ in layout.columns]:
            own = F.col(quoted(layout.name))
            rows = rows.withColumn(layout.name, _with_fields(own, known, {f.name: f.dataType for f in there.fields}))
    return rows


def in_layout(rows: DataFrame, layout: StoreLayout) -> DataFrame:
    """`rows` of a table with the fields of their `state` as the store has them now: those the table lacks are null."""
    there: Any = rows.schema["state"].dataType
    wanted = {name: SQL_TYPES[type_] for name, type_ in layout.columns}
    return rows.withColumn("state", _with_fields(F.col("state"), there.fieldNames(), wanted))


def _with_fields(own: SparkColumn, known: Collection[str], wanted: Mapping[str, Any]) -> SparkColumn:
    """A struct with the `wanted` fields, by name their types, in that order: those that are not `known` are null."""
    fields = [(own[n] if n in known else F.lit(None).cast(type_)).alias(n) for n, type_ in wanted.items()]
    return F.when(own.isNotNull(), F.struct(*fields))


def snapshot(spark: SparkSession, path: str) -> DataFrame | None:
    """A table as it is now, however often it is read and whatever is written meanwhile; None where there is none."""
    if not exists(spark, path):
        return None
    return spark.read.format("delta").option("versionAsOf", delta_log.newest_version(spark, path)).load(path)


def progress_rows(spark: SparkSession, path: str) -> dict[int, Row]:
    """The progress row of each partition, none where there is no table yet."""
    return progress_of(spark.table(delta(path))) if exists(spark, path) else {}


def progress_of(state: DataFrame) -> dict[int, Row]:
    """The progress row of each partition."""
    return _by_partition(_others(state, "row = 'progress'"))


def covered_rows(spark: SparkSession, path: str) -> tuple[dict[int, Row], frozenset[Place], int]:
    """The progress row of each partition, the places of rules, and how many live windows `state` has.

    Those are of all rows those that are another.

    How many rows there are Delta's log says, and what it says of files decides which ones need not be read.
    """
    if not exists(spark, path):
        return {}, frozenset(), 0
    state = spark.table(delta(path))
    others = _others(state, "row <> 'window'")
    places = frozenset((row.partition, row.changelog_offset) for row in others if row.row == RULE)
    return _by_partition(row for row in others if row.row == "progress"), places, state.count() - len(others)


def _others(state: DataFrame, where: str) -> list[Row]:
    """Rows that are no window, of whom `where` holds. SchemaMismatch where the table is none of ours."""
    columns = ("row", "partition", "changelog_offset", "epoch", "commit", "progress", "topic_id", "run")
    if missing := set(columns) - set(state.columns):
        raise SchemaMismatch(
            f"the lake's table `state` has no column {', '.join(sorted(missing))}: it is none of Penstock's; lake and "
            "application must be the aggregator's"
        )
    # What rules say is as long as all stores are, and looked at where one is new.
    texts = F.when(F.col("row") != RULE, F.col("progress")).alias("progress")
    return list(state.filter(where).withColumn("progress", texts).select(*columns).collect())


def _by_partition(rows: Iterable[Row]) -> dict[int, Row]:
    return {row.partition: row for row in sorted(rows, key=lambda r: int(r.partition))}


def history(spark: SparkSession, path: str, limit: int | None = HISTORY_VERSIONS_MAX) -> list[Row]:
    """The newest versions of a table, newest first: version, operation, userMetadata, operationMetrics.

    Without a limit all that its log still has. With one that went back to a time they have their timestamps as well,
    which only Delta's own history knows.
    """
    if delta_log.is_near(spark, path):
        found = list(islice(delta_log.commits(spark, path), limit))
        if all(row.operation != RESTORE or (row.operationParameters or {}).get("version") for row in found):
            return found
    limited = "" if limit is None else f" LIMIT {limit}"
    return list(spark.sql(f"DESCRIBE HISTORY {delta(path)}{limited}").collect())


def log(spark: SparkSession, path: str, name: str = RUN, down_to: int | None = None) -> list[Version]:
    """A table's versions, newest first, as far back as to the newest run of that name; none where there is no table.

    With `down_to` as far back as to a run of no higher number, in LATE_VERSIONS_MAX versions at most.
    """
    if not exists(spark, path):
        return []

    @functools.cache
    def files(number: int) -> frozenset[str] | None:
        frame = spark.read.format("delta").option("versionAsOf", number)
        try:
            return frozenset(frame.load(path).inputFiles())
        except (PySparkException, Py4JError):  # its part of the log is gone
            return None

    def are_same(one: int, other: int) -> bool:
        return files(one) is not None and files(one) == files(other)

    found = versions(history(spark, path, HISTORY_VERSIONS_MAX), are_same)
    if len(found) < HISTORY_VERSIONS_MAX or is_down_to(found, name, down_to):
        return found
    return versions(history(spark, path, None if down_to is None else LATE_VERSIONS_MAX), are_same)


def version(spark: SparkSession, path: str) -> int | None:
    """The newest version of a table, None where there is none."""
    return delta_log.newest_version(spark, path) if exists(spark, path) else None


def appended_before(spark: SparkSession, path: str) -> dict[int, int]:
    """By partition the changelog offset before which all closed windows are in the table at `path`."""
    closed = spark.table(delta(path)).filter("revision = 0")
    rows = closed.groupBy("partition").agg(F.max("changelog_offset").alias("last")).collect()
    return {row.partition: row.last + 1 for row in rows}


def closed_frame(finals: DataFrame, store: StoreSchema, *, are_corrections: bool = False) -> DataFrame:
    """Decoded finals (as `bodies.final_rows` gives them) as rows of `closed/<store>`, of revision 0.

    Corrections have a `revision` of their own beside them, and `corrected_by`.

    A closing time that no timestamp can say is null: one record from the far future closes windows that are sound.
    """
    closed_at = F.when(F.col("closed_ms") <= TIME_MS_MAX, F.timestamp_millis("closed_ms"))
    key = F.col("key").cast("string") if store.key == "string" else F.col("key")
    return finals.select(
        key.alias("key"),
        F.timestamp_millis("start_ms").alias("start"),
        F.timestamp_millis("end_ms").alias("end"),
        "start_ms",
        "end_ms",
        *results(store),
        "state",
        closed_at.alias("closed_at"),
        F.timestamp_millis("written_ms").alias("written_at"),
        (F.col("revision").cast("int") if are_corrections else F.lit(0)).alias("revision"),
        "partition",
        "changelog_offset",
        (F.col("corrected_by") if are_corrections else F.lit(None).cast("string")).alias("corrected_by"),
        F.to_date(F.timestamp_millis("end_ms")).alias("day"),
    )


def append_closed(rows: DataFrame, store: StoreSchema, path: str, once: tuple[str, int], said: str) -> None:
    """Append rows to `closed/<store>`, once for `once` (a transaction's name and version), with what is said of them.

    A table that this makes keeps the bounds of every column for each file, `revision` among them however many results
    stand before it.
    """
    numbers = len(CLOSED_COLUMNS) + len(store.aggregations) + len(store.state_columns())
    (
        # A day's rows in one task: as many files as days, not days times tasks.
        rows.repartition("day")
        .write.format("delta")
        .mode("append")
        .partitionBy("day")
        .option("mergeSchema", True)
        .option("delta.dataSkippingNumIndexedCols", max(INDEXED_COLUMNS, numbers))
        .option("txnAppId", once[0])
        .option("txnVersion", once[1])
        .option("userMetadata", said)
        .save(path)
    )


def results(store: StoreSchema, state: str = "state") -> list[Any]:
    """The typed result columns of a store, computed from its state struct."""
    return [F.expr(_result(a, state)).alias(a.name) for a in store.aggregations]


def _result(aggregation: AggregationSchema, state: str) -> str:
    def column(name: str) -> str:
        return f"{state}.{quoted(f'{aggregation.name}_{name}')}"

    match aggregation.function:
        case "count":
            return column("n")
        case "latest":
            return column("ms")
        case "sum" | "min" | "max" as function:
            return f"IF({column('n')} > 0, {column(function)}, NULL)"
        case "mean":
            return f"IF({column('n')} > 0, CAST({column('sum')} AS DOUBLE) / {column('n')}, NULL)"
        case "count_distinct":
            return f"hll_sketch_estimate({column('hll')})"
        case "aggregate" | "collect_list" | "collect_set" | "quantiles":
            return f"CAST({column('json')} AS STRING)"
        case "first" | "last" if aggregation.result != "json":
            return f"IF({column('at_ms')} >= 0, {column('value')}, NULL)"
        case "first" | "last":
            return f"NULLIF(CAST({column('json')} AS STRING), '')"
    raise SchemaMismatch(
        f"aggregation {aggregation.name!r}: this release does not know the function {aggregation.function!r}"
    )


def final_schema(layout: StoreLayout) -> str:
    """What `bodies.final_rows` gives, as a SQL schema."""
    return (
        "key BINARY, start_ms BIGINT, end_ms BIGINT, closed_ms BIGINT, "
        f"state {struct_type(layout)}, written_ms BIGINT, partition INT, changelog_offset BIGINT"
    )


def live_schema(layouts: tuple[StoreLayout, ...]) -> str:
    """What `bodies.live_rows` gives, as a SQL schema."""
    head = ", ".join(f"{name} {type_}" for name, type_ in STATE_HEAD)
    own = "".join(f", {quoted(layout.name)} {struct_type(layout)}" for layout in layouts)
    return f"{head}{own}, changelog_offset BIGINT, epoch INT, commit BIGINT, live BOOLEAN"
