"""The reader's rule of the changelog, in Spark's expressions.

An entry counts only if a progress record of its epoch and commit number follows it while that epoch is in force. Epoch
and commit number lie next to each other in the envelope, big-endian and never negative, so their twelve bytes compare
and join as they are (`identity`). Of a range of the changelog, `Window` is what is covered: everything up to the newest
valid progress record of each partition. Records without the mark of an entry are foreign, as for every reader: they are
counted, said, and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from services.compactor.bodies import ENVELOPE_BYTES, START_BYTES, START_END_BYTES, START_END_CLOSED_BYTES, StoreLayout
from shared.common.errors import CorruptRecord, SchemaMismatch
from shared.common.log import get_logger
from shared.streams.changelog_format import (
    DELETED,
    FINAL,
    FORMAT_VERSION,
    LIVE,
    OPERATIONS,
    PROGRESS,
    TAKEOVER,
    VERSIONS_MAX,
    Progress,
    StoreSchema,
    decode,
    decode_progress,
    way_out,
)

log = get_logger(__name__)

_FIXED_BYTES = {LIVE: START_END_BYTES, FINAL: START_END_CLOSED_BYTES, DELETED: START_BYTES}
_EPOCH_BYTES = 4


class Newest(NamedTuple):
    """The newest valid progress record of a partition; `covered_offset` is the one after it."""

    covered_offset: int
    epoch: int
    commit: int
    body: bytes
    progress: Progress


class Window(NamedTuple):
    """What a range of the changelog says by the reader's rule.

    `entries` has the columns that `bodies` names; `newest` has no entry for a partition without a valid progress
    record; `stores` are those of the newest progress record that knows most; `foreign_records` were left out.
    """

    entries: DataFrame
    newest: dict[int, Newest]
    stores: tuple[StoreSchema, ...]
    foreign_records: int = 0

    def layouts(self) -> tuple[StoreLayout, ...]:
        return layouts_of(self.stores)


def layouts_of(stores: tuple[StoreSchema, ...]) -> tuple[StoreLayout, ...]:
    """Stores as the body decoder needs them."""
    return tuple(
        StoreLayout(i, s.name, tuple((c.name, c.type) for c in s.state_columns())) for i, s in enumerate(stores)
    )


def read_window(
    spark: SparkSession,
    topic: str,
    records: DataFrame,
    epochs: Mapping[int, int],
    skip: frozenset[tuple[int, int]] = frozenset(),
) -> Window:
    """Apply the rule to `records` (READ_SCHEMA; best cached, as it is read several times).

    `epochs` gives the epoch in force at each partition's first offset, none where nothing was covered yet; `skip` are
    (partition, offset) to leave out as if they were foreign. Raises CorruptRecord with the place of the first record
    that cannot be read, and SchemaMismatch where commits of the range were written with stores that contradict each
    other.
    """
    everything = _parts(records)
    foreign = is_foreign(skip)
    parts = everything.filter(~foreign)
    foreign_records = _say_foreign(topic, everything.filter(foreign))
    _refuse_corrupt(topic, parts)
    valid = _valid_progress(parts, epochs)
    newest = _newest(topic, valid)
    stores = _stores(topic, valid, newest)
    commits = valid.groupBy("partition", "identity").agg(F.max("offset").alias("progress_offset"))
    entries = (
        parts.filter(F.col("operation").isin(LIVE, DELETED, FINAL))
        .join(F.broadcast(commits), ["partition", "identity"])
        .filter(F.col("offset") < F.col("progress_offset"))
        .withColumn("store", F.conv(F.hex("store"), 16, 10).cast("int"))
        .drop("progress_offset")
    )
    return Window(entries, newest, stores, foreign_records)


def latest_per_window(entries: DataFrame) -> DataFrame:
    """Of all entries, the last one of each (partition, store, key, start)."""
    start = F.substring("value", ENVELOPE_BYTES + 1, START_BYTES)
    order = SparkWindow.partitionBy("partition", "store", "key", start).orderBy(F.col("offset").desc())
    return entries.withColumn("_place", F.row_number().over(order)).filter("_place = 1").drop("_place")


def _parts(records: DataFrame) -> DataFrame:
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


def is_foreign(skip: frozenset[tuple[int, int]]) -> SparkColumn:
    """As `changelog_format.is_foreign`, on the columns `partition`, `offset` and `value`; the places of `skip` too."""
    version, operation = F.substring("value", 1, 1), F.substring("value", 2, 1)
    mark = (version >= F.lit(b"\x01")) & (version <= F.lit(bytes([VERSIONS_MAX])))
    mark &= (operation >= F.lit(b"A")) & (operation <= F.lit(b"Z"))
    skipped = F.lit(False)
    for partition, offset in sorted(skip):
        skipped |= (F.col("partition") == partition) & (F.col("offset") == offset)
    return ~F.coalesce(mark, F.lit(False)) | skipped


def _say_foreign(topic: str, foreign: DataFrame) -> int:
    """Warn of each partition's foreign records; their number."""
    rows = foreign.groupBy("partition").agg(F.min("offset").alias("first"), F.count(F.lit(1)).alias("number")).collect()
    for row in sorted(rows):
        log.warning(
            "records that are no changelog entries were passed over",
            topic=topic,
            partition=row.partition,
            first_offset=row.first,
            records=row.number,
        )
    return sum(int(row.number) for row in rows)


def _refuse_corrupt(topic: str, parts: DataFrame) -> None:
    length, operation = F.octet_length("value"), F.col("operation")
    wrong = F.col("value").isNull() | (length < ENVELOPE_BYTES)
    wrong |= F.substring("value", 1, 1) != F.lit(bytes([FORMAT_VERSION]))
    wrong |= ~operation.isin(*sorted(OPERATIONS))
    # The sign bits of epoch and commit: neither is ever negative, and their bytes are compared.
    wrong |= (F.substring("value", 4, 1) >= F.lit(b"\x80")) | (F.substring("value", 8, 1) >= F.lit(b"\x80"))
    for kind, size in _FIXED_BYTES.items():
        wrong |= (operation == F.lit(kind)) & (F.col("key").isNull() | (length < ENVELOPE_BYTES + size))
    wrong |= (operation == F.lit(DELETED)) & (length != ENVELOPE_BYTES + START_BYTES)
    first = parts.filter(F.coalesce(wrong, F.lit(True))).orderBy("partition", "offset").limit(1).collect()
    for row in first:
        reason = f"a record of {len(row.value or b'')} bytes without a key, too short or too long"
        try:
            entry = decode(None if row.value is None else bytes(row.value))
            reason = f"{reason} for operation {entry.operation!r} of epoch {entry.epoch}, commit {entry.commit}"
        except CorruptRecord as e:
            reason = str(e)
        raise _corrupt(topic, row.partition, row.offset, reason)


def _corrupt(topic: str, partition: int, offset: int, reason: object) -> CorruptRecord:
    return CorruptRecord(f"{topic}-{partition} at offset {offset}: {reason}. {way_out(partition, offset)}")


def _valid_progress(parts: DataFrame, epochs: Mapping[int, int]) -> DataFrame:
    """Progress records whose epoch is in force where they stand."""
    epoch = F.substring("identity", 1, _EPOCH_BYTES)
    so_far = SparkWindow.partitionBy("partition").orderBy("offset").rowsBetween(SparkWindow.unboundedPreceding, 0)
    taken = F.max(F.when(F.col("operation") == F.lit(TAKEOVER), epoch)).over(so_far)
    in_force = F.greatest(taken, _epoch_at_start(epochs))
    controls = parts.filter(F.col("operation").isin(PROGRESS, TAKEOVER)).withColumn("_in_force", in_force)
    return controls.filter((F.col("operation") == F.lit(PROGRESS)) & (epoch == F.col("_in_force"))).drop("_in_force")


def _epoch_at_start(epochs: Mapping[int, int]) -> SparkColumn:
    by_partition = F.lit(None).cast("binary")
    for partition, epoch in epochs.items():
        known = F.lit(epoch.to_bytes(_EPOCH_BYTES, "big"))
        by_partition = F.when(F.col("partition") == partition, known).otherwise(by_partition)
    return by_partition


def _newest(topic: str, valid: DataFrame) -> dict[int, Newest]:
    rows = valid.groupBy("partition").agg(F.max("offset").alias("offset"), F.max_by("value", "offset").alias("value"))
    newest = {}
    for row in rows.collect():
        entry = decode(bytes(row.value))
        try:
            progress = decode_progress(entry.body)
        except CorruptRecord as e:
            raise _corrupt(topic, row.partition, row.offset, e) from None
        newest[row.partition] = Newest(row.offset + 1, entry.epoch, entry.commit, entry.body, progress)
    return dict(sorted(newest.items()))


def _stores(topic: str, valid: DataFrame, newest: Mapping[int, Newest]) -> tuple[StoreSchema, ...]:
    """The stores of the range. All its commits must agree on what store a number is and how its state reads."""
    if not newest:
        return ()
    stores = max((n.progress.stores for n in newest.values()), key=len)
    body = F.substring("value", ENVELOPE_BYTES + 1, 2**31 - 1).cast("string")
    place = F.struct("partition", "offset")
    said = valid.groupBy(F.get_json_object(body, "$.stores").alias("stores")).agg(F.min(place).alias("first"))
    for row in said.collect():
        try:
            earlier = msgspec.json.decode(row.stores or b"", type=tuple[StoreSchema, ...])
        except msgspec.MsgspecError as e:
            raise _corrupt(topic, row.first.partition, row.first.offset, f"a progress record: {e}") from None
        require_same_layout(earlier, stores)
    return stores


def require_same_layout(earlier: tuple[StoreSchema, ...], later: tuple[StoreSchema, ...]) -> None:
    """Raise SchemaMismatch unless every earlier store is there under its number, with the same key and columns."""
    for number, store in enumerate(earlier):
        if number >= len(later) or later[number].name != store.name:
            now = later[number].name if number < len(later) else "none"
            raise SchemaMismatch(f"store {number} of the changelog was {store.name!r} and is {now!r} now")
        before, now_columns = _shape(store), _shape(later[number])
        if before != now_columns:
            raise SchemaMismatch(f"store {store.name!r} was written as {before} and is {now_columns} now")


def _shape(store: StoreSchema) -> str:
    return f"key {store.key}, " + ", ".join(f"{c.name} {c.type}" for c in store.state_columns())
