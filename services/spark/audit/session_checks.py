"""The audit's checks of sessions: from DataFrames to differences. No function here reads Kafka or a table.

Spark's own `session_window` computes sessions from the source records. In Spark as in Kafka, two records whose distance
is exactly the gap share a session. Spark does not close sessions, so one session of Spark ("computed session") can
correspond to several sessions of the stream:

1. Conservation. Computed sessions are made of the accepted records: those with a key that are neither late nor dead
   letters. The measures of the stream's sessions within a computed session, merged, must equal its measures. Every
   session of the stream must be within a computed session.
2. Recomputation. `session_reference` applies Kafka's session rule record by record. It determines which records are
   late, and the bounds of each session. Spark computes the sessions' measures. All of these must equal the stream's.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
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
from penstock.services.spark.audit.measures import Measure, measures, unequal_measures
from penstock.services.spark.audit.session_reference import assign_sessions
from penstock.shared.streams.changelog.store_schema import StoreSchema


def compare_sessions(inputs: Inputs) -> Compared:
    """Run the checks of sessions over all inputs. The result is lazy, except for materialized parts."""
    store = inputs.store
    numbers = measures(store)
    labelled = materialized(label_outcomes(inputs))
    # Compare sketches once, as they cost more than all other numbers: if every session is recomputed, only there.
    is_all_recomputed = inputs.recomputes and not inputs.idled
    balanced = [m for m in numbers if not (m.is_sketch and is_all_recomputed)]
    computed = materialized(computed_sessions(labelled, store, balanced))
    stream = materialized(stream_windows(inputs, numbers))
    if inputs.deleted_until_ms:
        labelled, computed, stream = (
            materialized(rows) for rows in sessions_after_deleted_records(inputs, labelled, computed, stream)
        )
    contained = materialized(sessions_within(stream, computed))
    found = [
        unknown_coordinates(inputs),
        repeated_coordinates(labelled, inputs.exactly_once),
        unbalanced_sessions(contained, computed, balanced),
        outside_sessions(contained),
        wrong_results(inputs),
    ]
    if inputs.recomputes:
        keyed = labelled.filter(F.col("outcome").isin(ACCEPTED, LATE))
        assigned = materialized(assign_sessions(keyed, store.gap_ms))
        recomputed = [
            differing_windows(expected_sessions(assigned, numbers), stream, numbers),
            early_closed_windows(stream, store),
            wrong_lateness(assigned),
        ]
        found += [without_idle_partitions(inputs, one) for one in recomputed]
    return Compared(union_of(found), labelled, computed, stream, contained=contained)


def sessions_after_deleted_records(
    inputs: Inputs, labelled: DataFrame, computed: DataFrame, stream: DataFrame
) -> tuple[DataFrame, DataFrame, DataFrame]:
    """Leave out records and sessions that may share a session with a deleted record.

    Returns all records, with the outcome LEFT_OUT where this applies, and the remaining computed and stream sessions.
    """
    gap = inputs.store.gap_ms
    deleted_until = inputs.deleted_until()
    # 1. For each key, find the computed sessions that may have contained deleted records: those that start at most one
    # gap after `deleted_until`, the time up to which records may have been deleted.
    near = computed.filter(F.col("start_ms") <= deleted_until + gap)
    ends = near.groupBy(*KEY).agg(F.max("end_ms").alias("_end"))

    def with_lower_bound(rows: DataFrame) -> DataFrame:
        # 2. The limit is one gap after `deleted_until`, or one gap after the end of the last such session if that is
        # later.
        low = F.greatest(deleted_until, F.coalesce(F.col("_end"), deleted_until)) + gap
        return rows.join(ends, list(KEY), "left").withColumn("_low", F.when(deleted_until >= 0, low).otherwise(-1))

    # 3. Leave out accepted and late records with timestamps up to the limit, and sessions that start at the limit or
    # earlier.
    is_left_out = (F.col("timestamp_ms") <= F.col("_low")) & F.col("outcome").isin(ACCEPTED, LATE)
    outcome = F.when(is_left_out, LEFT_OUT).otherwise(F.col("outcome"))
    own = with_lower_bound(labelled).withColumn("outcome", outcome)
    behind = (with_lower_bound(rows).filter(F.col("start_ms") > F.col("_low")) for rows in (computed, stream))
    labelled, computed, stream = (rows.drop("_low", "_end") for rows in (own, *behind))
    return labelled, computed, stream


def computed_sessions(labelled: DataFrame, store: StoreSchema, numbers: list[Measure]) -> DataFrame:
    """Return Spark's sessions over the accepted records."""
    length = F.session_window(F.timestamp_millis("timestamp_ms"), f"{store.gap_ms} milliseconds")
    grouped = labelled.filter(F.col("outcome") == ACCEPTED).groupBy(*KEY, length)
    return grouped.agg(
        F.count(F.lit(1)).alias("records"),
        *(m.of_records.alias(m.name) for m in numbers),
    ).select(
        *KEY,
        F.unix_millis("session_window.start").alias("start_ms"),
        (F.unix_millis("session_window.end") - store.gap_ms).alias("end_ms"),
        "records",
        *(m.name for m in numbers),
    )


def previous_session(stream: DataFrame, computed: DataFrame) -> DataFrame:
    """Return the stream's sessions with `computed_ms`: the last start of a computed session of the same key that is not
    later than the session's own start."""
    # An as-of join by one sort: joining by key and range would compare every pair of a key's sessions.
    rows = stream.withColumn("_row", F.lit(1)).withColumn("_start", F.lit(None).cast("bigint"))
    starts = computed.select(*KEY, "start_ms", F.lit(0).alias("_row"), F.col("start_ms").alias("_start"))
    frame = SparkWindow.partitionBy(*KEY).orderBy("start_ms", "_row").rowsBetween(SparkWindow.unboundedPreceding, 0)
    found = rows.unionByName(starts, allowMissingColumns=True).withColumn(
        "computed_ms", F.last("_start", ignorenulls=True).over(frame)
    )
    return found.filter("_row = 1").drop("_row", "_start")


def sessions_within(stream: DataFrame, computed: DataFrame) -> DataFrame:
    """Return the stream's sessions with the start of the computed session that holds them, null if there is none."""
    ends = computed.select(*KEY, F.col("start_ms").alias("computed_ms"), F.col("end_ms").alias("computed_end_ms"))
    held = previous_session(stream, computed).join(ends, [*KEY, "computed_ms"], "left")
    inside = F.col("end_ms") <= F.col("computed_end_ms")
    return held.withColumn("computed_ms", F.when(inside, F.col("computed_ms"))).drop("computed_end_ms")


def unbalanced_sessions(contained: DataFrame, computed: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Return computed sessions that hold no session of the stream, or whose measures differ from the merged measures
    of the stream's sessions that they hold.
    """
    merged = (
        contained.filter(F.col("computed_ms").isNotNull())
        .groupBy(*KEY, "computed_ms")
        .agg(F.count(F.lit(1)).alias("sessions"), *(m.merge(m.name).alias(f"found_{m.name}") for m in numbers))
        .withColumnRenamed("computed_ms", "start_ms")
    )
    both = computed.join(merged, [*KEY, "start_ms"], "left").withColumn("wrong", unequal_measures(numbers))
    lost = F.col("sessions").isNull()
    reason = F.when(lost, "no session of the stream").otherwise(F.col("wrong"))
    detail = F.concat(F.format_string("%s..%s, %s records: ", "start_ms", "end_ms", "records"), reason)
    return as_differences(both.filter(lost | (F.col("wrong") != "")), "unbalanced", "start_ms", detail)


def outside_sessions(contained: DataFrame) -> DataFrame:
    """Return the sessions of the stream that no computed session holds."""
    detail = F.format_string("%s..%s holds records that the source does not have there", "start_ms", "end_ms")
    return as_differences(contained.filter(F.col("computed_ms").isNull()), "outside", "start_ms", detail)


def expected_sessions(assigned: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Return the sessions that the stream should have, with the measures of the records that the stream accepted."""
    own = assigned.filter((F.col("outcome") == ACCEPTED) & F.col("start_ms").isNotNull())
    return own.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))


def wrong_lateness(assigned: DataFrame) -> DataFrame:
    """Return late records that the session rule accepts, and accepted records that it rejects as late."""
    is_wrong = (F.col("outcome") == LATE) == F.col("start_ms").isNotNull()
    text = "offset %s is %s, though its time is %s and the close time was %s"
    detail = F.format_string(text, "offset", "outcome", "timestamp_ms", "close_ms")
    return as_differences(assigned.filter(is_wrong), "lateness", "timestamp_ms", detail)
