"""Reads the audit's inputs: the source topic, its dead letters and a store's tables, up to the covered offsets.

The application may run during the audit. The newest progress rows of `state` have the source offsets that the tables
cover. The audit compares the records before these offsets and counts the later ones as not covered yet. `kafka_source`
reads the records of topics, and `lake_tables` the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.audit.kafka_source import KAFKA_SOURCE_MS_MAX, count_records, read_topic
from penstock.services.spark.audit.measures import parsed, texts_alone, unchecked, unequal_results
from penstock.services.spark.audit.settings import SAMPLE_PARTS, AuditSettings
from penstock.services.spark.lake_tables import LakeTables
from penstock.services.spark.spark_sql import by_partition, empty
from penstock.services.spark.topic_offsets import (
    TopicOffsets,
    offsets_after_open_transactions,
    offsets_at,
    topic_offsets,
)
from penstock.shared.clients.dead_letters.dead_letter import NODE, PREFIX
from penstock.shared.common.errors import FatalError
from penstock.shared.streams.changelog.format import BatchInput
from penstock.shared.streams.changelog.store_schema import WINDOWED, StoreSchema

KEY = ("partition", "key")
WINDOW = (*KEY, "start_ms", "end_ms")
COORDINATES = ["partition", "offset"]


class NotAuditable(FatalError):
    """The store's windows cannot be compared with its source topic. The message has the reason.

    Nothing was compared.
    """


class Inputs(NamedTuple):
    """The inputs of an audit, for one store: the source's records, late records, dead letters, and the stream's
    windows.
    """

    records: DataFrame
    """The source's covered records: partition, offset, timestamp_ms, key (null if the windows skip the record), and the
    fields of `parsed`.
    """
    late: DataFrame
    """Late records: partition, offset, key, timestamp_ms, and missed (the starts of the missed windows, in ms)."""
    dead: DataFrame
    """Coordinates of dead letters: partition and offset, null if they cannot be read."""
    stream: DataFrame
    """The store's windows: WINDOW, state, `closed`, `closed_ms`, `wrong_results` (`unequal_results`; empty if open)."""
    store: StoreSchema
    recomputes: bool = True
    """True if the audit checks what depends on stream time: close times, which records were late, and the bounds of
    sessions and sliding windows.
    """
    idled: tuple[int, ...] = ()
    """Partitions that the checks of stream time leave out, because their time advanced while they were idle."""
    exactly_once: bool = True
    """True if a repeated dead letter is a difference."""
    sample: float = 1.0
    deleted_until_ms: Mapping[int, int] = {}
    """By partition, the time up to which records may have been deleted from the topic."""

    def deleted_until(self) -> SparkColumn:
        """Return the time up to which records of a row's partition may have been deleted; below zero if none were."""
        return F.coalesce(by_partition(self.deleted_until_ms, "bigint"), F.lit(-1).cast("bigint"))


class Read(NamedTuple):
    """The inputs, the number of the source's records, and the number of those that are not covered yet.

    The source's records are only counted if the settings expect a number of them; otherwise `records` is None.
    `not_compared` lists the parts that are left out of the comparison, with the reason. `assumed` lists assumptions
    that cannot be verified.
    """

    inputs: Inputs
    records: int | None
    uncovered: int
    not_compared: list[str]
    assumed: list[str]


def read_inputs(spark: SparkSession, settings: AuditSettings, log: Callable[[str], Any]) -> Read:
    """Read all inputs of the audit.

    Raises ConfigError if the lake or store does not exist, NotAuditable, or an error of Kafka or Spark.
    """
    found = LakeTables(spark, settings.tables)
    store = found.store(settings.store)
    require_auditable(store)
    require_no_files(found)
    shape = f"gap {store.gap_ms} ms" if store.kind == "session" else f"{store.kind}, {store.size_ms} ms"
    log(f"store {store.name}: {shape}, grace {store.grace_ms} ms, source {store.source}")
    source = topic_offsets(settings.kafka, [store.source], settings.kafka_timeout_ms)[store.source]
    require_readable(settings, source)
    covered = covered_offsets(found, store, source)
    # Compare only what the tables cover. Later records have no windows in them yet.
    end = {p: min(latest, covered[p]) for p, latest in source.latest.items()}
    records = read_topic(spark, settings.kafka, store.source, source.earliest, end)
    if store.kind == "sliding":
        # Sliding windows skip a record without a value as all windows skip one without a key.
        is_null = F.col("value").cast("string").rlike(r"^[ \t\r\n]*null[ \t\r\n]*\z")
        records = records.withColumn("key", F.when(~is_null, F.col("key")))
    records = parsed(records, store, in_sample(settings.sample)).persist()
    start = {p: max(earliest, covered[p]) for p, earliest in source.earliest.items()}
    beyond = count_records(spark, settings.kafka, store.source, start, source.latest)
    not_compared: list[str] = []
    assumed = [f"the grace of {store.grace_ms} ms was in force for all records"]
    late = read_late_records(found, store, source.earliest).persist()
    changelog_id = next(iter(found.covered.values())).topic_id
    dead = read_dead_letters(spark, settings, store, changelog_id, not_compared)
    # A dead letter without readable coordinates is kept, so that a check reports it.
    dead = dead.filter(F.coalesce(F.col("offset") < by_partition(covered, "bigint"), F.lit(True)))
    dead = dead.filter(F.coalesce(F.col("offset") >= by_partition(source.earliest, "bigint"), F.lit(True))).persist()
    # The inputs are used by several checks: `persist` keeps Spark from reading them again.
    stream = read_stream_windows(found, store).persist()
    store = without_added(stream, store, not_compared)
    store = texts_alone(records, store)
    if names := unchecked(store):
        not_compared.append(f"{', '.join(names)}: states that Spark cannot make from the records")
    if not any(a.function == "count" for a in store.aggregations):
        not_compared.append("the number of records in a window, which the store does not count")
    known = deleted_until_ms_of(records, late, dead, stream, store, source.earliest)
    for partition, ms in known.items():
        first = source.earliest[partition]
        not_compared.append(
            f"{store.source}-{partition}: records before offset {first} were deleted; windows that begin at {ms} ms or "
            "earlier may have held some of them"
        )
    recomputes = not settings.conservation_only
    progress = [one.progress for one in found.covered.values()]
    idled = tuple(sorted(p for p, one in found.covered.items() if one.progress.idle_ms))
    if not recomputes:
        not_compared.append("when windows were closed and which records were late (--conservation-only)")
    # The time of an idle partition advances by the clock, and windows close without a record. Spark cannot recompute
    # that from the records.
    elif idled:
        recomputes = len(idled) < len(found.covered)
        not_compared.append(
            f"when windows of partitions {', '.join(map(str, idled))} were closed and which of their records were "
            "late: time advanced while they were idle, which the records do not show"
        )
    if store.kind == "sliding" and not recomputes:
        raise NotAuditable(
            f"store {store.name!r}: nothing was compared. The set of sliding windows depends on what the audit cannot "
            f"compare: {not_compared[-1]}"
        )
    # Under at_least_once a task that restarts may send a dead letter again.
    exactly_once = all(one.guarantee == "exactly_once" for one in progress)
    inputs = Inputs(
        records=records,
        late=late,
        dead=dead,
        stream=stream,
        store=store,
        recomputes=recomputes,
        idled=idled,
        exactly_once=exactly_once,
        sample=settings.sample,
        deleted_until_ms=known,
    )
    number = None if settings.expect_records is None else records.count() + beyond
    return Read(inputs, number, beyond, not_compared, assumed if recomputes else [])


def in_sample(sample: float) -> SparkColumn:
    """Return whether a row's key is in the sample. It depends on the key alone, so all inputs have the same keys."""
    if sample >= 1:
        return F.lit(True)
    hashed = F.pmod(F.xxhash64("key"), F.lit(SAMPLE_PARTS))
    return F.col("key").isNotNull() & (hashed < F.lit(round(sample * SAMPLE_PARTS)))


def require_auditable(store: StoreSchema) -> None:
    """Check a store before the audit's inputs are read.

    Raises NotAuditable if the store has no windows, or if its input may differ from the records of its source topic
    (`upstream`).
    """
    if store.kind not in WINDOWED:
        raise NotAuditable(f"store {store.name!r} cannot be audited: it has no windows ({store.kind})")
    if store.upstream:
        raise NotAuditable(
            f"store {store.name!r} cannot be audited: {', '.join(store.upstream)} is before its window and may drop, "
            f"change or add records, but Spark reads only the topic {store.source}. Nothing was compared. "
            "To audit the store, write the node's output to a topic and window that topic"
        )


def require_no_files(found: LakeTables) -> None:
    """Raises NotAuditable if windows hold history from files, which no topic has."""
    partitions = [str(p) for p, one in sorted(found.covered.items()) if isinstance(one.progress.input, BatchInput)]
    if partitions:
        raise NotAuditable(
            f"partitions {', '.join(partitions)}: their history came from files (`penstock batch --files`), which the "
            "source topic does not have. Nothing was compared"
        )


def covered_offsets(found: LakeTables, store: StoreSchema, source: TopicOffsets) -> dict[int, int]:
    """Return, for each partition of the source, the offset up to which the tables cover it; 0 for no commit.

    Raises NotAuditable if the tables were made from a deleted topic of the same name, or cover records after the
    topic's end.
    """
    covered = dict.fromkeys(source.latest, 0)
    for partition, one in found.covered.items():
        covered[partition] = one.progress.sources.get(store.source, 0)
        known = one.progress.source_ids.get(store.source)
        # Offsets of another topic do not identify the same records: each comparison would be wrong.
        if known is not None and known != source.topic_id:
            raise NotAuditable(
                f"the topic {store.source} was deleted and created again: its id is {source.topic_id}, and the tables "
                f"are about {known}. Nothing was compared"
            )
        if covered[partition] > source.latest.get(partition, 0):
            raise NotAuditable(
                f"{store.source}-{partition} ends at offset {source.latest.get(partition, 0)}, and the tables cover it "
                f"up to {covered[partition]}: records were lost, or it is another topic. Nothing was compared"
            )
    return covered


def read_late_records(found: LakeTables, store: StoreSchema, earliest: Mapping[int, int]) -> DataFrame:
    """Read the audit's late records: the store's in the lake, except those before the source's earliest offsets."""
    key = F.col("key").cast("binary") if store.key == "string" else F.col("key_bytes")
    missed = F.transform("missed", F.unix_millis)
    rows = found.late(store).select(
        "partition",
        F.col("source_offset").alias("offset"),
        key.alias("key"),
        F.unix_millis("event_time").alias("timestamp_ms"),
        missed.alias("missed"),
    )
    return rows.filter(F.coalesce(F.col("offset") >= by_partition(earliest, "bigint"), F.lit(True)))


def read_stream_windows(found: LakeTables, store: StoreSchema) -> DataFrame:
    """Read the audit's input of the stream's windows from the lake: the store's closed and open windows."""
    key = F.col("key").cast("binary") if store.key == "string" else F.col("key_bytes")
    bounds = (F.unix_millis("window_start").alias("start_ms"), F.unix_millis("window_end").alias("end_ms"))
    at = F.unix_millis("closed_at").alias("closed_ms")
    closed = found.closed(store).select(
        *("partition", key.alias("key"), *bounds, "state", F.lit(True).alias("closed"), at),
        unequal_results(store).alias("wrong_results"),
    )
    live = found.live(store).withColumn("closed_at", F.lit(None).cast("timestamp"))
    live = live.select(
        *("partition", key.alias("key"), *bounds, "state", F.lit(False).alias("closed"), at),
        F.lit("").alias("wrong_results"),
    )
    return closed.unionByName(live)


def without_added(stream: DataFrame, store: StoreSchema, not_compared: list[str]) -> StoreSchema:
    """Return the audited store without the aggregations that some windows lack, since they were added after these
    windows.

    Adds a text to `not_compared` if there are any.
    """
    lacks = [F.max(F.col("state")[f"{a.name}_{a.state[0][0]}"].isNull()).alias(a.name) for a in store.aggregations]
    found = stream.agg(*lacks).first() if lacks else None
    added = [a.name for a in store.aggregations if found is not None and found[a.name]]
    if added:
        not_compared.append(f"{', '.join(added)}: appended to the store later than windows that are compared")
    return msgspec.structs.replace(store, aggregations=tuple(a for a in store.aggregations if a.name not in added))


def deleted_until_ms_of(
    records: DataFrame,
    late: DataFrame,
    dead: DataFrame,
    stream: DataFrame,
    store: StoreSchema,
    earliest: Mapping[int, int],
) -> dict[int, int]:
    """Return, for each partition whose first records are deleted, an upper bound in ms of the timestamps of those
    deleted records that a window accepted.

    The first remaining record that a window accepted gives this bound. If there is no such record, the bound is 2**62.
    """
    partitions = [partition for partition, first in earliest.items() if first > 0]
    if not partitions:
        return {}
    accepted = records.filter(F.col("partition").isin(partitions) & F.col("key").isNotNull())
    # Leave out late records and dead letters: only a record that a window accepted bounds the stream time before it.
    for rejected in (late, dead):
        accepted = accepted.join(rejected.select(*COORDINATES).dropna(), COORDINATES, "left_anti")
    record = F.min_by(F.struct("key", F.col("timestamp_ms").alias("ms")), "offset").alias("record")
    first = accepted.groupBy("partition").agg(record).select("partition", "record.*")
    # The first accepted record was not late, so its window was open. The stream time before it was at most the time
    # that closes this window. A session can end long after the record. Its end is read from the stream's windows.
    if store.kind == "session":
        end = F.when(F.col("ms").between(F.col("start_ms"), F.col("end_ms")), F.col("end_ms"))
        sessions = first.join(stream.select(*KEY, "start_ms", "end_ms"), list(KEY), "left")
        first = sessions.groupBy("partition").agg(F.greatest(F.max("ms"), F.max(end)).alias("ms"))
    waits = store.grace_ms + (store.gap_ms if store.kind == "session" else store.size_ms)
    found = {row.partition: row.ms + waits for row in first.collect()}
    # Without an accepted record nothing bounds the time, so any window may have held deleted records.
    return {partition: found.get(partition, 2**62) for partition in sorted(partitions)}


def read_dead_letters(
    spark: SparkSession, settings: AuditSettings, store: StoreSchema, changelog_id: str | None, not_compared: list[str]
) -> DataFrame:
    """Read the source partition and offset in the headers of dead letters; null if a header is missing or not a number.

    Leaves out dead letters of nodes after a store, and those whose headers name another topic, group or changelog
    topic. Adds a text to `not_compared` if dead letters were deleted.
    """

    def header_column(name: str) -> SparkColumn:
        found = F.filter("headers", lambda h: h["key"] == f"{PREFIX}{name}")
        return F.try_element_at(found, F.lit(-1))["value"].cast("string")

    if store.dead_letters is None:
        return empty(spark, "partition INT, offset BIGINT")
    # An open transaction of another task keeps the last stable offset before it. So without the wait, a dead letter
    # of a covered record could be hidden, and the record would count as lost.
    held = offsets_after_open_transactions(settings.kafka, store.dead_letters, settings.kafka_timeout_ms)
    require_readable(settings, held)
    if deleted := [f"{store.dead_letters}-{p} before offset {first}" for p, first in held.earliest.items() if first]:
        not_compared.append(f"dead letters that are gone: {', '.join(deleted)}; their source records count as lost")
    rows = read_topic(spark, settings.kafka, store.dead_letters, held.earliest, held.latest, headers=True)
    # Leave out dead letters of nodes after a store: the store already has their source records. The last of these two
    # headers shows which kind it is, as in `parse_dead_letter`.
    kinds = F.filter("headers", lambda h: h["key"].isin(f"{PREFIX}topic", NODE))
    rows = rows.filter(F.coalesce(F.try_element_at(kinds, F.lit(-1))["key"] != NODE, F.lit(True)))
    # A reset of the application deletes the changelog topic. So a dead letter from before a reset has another id than
    # `changelog_id`. A dead letter without one of the headers is not left out for it.
    for name, own in (("topic", store.source), ("group", settings.application), ("changelog_id", changelog_id)):
        rows = rows.filter(F.coalesce(header_column(name) == own, F.lit(True)))
    return rows.select(
        header_column("partition").try_cast("INT").alias("partition"),
        header_column("offset").try_cast("BIGINT").alias("offset"),
    )


def require_readable(settings: AuditSettings, held: TopicOffsets) -> None:
    """Raises NotAuditable if a record's time is later than Spark's Kafka source can read."""
    topic = held.topic
    found = offsets_at(settings.kafka, {topic: held}, KAFKA_SOURCE_MS_MAX + 1, settings.kafka_timeout_ms)[topic]
    beyond = [(partition, offset) for partition, offset in sorted(found.items()) if offset < held.latest[partition]]
    if coordinates := ", ".join(f"{topic}-{partition} at offset {offset}" for partition, offset in beyond):
        raise NotAuditable(
            f"{coordinates}: the first record whose timestamp Spark's Kafka source cannot read, since it lies after "
            "the year 294246: were nanoseconds sent as milliseconds? Nothing was compared"
        )
