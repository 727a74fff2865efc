"""The differences that the audit's checks find, and the rows that the checks compare."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.audit_inputs import Inputs


class Compared(NamedTuple):
    """All differences (check, partition, key, at_ms, detail), and the rows that were compared.

    `contained` are the stream's sessions, each with the start of the computed session that contains it, or null.
    """

    differences: DataFrame
    labelled: DataFrame
    computed: DataFrame
    stream: DataFrame
    not_compared: Sequence[str] = ()
    contained: DataFrame | None = None


def as_differences(rows: DataFrame, check: str, at: str, detail: SparkColumn) -> DataFrame:
    """Return rows as differences of a check."""
    shown = F.col("key").cast("string") if "key" in rows.columns else F.lit(None).cast("string")
    return rows.select(
        F.lit(check).alias("check"),
        F.col("partition").cast("int").alias("partition"),
        shown.alias("key"),
        F.col(at).cast("bigint").alias("at_ms"),
        detail.alias("detail"),
    )


def without_idle_partitions(inputs: Inputs, differences: DataFrame) -> DataFrame:
    """Return the differences without those of the partitions whose time advanced while they were idle."""
    return differences.filter(~F.col("partition").isin(*inputs.idled)) if inputs.idled else differences


def union_of(parts: Sequence[DataFrame]) -> DataFrame:
    """Return the rows of all parts, which have the same columns."""
    return reduce(DataFrame.unionByName, parts)
