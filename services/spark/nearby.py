"""The closed windows that late records may change, found without reading all of `closed`.

They are windows of the same keys within reach of late records, and of windows that were closed since the newest
correction, where their keys have corrected ones. Delta keeps the least and the greatest `start_ms`, `end_ms`,
`revision` and `changelog_offset` of each file, so what lies within a few ranges of time is read from the files that can
have it alone. Nothing reaches further: which of them become one session is `session_joins`'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import session_joins, tables
from penstock.services.spark.gaps import Gaps
from penstock.services.spark.session import travelling
from penstock.shared.streams.changelog.format import StoreSchema

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
    return _within(closed, late.select(*KEY).distinct(), reaches(late))


def with_nearby_sessions(
    closed: DataFrame, late: DataFrame, gaps: Gaps, read: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """Late records, the closed sessions that become one by them or by a corrected one, and which is which: `cluster`.

    `late` has WINDOW, `is_late`, `revision`, `changelog_offset` and `reach_ms`, and `read` makes closed rows like it.
    """
    corrected = closed.filter("revision > 0")
    last = corrected.groupBy("partition").agg(F.max("changelog_offset").alias("offset")).collect()
    seen = tables.by_partition({row.partition: row.offset for row in last}, other=None)
    is_new = F.coalesce((F.col("revision") == 0) & (F.col("changelog_offset") > seen), F.lit(False))
    seeds = late.select(*WINDOW, "reach_ms")
    if last:
        own = closed.filter(is_new).join(corrected.select(*KEY).distinct(), KEY, "left_semi")
        own = own.select("partition", F.col("key").cast("binary").alias("key"), "start_ms", "end_ms")
        seeds = seeds.unionByName(own.withColumn("reach_ms", F.lit(gaps.longest_ms)))
    keys, ranges = seeds.select(*KEY).distinct(), reaches(seeds)
    found = late.unionByName(read(_within(closed, keys, ranges)))
    reach = F.when(F.col("revision") > 0, gaps.of_run(F.col("changelog_offset") + 1)).otherwise(F.col("reach_ms"))
    return clustered(found.withColumns({"reach_ms": reach, "is_new": is_new}))


def clustered(found: DataFrame) -> DataFrame:
    """Those sessions that are late or not alone, with the number of their `cluster` in their key.

    Of a session `reach_ms` is how far it joins others, and `is_new` whether corrected ones join it.
    """
    windows = found.groupBy(*WINDOW, "is_late").agg(
        F.max("reach_ms").alias("reach_ms"), F.max("is_new").alias("is_new")
    )
    each = F.collect_list(F.struct(*session_joins.Window._fields)).alias("windows")
    with travelling(session_joins):
        placed = (
            windows.groupBy(*KEY)
            .agg(each)
            .mapInArrow(
                session_joins.placed,
                "partition INT, key BINARY, start_ms BIGINT, end_ms BIGINT, is_late BOOLEAN, cluster INT",
            )
        )
    return found.join(placed, [*WINDOW, "is_late"]).persist()


def reaches(windows: DataFrame) -> list[Range]:
    """The ranges of time that windows take, and as much before and after them as they reach (`reach_ms`)."""
    day, reach = F.floor(F.col("start_ms") / DAY_MS), F.coalesce("reach_ms", F.lit(0))
    bounds = (F.min(F.col("start_ms") - reach).alias("first"), F.max(F.col("end_ms") + reach).alias("last"))
    return joined((r.first, r.last) for r in windows.groupBy(day).agg(*bounds).collect())


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


def starts(store: StoreSchema) -> SparkColumn:
    """The starts of all tumbling or hopping windows that a record at `timestamp_ms` is in."""
    size, advance = store.size_ms, store.advance_ms or store.size_ms
    at = F.greatest(F.col("timestamp_ms") - size + advance, F.lit(0))
    return F.sequence(at - at % advance, F.col("timestamp_ms"), F.lit(advance).cast("bigint"))


def _within(closed: DataFrame, keys: DataFrame, ranges: list[Range]) -> DataFrame:
    """Of the closed windows of these keys those that touch a range, in their newest revision."""
    touches: SparkColumn = F.lit(False)
    for first, last in ranges:
        touches |= (F.col("end_ms") >= first) & (F.col("start_ms") <= last)
    own = keys.select(F.col("partition").alias("_partition"), F.col("key").alias("_key"))
    same = (F.col("partition") == F.col("_partition")) & (F.col("key").cast("binary") == F.col("_key"))
    return newest_windows(closed.filter(touches).join(own, same, "left_semi"))
