"""The reader's rule of the changelog, in Spark's expressions.

An entry counts only if it stands where its epoch is in force, and the next progress record of that epoch there has its
commit number: it lies between the one before (or the takeover) and its own. Epoch and commit number lie next to each
other in the envelope, big-endian and never negative, so their twelve bytes compare and join as they are (`identity`).
Of a range of the changelog, `Window` is what is covered: everything up to the newest valid progress record of each
partition. Records without the mark of an entry are foreign, as for every reader: they are counted, said, and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import UNSET
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import advances, rules
from penstock.services.spark.bodies import (
    ENVELOPE_BYTES,
    START_BYTES,
    START_END_BYTES,
    START_END_CLOSED_BYTES,
    Generations,
    StoreLayout,
)
from penstock.services.spark.epochs import (
    EPOCH_BYTES,
    require_takeovers,
    valid_progress,
    with_epochs,
)
from penstock.services.spark.generations import Stores, late_topics_left, layouts_of, newest_of, require_successor
from penstock.services.spark.unread_progress import unread_progress
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.log import get_logger
from penstock.shared.streams.changelog.format import (
    DELETED,
    EPOCH_MAX,
    FINAL,
    FORMAT_VERSION,
    LIVE,
    OPERATIONS,
    PROGRESS,
    VERSIONS_MAX,
    WAYS_OUT,
    Progress,
    decode,
    decode_progress,
)

log = get_logger(__name__)

_FIXED_BYTES = {LIVE: START_END_BYTES, FINAL: START_END_CLOSED_BYTES, DELETED: START_BYTES}


class Newest(NamedTuple):
    """The newest valid progress record of a partition; `covered_offset` is the one after it."""

    covered_offset: int
    epoch: int
    commit: int
    body: bytes
    progress: Progress

    @classmethod
    def of(cls, row: Row) -> Newest:
        """What a progress row of the tables says."""
        body = row.progress.encode()
        return cls(row.changelog_offset, row.epoch, row.commit, body, decode_progress(body))


class Window(NamedTuple):
    """What a range of the changelog says by the reader's rule.

    `entries` has the columns that `bodies` names, and `generation`; `newest` has no entry for a partition without a
    valid progress record; `stores` are those of the progress record that knows most, `generations` the layouts that
    the entries were written in. `foreign_records` were left out. `advances` are those of the range
    (see `advances`), None where time was never moved on; `late_left` are stores' late topics that they have no more;
    `rules` are those that begin in the range (see `rules`).
    """

    entries: DataFrame
    newest: dict[int, Newest]
    stores: Stores
    generations: Generations = ()
    foreign_records: int = 0
    advances: DataFrame | None = None
    late_left: frozenset[tuple[str, str]] = frozenset()
    rules: Mapping[rules.Place, rules.Rule] = {}

    def layouts(self) -> tuple[StoreLayout, ...]:
        """The newest layouts, which the tables have."""
        return layouts_of(self.stores)


class Counts(NamedTuple):
    """How many entries there are by partition, and how many of closed windows by the store's number."""

    by_partition: dict[int, int]
    finals: dict[int, int]


def known(covered: Mapping[int, Row]) -> dict[int, Newest]:
    """What the progress rows say of each partition, as the rule needs it."""
    return {p: Newest.of(row) for p, row in covered.items()}


def read_window(
    spark: SparkSession,
    topic: str,
    records: DataFrame,
    covered: Mapping[int, Newest],
) -> Window:
    """Apply the rule to `records` (READ_SCHEMA; best cached, as it is read several times).

    `covered` has no entry for a partition of which nothing was covered yet. Raises CorruptRecord with the place of the
    first record that cannot be read, and SchemaMismatch where commits were written with stores that contradict each
    other.
    """
    everything = split(records)
    foreign, wrong = is_foreign(), F.coalesce(_is_corrupt(), F.lit(True))
    foreign_records, is_sound = _survey(topic, everything, foreign, wrong)
    parts = everything.filter(~foreign)
    unread = unread_progress(spark, parts.filter(~wrong))
    if not is_sound or unread is not None:
        raise _corrupt(topic, parts, wrong, unread)
    controls = with_epochs(parts, {p: c.epoch for p, c in covered.items()})
    require_takeovers(topic, controls)
    valid = valid_progress(controls)
    said = rules.said(valid)
    newest = _newest(said)
    commits = [rules.decoded(row) for row in said]
    before = {p: c.progress for p, c in covered.items()}
    had = {p: progress.stores for p, progress in before.items()}
    left = late_topics_left([(one.partition, one.stores) for one in commits], had)
    stores, generations = _generations(commits, had)
    numbers = {row.stores: generations.index(layouts_of(one.stores)) for row, one in zip(said, commits, strict=True)}
    entries = (
        parts.filter(F.col("operation").isin(LIVE, DELETED, FINAL))
        .join(F.broadcast(_commits(spark, valid, numbers)), ["partition", "identity"])
        .filter((F.col("offset") > F.col("since")) & (F.col("offset") < F.col("progress_offset")))
        .withColumn("store", F.conv(F.hex("store"), 16, 10).cast("int"))
        .drop("since", "progress_offset")
    )
    moved = any(one.progress.idle is not UNSET for one in newest.values())
    told = advances.said(valid, stores) if moved else None
    begun = rules.begun(commits, before)
    return Window(entries, newest, stores, generations, foreign_records, told, left, begun)


def counted(entries: DataFrame) -> Counts:
    """The entries of a `Window`, counted."""
    is_final = (F.col("operation") == F.lit(FINAL)).alias("is_final")
    by_partition, finals = Counter[int](), Counter[int]()
    for row in entries.groupBy("partition", "store", is_final).agg(F.count(F.lit(1)).alias("number")).collect():
        by_partition[row.partition] += row.number
        if row.is_final:
            finals[row.store] += row.number
    return Counts(dict(by_partition), dict(finals))


def latest_per_window(entries: DataFrame) -> DataFrame:
    """Of all entries, the last one of each (partition, store, key, start); of one that takes a row out the head."""
    start = F.substring("value", ENVELOPE_BYTES + 1, START_BYTES).alias("start")
    # Numbers are hashed, grouped and sorted; whole entries, which a window function would sort by bytes, are only met.
    last = entries.groupBy("partition", "store", "key", start).agg(F.max("offset").alias("offset"))
    head = F.substring("value", 1, ENVELOPE_BYTES + START_BYTES)
    needed = F.when(F.col("operation") == F.lit(LIVE), F.col("value")).otherwise(head)
    found = entries.join(last.select("partition", "offset"), ["partition", "offset"], "left_semi")
    return found.withColumn("value", needed)


def split(records: DataFrame) -> DataFrame:
    """Records with the fields of an entry's envelope: `operation`, `store` and `identity`, as bytes.

    `identity` is the epoch and the commit number, which are in order as bytes are. Records too short for a field have
    it short or empty: which of them are the reader's is `is_foreign`'s to say.
    """
    value = F.col("value")
    return records.select(
        "partition",
        "offset",
        "key",
        "value",
        F.col("timestamp_ms").alias("written_ms"),
        F.substring(value, 2, 1).alias("operation"),
        F.substring(value, 3, 1).alias("store"),
        F.substring(value, 4, 12).alias("identity"),
    )


def is_foreign() -> SparkColumn:
    """As `changelog.format.is_foreign`, on the columns `partition`, `offset` and `value`."""
    version, operation = F.substring("value", 1, 1), F.substring("value", 2, 1)
    mark = (version >= F.lit(b"\x01")) & (version <= F.lit(bytes([VERSIONS_MAX])))
    mark &= (operation >= F.lit(b"A")) & (operation <= F.lit(b"Z"))
    return ~F.coalesce(mark, F.lit(False))


def _survey(topic: str, records: DataFrame, foreign: SparkColumn, wrong: SparkColumn) -> tuple[int, bool]:
    """Warn of each partition's foreign records; their number, and whether none of the others is corrupt."""
    found = (
        F.count_if(foreign).alias("number"),
        F.min(F.when(foreign, F.col("offset"))).alias("first"),
        F.coalesce(F.bool_or(~foreign & wrong), F.lit(False)).alias("is_wrong"),
    )
    rows = records.groupBy("partition").agg(*found).collect()
    for row in sorted((row for row in rows if row.number), key=lambda row: int(row.partition)):
        log.warning(
            "records that are no changelog entries were passed over",
            topic=topic,
            partition=row.partition,
            first_offset=row.first,
            records=row.number,
        )
    return sum(int(row.number) for row in rows), not any(row.is_wrong for row in rows)


def _is_corrupt() -> SparkColumn:
    """Whether a record that has an entry's mark is none that this release can read; null where there is no value."""
    length, operation = F.octet_length("value"), F.col("operation")
    wrong = F.col("value").isNull() | (length < ENVELOPE_BYTES)
    wrong |= F.substring("value", 1, 1) != F.lit(bytes([FORMAT_VERSION]))
    wrong |= ~operation.isin(*sorted(OPERATIONS))
    # The sign bits of epoch and commit: neither is ever negative, and their bytes are compared.
    wrong |= (F.substring("value", 4, 1) >= F.lit(b"\x80")) | (F.substring("value", 8, 1) >= F.lit(b"\x80"))
    wrong |= F.substring("value", 4, EPOCH_BYTES) > F.lit(EPOCH_MAX.to_bytes(EPOCH_BYTES, "big"))
    for kind, size in _FIXED_BYTES.items():
        wrong |= (operation == F.lit(kind)) & (F.col("key").isNull() | (length < ENVELOPE_BYTES + size))
    return wrong | ((operation == F.lit(DELETED)) & (length != ENVELOPE_BYTES + START_BYTES))


def _corrupt(topic: str, parts: DataFrame, wrong: SparkColumn, unread: DataFrame | None) -> CorruptRecord:
    """Names the first record that cannot be read."""
    all_wrong = parts.filter(wrong)
    if unread is not None:
        all_wrong = all_wrong.unionByName(parts.filter(~wrong).join(unread, ["partition", "offset"], "left_semi"))
    (row,) = all_wrong.orderBy("partition", "offset").limit(1).collect()
    return CorruptRecord(f"{topic}-{row.partition} at offset {row.offset}: {_reason(row)}. {WAYS_OUT}")


def _reason(row: Row) -> str:
    reason = f"a record of {len(row.value or b'')} bytes without a key, too short or too long"
    try:
        entry = decode(None if row.value is None else bytes(row.value))
        if entry.operation == PROGRESS:
            decode_progress(entry.body)
        return f"{reason} for operation {entry.operation!r} of epoch {entry.epoch}, commit {entry.commit}"
    except CorruptRecord as e:
        return str(e)


def _newest(said: list[Row]) -> dict[int, Newest]:
    newest = {}
    for row in {row.partition: row for row in sorted(said, key=lambda r: (r.partition, r.last))}.values():
        entry = decode(bytes(row.value))
        progress = decode_progress(entry.body)
        newest[row.partition] = Newest(row.last + 1, entry.epoch, entry.commit, entry.body, progress)
    return newest


def _generations(commits: list[rules.Said], covered: Mapping[int, Stores]) -> tuple[Stores, Generations]:
    """The newest stores, and the layouts of each generation. `covered` has each partition's stores before the range.

    A partition may come back to what it said before: while instances are upgraded it moves between them.
    """
    before, seen = dict(covered), set[tuple[int, Stores]]()
    for one in commits:
        if (one.partition, one.stores) not in seen:
            require_successor(before.get(one.partition, ()), one.stores)
            before[one.partition] = one.stores
            seen.add((one.partition, one.stores))
    newest = newest_of([*covered.values(), *(one.stores for one in commits)])
    for stores in before.values():
        require_successor(stores, newest)
    return newest, tuple(dict.fromkeys(layouts_of(one.stores) for one in commits))


def _commits(spark: SparkSession, valid: DataFrame, numbers: Mapping[str, int]) -> DataFrame:
    """Commits that count, with the offset of their progress record, the one they come `since`, and their generation."""
    before = F.lag("offset").over(SparkWindow.partitionBy("partition").orderBy("offset"))
    commits = valid.select(
        "partition",
        "identity",
        F.greatest("taken_offset", before).alias("since"),
        F.col("offset").alias("progress_offset"),
        rules.text_of("stores"),
    )
    if len(set(numbers.values())) <= 1:
        return commits.withColumn("generation", F.lit(0)).drop("stores")
    known = spark.createDataFrame(list(numbers.items()), "stores string, generation int")
    return commits.join(F.broadcast(known), "stores").drop("stores")
