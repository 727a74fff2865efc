"""Which epoch is in force where a record stands, and what hangs on a takeover record that is missing.

An epoch is in force from its takeover record on. Where that one cannot be read, nothing that its owner committed
counts, up to the takeover of the next: who passed over it would keep what was before, and say that nothing is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from services.compactor import tables
from shared.common.errors import CorruptRecord
from shared.common.log import get_logger
from shared.streams.changelog_format import PROGRESS, TAKEOVER

log = get_logger(__name__)

EPOCH_BYTES = 4


class Corrupt(NamedTuple):
    """A record that claims to be an entry and cannot be read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    reason: str


def epoch_bytes() -> SparkColumn:
    """The epoch of a record's `identity`, as bytes that are in order."""
    return F.substring("identity", 1, EPOCH_BYTES)


def with_epochs(parts: DataFrame, epochs: Mapping[int, int]) -> DataFrame:
    """Progress and takeover records with their `epoch` and the one `in_force` there, as entries have them.

    `taken_offset` is where the one in force was declared: -1 before the range. `epochs` are those in force before it,
    by partition.
    """
    epoch = epoch_bytes()
    so_far = SparkWindow.partitionBy("partition").orderBy("offset").rowsBetween(SparkWindow.unboundedPreceding, 0)
    # Of takeovers of the same epoch the first declared it.
    place = F.struct(epoch.alias("epoch"), (-F.col("offset")).alias("back"))
    highest = F.max(F.when(F.col("operation") == F.lit(TAKEOVER), place)).over(so_far)
    taken, at_start = F.col("highest.epoch"), _epoch_at_start(epochs)
    is_newer = F.coalesce(taken > at_start, taken.isNotNull())
    offset = F.when(is_newer, -F.col("highest.back")).otherwise(F.lit(-1))
    controls = parts.filter(F.col("operation").isin(PROGRESS, TAKEOVER)).withColumn("highest", highest)
    columns = {"epoch": epoch, "in_force": F.greatest(taken, at_start), "taken_offset": offset}
    return controls.withColumns(columns).drop("highest")


def _epoch_at_start(epochs: Mapping[int, int]) -> SparkColumn:
    """The epoch's bytes, as entries have them; null of a partition that is not known yet."""
    return F.unhex(F.lpad(F.hex(tables.by_partition(epochs, other=None)), 2 * EPOCH_BYTES, "0"))


def valid_progress(controls: DataFrame) -> DataFrame:
    """Of `with_epochs` the progress records whose epoch is in force where they stand."""
    is_valid = (F.col("operation") == F.lit(PROGRESS)) & (F.col("epoch") == F.col("in_force"))
    return controls.filter(is_valid).drop("epoch", "in_force")


def require_takeovers(topic: str, controls: DataFrame, corrupt: Sequence[Corrupt]) -> None:
    """Raise CorruptRecord where one of the corrupt records is a takeover, or stands before commits that lack theirs.

    Commits that lack theirs for another reason (it was named, to be left out) are warned of.
    """
    for one in corrupt:
        if (one.value or b"")[1:2] == TAKEOVER:
            raise _refused(topic, one, "it is a takeover record")
    for row in _without_takeover(controls):
        before = [one for one in corrupt if one.partition == row.partition and one.offset < row.first]
        epoch = int.from_bytes(row.epoch, "big")
        if before:
            told = f"commits of epoch {epoch} follow (offset {row.first} is the first), and no takeover record of it"
            raise _refused(topic, before[0], told)
        log.warning(
            "commits of an epoch without a takeover record were passed over",
            topic=topic,
            partition=row.partition,
            epoch=epoch,
            first_offset=row.first,
            commits=row.number,
        )


def _without_takeover(controls: DataFrame) -> list[Row]:
    """By partition and epoch the first progress record above the epoch in force, and their number."""
    lacks = (F.col("operation") == F.lit(PROGRESS)) & F.coalesce(F.col("epoch") > F.col("in_force"), F.lit(True))
    bounds = (F.min("offset").alias("first"), F.count(F.lit(1)).alias("number"))
    rows = controls.filter(lacks).groupBy("partition", "epoch").agg(*bounds).collect()
    return sorted(rows, key=lambda row: (row.partition, row.first))


def _refused(topic: str, one: Corrupt, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{topic}-{one.partition} at offset {one.offset}: {one.reason}; {why}. It is not left out unnamed: nothing "
        "that the epoch's owner committed would count. Put the topic back from a copy, or start afresh (`penstock "
        f"streams reset`). To do without those commits, name it: skip_changelog_records="
        f'"{one.partition}:{one.offset}"; see docs/changelog-format.md, Foreign and corrupt records'
    )
