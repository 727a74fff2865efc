"""The audit of tumbling, hopping and sliding windows, as DataFrames in and differences out.

Nothing merges here, so what must hold is said of each record by itself: of the windows that it lies in, those are its
own that were not closed when it came. Tumbling and hopping windows are Spark's own `window`; a window takes a record
while its end lies above the close time (the highest time so far, less the grace), and a record with no such window is
late. So the windows are compared one by one, with all their numbers.

A sliding window ends at each record or starts just after one, where that is not empty. Which of them there are after a
record below the close time depends on what was still kept; keys with such records are left out, and counted.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit_checks import (
    WINDOW,
    Compared,
    Inputs,
    all_differences,
    difference,
    label,
    published,
    repeated_coordinates,
    settled,
    stream_sessions,
    unknown_coordinates,
    windows,
)
from penstock.services.spark.audit_part import ACCEPTED, KEY, LATE, Edges, cut_records, cut_windows
from penstock.services.spark.measures import measures
from penstock.shared.streams.changelog.format import StoreSchema


class Members(NamedTuple):
    """`pairs`: a row a record and window that it must be in; `verdicts`: partition, offset, and whether it is `taken`.

    `left_out` are keys that are not compared.
    """

    pairs: DataFrame
    verdicts: DataFrame
    left_out: DataFrame | None


def compare_windows(inputs: Inputs) -> Compared:
    """All checks of windows that do not merge; lazy, but for what is settled."""
    store = inputs.store
    numbers = measures(store)
    whole, part = settled(label(inputs)), inputs.part
    labelled = whole if part is None else settled(cut_records(part, whole, store))
    keyed = labelled.filter(F.col("fate").isin(ACCEPTED, LATE))
    # A tumbling window at an edge has lost its records to it: it is made of them all, to be counted as left out.
    own = whole.filter(F.col("fate").isin(ACCEPTED, LATE)) if store.kind == "tumbling" else keyed
    members = sliding(keyed, store) if store.kind == "sliding" else fixed(own, store)
    expected = members.pairs.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))
    stream = settled(stream_sessions(inputs, numbers))
    if members.left_out is not None:
        # A sliding window that was closed is kept for a while: its final counts, not its live row.
        closed = stream.filter("closed")
        kept = stream.filter("NOT closed").join(closed.select(*WINDOW), list(WINDOW), "left_anti")
        stream = settled(closed.unionByName(kept).join(members.left_out, list(KEY), "left_anti"))
        expected = expected.join(members.left_out, list(KEY), "left_anti")
    expected, edges = settled(expected), Edges()
    if part is not None:
        expected, stream, edges = cut_windows(part, expected, stream, store.kind)
    found = [
        unknown_coordinates(inputs),
        repeated_coordinates(labelled, inputs.once),
        windows(expected, stream, numbers),
        lateness(keyed, members.verdicts),
    ]
    if inputs.published is not None and inputs.results is not None:
        found.append(published(inputs.published, inputs.results, inputs.once))
    not_compared = [] if members.left_out is None else _left_out(members.left_out, keyed)
    return Compared(all_differences(found), labelled, expected, stream, not_compared, edges)


def _left_out(keys: DataFrame, keyed: DataFrame) -> list[str]:
    """How many of the keys are left out, in words; none where none are."""
    count = keys.count()
    every = "all " if count and count == keyed.select(*KEY).distinct().count() else ""
    return [f"the windows of {every}{count} keys with records below the close time"] if count else []


def fixed(keyed: DataFrame, store: StoreSchema) -> Members:
    """Tumbling and hopping windows; the first starts at 0, and the end is not in the window."""
    size, advance = (f"{ms} milliseconds" for ms in (store.size_ms, store.advance_ms))
    spans = keyed.withColumn("span", F.window(F.timestamp_millis("timestamp_ms"), size, advance))
    spans = spans.withColumns({"start_ms": F.unix_millis("span.start"), "end_ms": F.unix_millis("span.end")})
    open_ = spans.filter((F.col("start_ms") >= 0) & (F.col("end_ms") > F.col("close_ms"))).drop("span")
    accepted = open_.filter(F.col("fate") == ACCEPTED)
    taken = open_.select("partition", "offset").distinct().withColumn("taken", F.lit(True))
    verdicts = keyed.join(taken, ["partition", "offset"], "left").fillna(False, ["taken"])
    return Members(accepted, verdicts.select("partition", "offset", "taken"), None)


def sliding(keyed: DataFrame, store: StoreSchema) -> Members:
    """Sliding windows of the keys of which no record came below the close time; both bounds are in the window."""
    reach, time = store.size_ms, F.col("timestamp_ms")
    below = keyed.filter(time < F.col("close_ms"))
    left_out = settled(below.select(*KEY).distinct())
    records = keyed.filter(F.col("fate") == ACCEPTED).join(left_out, list(KEY), "left_anti")
    times = records.select(*KEY, "timestamp_ms").distinct()
    starts = times.select(*KEY, F.greatest(F.lit(0), time - reach).alias("start_ms"))
    starts = starts.unionByName(times.select(*KEY, (time + 1).alias("start_ms"))).distinct()
    # Records and windows meet in spans of one window's length: a window lies in two of them at most.
    span = F.lit(reach + 1)
    cut = starts.withColumn("end_ms", F.col("start_ms") + reach)
    cut = cut.withColumn("_span", F.explode(F.sequence(_floor("start_ms", span), _floor("end_ms", span))))
    within = time.between(F.col("start_ms"), F.col("end_ms"))
    pairs = records.withColumn("_span", _floor("timestamp_ms", span)).join(cut, [*KEY, "_span"]).filter(within)
    # Between "its left window takes it" and "not even one to its right could" the rule asks what was kept.
    sure = keyed.filter((time >= F.col("close_ms")) | (time + 1 + reach <= F.col("close_ms")))
    verdicts = sure.select("partition", "offset", (time >= F.col("close_ms")).alias("taken"))
    return Members(pairs.drop("_span"), verdicts, left_out)


def lateness(keyed: DataFrame, verdicts: DataFrame) -> DataFrame:
    """Late records that a window should have taken, and accepted ones that none could."""
    judged = keyed.join(verdicts, ["partition", "offset"])
    text = "offset %s is %s, though its time is %s and the close time was %s"
    detail = F.format_string(text, "offset", "fate", "timestamp_ms", "close_ms")
    wrong = (F.col("fate") == LATE) == F.col("taken")
    return difference(judged.filter(wrong), "lateness", "timestamp_ms", detail)


def _floor(name: str, span: SparkColumn) -> SparkColumn:
    return F.floor(F.col(name) / span).cast("bigint")
