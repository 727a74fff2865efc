"""What the audit reads: topics as columns, and the stream's sessions from lake and changelog together.

The application may go on meanwhile. What is compared is what the newest commit covers that was found in the changelog:
source records, late records and dead letters by their source offsets. Of the results topic each must be a window that
was closed, by that commit or by one that has come since: the changelog is looked at again for those. Each topic is read
once no open transaction hides what was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import advances, audit_rules, rules, tables
from penstock.services.spark.audit_checks import Inputs, parsed
from penstock.services.spark.audit_part import TAIL_RECORDS, Part, first_moving, moving, settled_ms
from penstock.services.spark.audit_results import published_and_wanted, why_not
from penstock.services.spark.audit_topics import coordinates, dead_letters, dead_letters_of, held_by, whole_topic
from penstock.services.spark.backfill_inputs import place
from penstock.services.spark.bodies import StoreLayout, final_rows, live_rows
from penstock.services.spark.changelog import Window, known, latest_per_window, read_window
from penstock.services.spark.compact import require_no_hole
from penstock.services.spark.generations import layouts_of, newest_stores
from penstock.services.spark.kafka import (
    TopicOffsets,
    changelog_offsets,
    offsets_at,
    read_range,
    settled_offsets,
)
from penstock.services.spark.measures import TEXTS, holds_other_than_text, text_types, unchecked
from penstock.services.spark.origins import (
    NotAuditable,
    Origin,
    first_offsets,
    origin_of,
    require_written,
    unwritten_below,
)
from penstock.services.spark.settings import AuditSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.points_in_time import time_ms
from penstock.shared.streams.changelog.format import (
    FINAL,
    WINDOWED,
    Progress,
    StoreSchema,
    decode_progress,
)

SESSION = ("partition", "key", "start_ms", "end_ms", "state")


class Read(NamedTuple):
    """The inputs, how many records the source holds, and by partition from where on how many are not processed.

    `not_compared` says what is left out of the comparison, and why.
    """

    inputs: Inputs
    records: int
    unprocessed: dict[int, tuple[int, int]]
    not_compared: list[str]


class Stream(NamedTuple):
    """What lake and changelog say together: progress by partition, all stores, and the audited one's windows.

    `rules` are those that the tables know, and those that begin in the `changelog` past them.

    `closed` has the changelog's offsets as well: below zero are windows that a backfill closed. What was closed
    `later` is read from the changelog anew, None where that has not gone on. `advances` are those of
    the store's time (see `advances`), None where it moved with records alone.
    """

    progress: dict[int, Progress]
    store: StoreSchema
    stores: tuple[StoreSchema, ...]
    closed: DataFrame
    live: DataFrame
    later: Callable[[], DataFrame | None]
    changelog: TopicOffsets
    rules: rules.Rules
    advances: DataFrame | None = None
    origin: Origin | None = None


class Span(NamedTuple):
    """By partition the first record of the source that is compared, and from where to where it is read.

    `part` is the part that was asked for, None for all; `taken_for_granted` says what nobody can know.
    """

    first: dict[int, int]
    start: dict[int, int]
    end: dict[int, int]
    part: Part | None
    taken_for_granted: list[str]


def read_inputs(spark: SparkSession, settings: AuditSettings, say: Callable[[str], Any]) -> Read:
    """Everything that is compared. Raises ConfigError where there is nothing to audit, and NotAuditable."""
    stream = read_stream(spark, settings)
    store = stream.store
    require_auditable(store)
    if stream.advances is not None:
        require_all_advances(advances.moved_on_ms(stream.progress), stream.advances)
    not_compared: list[str] = []
    shape = f"gap {store.gap_ms} ms" if store.kind == "session" else f"{store.kind}, {store.size_ms} ms"
    say(f"store {store.name}: {shape}, grace {store.grace_ms} ms, source {store.source}")
    ours = {"store": store.name, "application": settings.application}
    late = coordinates(
        whole_topic(spark, settings, store.late), "penstock.late", store.source, ours, stream.changelog.topic_id
    )
    dead = dead_letters(spark, settings, store.dead_letters, store.source, stream.changelog.topic_id)
    source = held_by(spark, settings, store.source)
    committed = {
        p: stream.progress[p].sources.get(store.source, 0) if p in stream.progress else 0 for p in source.latest
    }
    span = read_span(spark, settings, stream, source, committed)
    not_compared += span.taken_for_granted
    span, compared, closed_to = require_one_rule(spark, settings, stream, span, committed, not_compared)
    once = all(era.guarantee == "exactly_once" for era in compared)
    everything = read_range(spark, settings.kafka, store.source, span.start, span.end).persist()
    gone, below = unwritten_below(stream.origin, store, span.first)
    if gone:
        taken = everything.filter(F.col("offset") < tables.by_partition(below))
        require_written(gone, moving(taken, dead).agg(F.max("timestamp_ms").alias("ms")).collect()[0].ms)
    is_covered = F.col("offset") < tables.by_partition(committed)
    records = everything.filter(is_covered)
    audit_rules.require_none_late(records, store, span.part, closed_to)
    left = everything.filter(~is_covered).groupBy("partition").count().collect()
    unprocessed = {row.partition: (committed[row.partition], row["count"]) for row in left}
    # Later than the commit came what names an offset between it and the end, which was asked for last.
    is_nowhere = F.col("offset") >= tables.by_partition(source.latest)
    is_read = (F.col("offset") >= tables.by_partition(span.first)) & (F.col("offset") < tables.by_partition(span.end))
    is_compared = (is_covered & is_read) | is_nowhere
    late, dead = (c.filter(F.coalesce(is_compared, F.lit(True))) for c in (late, dead))
    part = span.part
    if part is not None:
        part = part._replace(settled_ms=settled_ms(records, dead, span.end, committed, store.patience_ms))
        early = {p: ms for p, ms in part.settled_ms.items() if part.end_ms is not None and ms < part.end_ms}
        not_compared += [f"partition {p} from {ms} ms on: no record read settles more" for p, ms in early.items()]
        stream = stream._replace(closed=stream.closed.filter(part.overlaps()), live=stream.live.filter(part.overlaps()))
    given, wanted = _results(spark, settings, stream, not_compared, part, compared)
    store = _texts_alone(records, audit_rules.without_added(store, compared, not_compared))
    if names := unchecked(store):
        not_compared.append(f"{', '.join(names)}: states that Spark cannot make anew from the records")
    if not any(a.function == "count" for a in store.aggregations):
        not_compared.append("the number of records in a session, since the store does not count them")
    closed = stream.closed.drop("changelog_offset")
    inputs = Inputs(
        records, late, dead, closed, stream.live, given, wanted, store, once, settings.sample, stream.advances, part
    )
    return Read(inputs, everything.count(), dict(sorted(unprocessed.items())), not_compared)


def read_span(
    spark: SparkSession, settings: AuditSettings, stream: Stream, source: TopicOffsets, committed: dict[int, int]
) -> Span:
    """From where to where the source is read. Raises NotAuditable where the beginning that is needed is gone."""
    store, kafka, timeout_ms = stream.store, settings.kafka, settings.kafka_timeout_ms
    start_ms, end_ms = (None if text is None else time_ms(text) for text in (settings.start, settings.end))
    said = []
    if settings.began_at is not None:
        first = place(spark, settings, source, settings.began_at)
    else:
        needed = source.earliest if start_ms is None else dict.fromkeys(source.earliest, 0)
        first = first_offsets(stream.origin, store.source, needed, committed)
        if gone := [
            p for p, earliest in sorted(source.earliest.items()) if earliest > first[p] and start_ms is not None
        ]:
            which = ", ".join(map(str, gone))
            said.append(
                f"whether records of partitions {which} that are gone were from --start on (none is taken to be)"
            )
    end = source.latest
    if end_ms is not None:
        at = offsets_at(spark, kafka, source, end_ms + store.patience_ms, timeout_ms)
        end = {p: min(latest, at.get(p, latest) + TAIL_RECORDS) for p, latest in source.latest.items()}
    if start_ms is not None:
        # A broker's index may pass records of exactly the time that is asked for, in the batch where it points: the ms
        # before is asked for, and none of the part's is missed.
        at = offsets_at(spark, kafka, source, max(0, start_ms - 1), timeout_ms)
        first = {p: max(offset, at.get(p, source.latest[p])) for p, offset in first.items()}
    start = {p: min(max(earliest, first[p]), end[p]) for p, earliest in source.earliest.items()}
    part = None if start_ms is None and end_ms is None else Part(start_ms, end_ms, {})
    return Span(first, start, end, part, said)


def require_one_rule(
    spark: SparkSession,
    settings: AuditSettings,
    stream: Stream,
    span: Span,
    committed: dict[int, int],
    not_compared: list[str],
) -> tuple[Span, list[audit_rules.Era], dict[int, tuple[int, int]]]:
    """Which records are compared: a part begins with one that moves time. Who took them, and what was closed before by
    shorter rules (`audit_rules.closed_to`).

    NotAuditable where a rule that they are judged by was another then.
    """
    store, topic = stream.store, stream.store.source
    known = stream.rules
    if older := audit_rules.unknown_before(known, topic, span.start):
        until = {p: offset for p, (_, offset) in older.items()}
        known = known | audit_rules.in_changelog(spark, settings.kafka, stream.changelog, until)
    found = audit_rules.eras(known, stream.progress, store)
    compared = audit_rules.between(found, span.start, span.end)
    closed_to = audit_rules.closed_to(spark, audit_rules.shorter_before(known, store), stream.advances)
    what, since = audit_rules.changed(compared, store, settings.named)
    if what:
        names = {store.dead_letters, *(era.store.dead_letters for era in compared if era.store is not None)}
        dead = dead_letters_of(spark, settings, names, topic, stream.changelog.topic_id)
        if span.part is not None and span.part.start_ms is not None:
            read = read_range(spark, settings.kafka, topic, span.start, span.end)
            moved = first_moving(read, dead, span.part.start_ms)
            begun = {p: moved.get(p, span.end[p]) for p in since}
            span = span._replace(first=span.first | begun, start=span.start | begun)
            compared = audit_rules.between(found, span.start, span.end)
            what, since = audit_rules.changed(compared, store, settings.named)
    if what:

        def newest_ms(start: dict[int, int], end: dict[int, int]) -> int | None:
            start = {p: min(at, end[p]) for p, at in start.items()}
            records = moving(read_range(spark, settings.kafka, topic, start, end), dead)
            row = records.agg(F.max("timestamp_ms").alias("ms")).first()
            return None if row is None else row.ms

        before = newest_ms({p: span.start[p] for p in since}, since)
        newest = newest_ms(span.start | since, committed)
        closed_ms = max((ms for _, ms in closed_to.values()), default=0)
        raise audit_rules.refusal(store, what, since, before, newest, closed_ms)
    if unknown := audit_rules.unknown_before(known, topic, span.start):
        where = audit_rules.named([f"{topic}-{p} offset {at}" for p, (at, _) in unknown.items()])
        not_compared.append(f"whether gap, grace or topics changed before {where}: the changelog of then is deleted")
    return span, compared, closed_to


def require_auditable(store: StoreSchema) -> None:
    """Raise NotAuditable where there are no windows, or user code stands between the source topic and them."""
    if store.kind not in WINDOWED:
        raise NotAuditable(f"store {store.name!r} cannot be audited: it holds no windows ({store.kind})")
    if store.upstream:
        raise NotAuditable(
            f"store {store.name!r} cannot be audited: {', '.join(store.upstream)} stands before its window and may "
            f"drop, change or add records, and Spark sees the topic {store.source} alone. Nothing was compared. "
            "To audit it, write what the node forwards to a topic, and window that"
        )


def require_all_advances(moved_on: dict[int, int], rows: DataFrame) -> None:
    """Raise NotAuditable where time was moved on without records, and it is not known at which offsets."""
    sums = rows.groupBy("partition").agg(F.sum(F.col("total_ms") - F.col("from_ms")).alias("ms")).collect()
    if gone := advances.missing(moved_on, {row.partition: row.ms for row in sums}):
        which = ", ".join(f"{p} ({ms} of {moved_on[p]} ms)" for p, ms in gone.items())
        raise NotAuditable(
            f"the time of partitions {which} was moved on while their topics were idle, and neither the lake nor the "
            "changelog says at which offsets: an earlier version moved it or compacted it, or the table `advances` has "
            "lost rows. The records alone do not say which windows that closed. Nothing was compared"
        )


def _texts_alone(records: DataFrame, store: StoreSchema) -> StoreSchema:
    """The store without the distinct counts of fields that hold other values than text."""
    fields = {a.field for a in store.aggregations if a.function == "count_distinct" and a.field and a.verbatim}
    if not fields:
        return store
    texts = records.select(parsed("value", text_types(store)).alias(TEXTS))
    found = texts.agg(*(F.max(holds_other_than_text(field)).alias(field) for field in sorted(fields))).first()
    others = {field for field in fields if found is not None and found[field]}
    return msgspec.structs.replace(
        store,
        aggregations=tuple(
            msgspec.structs.replace(a, verbatim=False) if a.function == "count_distinct" and a.field in others else a
            for a in store.aggregations
        ),
    )


def read_stream(spark: SparkSession, settings: AuditSettings) -> Stream:
    """Progress and windows from the lake's snapshot and the changelog past it."""
    state = tables.snapshot(spark, f"{settings.tables}/state")
    covered = {} if state is None else tables.progress_of(state)
    offsets = changelog_offsets(spark, settings, settled_offsets)
    start = {p: covered[p].changelog_offset if p in covered else 0 for p in offsets.earliest}
    require_no_hole(offsets, covered, start)
    tail = read_range(spark, settings.kafka, offsets.topic, start, offsets.latest).persist()
    window = read_window(spark, offsets.topic, tail, known(covered))
    progress = {p: decode_progress(row.progress.encode()) for p, row in covered.items()}
    progress |= {p: newest.progress for p, newest in window.newest.items()}
    if not progress:
        raise ConfigError(f"{offsets.topic} has no commit yet: there is nothing to audit")
    stores = newest_stores(progress.values())
    store = _chosen(stores, settings)
    found = rules.kept(state)
    found = {**found, **rules.of_earlier_releases(covered, found), **window.rules}
    layout = layouts_of(stores)[[s.name for s in stores].index(store.name)]
    live = _live(state, window, offsets, layout)
    closed = _closed(spark, settings, window, offsets, layout, start)
    moved = _advances(spark, settings, window, store) if advances.moved_on_ms(progress) else None

    def later() -> DataFrame | None:
        now = changelog_offsets(spark, settings, settled_offsets)
        if now.latest == offsets.latest:
            return None
        ends = start | {p: newest.covered_offset for p, newest in window.newest.items()}
        since = known(covered) | window.newest
        records = read_range(spark, settings.kafka, now.topic, ends, now.latest).persist()
        return _finals(read_window(spark, now.topic, records, since), now.topic, layout)

    return Stream(progress, store, stores, closed, live, later, offsets, found, moved, origin_of(state))


def _chosen(stores: tuple[StoreSchema, ...], settings: AuditSettings) -> StoreSchema:
    names = ", ".join(s.name for s in stores)
    if settings.store is None and len(stores) != 1:
        raise ConfigError(f"store: which one is to be audited? The application has {names or 'none'} (--store)")
    found = [s for s in stores if settings.store in (None, s.name)]
    if not found:
        raise ConfigError(f"store: there is no {settings.store!r}; the application has {names} (--store)")
    return msgspec.structs.replace(found[0], **settings.named)


def _live(state: DataFrame | None, window: Window, offsets: TopicOffsets, layout: StoreLayout) -> DataFrame:
    latest = latest_per_window(window.entries).filter(F.col("store") == layout.number)
    tail = latest.mapInArrow(
        live_rows(offsets.topic, (layout,), window.generations), tables.live_schema((layout,))
    ).persist()
    now = tail.filter("live").withColumnRenamed(layout.name, "state").select(*SESSION)
    if state is None or layout.name not in state.columns:  # no compaction has seen the store yet
        return now
    own = (F.col("row") == "window") & (F.col("store") == layout.name)
    before = tables.in_layout(state.filter(own).withColumnRenamed(layout.name, "state").select(*SESSION), layout)
    return before.join(tail, ["partition", "key", "start_ms"], "left_anti").unionByName(now)


def _advances(spark: SparkSession, settings: AuditSettings, window: Window, store: StoreSchema) -> DataFrame:
    """Those of the store's time, from the lake and from the changelog past it."""
    rows = advances.kept(spark, settings.tables)
    if window.advances is not None:
        rows = rows.unionByName(window.advances)
    return advances.once_a_place(rows.filter(F.col("store") == store.name)).persist()


def _closed(
    spark: SparkSession,
    settings: AuditSettings,
    window: Window,
    offsets: TopicOffsets,
    layout: StoreLayout,
    covered: dict[int, int],
) -> DataFrame:
    tail = _finals(window, offsets.topic, layout)
    path = f"{settings.tables}/closed/{layout.name}"
    if not tables.exists(spark, path):
        return tail
    # A run that crashed may have appended what the state does not cover: that is read from the changelog.
    # Corrections say what late records would have made of it; what is audited is what the stream closed.
    own = F.col("revision") == 0
    kept = spark.table(tables.delta(path)).filter(own & (F.col("changelog_offset") < tables.by_partition(covered)))
    kept = kept.withColumn("key", F.col("key").cast("binary"))
    return tables.in_layout(kept.select(*SESSION, "changelog_offset"), layout).unionByName(tail)


def _finals(window: Window, topic: str, layout: StoreLayout) -> DataFrame:
    """The windows that changelog records say were closed."""
    own = window.entries.filter((F.col("operation") == F.lit(FINAL)) & (F.col("store") == layout.number))
    rows = own.mapInArrow(final_rows(topic, layout, window.generations), tables.final_schema(layout))
    return rows.select(*SESSION, "changelog_offset")


def _results(
    spark: SparkSession,
    settings: AuditSettings,
    stream: Stream,
    not_compared: list[str],
    part: Part | None,
    compared: list[audit_rules.Era],
) -> tuple[DataFrame | None, DataFrame | None]:
    why = why_not(stream.store, stream.stores)
    if why is None and audit_rules.published_otherwise(compared, stream.store, settings.named):
        why = "they went to another topic before, or at other moments"
    if why is not None:
        not_compared.append(f"published results: {why}")
        return None, None
    topic = whole_topic(spark, settings, stream.store.results)
    given, wanted, left_out = published_and_wanted(
        topic, stream.store, stream.closed, stream.later, part, settings.sample
    )
    not_compared += left_out
    return given, wanted
