"""The closed windows that late records may change, found without reading all of `closed`.

They are windows of the same keys, near late records or near windows that were corrected before. Delta keeps the least
and the greatest `start_ms`, `end_ms` and `revision` of each file, so what lies within a few ranges of time, and what
has a revision above 0, is read from the files that can have it alone. A session that is found reaches further than the
record that it was found by: ranges grow until no session that counts reaches out of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

DAY_MS = 86_400_000
RANGES_MAX = 64  # of time that are asked for; those nearest to each other become one beyond that
WINDOW = ("partition", "key", "start_ms", "end_ms")
KEY = ["partition", "key"]
Range = tuple[int, int]


def newest_windows(closed: DataFrame) -> DataFrame:
    """The windows that a table of closed ones says there are: of each its highest revision, unless it is no more."""
    order = SparkWindow.partitionBy(*WINDOW).orderBy(F.col("revision").desc())
    newest = closed.withColumn("_place", F.row_number().over(order)).filter("_place = 1").drop("_place")
    return newest.filter("state IS NOT NULL")


def nearby(closed: DataFrame, late: DataFrame) -> DataFrame:
    """The closed windows of the late records' keys that touch the bounds of one of them (WINDOW)."""
    return _within(closed, late.select(*KEY).distinct(), reaches(late, 0))


def with_nearby_sessions(
    closed: DataFrame, late: DataFrame, gap_ms: int, read: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """Late sessions (WINDOW, `is_late`, `revision`), the closed ones of their clusters, and which is which: `cluster`.

    Corrected sessions and what is within the gap of them are there too. `read` makes closed rows as `late` has them.
    """
    corrected = newest_windows(closed.filter("revision > 0"))
    seeds = late.select(*WINDOW).unionByName(corrected.withColumn("key", F.col("key").cast("binary")).select(*WINDOW))
    keys, ranges = seeds.select(*KEY).distinct().persist(), reaches(seeds, gap_ms)
    while True:
        found = clustered(late.unionByName(read(_within(closed, keys, ranges))), gap_ms)
        whole = SparkWindow.partitionBy(*KEY, "cluster")
        matters = F.max(F.col("is_late") | (F.col("revision") > 0)).over(whole)
        found = found.withColumn("_matters", matters).filter("_matters").drop("_matters").persist()
        further = joined([*ranges, *reaches(found, gap_ms)])
        if further == ranges:
            keys.unpersist()
            return found
        found.unpersist()
        ranges = further


def clustered(sessions: DataFrame, gap_ms: int) -> DataFrame:
    """Sessions with the number of their `cluster` in their key: those within the gap of each other have one."""
    order = SparkWindow.partitionBy(*KEY).orderBy("start_ms", "end_ms", "is_late", "revision")
    before = F.max("end_ms").over(order.rowsBetween(SparkWindow.unboundedPreceding, -1))
    first = F.coalesce(F.col("start_ms") > before + gap_ms, F.lit(True)).cast("bigint")
    until = order.rowsBetween(SparkWindow.unboundedPreceding, SparkWindow.currentRow)
    return sessions.withColumn("_first", first).withColumn("cluster", F.sum("_first").over(until)).drop("_first")


def reaches(windows: DataFrame, gap_ms: int) -> list[Range]:
    """The ranges of time that windows take, and the gap before and after them."""
    day = F.floor(F.col("start_ms") / DAY_MS)
    bounds = (F.min("start_ms").alias("first"), F.max("end_ms").alias("last"))
    return joined((r.first - gap_ms, r.last + gap_ms) for r in windows.groupBy(day).agg(*bounds).collect())


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, overlapping ones made one, and no more than RANGES_MAX.

    >>> joined([(7, 9), (0, 3), (2, 5)])
    [(0, 5), (7, 9)]
    """
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    if len(found) > RANGES_MAX:
        between = sorted(b[0] - a[1] for a, b in itertools.pairwise(found))
        near = between[len(found) - RANGES_MAX - 1]
        apart: list[Range] = [found[0]]
        for first, last in found[1:]:
            if first - apart[-1][1] <= near:
                apart[-1] = (apart[-1][0], last)
            else:
                apart.append((first, last))
        return apart
    return found


def _within(closed: DataFrame, keys: DataFrame, ranges: list[Range]) -> DataFrame:
    """Of the closed windows of these keys those that touch a range, in their newest revision."""
    touches: SparkColumn = F.lit(False)
    for first, last in ranges:
        touches |= (F.col("end_ms") >= first) & (F.col("start_ms") <= last)
    own = keys.select(F.col("partition").alias("_partition"), F.col("key").alias("_key"))
    same = (F.col("partition") == F.col("_partition")) & (F.col("key").cast("binary") == F.col("_key"))
    return newest_windows(closed.filter(touches).join(own, same, "left_semi"))
