"""The audit's checks that all kinds of windows share, and the outcome of each source record.

A check takes DataFrames and returns the differences it finds. No function here reads Kafka or a table. `session_checks`
has the checks of sessions alone, `window_checks` those of tumbling, hopping and sliding windows.
"""

from __future__ import annotations

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.audit_inputs import COORDINATES, WINDOW, Inputs, in_sample
from penstock.services.spark.audit.differences import as_differences
from penstock.services.spark.audit.measures import FIELDS, Measure, unequal_measures
from penstock.shared.streams.changelog.store_schema import StoreSchema

ACCEPTED = "accepted"
LATE = "late"
DEAD = "dead"
SKIPPED = "skipped"
LEFT_OUT = "left out"
SESSION_CHECKS = {
    "unknown": "every late record and dead letter is a covered source record",
    "twice": "no source record is late or a dead letter twice, or both",
    "unbalanced": "the records of each computed session are in the stream's sessions within it, once",
    "outside": "every session of the stream is within a computed session",
    "windows": "sessions are split, kept and closed as the session rule requires",
    "results": "the result columns of each closed window are the results of its state",
    "closing": "no window was closed before its end and the grace had passed",
    "lateness": "exactly the late records are reported as late",
}
"""The checks of sessions: the claim that must hold, by the check's name."""
RECOMPUTED = frozenset(("windows", "closing", "lateness"))
"""The checks that need the time at which records came."""
WINDOW_CHECKS = {
    **{name: SESSION_CHECKS[name] for name in ("unknown", "twice")},
    "windows": "each window has exactly the records in its bounds that did not miss it",
    **{name: SESSION_CHECKS[name] for name in ("results", "closing", "lateness")},
}
"""The checks of windows that do not merge. The contents of tumbling and hopping windows do not depend on time."""


def materialized(rows: DataFrame) -> DataFrame:
    """Compute the rows now and return them without their plan, so that the checks that use them do not compute them
    again.

    The executors keep the rows in memory or on disk. If an executor is lost, its rows are lost too, and the audit must
    be run again.
    """
    return rows.localCheckpoint()


def label_outcomes(inputs: Inputs) -> DataFrame:
    """Return the source records in the sample, each with its outcome.

    A record also has the fields that measures need, and the close time when it arrived: `close_ms` is stream time minus
    the gap and the grace. A record's outcome is `late` only if it missed all of its windows.
    """
    store = inputs.store
    late = inputs.late.filter(F.col("offset").isNotNull()).groupBy(*COORDINATES)
    late = late.agg(F.count(F.lit(1)).alias("late_times"), F.first("missed").alias("missed"))
    dead = inputs.dead.dropna().groupBy(*COORDINATES).agg(F.count(F.lit(1)).alias("dead_times"))
    records = inputs.records.join(late, COORDINATES, "left").join(dead, COORDINATES, "left")
    records = records.fillna(0, ["late_times", "dead_times"])
    outcome = F.when(F.col("dead_times") > 0, DEAD).when(F.size("missed") >= late_window_count(store), LATE)
    records = records.withColumn("outcome", outcome.when(F.col("key").isNull(), SKIPPED).otherwise(ACCEPTED))
    # Skipped records and dead letters do not advance the operator's time; late records do.
    reached = F.when(F.col("outcome").isin(ACCEPTED, LATE), F.col("timestamp_ms"))
    so_far = SparkWindow.partitionBy("partition").orderBy("offset").rowsBetween(SparkWindow.unboundedPreceding, 0)
    close = F.max(reached).over(so_far) - store.grace_ms - store.gap_ms
    # The sample is taken only now, because the close time depends on all records.
    return (
        records.withColumn("close_ms", close)
        .filter(in_sample(inputs.sample))
        .select(
            *("partition", "offset", "timestamp_ms", "key", "outcome", "missed", "late_times", "dead_times"),
            *(FIELDS, "close_ms"),
        )
    )


def late_window_count(store: StoreSchema) -> SparkColumn:
    """Return how many windows a late record lists if it missed all of its windows, for any kind of window."""
    if store.kind != "hopping":
        return F.lit(1)
    return F.size(late_window_starts(store))


def late_window_starts(store: StoreSchema) -> SparkColumn:
    """Return the starts that a late record lists if it missed all of its windows, for any kind of window."""
    time = F.col("timestamp_ms")
    if store.kind == "session":
        return F.array(time)
    if store.kind == "sliding":
        return F.array(F.greatest(time - store.size_ms, F.lit(0).cast("bigint")))
    advance = F.lit(store.advance_ms or store.size_ms).cast("bigint")
    first = F.greatest(time - store.size_ms + advance, F.lit(0).cast("bigint"))
    return F.sequence(first - first % advance, time - time % advance, advance)


def stream_windows(inputs: Inputs, numbers: list[Measure]) -> DataFrame:
    """Return the stream's windows of the sampled keys, closed and open, with the columns of these measures."""
    rows = inputs.stream.filter(in_sample(inputs.sample))
    return rows.select(*WINDOW, "closed", "closed_ms", *(m.of_state.alias(m.name) for m in numbers))


def unknown_coordinates(inputs: Inputs) -> DataFrame:
    """Return the late records and dead letters that refer to no covered source record.

    Also returns late records whose key or timestamp differs from the source record's, and those that list no window or
    one that they cannot have missed. Works with any kind of window.
    """
    known = inputs.records.select(*COORDINATES, F.col("key").alias("_key"), F.col("timestamp_ms").alias("_ms"))
    known = known.withColumn("_known", F.lit(True))
    dead = inputs.dead.withColumn("kind", F.lit("dead letter"))
    both = inputs.late.withColumn("kind", F.lit("late")).unionByName(dead, allowMissingColumns=True)
    both = both.join(known, COORDINATES, "left").withColumn("at", F.col("timestamp_ms"))
    own = F.array_except("missed", late_window_starts(inputs.store))
    another = ~F.col("key").eqNullSafe(F.col("_key")) | (F.col("timestamp_ms") != F.col("_ms"))
    reason = (
        F.when(F.col("_known").isNull(), "is not a covered source record")
        .when(F.col("kind") == "dead letter", None)
        .when(another, "has another key or time in the source")
        .when((F.size(own) > 0) | (F.size("missed") == 0), "cannot have missed these windows")
    )
    detail = F.format_string("%s: offset %s %s", "kind", "offset", "reason")
    return as_differences(both.withColumn("reason", reason).filter("reason IS NOT NULL"), "unknown", "at", detail)


def repeated_coordinates(labelled: DataFrame, exactly_once: bool) -> DataFrame:
    """Check that no source record is rejected twice, with any kind of window.

    Returns source records with several late records, and those with a late record and a dead letter. With
    `exactly_once`, also returns source records with several dead letters.
    """
    often = (F.col("late_times") > 1) | ((F.col("late_times") > 0) & (F.col("dead_times") > 0))
    if exactly_once:
        often |= F.col("dead_times") > 1
    detail = F.format_string("offset %s: late %s times, dead letter %s times", "offset", "late_times", "dead_times")
    return as_differences(labelled.filter(often), "twice", "timestamp_ms", detail)


def differing_windows(expected: DataFrame, stream: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Check the stream's windows, of any kind, against the expected ones.

    Returns windows that are missing, unexpected or repeated in the stream, and those whose measures are wrong.
    """
    found = stream.groupBy(*WINDOW).agg(
        F.count(F.lit(1)).alias("times"), *(F.first(m.name).alias(f"found_{m.name}") for m in numbers)
    )
    wanted = expected.withColumn("wanted", F.lit(True))
    both = wanted.join(found, list(WINDOW), "full").withColumn("wrong", unequal_measures(numbers))
    reason = (
        F.when(F.col("times").isNull(), "expected, and the stream does not have it")
        .when(F.col("wanted").isNull(), "the stream has it, and it is not expected")
        .when(F.col("times") > 1, F.format_string("the stream has it %s times", "times"))
        .when(F.col("wrong") != "", F.col("wrong"))
    )
    detail = F.concat(F.format_string("%s..%s: ", "start_ms", "end_ms"), F.col("reason"))
    return as_differences(
        both.withColumn("reason", reason).filter(F.col("reason").isNotNull()), "windows", "start_ms", detail
    )


def wrong_results(inputs: Inputs) -> DataFrame:
    """Return the closed windows, of any kind, in which a result column differs from the result of the state."""
    wrong = inputs.stream.filter(in_sample(inputs.sample) & (F.col("wrong_results") != ""))
    detail = F.format_string("%s..%s: %s", "start_ms", "end_ms", "wrong_results")
    return as_differences(wrong, "results", "start_ms", detail)


def early_closed_windows(stream: DataFrame, store: StoreSchema) -> DataFrame:
    """Check that each window, of any kind, was closed at least `store.close_delay_ms` after its end.

    Returns the windows that were closed earlier.
    """
    early = stream.filter(F.col("closed") & (F.col("closed_ms") < F.col("end_ms") + store.close_delay_ms))
    text = f"%s..%s was closed at %s, not {store.close_delay_ms} ms after its end"
    return as_differences(early, "closing", "start_ms", F.format_string(text, "start_ms", "end_ms", "closed_ms"))
