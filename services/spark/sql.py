"""Names, types and tables in Spark SQL, and the results of windows computed from their states.

Compactions write results with Arrow (`results`); these are for what Spark has merged, and for live windows, which have
a state alone. Tests hold the two to each other.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.spark_session import jvm
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.latest import shown

SQL_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "binary": "BINARY"}


def quoted(name: str) -> str:
    """A name as Spark SQL takes any name."""
    return "`" + name.replace("`", "``") + "`"


def empty(spark: SparkSession, schema: str) -> DataFrame:
    """No rows, of a schema in SQL. `createDataFrame` would start Python workers for them."""
    return spark.range(0).select(F.from_json(F.lit("{}"), schema).alias("row")).select("row.*")


def snapshot(spark: SparkSession, path: str) -> DataFrame | None:
    """A table at its newest version, however often it is read and whatever is written meanwhile; None if none exists.

    Delta reads a table that is named without a version anew with every action.
    """
    java: Any = jvm(spark)
    if not java.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, path):
        return None
    none = java.scala.Option.empty()
    log = java.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)
    return spark.read.format("delta").option("versionAsOf", log.update(False, none, none).version()).load(path)


def state_type(store: StoreSchema) -> str:
    """The struct of a store's state columns."""
    return f"STRUCT<{', '.join(f'{quoted(c.name)}: {SQL_TYPES[c.type]}' for c in store.state_columns())}>"


def results(store: StoreSchema) -> dict[str, SparkColumn]:
    """The typed results by aggregation, computed from the column `state`."""
    return {a.name: F.expr(_result(a)).alias(a.name) for a in shown(store)}


def _result(aggregation: AggregationSchema) -> str:
    def column(name: str) -> str:
        return f"state.{quoted(f'{aggregation.name}_{name}')}"

    match aggregation.function:
        case "count":
            return column("n")
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
