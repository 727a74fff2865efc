"""Which source records were taken by a rule that has changed since, and cannot be audited by the newest (see `rules`).

An audit judges by one rule, the newest. The tables know the others, but those of before the first compaction of a
release that keeps them: these are looked for in the changelog, as far as it is still there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import rules, tables
from penstock.services.spark.audit_part import Part
from penstock.services.spark.changelog import is_foreign, split
from penstock.services.spark.epochs import epoch_bytes, valid_progress
from penstock.services.spark.kafka import TopicOffsets, read_range
from penstock.services.spark.origins import NotAuditable
from penstock.services.spark.rules import Rule, Rules
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import FORMAT_VERSION, PROGRESS, TAKEOVER, Progress, StoreSchema

PARTITIONS_NAMED = 5
_JUDGED_BY = {
    "gap_ms": "gap",
    "grace_ms": "grace",
    "size_ms": "size",
    "advance_ms": "advance",
    "late": "late topic",
    "dead_letters": "dead-letter topic",
}
_PUBLISHED = ("results", "emit")


class Era(NamedTuple):
    """Commits of a partition that took the source's records from `start` on and before `end`, by one rule.

    `store` is None where there was no such store.
    """

    partition: int
    start: int
    end: int
    store: StoreSchema | None
    guarantee: str


def in_changelog(
    spark: SparkSession,
    kafka: KafkaSettings,
    offsets: TopicOffsets,
    until: Mapping[int, int],
) -> Rules:
    """What the changelog still has of rules up to and with these offsets, of the partitions that have one."""
    earliest = {p: offsets.earliest[p] for p in until}
    end = {p: min(at + 1, offsets.latest[p]) for p, at in until.items()}
    operation, epoch = F.col("operation"), epoch_bytes()
    mark = F.substring("value", 1, 1) == F.lit(bytes([FORMAT_VERSION]))
    controls = split(read_range(spark, kafka, offsets.topic, earliest, end))
    controls = controls.filter(~is_foreign() & mark & operation.isin(PROGRESS, TAKEOVER))
    # An owner takes over before it commits: the highest epoch so far is the one in force.
    order = SparkWindow.partitionBy("partition").orderBy("offset")
    in_force = F.max(epoch).over(order.rowsBetween(SparkWindow.unboundedPreceding, 0))
    valid = valid_progress(controls.withColumns({"epoch": epoch, "in_force": in_force}))
    said = []
    for row in rules.said(valid.filter(rules.text_of("stores").isNotNull())):
        try:
            said.append(rules.decoded(row))
        except msgspec.MsgspecError:  # what lies before the covered offset was settled when that was compacted
            continue
    return rules.begun(said, {}, {p for p, first in earliest.items() if first > 0})


def by_partition(known: Rules) -> dict[int, list[tuple[int, Rule]]]:
    """The rules of each partition in order, with the changelog offsets from which on commits were made by them."""
    found: dict[int, list[tuple[int, Rule]]] = {}
    for (partition, offset), rule in sorted(known.items(), key=lambda one: one[0]):
        found.setdefault(partition, []).append((offset, rule))
    return found


def eras(known: Rules, newest: Mapping[int, Progress], store: StoreSchema) -> list[Era]:
    """Who took which records of the store's source; what is not known of the beginning is the first's that is."""
    found = []
    for partition, own in by_partition(known).items():
        ends = [*(rule.sources for _, rule in own[1:]), newest[partition].sources]
        start = 0
        for (_, rule), sources in zip(own, ends, strict=True):
            then = next((s for s in rule.stores if s.name == store.name), None)
            end = sources.get(store.source, 0)
            if end > start:
                found.append(Era(partition, start, end, then, rule.guarantee))
            start = max(start, end)
    return found


def between(found: Iterable[Era], start: Mapping[int, int], end: Mapping[int, int]) -> list[Era]:
    """The eras of which records lie between these source offsets."""
    return [e for e in found if min(e.end, end.get(e.partition, 0)) > max(e.start, start.get(e.partition, 0))]


def changed(found: Iterable[Era], store: StoreSchema, given: Collection[str]) -> tuple[list[str], dict[int, int]]:
    """What is another now than it was in some of these eras, and by partition the source offset from which on it is.

    What is `given` by name is not looked at: the user knows better.
    """
    what: dict[str, None] = {}
    since: dict[int, int] = {}
    for era in found:
        now = [f"store {store.name!r} was not there"] if era.store is None else []
        for name, label in _JUDGED_BY.items() if era.store is not None else ():
            was, is_ = getattr(era.store, name), getattr(store, name)
            if was != is_ and name not in given:
                unit = " ms" if name.endswith("_ms") else ""
                now.append(f"{label} was {was or 'none' if not unit else was}{unit} and is {is_}{unit}")
        if now:
            what |= dict.fromkeys(now)
            since[era.partition] = max(since.get(era.partition, 0), era.end)
    return list(what), dict(sorted(since.items()))


def published_otherwise(found: Iterable[Era], store: StoreSchema, given: Collection[str]) -> bool:
    """Whether results of some of these eras went to another topic, or at other moments."""
    names = [name for name in _PUBLISHED if name not in given]
    return any(era.store is not None and getattr(era.store, n) != getattr(store, n) for era in found for n in names)


def added_since(found: Iterable[Era], store: StoreSchema) -> dict[str, dict[int, int]]:
    """The aggregations that were not there in some of these eras, or were others, by partition the source offset from
    which on they are: what windows have of earlier records says nothing of them."""
    since: dict[str, dict[int, int]] = {}
    for era in found:
        had = {(a.name, a.function, a.field) for a in (era.store.aggregations if era.store is not None else ())}
        for one in store.aggregations:
            if (one.name, one.function, one.field) not in had:
                of_one = since.setdefault(one.name, {})
                of_one[era.partition] = max(of_one.get(era.partition, 0), era.end)
    return since


def without_added(store: StoreSchema, compared: Iterable[Era], not_compared: list[str]) -> StoreSchema:
    """The store without the aggregations that came when some of the records compared had been taken."""
    added = added_since(compared, store)
    for name, since in added.items():
        where = named([f"{store.source}-{p} offset {at}" for p, at in since.items()])
        why = "windows of before that lack it, or have it of later records alone (a later --start compares it)"
        not_compared.append(f"{name}: it was added at {where}, and there are {why}")
    kept = tuple(a for a in store.aggregations if a.name not in added)
    return msgspec.structs.replace(store, aggregations=kept)


def unknown_before(known: Rules, source: str, start: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Where it is not known by which rule records from `start` on were taken: by partition, that of what lies before.

    The source offset and the changelog's from which on it is known.
    """
    firsts = ((p, own[0]) for p, own in by_partition(known).items())
    at = {p: (rule.sources.get(source, 0), offset) for p, (offset, rule) in firsts}
    return {p: places for p, places in at.items() if places[0] > start.get(p, 0)}


class Shorter(NamedTuple):
    """Before this source offset of a partition windows were closed by a shorter gap or grace than behind it."""

    partition: int
    before: int
    patience_ms: int


def shorter_before(known: Rules, store: StoreSchema) -> list[Shorter]:
    """Where gap and grace were together shorter than the store's, and until which source offsets.

    A rule under which no record came and time was not moved on has closed nothing.
    """
    found = []
    for partition, own in by_partition(known).items():
        for (_, rule), (_, after) in pairwise(own):
            then = next((s for s in rule.stores if s.name == store.name), None)
            before = after.sources.get(store.source, 0)
            came = before > rule.sources.get(store.source, 0)
            moved = rule.moved_ms is None or rule.moved_ms != after.moved_ms
            if then is not None and then.patience_ms < store.patience_ms and (came or moved):
                found.append(Shorter(partition, before, then.patience_ms))
    return found


def closed_to(spark: SparkSession, shorter: list[Shorter], moved: DataFrame | None) -> dict[int, tuple[int, int]]:
    """By partition the source offset from which on, and the time below which, a record may be late by a shorter rule.

    It is for what was closed when time had been `moved` on without a record, beyond all that came: what records closed
    lies before those that came later and are compared.
    """
    if not shorter or moved is None:
        return {}
    rows = moved.join(spark.createDataFrame(shorter, "partition INT, before BIGINT, patience_ms BIGINT"), "partition")
    times = (F.min("before").alias("since"), F.max(F.col("time_ms") - F.col("patience_ms")).alias("ms"))
    found = rows.filter(F.col("position") <= F.col("before")).groupBy("partition").agg(*times).collect()
    return {row.partition: (row.since, row.ms) for row in found}


def require_none_late(
    records: DataFrame, store: StoreSchema, part: Part | None, closed: Mapping[int, tuple[int, int]]
) -> None:
    """Raise NotAuditable where `records` of the part may be late by a shorter rule, which had `closed_to` so far."""
    if not closed:
        return
    since, until = ({p: place[i] for p, place in closed.items()} for i in (0, 1))
    start_ms = (part.start_ms if part is not None else None) or 0
    later = records.filter((F.col("offset") >= tables.by_partition(since)) & (F.col("timestamp_ms") >= start_ms))
    found = later.filter(F.col("timestamp_ms") < tables.by_partition(until)).groupBy("partition").count().collect()
    if found:
        raise refusal_of_late(store, {r.partition: r["count"] for r in found}, max(until[r.partition] for r in found))


def named(places: list[str]) -> str:
    """The first few.

    >>> named(["in-0 offset 3", "in-1 offset 4"]), named(list("abcdefg"))
    ('in-0 offset 3, in-1 offset 4', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(places) - PARTITIONS_NAMED} more" if len(places) > PARTITIONS_NAMED else ""
    return ", ".join(places[:PARTITIONS_NAMED]) + more


def refusal(
    store: StoreSchema,
    what: list[str],
    since: Mapping[int, int],
    before_ms: int | None,
    newest_ms: int | None,
    closed_to_ms: int = 0,
) -> NotAuditable:
    """Says what changed where, and what can be audited.

    `before_ms` is the highest time of the records before the change, and `newest_ms` of those behind it; up to
    `closed_to_ms` windows were closed by then without a record.
    """
    where = named([f"{store.source}-{p} offset {at}" for p, at in since.items()])
    # A partition is read from its first record of the ms before the part's.
    start = max(0 if before_ms is None else before_ms + 2, closed_to_ms)
    out = f"--start {start} audits what came after it"
    if newest_ms is None or newest_ms < start:
        out = f"Once there are records of {start} ms and later, {out}"
    return NotAuditable(
        f"store {store.name!r} was changed: {'; '.join(what)} from {where} on. An audit judges by the newest alone, "
        f"and what came before the change was made by another. Nothing was compared. {out}"
    )


def refusal_of_late(store: StoreSchema, late: Mapping[int, int], closed_to_ms: int) -> NotAuditable:
    """Says of which partitions so many records are there that may be late by the gap and grace of before."""
    where = named([f"{store.source}-{p} ({records} records)" for p, records in sorted(late.items())])
    return NotAuditable(
        f"store {store.name!r} had a shorter gap or grace, by which windows were closed while its source was idle, "
        f"and what came for those later may be late by that: {where}. An audit judges by the newest alone. Nothing was "
        f"compared. --start {closed_to_ms} audits what that has nothing to do with"
    )
