"""The audit's checks of sessions: from DataFrames to differences. No function here reads Kafka or a table.

Spark's own `session_window` computes sessions from the source records. In Spark as in Kafka, two records whose distance
is exactly the gap share a session. Spark does not close sessions, so one of its sessions ("computed session") can be
several sessions of the stream:

1. Conservation. A computed session consists of the records that are not late, not dead letters and have a key. The
   stream's sessions within it must together have the same numbers. Every session of the stream is within a computed
   session.
2. Recomputation. The session rule, record by record (`session_reference`), determines the late records and the
   sessions; Spark computes their numbers.
"""

from __future__ import annotations

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit import session_reference
from penstock.services.spark.audit.audit_inputs import COORDINATES, KEY, WINDOW, Inputs, in_sample
from penstock.services.spark.audit.differences import (
    Compared,
    all_differences,
    as_differences,
    materialized,
    without_idle_partitions,
)
from penstock.services.spark.audit.measures import (
    FIELDS,
    Measure,
    contradictions,
    measures,
)
from penstock.shared.streams.changelog.format import StoreSchema

ACCEPTED, LATE, DEAD, NULL_KEY, LEFT_OUT = "accepted", "late", "dead", "null key", "left out"
CHECKS = {
    "unknown": "every late record and dead letter is a covered source record",
    "twice": "no source record is late or a dead letter twice, or both",
    "unbalanced": "the records of each computed session are in the stream's sessions within it, once",
    "outside": "every session of the stream is within a computed session",
    "windows": "sessions are split, kept and closed as the session rule requires",
    "closing": "no window was closed before its end and the grace had passed",
    "lateness": "exactly the late records are reported as late",
}
"""The checks of sessions: the claim that must hold, by the check's name."""
RECOMPUTED = frozenset(("windows", "closing", "lateness"))
"""The checks that need the time at which records came."""
OF_WINDOWS = {
    **{name: CHECKS[name] for name in ("unknown", "twice")},
    "windows": "each window has exactly the records in its bounds that did not miss it",
    **{name: CHECKS[name] for name in ("closing", "lateness")},
}
"""The checks of windows that do not merge. The contents of tumbling and hopping windows do not depend on time."""


def compare(inputs: Inputs) -> Compared:
    """Runs all checks of sessions over all inputs. The result is lazy, except for materialized parts."""
    store = inputs.store
    numbers = measures(store)
    labelled = materialized(label(inputs))
    # Compare sketches once, as they cost more than all other numbers: if every session is recomputed, only there.
    is_all_recomputed = inputs.recomputes and not inputs.idled
    balanced = [m for m in numbers if not (m.is_sketch and is_all_recomputed)]
    computed = materialized(computed_sessions(labelled, store, balanced))
    stream = materialized(stream_sessions(inputs, numbers))
    if inputs.deleted_until_ms:
        labelled, computed, stream = (
            materialized(rows) for rows in sessions_after_deleted_records(inputs, labelled, computed, stream)
        )
    contained = materialized(within(stream, computed))
    found = [
        unknown_coordinates(inputs),
        repeated_coordinates(labelled, inputs.exactly_once),
        unbalanced(contained, computed, balanced),
        outside(contained),
    ]
    if inputs.recomputes:
        assigned = materialized(assigned_records(labelled, store))
        recomputed = [
            windows(rule_sessions(assigned, numbers), stream, numbers),
            closing(stream, store),
            lateness(assigned),
        ]
        found += [without_idle_partitions(inputs, one) for one in recomputed]
    return Compared(all_differences(found), labelled, computed, stream, contained=contained)


def sessions_after_deleted_records(
    inputs: Inputs, labelled: DataFrame, computed: DataFrame, stream: DataFrame
) -> tuple[DataFrame, DataFrame, DataFrame]:
    """Return the records, computed sessions and stream sessions that cannot share a session with a deleted record.

    Records up to `deleted_until` may have been deleted. A computed session that begins within the gap of that
    time may hold some of them. It is left out, with the records and sessions up to one gap after its end.
    """
    gap = inputs.store.gap_ms
    deleted_until = inputs.deleted_until()
    near = computed.filter(F.col("start_ms") <= deleted_until + gap)
    ends = near.groupBy(*KEY).agg(F.max("end_ms").alias("_end"))

    def with_lower_bound(rows: DataFrame) -> DataFrame:
        low = F.greatest(deleted_until, F.coalesce(F.col("_end"), deleted_until)) + gap
        return rows.join(ends, list(KEY), "left").withColumn("_low", F.when(deleted_until >= 0, low).otherwise(-1))

    is_left_out = (F.col("timestamp_ms") <= F.col("_low")) & F.col("outcome").isin(ACCEPTED, LATE)
    outcome = F.when(is_left_out, LEFT_OUT).otherwise(F.col("outcome"))
    own = with_lower_bound(labelled).withColumn("outcome", outcome)
    behind = (with_lower_bound(rows).filter(F.col("start_ms") > F.col("_low")) for rows in (computed, stream))
    labelled, computed, stream = (rows.drop("_low", "_end") for rows in (own, *behind))
    return labelled, computed, stream


def label(inputs: Inputs) -> DataFrame:
    """Return source records with their outcome, the fields to sum, and the close time on their arrival (`close_ms`).

    A record's outcome is `late` if it missed all of its windows.
    """
    store = inputs.store
    late = inputs.late.filter(F.col("offset").isNotNull()).groupBy(*COORDINATES)
    late = late.agg(F.count(F.lit(1)).alias("late_times"), F.first("missed").alias("missed"))
    dead = inputs.dead.dropna().groupBy(*COORDINATES).agg(F.count(F.lit(1)).alias("dead_times"))
    records = inputs.records.join(late, COORDINATES, "left").join(dead, COORDINATES, "left")
    records = records.fillna(0, ["late_times", "dead_times"])
    outcome = F.when(F.col("dead_times") > 0, DEAD).when(F.size("missed") >= windows_of(store), LATE)
    records = records.withColumn("outcome", outcome.when(F.col("key").isNull(), NULL_KEY).otherwise(ACCEPTED))
    # Records without a key and dead letters do not advance the operator's time; late records do.
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


def windows_of(store: StoreSchema) -> SparkColumn:
    """Return the number of windows that a late record at `timestamp_ms` names if it missed all of its windows."""
    if store.kind != "hopping":
        return F.lit(1)
    return F.size(starts_of(store))


def starts_of(store: StoreSchema) -> SparkColumn:
    """Return the window starts that a late record at `timestamp_ms` names if it missed all of its windows."""
    time = F.col("timestamp_ms")
    if store.kind == "session":
        return F.array(time)
    if store.kind == "sliding":
        return F.array(F.greatest(time - store.size_ms, F.lit(0).cast("bigint")))
    advance = F.lit(store.advance_ms or store.size_ms).cast("bigint")
    first = F.greatest(time - store.size_ms + advance, F.lit(0).cast("bigint"))
    return F.sequence(first - first % advance, time - time % advance, advance)


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


def stream_sessions(inputs: Inputs, numbers: list[Measure]) -> DataFrame:
    """Return the stream's windows, closed and live, with their numbers."""
    rows = inputs.stream.filter(in_sample(inputs.sample))
    return rows.select(*WINDOW, "closed", "closed_ms", *(m.of_state.alias(m.name) for m in numbers))


def previous(rows: DataFrame, at: str, marks: DataFrame, mark: str) -> DataFrame:
    """Return `rows` with `computed_ms`: for the same key, the highest `mark` of `marks` that is at most `at`."""
    # An as-of join by one sort: joining by key and range would compare every pair of a key's sessions.
    both = (
        rows.withColumn("_at", F.col(at)).withColumn("_row", F.lit(1)).withColumn("_mark", F.lit(None).cast("bigint"))
    )
    own = marks.select(*KEY, F.col(mark).alias("_at"), F.lit(0).alias("_row"), F.col(mark).alias("_mark"))
    frame = SparkWindow.partitionBy(*KEY).orderBy("_at", "_row").rowsBetween(SparkWindow.unboundedPreceding, 0)
    found = both.unionByName(own, allowMissingColumns=True).withColumn(
        "computed_ms", F.last("_mark", ignorenulls=True).over(frame)
    )
    return found.filter("_row = 1").drop("_at", "_row", "_mark")


def within(stream: DataFrame, computed: DataFrame) -> DataFrame:
    """Return the stream's sessions with the start of the computed session that holds them, null if there is none."""
    ends = computed.select(*KEY, F.col("start_ms").alias("computed_ms"), F.col("end_ms").alias("computed_end_ms"))
    held = previous(stream, "start_ms", computed, "start_ms").join(ends, [*KEY, "computed_ms"], "left")
    inside = F.col("end_ms") <= F.col("computed_end_ms")
    return held.withColumn("computed_ms", F.when(inside, F.col("computed_ms"))).drop("computed_end_ms")


def unknown_coordinates(inputs: Inputs) -> DataFrame:
    """Return late records and dead letters without a covered source record, and late records that contradict it.

    A late record contradicts its source record if its key, its time or its missed windows do not match.
    """
    known = inputs.records.select(*COORDINATES, F.col("key").alias("_key"), F.col("timestamp_ms").alias("_ms"))
    known = known.withColumn("_known", F.lit(True))
    dead = inputs.dead.withColumn("kind", F.lit("dead letter"))
    both = inputs.late.withColumn("kind", F.lit("late")).unionByName(dead, allowMissingColumns=True)
    both = both.join(known, COORDINATES, "left").withColumn("at", F.col("timestamp_ms"))
    own = F.array_except("missed", starts_of(inputs.store))
    another = (F.col("key") != F.col("_key")) | (F.col("timestamp_ms") != F.col("_ms"))
    reason = (
        F.when(F.col("_known").isNull(), "is not a covered source record")
        .when(F.col("kind") == "dead letter", None)
        .when(another, "has another key or time in the source")
        .when((F.size(own) > 0) | (F.size("missed") == 0), "cannot have missed these windows")
    )
    detail = F.format_string("%s: offset %s %s", "kind", "offset", "reason")
    return as_differences(both.withColumn("reason", reason).filter("reason IS NOT NULL"), "unknown", "at", detail)


def repeated_coordinates(labelled: DataFrame, exactly_once: bool) -> DataFrame:
    """Return source records that are late more than once, or both late and dead letters.

    With `exactly_once`, also those that are dead letters more than once.
    """
    often = (F.col("late_times") > 1) | ((F.col("late_times") > 0) & (F.col("dead_times") > 0))
    if exactly_once:
        often |= F.col("dead_times") > 1
    detail = F.format_string("offset %s: late %s times, dead letter %s times", "offset", "late_times", "dead_times")
    return as_differences(labelled.filter(often), "twice", "timestamp_ms", detail)


def unbalanced(contained: DataFrame, computed: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Return computed sessions whose numbers differ from those of the stream's sessions within them."""
    merged = (
        contained.filter(F.col("computed_ms").isNotNull())
        .groupBy(*KEY, "computed_ms")
        .agg(F.count(F.lit(1)).alias("sessions"), *(m.merge(m.name).alias(f"found_{m.name}") for m in numbers))
        .withColumnRenamed("computed_ms", "start_ms")
    )
    both = computed.join(merged, [*KEY, "start_ms"], "left").withColumn("wrong", contradictions(numbers))
    lost = F.col("sessions").isNull()
    reason = F.when(lost, "no session of the stream").otherwise(F.col("wrong"))
    detail = F.concat(F.format_string("%s..%s, %s records: ", "start_ms", "end_ms", "records"), reason)
    return as_differences(both.filter(lost | (F.col("wrong") != "")), "unbalanced", "start_ms", detail)


def outside(contained: DataFrame) -> DataFrame:
    """Return the sessions of the stream that no computed session holds."""
    detail = F.format_string("%s..%s holds records that the source does not have there", "start_ms", "end_ms")
    return as_differences(contained.filter(F.col("computed_ms").isNull()), "outside", "start_ms", detail)


def assigned_records(labelled: DataFrame, store: StoreSchema) -> DataFrame:
    """Return accepted and late records with their session's `start_ms` and `end_ms` by the rule, or null."""
    keyed = labelled.filter(F.col("outcome").isin(ACCEPTED, LATE))
    in_order = keyed.select(*KEY, "offset", "timestamp_ms", "close_ms").repartition(*KEY)
    in_order = in_order.sortWithinPartitions(*KEY, "offset")
    assigned = in_order.mapInArrow(session_reference.replay(store.gap_ms), session_reference.COLUMNS)
    return keyed.join(assigned, COORDINATES)


def rule_sessions(assigned: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Return the sessions that the stream must have, with the numbers of the records that it accepted."""
    own = assigned.filter((F.col("outcome") == ACCEPTED) & F.col("start_ms").isNotNull())
    return own.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))


def windows(expected: DataFrame, stream: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Return windows that are missing, unexpected or repeated in the stream, or have other numbers than expected."""
    found = stream.groupBy(*WINDOW).agg(
        F.count(F.lit(1)).alias("times"), *(F.first(m.name).alias(f"found_{m.name}") for m in numbers)
    )
    wanted = expected.withColumn("wanted", F.lit(True))
    both = wanted.join(found, list(WINDOW), "full").withColumn("wrong", contradictions(numbers))
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


def closing(stream: DataFrame, store: StoreSchema) -> DataFrame:
    """Return windows that were closed too early by their own close time."""
    early = stream.filter(F.col("closed") & (F.col("closed_ms") < F.col("end_ms") + store.patience_ms))
    text = f"%s..%s was closed at %s, not {store.patience_ms} ms after its end"
    return as_differences(early, "closing", "start_ms", F.format_string(text, "start_ms", "end_ms", "closed_ms"))


def lateness(assigned: DataFrame) -> DataFrame:
    """Return late records that the session rule accepts, and accepted records that it rejects as late."""
    is_wrong = (F.col("outcome") == LATE) == F.col("start_ms").isNotNull()
    text = "offset %s is %s, though its time is %s and the close time was %s"
    detail = F.format_string(text, "offset", "outcome", "timestamp_ms", "close_ms")
    return as_differences(assigned.filter(is_wrong), "lateness", "timestamp_ms", detail)
