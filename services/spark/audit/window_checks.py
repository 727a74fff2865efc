"""The audit of tumbling, hopping and sliding windows, as DataFrames in and differences out.

Nothing merges here, so what must hold is said of each pair of a record and a window that it lies in. Tumbling and
hopping windows are Spark's own `window`:

1. Conservation. A window holds the records that lie in it and did not miss it, as the table of late records says.
2. Recomputation. A record misses a window that ends at the close time or before: the highest time so far, less the
   grace.

A sliding window ends at each record or starts just after one, where that is not empty. Which of them there are after a
record below the close time depends on what was still kept; keys with such records are left out, and counted.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.inputs import KEY, WINDOW, Inputs
from penstock.services.spark.audit.measures import measures
from penstock.services.spark.audit.session_checks import (
    ACCEPTED,
    LATE,
    LEFT_OUT,
    Compared,
    after_gone_records,
    all_differences,
    closing,
    difference,
    label,
    materialized,
    repeated_coordinates,
    stream_sessions,
    unknown_coordinates,
    windows,
)
from penstock.shared.streams.changelog.format import StoreSchema


class Members(NamedTuple):
    """`pairs`: a row a record and window that it must be in; `verdicts`: what is to be said of lateness.

    A verdict has the record's columns, `start_ms`, whether the record `missed_it` and whether it `was_late`.
    `left_out` are keys that are not compared.
    """

    pairs: DataFrame
    verdicts: DataFrame
    left_out: DataFrame | None = None


def compare_windows(inputs: Inputs) -> Compared:
    """All checks of windows that do not merge; lazy, except for what is materialized."""
    store, gone_until = inputs.store, inputs.gone_until()
    numbers = measures(store)
    labelled = materialized(label(inputs))
    keyed = labelled.filter(F.col("fate").isin(ACCEPTED, LATE))
    members = sliding(keyed, store) if store.kind == "sliding" else fixed(keyed, store)
    expected = members.pairs.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))
    stream = stream_sessions(inputs, numbers)
    if members.left_out is not None:
        # A sliding window that was closed is kept for a while: its final counts, not its live row.
        closed = materialized(stream.filter("closed"))
        kept = stream.filter("NOT closed").join(closed.select(*WINDOW), list(WINDOW), "left_anti")
        stream = closed.unionByName(kept).join(members.left_out, list(KEY), "left_anti")
        expected = expected.join(members.left_out, list(KEY), "left_anti")
    if inputs.gone_until_ms:
        # A sliding window may begin just behind a record that is gone.
        low = gone_until + (1 if store.kind == "sliding" else 0)
        expected, stream = (rows.filter(F.col("start_ms") > low) for rows in (expected, stream))
        first = F.col("timestamp_ms") - (F.col("timestamp_ms") % F.lit(store.advance_ms or store.size_ms))
        of_window = first if store.kind != "sliding" else F.col("timestamp_ms")
        is_left_out = F.col("fate").isin(ACCEPTED, LATE) & (of_window <= low)
        labelled = materialized(labelled.withColumn("fate", F.when(is_left_out, LEFT_OUT).otherwise(F.col("fate"))))
    expected, stream = materialized(expected), materialized(stream)
    found = [unknown_coordinates(inputs), repeated_coordinates(labelled, inputs.exactly_once)]
    contents = windows(expected, stream, numbers)
    if store.kind != "sliding":
        found.append(contents)
    if inputs.recomputes:
        recomputed = [closing(stream, store), lateness(members.verdicts, gone_until)]
        recomputed += [contents] if store.kind == "sliding" else []
        found += [after_gone_records(inputs, one) for one in recomputed]
    not_compared = [] if members.left_out is None else _left_out(members.left_out, keyed)
    return Compared(all_differences(found), labelled, expected, stream, not_compared)


def _left_out(keys: DataFrame, keyed: DataFrame) -> list[str]:
    """How many of the keys are left out, in words; nothing if none are."""
    count = keys.count()
    every = "all " if count and count == keyed.select(*KEY).distinct().count() else ""
    return [f"the windows of {every}{count} keys with records below the close time"] if count else []


def fixed(keyed: DataFrame, store: StoreSchema) -> Members:
    """Tumbling and hopping windows; the first starts at 0, and the end is not in the window."""
    size, advance = (f"{ms} milliseconds" for ms in (store.size_ms, store.advance_ms or store.size_ms))
    spans = keyed.withColumn("span", F.window(F.timestamp_millis("timestamp_ms"), size, advance))
    spans = spans.withColumns({"start_ms": F.unix_millis("span.start"), "end_ms": F.unix_millis("span.end")})
    missed = F.coalesce(F.array_contains("missed", F.col("start_ms")), F.lit(False))
    spans = spans.filter("start_ms >= 0").drop("span").withColumn("missed_it", missed)
    verdicts = spans.withColumn("was_late", F.col("end_ms") <= F.col("close_ms"))
    return Members(spans.filter("NOT missed_it"), verdicts)


def sliding(keyed: DataFrame, store: StoreSchema) -> Members:
    """Sliding windows of the keys of which no record came below the close time; both bounds are in the window."""
    reach, time = store.size_ms, F.col("timestamp_ms")
    below = keyed.filter(time < F.col("close_ms"))
    left_out = materialized(below.select(*KEY).distinct())
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
    verdicts = sure.withColumns(
        {"start_ms": time, "missed_it": F.col("fate") == LATE, "was_late": time < F.col("close_ms")}
    )
    return Members(pairs.drop("_span"), verdicts, left_out)


def lateness(verdicts: DataFrame, gone_until: SparkColumn) -> DataFrame:
    """Pairs of a record and a window that it should have missed and did not, or the other way round."""
    wrong = verdicts.filter((F.col("missed_it") != F.col("was_late")) & (F.col("start_ms") > gone_until))
    text = F.when(F.col("missed_it"), "is late").otherwise("is not late")
    detail = F.concat(
        F.format_string("offset %s, window from %s, ", "offset", "start_ms"),
        text,
        F.format_string(", though its time is %s and the close time was %s", "timestamp_ms", "close_ms"),
    )
    return difference(wrong, "lateness", "timestamp_ms", detail)


def _floor(name: str, span: SparkColumn) -> SparkColumn:
    return F.floor(F.col(name) / span).cast("bigint")
