"""Names, types, literals and schemas in Spark SQL, and the results of windows computed from their states.

Compactions write results with Arrow (`table_columns.lake_result_columns`). The expressions here are for merged windows
and for open windows, which only have a state. Tests compare both ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.table_columns import TIMESTAMP
from penstock.shared.common.arrow_arrays import ARROW_TYPES
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

SQL_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    TIMESTAMP: "TIMESTAMP",
}
SQL_TYPES = {name: SQL_NAMES[type_] for name, type_ in ARROW_TYPES.items()}
"""Spark SQL's type by the type of a state's column."""


def quoted(name: str) -> str:
    """Return a name quoted for Spark SQL, which then accepts any character in it."""
    return "`" + name.replace("`", "``") + "`"


def empty(spark: SparkSession, schema: str) -> DataFrame:
    """Return a DataFrame without rows from a schema in SQL. `createDataFrame` would start Python workers for it."""
    return spark.range(0).select(F.from_json(F.lit("{}"), schema).alias("row")).select("row.*")


def by_partition(values: Mapping[int, Any], type_: str) -> SparkColumn:
    """Return a column of Spark SQL: the value of the row's partition, null for a partition without a value.

    It is one literal for any number of partitions, because Spark cannot plan a CASE of thousands of branches.
    """
    listed = [values.get(partition) for partition in range(max(values, default=-1) + 1)]
    return F.get(F.from_json(F.lit(json.dumps(listed)), f"array<{type_}>"), F.col("partition"))


def sql_type(type_: pa.DataType) -> str:
    """Return the Spark SQL type of an Arrow type.

    >>> sql_type(pa.struct([("n", pa.int64()), ("at", pa.list_(TIMESTAMP))]))
    'STRUCT<`n`: BIGINT, `at`: ARRAY<TIMESTAMP>>'
    """
    if pa.types.is_list(type_):
        return f"ARRAY<{sql_type(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(f'{quoted(field.name)}: {sql_type(field.type)}' for field in type_)}>"
    return SQL_NAMES[type_]


def sql_columns(schema: pa.Schema) -> str:
    """Return the columns of an Arrow schema in Spark SQL.

    >>> sql_columns(pa.schema([("key", pa.string()), ("partition", pa.int32())]))
    '`key` STRING, `partition` INT'
    """
    return ", ".join(f"{quoted(field.name)} {sql_type(field.type)}" for field in schema)


def result_expressions(store: StoreSchema) -> dict[str, SparkColumn]:
    """Return the results of windows by aggregation, as expressions of Spark SQL over the column `state`."""
    return {a.name: F.expr(_result_expression(a)).alias(a.name) for a in store.shown_aggregations()}


def _result_expression(aggregation: AggregationSchema) -> str:
    def state_column(name: str) -> str:
        return f"state.{quoted(f'{aggregation.name}_{name}')}"

    match aggregation.function:
        case "count":
            return state_column("n")
        case "sum" | "min" | "max" as function:
            return f"IF({state_column('n')} > 0, {state_column(function)}, NULL)"
        case "mean":
            return f"IF({state_column('n')} > 0, CAST({state_column('sum')} AS DOUBLE) / {state_column('n')}, NULL)"
        case "count_distinct":
            return f"hll_sketch_estimate({state_column('hll')})"
        case "first" | "last" if aggregation.result != "json":
            return f"IF({state_column('at_ms')} >= 0, {state_column('value')}, NULL)"
        case "aggregate" | "collect_list" | "collect_set" | "quantiles" | "value" | "join" | "first" | "last":
            return f"NULLIF(CAST({state_column('json')} AS STRING), '')"
    raise SchemaMismatch(
        f"aggregation {aggregation.name!r}: this release does not know the function {aggregation.function!r}"
    )
