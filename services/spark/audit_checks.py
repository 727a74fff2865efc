"""The audit's checks, as DataFrames in and differences out: nothing here reads Kafka or a table.

Sessions are made anew from the source records by Spark's own `session_window`. Spark, like Kafka, lets records at a
distance of exactly the gap share a session (a test holds it to that). Since Spark knows nothing of closing, one of its
sessions ("batch session") can be several of the stream; what must hold is said at each check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit_part import ACCEPTED, KEY, LATE, Edges, Part, cut_sessions
from penstock.services.spark.measures import (
    FIELDS,
    TEXTS,
    Measure,
    contradictions,
    field_types,
    measures,
    text_types,
)
from penstock.services.spark.sessions import replay
from penstock.services.spark.settings import SAMPLE_PARTS
from penstock.shared.streams.changelog.format import StoreSchema

DEAD, NULL_KEY = "dead", "null key"
WINDOW = (*KEY, "start_ms", "end_ms")
CHECKS = {
    "unknown": "every late record and dead letter names a source record",
    "twice": "no source record is late or a dead letter twice, or both",
    "unbalanced": "every batch session's records are in the stream's sessions within it, once",
    "outside": "every session of the stream lies in a batch session",
    "windows": "no session is split, kept or closed but where the rule says so",
    "lateness": "every late record was late, and no other was",
    "published": "the results topic holds every closed session once, with its results",
}
OF_WINDOWS = {
    **{name: CHECKS[name] for name in ("unknown", "twice")},
    "windows": "every window holds the records that lie in it and came before it was closed",
    "lateness": CHECKS["lateness"],
    "published": "the results topic holds every closed window once, with its results",
}
"""The checks of windows that do not merge."""


class Inputs(NamedTuple):
    """What is compared.

    `records`: the source's processed records (partition, offset, timestamp_ms, key, value). `late`, `dead`: coordinates
    (partition, offset), null where they cannot be read. `closed`, `live`: the stream's sessions (partition, key,
    start_ms, end_ms, state). `published`, `results`: what was and what should have been published (key as text,
    start_ms, end_ms, result columns; the latter with `sure`, see `published`), None where results cannot be compared.
    `once`: whether a repeated coordinate is a difference (under at_least_once it is not). `sample` is the share of keys
    that are compared, and `part` the part of the source. `advances` say that the operator's time was `time_ms` (or
    more) for all records from `position` on (partition, position, time_ms).
    """

    records: DataFrame
    late: DataFrame
    dead: DataFrame
    closed: DataFrame
    live: DataFrame
    published: DataFrame | None
    results: DataFrame | None
    store: StoreSchema
    once: bool
    sample: float = 1.0
    advances: DataFrame | None = None
    part: Part | None = None


class Compared(NamedTuple):
    """All differences (check, partition, key, at_ms, detail), what there was to compare, and what lies at its edges."""

    differences: DataFrame
    labelled: DataFrame
    batch: DataFrame
    stream: DataFrame
    not_compared: Sequence[str] = ()
    edges: Edges = Edges()


def compare(inputs: Inputs) -> Compared:
    """All checks over all inputs; lazy, but for what is settled."""
    store = inputs.store
    numbers = measures(store)
    labelled = settled(label(inputs))
    batch = settled(batch_sessions(labelled, store, numbers))
    stream, edges = settled(stream_sessions(inputs, numbers)), Edges()
    if inputs.part is not None:
        cut = cut_sessions(inputs.part, labelled, batch, stream, store.gap_ms)
        labelled, batch, stream, edges = settled(cut.labelled), settled(cut.batch), settled(cut.stream), cut.edges
    contained = settled(within(stream, batch))
    replayed = settled(replay_groups(labelled, batch, store))
    found = [
        unknown_coordinates(inputs),
        repeated_coordinates(labelled, inputs.once),
        unbalanced(contained, batch, numbers),
        outside(contained),
        windows(expected_windows(labelled, batch, replayed, numbers), stream, numbers),
        lateness(labelled, replayed),
    ]
    if inputs.published is not None and inputs.results is not None:
        found.append(published(inputs.published, inputs.results, inputs.once))
    return Compared(all_differences(found), labelled, batch, stream, edges=edges)


def settled(rows: DataFrame) -> DataFrame:
    """The same rows, computed now and kept on the executors, in memory or on disk, without the plan they came by.

    Spark goes through a whole plan again at each step that is built on it: with the checks' steps on top of each other,
    that took most of an audit's time. If an executor is lost, so are its rows, and the audit has to be run again.
    """
    return rows.localCheckpoint()


def all_differences(found: Sequence[DataFrame]) -> DataFrame:
    """The differences of all checks."""
    differences = found[0]
    for more in found[1:]:
        differences = differences.unionByName(more)
    return differences


def sampled(rows: DataFrame, sample: float, key: SparkColumn | None = None) -> DataFrame:
    """The rows of the keys that a sample has: the same keys everywhere, whatever else the rows are."""
    if sample >= 1:
        return rows
    hashed = F.pmod(F.xxhash64(F.col("key") if key is None else key), F.lit(SAMPLE_PARTS))
    return rows.filter(F.col("key").isNotNull() & (hashed < F.lit(round(sample * SAMPLE_PARTS))))


def label(inputs: Inputs) -> DataFrame:
    """Source records with their fate, the fields to sum, and the close time that each met on arrival (`close_ms`)."""

    def counted(coordinates: DataFrame, name: str) -> DataFrame:
        return coordinates.dropna().groupBy("partition", "offset").agg(F.count(F.lit(1)).alias(name))

    store = inputs.store
    fate = F.when(F.col("dead_times") > 0, DEAD).when(F.col("late_times") > 0, LATE)
    fate = fate.when(F.col("key").isNull(), NULL_KEY).otherwise(ACCEPTED)
    records = (
        inputs.records.join(counted(inputs.late, "late_times"), ["partition", "offset"], "left")
        .join(counted(inputs.dead, "dead_times"), ["partition", "offset"], "left")
        .fillna(0, ["late_times", "dead_times"])
        .withColumn("fate", fate)
    )
    # Neither a record without a key nor a dead letter moves the operator's time; a late one does.
    reached = F.when(F.col("fate").isin(ACCEPTED, LATE), F.col("timestamp_ms"))
    timed = with_times(records.withColumn("reached_ms", reached), inputs.advances)
    close = F.col("time_ms") - store.grace_ms - store.gap_ms
    # Only now: the close time is that of all records.
    return sampled(timed.withColumn("close_ms", close), inputs.sample).select(
        *("partition", "offset", "timestamp_ms", "key", "fate", "late_times", "dead_times"),
        parsed("value", field_types(store)).alias(FIELDS),
        parsed("value", text_types(store)).alias(TEXTS),
        "close_ms",
    )


def with_times(records: DataFrame, advances: DataFrame | None) -> DataFrame:
    """Records with the time that the operator had when each was in hand (`time_ms`).

    It is the highest of what they `reached_ms`, up to and with each in its partition, and of the advances at or before
    its offset: an advance's position is the offset of the record that came next.
    """
    both = records.withColumn("_record", F.lit(1))
    if advances is not None:
        moved = advances.select("partition", F.col("position").alias("offset"), F.col("time_ms").alias("reached_ms"))
        both = both.unionByName(moved.withColumn("_record", F.lit(0)), allowMissingColumns=True)
    order = SparkWindow.partitionBy("partition").orderBy("offset", "_record")
    so_far = order.rowsBetween(SparkWindow.unboundedPreceding, 0)
    timed = both.withColumn("time_ms", F.max("reached_ms").over(so_far))
    return timed.filter("_record = 1").drop("_record")


def parsed(value: str, types: str) -> SparkColumn:
    """A column of JSON as a struct of these fields; null where there are none."""
    return F.from_json(F.col(value).cast("string"), types) if types else F.lit(None).cast("string")


def batch_sessions(labelled: DataFrame, store: StoreSchema, numbers: list[Measure]) -> DataFrame:
    """Spark's sessions over the accepted records, with the highest close time that one of their records met."""
    length = F.session_window(F.timestamp_millis("timestamp_ms"), f"{store.gap_ms} milliseconds")
    grouped = labelled.filter(F.col("fate") == ACCEPTED).groupBy(*KEY, length)
    return grouped.agg(
        F.count(F.lit(1)).alias("records"),
        F.max("close_ms").alias("close_ms"),
        *(m.of_records.alias(m.name) for m in numbers),
    ).select(
        *KEY,
        F.unix_millis("session_window.start").alias("start_ms"),
        (F.unix_millis("session_window.end") - store.gap_ms).alias("end_ms"),
        *("records", "close_ms"),
        *(m.name for m in numbers),
    )


def stream_sessions(inputs: Inputs, numbers: list[Measure]) -> DataFrame:
    """The stream's sessions, closed and live, with their numbers."""
    both = inputs.closed.withColumn("closed", F.lit(True)).unionByName(inputs.live.withColumn("closed", F.lit(False)))
    return sampled(both, inputs.sample).select(*WINDOW, "closed", *(m.of_state.alias(m.name) for m in numbers))


def previous(rows: DataFrame, at: str, marks: DataFrame, mark: str, *, after: bool = False) -> DataFrame:
    """`rows` with `marks`' greatest `mark` that is not above `at` for the same key (`after`: the least one above)."""
    # An as-of join by one sort: joining by key and range would compare every pair of a key's sessions.
    both = (
        rows.withColumn("_at", F.col(at)).withColumn("_row", F.lit(1)).withColumn("_mark", F.lit(None).cast("bigint"))
    )
    own = marks.select(*KEY, F.col(mark).alias("_at"), F.lit(0).alias("_row"), F.col(mark).alias("_mark"))
    order = (F.col("_at").desc(), F.col("_row").desc()) if after else (F.col("_at"), F.col("_row"))
    frame = SparkWindow.partitionBy(*KEY).orderBy(*order).rowsBetween(SparkWindow.unboundedPreceding, 0)
    name = "after_ms" if after else "batch_ms"
    found = both.unionByName(own, allowMissingColumns=True).withColumn(
        name, F.last("_mark", ignorenulls=True).over(frame)
    )
    return found.filter("_row = 1").drop("_at", "_row", "_mark")


def within(stream: DataFrame, batch: DataFrame) -> DataFrame:
    """The stream's sessions with the batch session that holds them: its start, null where there is none."""
    ends = batch.select(*KEY, F.col("start_ms").alias("batch_ms"), F.col("end_ms").alias("batch_end_ms"))
    held = previous(stream, "start_ms", batch, "start_ms").join(ends, [*KEY, "batch_ms"], "left")
    inside = F.col("end_ms") <= F.col("batch_end_ms")
    return held.withColumn("batch_ms", F.when(inside, F.col("batch_ms"))).drop("batch_end_ms")


def difference(rows: DataFrame, check: str, at: str, detail: SparkColumn) -> DataFrame:
    """Rows as differences of a check."""
    shown = F.col("key").cast("string") if "key" in rows.columns else F.lit(None).cast("string")
    return rows.select(
        F.lit(check).alias("check"),
        F.col("partition").cast("int").alias("partition"),
        shown.alias("key"),
        F.col(at).cast("bigint").alias("at_ms"),
        detail.alias("detail"),
    )


def unknown_coordinates(inputs: Inputs) -> DataFrame:
    """Late records and dead letters that name no processed source record."""
    known = inputs.records.select("partition", "offset", F.lit(True).alias("known"))
    late, dead = inputs.late.withColumn("what", F.lit("late")), inputs.dead.withColumn("what", F.lit("dead letter"))
    unknown = late.unionByName(dead).join(known, ["partition", "offset"], "left").filter(F.col("known").isNull())
    detail = F.format_string("%s: offset %s is not a processed source record", "what", "offset")
    return difference(unknown.withColumn("at", F.lit(None)), "unknown", "at", detail)


def repeated_coordinates(labelled: DataFrame, once: bool) -> DataFrame:
    """Source records that are late or dead more than once."""
    both = (F.col("late_times") > 0) & (F.col("dead_times") > 0)
    often = (F.col("late_times") > 1) | (F.col("dead_times") > 1)
    detail = F.format_string("offset %s: late %s times, dead letter %s times", "offset", "late_times", "dead_times")
    return difference(labelled.filter(both | often if once else both), "twice", "timestamp_ms", detail)


def unbalanced(contained: DataFrame, batch: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Batch sessions whose numbers are not those of the stream's sessions within them."""
    merged = (
        contained.filter(F.col("batch_ms").isNotNull())
        .groupBy(*KEY, "batch_ms")
        .agg(F.count(F.lit(1)).alias("sessions"), *(m.merge(m.name).alias(f"found_{m.name}") for m in numbers))
        .withColumnRenamed("batch_ms", "start_ms")
    )
    both = batch.join(merged, [*KEY, "start_ms"], "left").withColumn("wrong", contradictions(numbers))
    lost = F.col("sessions").isNull()
    said = F.when(lost, "no session of the stream").otherwise(F.col("wrong"))
    detail = F.concat(F.format_string("%s..%s, %s records: ", "start_ms", "end_ms", "records"), said)
    return difference(both.filter(lost | (F.col("wrong") != "")), "unbalanced", "start_ms", detail)


def outside(contained: DataFrame) -> DataFrame:
    """Sessions of the stream that no batch session holds."""
    detail = F.format_string("%s..%s holds records that the source does not have there", "start_ms", "end_ms")
    return difference(contained.filter(F.col("batch_ms").isNull()), "outside", "start_ms", detail)


def is_simple(near_late: SparkColumn) -> SparkColumn:
    """Batch sessions that no closing can have cut: no record met a close time above the earliest event or was late."""
    return (F.col("close_ms") <= F.col("start_ms")) & ~near_late


def replay_groups(labelled: DataFrame, batch: DataFrame, store: StoreSchema) -> DataFrame:
    """Records of all batch sessions that are not simple, as the plain reference places them.

    One row a record and group: partition, offset, batch_ms (of its group), start_ms and end_ms, null for late. A late
    record takes part in each group within whose reach it lies (two at most), an accepted one in its own.
    """
    keyed = labelled.filter(F.col("fate").isin(ACCEPTED, LATE))
    columns = (*KEY, "offset", "timestamp_ms", "close_ms", "fate")
    accepted = previous(keyed.filter(F.col("fate") == ACCEPTED).select(*columns), "timestamp_ms", batch, "start_ms")
    late = previous(keyed.filter(F.col("fate") == LATE).select(*columns), "timestamp_ms", batch, "start_ms")
    late = previous(late, "timestamp_ms", batch, "start_ms", after=True)
    ends = batch.select(*KEY, F.col("start_ms").alias("batch_ms"), F.col("end_ms").alias("batch_end_ms"))
    reach = F.col("timestamp_ms") <= F.col("batch_end_ms") + store.gap_ms
    before = late.drop("after_ms").join(ends, [*KEY, "batch_ms"]).filter(reach).drop("batch_end_ms")
    follows = late.filter(F.col("after_ms") <= F.col("timestamp_ms") + store.gap_ms)
    follows = follows.drop("batch_ms").withColumnRenamed("after_ms", "batch_ms")
    near = before.unionByName(follows)
    touched = near.select(*KEY, "batch_ms").distinct().withColumn("touched", F.lit(True))
    starts = batch.select(*KEY, F.col("start_ms"), F.col("start_ms").alias("batch_ms"), "close_ms")
    chosen = starts.join(touched, [*KEY, "batch_ms"], "left").filter(~is_simple(F.col("touched").isNotNull()))
    chosen = chosen.select(*KEY, "batch_ms")
    members = accepted.unionByName(near).join(chosen, [*KEY, "batch_ms"])
    one = F.struct("offset", "timestamp_ms", "close_ms")
    groups = members.groupBy(*KEY, "batch_ms").agg(F.sort_array(F.collect_list(one)).alias("records"))
    placed = groups.select("partition", "batch_ms", "records").mapInArrow(
        replay(store.gap_ms), "partition int, batch_ms bigint, offset bigint, start_ms bigint, end_ms bigint"
    )
    return placed.join(keyed.select("partition", "offset", "key", "fate"), ["partition", "offset"])


def expected_windows(labelled: DataFrame, batch: DataFrame, replayed: DataFrame, numbers: list[Measure]) -> DataFrame:
    """The sessions that the stream must have: simple batch sessions as they are, the others as the rule cuts them."""
    accepted = labelled.filter(F.col("fate") == ACCEPTED).select("partition", "offset", FIELDS, TEXTS)
    placed = replayed.filter((F.col("fate") == ACCEPTED) & F.col("start_ms").isNotNull())
    placed = placed.join(accepted, ["partition", "offset"])
    cut = placed.groupBy(*WINDOW).agg(*(m.of_records.alias(m.name) for m in numbers))
    replaced = replayed.select(*KEY, F.col("batch_ms").alias("start_ms")).distinct()
    simple = batch.join(replaced, [*KEY, "start_ms"], "left_anti").select(*WINDOW, *(m.name for m in numbers))
    return simple.unionByName(cut)


def windows(expected: DataFrame, stream: DataFrame, numbers: list[Measure]) -> DataFrame:
    """Sessions that should be there and are not, or the other way round, or are there with other numbers."""
    found = stream.groupBy(*WINDOW).agg(
        F.count(F.lit(1)).alias("times"), *(F.first(m.name).alias(f"found_{m.name}") for m in numbers)
    )
    wanted = expected.withColumn("wanted", F.lit(True))
    both = wanted.join(found, list(WINDOW), "full").withColumn("wrong", contradictions(numbers))
    said = (
        F.when(F.col("times").isNull(), "the rule makes this session, the stream does not have it")
        .when(F.col("wanted").isNull(), "the stream has this session, the rule does not make it")
        .when(F.col("times") > 1, F.format_string("the stream has this session %s times", "times"))
        .when(F.col("wrong") != "", F.col("wrong"))
    )
    detail = F.concat(F.format_string("%s..%s: ", "start_ms", "end_ms"), F.col("said"))
    return difference(both.withColumn("said", said).filter(F.col("said").isNotNull()), "windows", "start_ms", detail)


def lateness(labelled: DataFrame, replayed: DataFrame) -> DataFrame:
    """Late records that the rule takes in, and accepted ones that it does not."""
    taken = F.max(F.when(F.col("start_ms").isNotNull(), 1).otherwise(0)).alias("taken")
    verdict = replayed.groupBy("partition", "offset").agg(taken)
    keyed = labelled.filter(F.col("fate").isin(ACCEPTED, LATE)).join(verdict, ["partition", "offset"], "left")
    # One that no session lies within reach of is late exactly if its own time is.
    alone = F.when(F.col("timestamp_ms") >= F.col("close_ms"), 1).otherwise(0)
    taken_in = F.coalesce(F.col("taken"), F.when(F.col("fate") == LATE, alone).otherwise(1)) == 1
    wrong = (F.col("fate") == LATE) == taken_in
    text = "offset %s is %s, though its time is %s and the close time was %s"
    detail = F.format_string(text, "offset", "fate", "timestamp_ms", "close_ms")
    return difference(keyed.filter(wrong), "lateness", "timestamp_ms", detail)


def published(given: DataFrame, wanted: DataFrame, once: bool) -> DataFrame:
    """Results that were not published, or were and should not have been, or with other values.

    What is `wanted` and not `sure` may be published or not.
    """
    bounds = ("key", "start_ms", "end_ms", "sure")
    types = [type_ for name, type_ in wanted.dtypes if name not in bounds]
    labels = [name for name in wanted.columns if name not in bounds]
    names = [f"r{i}" for i in range(len(labels))]
    wanted, given = wanted.toDF(*bounds, *names), given.toDF("key", "start_ms", "end_ms", *names)
    given = given if once else given.dropDuplicates()
    key = ["key", "start_ms", "end_ms"]
    nth = F.row_number().over(SparkWindow.partitionBy(*key).orderBy(*(names or ["key"])))
    ours = wanted.withColumn("nth", nth).withColumn("wanted", F.lit(True))
    theirs = given.withColumn("nth", nth).withColumn("given", F.lit(True))
    theirs = theirs.withColumnsRenamed({name: f"found_{name}" for name in names})
    both = ours.join(theirs, [*key, "nth"], "full")
    nothing = F.lit(None)
    as_measures = [
        Measure(name, label, nothing, nothing, None, is_float=type_ == "double")
        for name, label, type_ in zip(names, labels, types, strict=True)
    ]
    said = (
        F.when(F.col("given").isNull(), F.when(F.col("sure"), "was closed but not published"))
        .when(F.col("wanted").isNull(), "was published but not closed, or twice")
        .when(F.col("wrong") != "", F.col("wrong"))
    )
    both = both.withColumn("wrong", contradictions(as_measures)).withColumn("said", said)
    detail = F.concat(F.format_string("%s..%s ", "start_ms", "end_ms"), F.col("said"))
    nowhere = both.filter(F.col("said").isNotNull()).withColumn("partition", F.lit(None).cast("int"))
    return difference(nowhere, "published", "start_ms", detail)
