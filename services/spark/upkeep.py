"""What keeps the tables readable at speed: few files a partition, and none that nobody needs.

Every run adds a file to each partition that it touches. OPTIMIZE rewrites a partition's small files into one once
there are more than a limit; it changes no row, so readers and the next run notice nothing. VACUUM then removes what no
version younger than the retention needs. Neither is part of a run: what is not done now is done after the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

from pyspark.sql import SparkSession

from penstock.services.spark import delta_log, tables
from penstock.services.spark.session import jvm

VACUUM_ENDED = "VACUUM END"  # as Delta's history calls it


def tables_below(spark: SparkSession, root: str) -> list[str]:
    """The names of the folders below `root`; none where there is no such folder."""
    java: Any = jvm(spark)
    folder = java.org.apache.hadoop.fs.Path(root)
    files = folder.getFileSystem(spark._jsc.hadoopConfiguration())
    if not files.exists(folder):
        return []
    return sorted(str(status.getPath().getName()) for status in files.listStatus(folder) if status.isDirectory())


def files_by_partition(spark: SparkSession, path: str) -> dict[str, int]:
    """How many files the newest version of a table has, by partition as its folder is called (`day=2013-01-01`)."""
    folders = (file.rsplit("/", 2)[-2] for file in spark.read.format("delta").load(path).inputFiles())
    return dict(sorted(Counter(unquote(folder) for folder in folders).items()))


def optimize(spark: SparkSession, path: str, files_max: int) -> int:
    """Rewrite the partitions that have more than `files_max` files; how many those were."""
    if delta_log.files(spark, path) <= files_max:
        return 0
    crowded = [name for name, files in files_by_partition(spark, path).items() if files > files_max]
    if crowded:
        column = crowded[0].partition("=")[0]
        values = ", ".join(f"'{name.partition('=')[2]}'" for name in crowded)
        spark.sql(f"OPTIMIZE {tables.delta(path)} WHERE {tables.quoted(column)} IN ({values})")
    return len(crowded)


def expire(spark: SparkSession, path: str, newest_ms: int, days: int) -> list[str]:
    """Delete the rows of `closed` whose day lies more than `days` before that of `newest_ms`; which days those were.

    Whole partitions go, so nothing is rewritten; their files are left to VACUUM.
    """
    limit = datetime.fromtimestamp(newest_ms / 1000, UTC).date() - timedelta(days=days)
    names = (name.partition("=")[2] for name in files_by_partition(spark, path))
    old = [name for name in names if name < limit.isoformat()]
    if old:
        before = f"day < DATE'{limit.isoformat()}'"
        spark.sql(f"DELETE FROM {tables.delta(path)} WHERE {before}")  # noqa: S608 - a quoted path and a date
    return old


def is_vacuum_due(versions: Iterable[tuple[str, int | None]], every: int) -> bool:
    """Whether `every` runs have passed since the last VACUUM that ended, by a table's operations, newest first.

    With each operation goes the number of the run that it was, None for what is none. Where more versions than are
    looked at lie between, the run's number alone decides. After a VACUUM that was missed at run 4:

    >>> is_vacuum_due([("MERGE", 5), ("MERGE", 4), ("MERGE", 3), ("OPTIMIZE", None), ("VACUUM END", None)], 2)
    True
    """
    since: list[int] = []
    for operation, run in versions:
        if operation == VACUUM_ENDED:
            return len(since) >= every
        if run is not None:
            since.append(run)
    return len(since) >= every or (bool(since) and since[0] % every == 0)


def vacuum(spark: SparkSession, path: str, retention_hours: int) -> None:
    """Remove the files that no version younger than the retention needs."""
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.conf.set("spark.databricks.delta.vacuum.logging.enabled", "true")  # not Delta's default for every store
    spark.sql(f"VACUUM {tables.delta(path)} RETAIN {retention_hours} HOURS")
