"""The audit of tumbling, hopping and sliding windows: from DataFrames to differences.

These windows do not merge, so the checks apply to each pair of a record and a window that contains its time. Tumbling
and hopping windows are computed with Spark's own `window`:

1. Conservation. A window must contain the records within its bounds, except those that missed it according to the table
   of late records.
2. Recomputation. A record must miss exactly those of its windows that end at or before the close time. The close time
   is the highest timestamp so far minus the grace period.

A sliding window that is not empty ends at a record or starts just after one. If a record's timestamp is below the close
time, its windows depend on which earlier records the store still held, which cannot be recomputed. Keys with such
records are left out and counted.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.audit_inputs import KEY, WINDOW, Inputs
from penstock.services.spark.audit.common_checks import (
    ACCEPTED,
    LATE,
    LEFT_OUT,
    differing_windows,
    early_closed_windows,
    label_outcomes,
    materialized,
    repeated_coordinates,
    stream_windows,
    unknown_coordinates,
    wrong_results,
)
from penstock.services.spark.audit.differences import (
    Compared,
    as_differences,
    union_of,
    without_idle_partitions,
)
from penstock.services.spark.audit.measures import measures
from penstock.shared.streams.changelog.store_schema import StoreSchema


class Members(NamedTuple):
    """The pairs of records and windows of one store that the audit expects."""

    pairs: DataFrame
    """One row for each record and each window that must contain it."""
    verdicts: DataFrame
    """One row for each record and window for which the audit checks whether the record missed the window. The columns
    include the record's, `start_ms`, `missed_it` (whether the stream's late records say so) and `was_late` (the
    expected value).
    """
    left_out: DataFrame | None = None
    """The keys that are not compared."""


def compare_windows(inputs: Inputs) -> Compared:
    """Run the checks of windows that do not merge. The result is lazy, except for materialized parts."""
    store = inputs.store
    deleted_until = inputs.deleted_until()
    numbers = measures(store)
    labelled = materialized(label_outcomes(inputs))
    keyed = labelled.filter(F.col("outcome").isin(ACCEPTED, LATE))
    members = sliding_members(keyed, store) if store.kind == "sliding" else fixed_members(keyed, store)
    expected = members.pairs.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))
    stream = stream_windows(inputs, numbers)
    if members.left_out is not None:
        expected, stream = (rows.join(members.left_out, list(KEY), "left_anti") for rows in (expected, stream))
    if inputs.deleted_until_ms:
        # A sliding window may begin just after a record that is gone.
        low = deleted_until + (1 if store.kind == "sliding" else 0)
        expected, stream = (rows.filter(F.col("start_ms") > low) for rows in (expected, stream))
        first = F.col("timestamp_ms") - (F.col("timestamp_ms") % F.lit(store.advance_ms or store.size_ms))
        of_window = first if store.kind != "sliding" else F.col("timestamp_ms")
        is_left_out = F.col("outcome").isin(ACCEPTED, LATE) & (of_window <= low)
        labelled = materialized(
            labelled.withColumn("outcome", F.when(is_left_out, LEFT_OUT).otherwise(F.col("outcome")))
        )
    expected = materialized(expected)
    stream = materialized(stream)
    found = [unknown_coordinates(inputs), repeated_coordinates(labelled, inputs.exactly_once), wrong_results(inputs)]
    contents = differing_windows(expected, stream, numbers)
    if store.kind != "sliding":
        found.append(contents)
    if inputs.recomputes:
        recomputed = [early_closed_windows(stream, store), wrong_lateness(members.verdicts, deleted_until)]
        recomputed += [contents] if store.kind == "sliding" else []
        found += [without_idle_partitions(inputs, one) for one in recomputed]
    not_compared = [] if members.left_out is None else _describe_left_out_keys(members.left_out, keyed)
    return Compared(union_of(found), labelled, expected, stream, not_compared)


def _describe_left_out_keys(keys: DataFrame, keyed: DataFrame) -> list[str]:
    """Return the text with the number of keys whose sliding windows are not compared; empty if there are none."""
    count = keys.count()
    every = "all " if count and count == keyed.select(*KEY).distinct().count() else ""
    return [f"the windows of {every}{count} keys with records below the close time"] if count else []


def fixed_members(keyed: DataFrame, store: StoreSchema) -> Members:
    """Return the pairs of records and tumbling or hopping windows (see `Members`).

    Windows start at 0 or later. Their end is exclusive.
    """
    size, advance = (f"{ms} milliseconds" for ms in (store.size_ms, store.advance_ms or store.size_ms))
    spans = keyed.withColumn("span", F.window(F.timestamp_millis("timestamp_ms"), size, advance))
    spans = spans.withColumns({"start_ms": F.unix_millis("span.start"), "end_ms": F.unix_millis("span.end")})
    missed = F.coalesce(F.array_contains("missed", F.col("start_ms")), F.lit(False))
    spans = spans.filter("start_ms >= 0").drop("span").withColumn("missed_it", missed)
    verdicts = spans.withColumn("was_late", F.col("end_ms") <= F.col("close_ms"))
    return Members(spans.filter("NOT missed_it"), verdicts)


def sliding_members(keyed: DataFrame, store: StoreSchema) -> Members:
    """Return the pairs of records and sliding windows (see `Members`). Both bounds of a window are inclusive.

    If the timestamp of any record of a key was below the close time when the record arrived, the key is in `left_out`
    and has no rows in `pairs`. `verdicts` has, for every key, the records that are certainly late or certainly not
    late.
    """
    reach = store.size_ms
    time = F.col("timestamp_ms")
    below = keyed.filter(time < F.col("close_ms"))
    left_out = materialized(below.select(*KEY).distinct())
    records = keyed.filter(F.col("outcome") == ACCEPTED).join(left_out, list(KEY), "left_anti")
    times = records.select(*KEY, "timestamp_ms").distinct()
    starts = times.select(*KEY, F.greatest(F.lit(0), time - reach).alias("start_ms"))
    starts = starts.unionByName(times.select(*KEY, (time + 1).alias("start_ms"))).distinct()
    # Join records and windows by spans of one window's length: a window lies in at most two spans.
    span = F.lit(reach + 1)
    cut = starts.withColumn("end_ms", F.col("start_ms") + reach)
    cut = cut.withColumn("_span", F.explode(F.sequence(_floor_time("start_ms", span), _floor_time("end_ms", span))))
    within = time.between(F.col("start_ms"), F.col("end_ms"))
    pairs = records.withColumn("_span", _floor_time("timestamp_ms", span)).join(cut, [*KEY, "_span"]).filter(within)
    # A record is surely not late if the window that ends at it is open, and surely late if even the window that starts
    # just after it is closed. Between the two, lateness depends on the records that were still kept.
    sure = keyed.filter((time >= F.col("close_ms")) | (time + 1 + reach <= F.col("close_ms")))
    verdicts = sure.withColumns(
        {"start_ms": time, "missed_it": F.col("outcome") == LATE, "was_late": time < F.col("close_ms")}
    )
    return Members(pairs.drop("_span"), verdicts, left_out)


def wrong_lateness(verdicts: DataFrame, deleted_until: SparkColumn) -> DataFrame:
    """Return the pairs in which a record missed a window and should not have, or should have missed it and did not."""
    wrong = verdicts.filter((F.col("missed_it") != F.col("was_late")) & (F.col("start_ms") > deleted_until))
    text = F.when(F.col("missed_it"), "is late").otherwise("is not late")
    detail = F.concat(
        F.format_string("offset %s, window from %s, ", "offset", "start_ms"),
        text,
        F.format_string(", though its time is %s and the close time was %s", "timestamp_ms", "close_ms"),
    )
    return as_differences(wrong, "lateness", "timestamp_ms", detail)


def _floor_time(name: str, span: SparkColumn) -> SparkColumn:
    return F.floor(F.col(name) / span).cast("bigint")
