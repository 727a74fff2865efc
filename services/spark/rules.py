"""By which rules commits were made: a topology may change its gap, grace and topics at any time (changelog-format.md).

An audit must know which source records were taken by which. Each commit's progress record says what the stores were,
but a snapshot keeps the newest alone, and the changelog's records are deleted. So `state` has a row (`row = 'rule'`)
for each partition's first commit, and for each that says something else than the one before it. They are written by the
MERGE that makes a run count: what is covered and what is known of rules change in one, so a rerun, a crash and a
RESTORE need no thought.

They stay, whatever the source still has: late records that wait for their correction, corrected sessions and the table
`advances` go by rules of which no source record is left. They are few, since each is a change of the topology; beyond
RULES_MAX of a partition the oldest go, and the run says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.bodies import ENVELOPE_BYTES
from penstock.shared.streams.changelog.format import Progress, StoreSchema, decode_progress

RULE = "rule"
RULES_MAX = 100  # of a partition: years of changes, and no more than `state` can be asked for at once
Place = tuple[int, int]
"""A changelog partition and offset."""


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """What commits say from one on. `sources` is what had been taken before that one: nothing where it is the first.

    `moved_ms` is by how much time had been moved on without a record before it; None where that is not known.
    """

    sources: dict[str, int]
    guarantee: str
    stores: tuple[StoreSchema, ...]
    moved_ms: int | None = None


Rules = dict[Place, Rule]
"""Each by the place of the first commit that says so."""


class Said(NamedTuple):
    """Commits of a partition that follow each other and say the same, with the offsets of the `first` and `last`.

    `began` and `ended` are the source offsets that these two say; up to the last one time was moved on by `moved_ms`
    without a record.
    """

    partition: int
    first: int
    last: int
    guarantee: str
    stores: tuple[StoreSchema, ...]
    began: dict[str, int]
    ended: dict[str, int]
    moved_ms: int = 0


def said(valid: DataFrame) -> list[Row]:
    """What valid progress records (partition, offset, value) say, in order, with those as one that say the same.

    Columns of `Said`, `stores`, `began`, `ended` and `moved` as texts, and the whole `value` of the last.
    """
    order = SparkWindow.partitionBy("partition").orderBy("offset")
    same = (F.lag(name).over(order).eqNullSafe(F.col(name)) for name in ("stores", "guarantee"))
    texts = valid.select("partition", "offset", "value", text_of("stores"), text_of("guarantee"))
    turns = F.sum(F.when(next(same) & next(same), 0).otherwise(1))
    numbered = texts.withColumn("turn", turns.over(order.rowsBetween(SparkWindow.unboundedPreceding, 0)))
    of = numbered.groupBy("partition", "turn").agg(
        *(F.first(name).alias(name) for name in ("stores", "guarantee")),
        F.min("offset").alias("first"),
        F.max("offset").alias("last"),
        F.min_by("value", "offset").alias("first_value"),
        F.max_by("value", "offset").alias("value"),
    )
    began, ended = text_of("sources", "first_value").alias("began"), text_of("sources").alias("ended")
    moved = text_of("idle.total_ms").alias("moved")
    rows = of.select("partition", "first", "last", "guarantee", "stores", began, ended, moved, "value").collect()
    return sorted(rows, key=lambda row: (int(row.partition), int(row.first)))


def text_of(name: str, value: str = "value") -> SparkColumn:
    """A field of a progress record, by its path, as JSON; null where there is none."""
    body = F.substring(value, ENVELOPE_BYTES + 1, 2**31 - 1).cast("string")
    return F.get_json_object(body, f"$.{name}").alias(name)


def decoded(row: Row) -> Said:
    """A row of `said`. Raises MsgspecError where it is not what a progress record says."""
    began, ended = (msgspec.json.decode(text or "{}", type=dict[str, int]) for text in (row.began, row.ended))
    stores = msgspec.json.decode(row.stores, type=tuple[StoreSchema, ...])
    moved_ms = msgspec.json.decode(row.moved or "0", type=int)
    return Said(row.partition, row.first, row.last, row.guarantee, stores, began, ended, moved_ms)


def begun(commits: Iterable[Said], before: Mapping[int, Progress], cut: Collection[int] = ()) -> Rules:
    """Where commits of a range, in order, begin to say something else than the one before each.

    `before` is by partition what the last one ahead of the range says. Where there is none, the first of the range is
    the partition's first, but in those that are `cut`: what came before it is not known.
    """
    found: Rules = {}
    had = {p: Rule(one.sources, one.guarantee, one.stores, _moved_ms(one)) for p, one in before.items()}
    for one in commits:
        nothing = Rule(one.began, "", ()) if one.partition in cut else Rule({}, "", (), 0)
        earlier = had.get(one.partition, nothing)
        if (earlier.guarantee, earlier.stores) != (one.guarantee, one.stores):
            found[one.partition, one.first] = Rule(earlier.sources, one.guarantee, one.stores, earlier.moved_ms)
        had[one.partition] = Rule(one.ended, one.guarantee, one.stores, one.moved_ms)
    return found


def _moved_ms(progress: Progress) -> int:
    return 0 if progress.idle is UNSET else progress.idle.total_ms


def of_earlier_releases(covered: Mapping[int, Row], known: Iterable[Place]) -> Rules:
    """What progress rows say of partitions that no release covered which keeps rules: `known` has none of theirs.

    It is known from the covered commit on; before the changelog's beginning there is but what a backfill left.
    """
    found: Rules = {}
    for partition in covered.keys() - {partition for partition, _ in known}:
        offset, progress = covered[partition].changelog_offset, decode_progress(covered[partition].progress.encode())
        # Its commits began earlier, and may have moved time then.
        sources, moved_ms = (progress.sources, None) if offset else ({}, 0)
        found[partition, offset - 1] = Rule(sources, progress.guarantee, progress.stores, moved_ms)
    return found


def kept(state: DataFrame | None) -> Rules:
    """The rules that the table has."""
    if state is None:
        return {}
    rows = state.filter(F.col("row") == RULE).select("partition", "changelog_offset", "progress").collect()
    return {(r.partition, r.changelog_offset): msgspec.json.decode(r.progress, type=Rule) for r in rows}


def oldest(places: Iterable[Place], rules_max: int) -> frozenset[Place]:
    """Those beyond `rules_max` of a partition.

    >>> sorted(oldest([(0, 9), (0, 2), (1, 1), (0, 5)], 1))
    [(0, 2), (0, 5)]
    """
    of: dict[int, list[int]] = {}
    for partition, offset in places:
        of.setdefault(partition, []).append(offset)
    return frozenset((p, at) for p, own in of.items() for at in sorted(own, reverse=True)[rules_max:])


def rows_of(
    new: Rules, gone: Iterable[Place], topic_id: str, run: int
) -> list[tuple[str, int, str, bytes, int, int, None, None, str | None, str, int, bool]]:
    """Rows of `state` to write and to take out: STATE_HEAD without `end_ms`, STATE_TAIL, and whether it is live."""
    texts: dict[Place, str | None] = {place: msgspec.json.encode(rule).decode() for place, rule in new.items()}
    texts |= dict.fromkeys(gone)
    return [
        (RULE, p, "", str(offset).encode(), 0, offset, None, None, text, topic_id, run, text is not None)
        for (p, offset), text in texts.items()
    ]
