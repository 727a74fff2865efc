"""An audit of a part of the source: from one event time (inclusive) to another (exclusive).

Read is each partition from its first record of the part's time on, up to where the stream's time has passed the part's
end by so much that no later record can change a window that ends before it. So what lies in the part has been read
whole, and the time that each of its records met is known: whatever came before is older than the part.

What is not in the part as a whole is left out on both sides. Sessions do not stay within bounds that somebody chose:
one of Spark's that begins within the gap of the part's start may have begun before it, one that reaches its end may go
on. Of such a key everything up to the first's end, or from the second's start on, is left out: Spark's sessions, the
stream's, their records, and late records within the gap of them, of which those sessions decide. With a gap of 10 and
the part [100, 200), a key's sessions of [95, 104], [130, 141] and [188, 203] leave [105, 188) to compare.

Tumbling and hopping windows are compared if they lie in the part; sliding ones if they begin after its start, since one
that begins at it is made by a record before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.services.spark.bodies import TIME_MS_MAX
from penstock.shared.streams.changelog.format import StoreSchema

ACCEPTED, LATE = "accepted", "late"
LEFT_OUT, LATE_LEFT_OUT = "left out", "late, left out"
KEY = ("partition", "key")
TAIL_RECORDS = 1_000  # read beyond the record that moves the time far enough, which may turn out to be a dead letter


class Part(NamedTuple):
    """The part, in ms; `settled_ms` is by partition the time below which no record that was not read can change a
    window. A partition that was read to its newest commit has none: windows are what they were at that commit."""

    start_ms: int | None
    end_ms: int | None
    settled_ms: Mapping[int, int]

    def low(self, gap_ms: int) -> SparkColumn:
        """The least start of a window that is surely in the part."""
        return F.lit(-(2**62) if self.start_ms is None else self.start_ms + gap_ms)

    def high(self) -> SparkColumn:
        """The time at which the part ends, in a row's partition."""
        end = TIME_MS_MAX if self.end_ms is None else self.end_ms
        return F.least(F.lit(end), tables.by_partition(self.settled_ms, other=None))

    def overlaps(self) -> SparkColumn:
        """Whether a window has to do with the part at all."""
        start = F.lit(True) if self.start_ms is None else F.col("end_ms") >= self.start_ms
        return start if self.end_ms is None else start & (F.col("start_ms") < self.end_ms)

    def holds(self) -> SparkColumn:
        """Whether a window's bounds lie in the part, whatever the partition."""
        start = F.lit(True) if self.start_ms is None else F.col("start_ms") > self.start_ms
        return start if self.end_ms is None else start & (F.col("end_ms") < self.end_ms)


class Edges(NamedTuple):
    """What was left out: Spark's windows at the edges and the stream's."""

    batch: int = 0
    stream: int = 0


class Cut(NamedTuple):
    """What remains to compare; records that were left out have a fate of their own."""

    labelled: DataFrame
    batch: DataFrame
    stream: DataFrame
    edges: Edges


def cut_sessions(part: Part, labelled: DataFrame, batch: DataFrame, stream: DataFrame, gap_ms: int) -> Cut:
    """Leave out what is not in the part as a whole."""
    low, high = part.low(gap_ms), part.high()
    begins_before, goes_on = F.col("start_ms") < low, F.col("end_ms") >= high
    at_edge = batch.filter(begins_before | goes_on)
    own = at_edge.groupBy(*KEY).agg(
        F.max(F.when(begins_before, F.col("end_ms") + 1)).alias("_after"),
        F.min(F.when(goes_on, F.col("start_ms"))).alias("_before"),
    )

    def bounded(rows: DataFrame) -> DataFrame:
        found = rows.join(own, list(KEY), "left")
        bounds = {"_low": F.greatest(low, F.col("_after")), "_high": F.least(high, F.col("_before"))}
        return found.withColumns(bounds).drop("_after", "_before")

    inside = (F.col("start_ms") >= F.col("_low")) & (F.col("end_ms") < F.col("_high"))
    reach = F.when(F.col("fate") == LATE, F.lit(gap_ms)).otherwise(F.lit(0))
    time = F.col("timestamp_ms")
    is_in = (time - reach >= F.col("_low")) & (time + reach < F.col("_high"))
    kept = bounded(stream).withColumn("_in", inside).drop("_low", "_high")
    edges = Edges(at_edge.filter(part.overlaps()).count(), kept.filter(~F.col("_in") & part.overlaps()).count())
    return Cut(
        refated(bounded(labelled), is_in).drop("_low", "_high"),
        bounded(batch).filter(inside).drop("_low", "_high"),
        kept.filter("_in").drop("_in"),
        edges,
    )


def refated(labelled: DataFrame, is_in: SparkColumn) -> DataFrame:
    """Records with the fates of those that are left out."""
    fate = F.when(is_in, F.col("fate")).when(F.col("fate") == ACCEPTED, LEFT_OUT)
    return labelled.withColumn("fate", fate.when(F.col("fate") == LATE, LATE_LEFT_OUT).otherwise(F.col("fate")))


def cut_records(part: Part, labelled: DataFrame, store: StoreSchema) -> DataFrame:
    """Leave out the records of windows that do not merge, where they are not in the part.

    A record of a tumbling window is in it if that is; one of several windows is in it by its own time.
    """
    time, size = F.col("timestamp_ms"), F.lit(store.size_ms)
    if store.kind == "tumbling":
        start = F.floor(time / size) * size
        return refated(labelled, (start >= part.low(0)) & (start + size <= part.high()))
    return refated(labelled, (time >= part.low(0)) & (time < part.high()))


def whole(part: Part, kind: str) -> SparkColumn:
    """Whether a window that does not merge lies in the part."""
    if kind == "sliding":
        return (F.col("start_ms") > part.low(0)) & (F.col("end_ms") < part.high())
    return (F.col("start_ms") >= part.low(0)) & (F.col("end_ms") <= part.high())


def cut_windows(part: Part, expected: DataFrame, stream: DataFrame, kind: str) -> tuple[DataFrame, DataFrame, Edges]:
    """Spark's windows and the stream's that lie in the part, and how many lie at its edges."""
    is_in = whole(part, kind)
    edges = Edges(*(rows.filter(~is_in & part.overlaps()).count() for rows in (expected, stream)))
    return expected.filter(is_in), stream.filter(is_in), edges


def settled_ms(
    records: DataFrame, dead: DataFrame, ends: Mapping[int, int], committed: Mapping[int, int], reach_ms: int
) -> dict[int, int]:
    """`Part.settled_ms`, of the partitions that were read to an end before what is committed.

    `records` are those that were read.
    """
    cut = {p for p, end in ends.items() if end < committed.get(p, 0)}
    if not cut:
        return {}
    rows = moving(records, dead).groupBy("partition").agg(F.max("timestamp_ms").alias("ms")).collect()
    reached = {row.partition: row.ms for row in rows}
    return {p: reached.get(p, 0) - reach_ms for p in sorted(cut)}


def moving(records: DataFrame, dead: DataFrame) -> DataFrame:
    """Of the records those that move time: all but those without a key and dead letters, by their coordinates."""
    return records.filter("key IS NOT NULL").join(dead.dropna(), ["partition", "offset"], "left_anti")


def first_moving(records: DataFrame, dead: DataFrame, start_ms: int) -> dict[int, int]:
    """By partition the offset of the first record of a part that moves time: what lies before is none of it."""
    found = moving(records, dead).filter(F.col("timestamp_ms") >= start_ms - 1)
    return {r.partition: r.offset for r in found.groupBy("partition").agg(F.min("offset").alias("offset")).collect()}
