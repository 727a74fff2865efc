"""By which rules commits were made: a topology may change its gap, grace and topics at any time (changelog-format.md).

An audit judges by one rule, the newest. Each commit's progress record says what its stores were, so that the changelog,
as far as it is still there, says which source records were taken by an earlier rule: those cannot be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from services.compactor.bodies import ENVELOPE_BYTES
from services.compactor.changelog import is_foreign, split
from services.compactor.epochs import epoch_bytes
from services.compactor.kafka import TopicOffsets, read_range
from services.compactor.origins import NotAuditable
from shared.common.errors import CorruptRecord
from shared.common.settings import KafkaSettings
from shared.streams.changelog_format import (
    FORMAT_VERSION,
    PROGRESS,
    TAKEOVER,
    Progress,
    StoreSchema,
    decode,
    decode_progress,
)

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
History = dict[int, list[Progress]]
"""By partition, in order: the first progress record that is known, and the last before each change of the stores."""


class Era(NamedTuple):
    """Commits of a partition that took the source's records from `start` on and before `end`, by one rule.

    `store` is None where there was no such store.
    """

    partition: int
    start: int
    end: int
    store: StoreSchema | None
    guarantee: str


def history(
    spark: SparkSession,
    kafka: KafkaSettings,
    offsets: TopicOffsets,
    skip: frozenset[tuple[int, int]],
    covered: Mapping[int, Row],
) -> History:
    """What the changelog still has of earlier rules, and `covered`, the tables' progress rows."""
    records = read_range(spark, kafka, offsets.topic, offsets.earliest, offsets.latest)
    places: dict[int, list[int]] = {}
    for row in _turns(records, skip).collect():
        places.setdefault(row.partition, []).append(row.offset)
    found = [(p, row.changelog_offset - 1, decode_progress(row.progress.encode())) for p, row in covered.items()]
    for nth in zip_longest(*([(p, at) for at in own] for p, own in places.items())):
        start = dict(place for place in nth if place is not None)
        end = {p: at + 1 for p, at in start.items()}
        for row in read_range(spark, kafka, offsets.topic, start, end).collect():
            try:
                found.append((row.partition, row.offset, decode_progress(decode(bytes(row.value)).body)))
            except CorruptRecord:  # what lies before the covered offset was settled when that was compacted
                continue
    said: History = {}
    for partition, _, progress in sorted(found, key=lambda f: f[:2]):
        said.setdefault(partition, []).append(progress)
    return said


def _turns(records: DataFrame, skip: frozenset[tuple[int, int]]) -> DataFrame:
    """Places of the first progress record of each partition, and of those behind which others say something else."""
    value, operation, epoch = F.col("value"), F.col("operation"), epoch_bytes()
    mark = F.substring(value, 1, 1) == F.lit(bytes([FORMAT_VERSION]))
    controls = split(records).filter(~is_foreign(skip) & mark & operation.isin(PROGRESS, TAKEOVER))
    order = SparkWindow.partitionBy("partition").orderBy("offset")
    # An owner takes over before it commits: the highest epoch so far is the one in force.
    in_force = F.max(epoch).over(order.rowsBetween(SparkWindow.unboundedPreceding, 0))
    body = F.substring(value, ENVELOPE_BYTES + 1, 2**31 - 1).cast("string")
    text = F.when(operation == F.lit(PROGRESS), body)
    said = F.xxhash64(_field(text, "stores"), _field(text, "guarantee"))
    columns = (said.alias("said"), epoch.alias("epoch"), in_force.alias("in_force"))
    is_progress = (operation == F.lit(PROGRESS)).alias("is_progress")
    valid = controls.select("partition", "offset", is_progress, *columns).filter("is_progress AND epoch = in_force")
    before, after = F.lag("said").over(order), F.lead("said").over(order)
    turns = valid.withColumns({"before": before, "after": after})
    return turns.filter("before IS NULL OR said <> after").select("partition", "offset")


def _field(text: SparkColumn, name: str) -> SparkColumn:
    return F.get_json_object(text, f"$.{name}")


def eras(said: History, newest: Mapping[int, Progress], store: StoreSchema) -> list[Era]:
    """Who took which records of the store's source; what is not known of the beginning is the first's that is."""
    found = []
    for partition, last in newest.items():
        start = 0
        for progress in [*said.get(partition, ()), last]:
            own = next((s for s in progress.stores if s.name == store.name), None)
            end = progress.sources.get(store.source, 0)
            if end > start:
                found.append(Era(partition, start, end, own, progress.guarantee))
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


def unknown_before(
    said: History, newest: Mapping[int, Progress], changelog: TopicOffsets, source: str, start: Mapping[int, int]
) -> list[str]:
    """Where a change would not be seen, since the changelog's beginning is deleted: partition and source offset."""
    known = {p: said.get(p, [progress])[0].sources.get(source, 0) for p, progress in newest.items()}
    return [
        f"{source}-{p} offset {at}"
        for p, at in sorted(known.items())
        if changelog.earliest.get(p, 0) > 0 and at > start.get(p, 0)
    ]


def named(places: list[str]) -> str:
    """The first few.

    >>> named(["in-0 offset 3", "in-1 offset 4"]), named(list("abcdefg"))
    ('in-0 offset 3, in-1 offset 4', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(places) - PARTITIONS_NAMED} more" if len(places) > PARTITIONS_NAMED else ""
    return ", ".join(places[:PARTITIONS_NAMED]) + more


def refusal(
    store: StoreSchema, what: list[str], since: Mapping[int, int], before_ms: int | None, newest_ms: int | None
) -> NotAuditable:
    """Says what changed where, and what can be audited.

    `before_ms` is the highest time of the records before the change, and `newest_ms` of those behind it.
    """
    where = named([f"{store.source}-{p} offset {at}" for p, at in since.items()])
    # A partition is read from its first record of the ms before the part's.
    start = 0 if before_ms is None else before_ms + 2
    out = f"--start {start} audits what came after it"
    if newest_ms is None or newest_ms < start:
        out = f"Once there are records of {start} ms and later, {out}"
    return NotAuditable(
        f"store {store.name!r} was changed: {'; '.join(what)} from {where} on. An audit judges by the newest alone, "
        f"and what came before the change was made by another. Nothing was compared. {out}"
    )
