"""The table `quarantine`: the corrupt changelog records that a run left out, once each.

A record is known by its place and what it holds, not by the run that met it: a run that ended before its MERGE is begun
again under the same number, over a range that may have grown. So records are merged: those that are there stay as they
are. Of two jobs at once Delta lets one do so.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from penstock.services.compactor import tables
from penstock.services.compactor.epochs import Corrupt

SCHEMA = "topic string, partition int, offset bigint, key binary, value binary, reason string, run bigint"
_RECORD = ("topic", "partition", "offset", "key", "value")
_NEW = "penstock_corrupt"


def keep(spark: SparkSession, folder: str, topic: str, run: int, corrupt: Sequence[Corrupt]) -> None:
    """Put corrupt records into the table below `folder`, unless they are there; nothing to put makes no table."""
    if not corrupt:
        return
    path = f"{folder}/quarantine"
    if not tables.exists(spark, path):
        tables.create(spark, path, SCHEMA)
    rows = [(topic, *record, run) for record in corrupt]
    spark.createDataFrame(rows, SCHEMA).coalesce(1).createOrReplaceTempView(_NEW)
    same = " AND ".join(f"t.{name} <=> s.{name}" for name in _RECORD)
    spark.sql(f"MERGE INTO {tables.delta(path)} t USING {_NEW} s ON {same} WHEN NOT MATCHED THEN INSERT *")
