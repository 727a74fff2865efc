"""Which epoch is in force where a record stands, and what hangs on a takeover record that is missing.

An epoch is in force from its takeover record on. Where that one cannot be read or is not there, nothing that its owner
committed counts: who passed over it would keep what was before, and say that nothing is new. It is as `ChangelogReader`
has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.compactor import tables
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.log import get_logger
from penstock.shared.streams.changelog_format import PROGRESS, TAKEOVER, decode, way_out, without_takeover
from penstock.shared.streams.changelog_reader import NO_EPOCH

log = get_logger(__name__)

EPOCH_BYTES = 4
NONE_IN_FORCE = NO_EPOCH.to_bytes(EPOCH_BYTES, "big")


class Corrupt(NamedTuple):
    """A record that claims to be an entry and cannot be read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    reason: str


class Named(NamedTuple):
    """A record that is left out by name, and the epoch that it says; None where it cannot be read."""

    partition: int
    offset: int
    epoch: int | None


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
    declares = (F.col("operation") == F.lit(TAKEOVER)) & (epoch > F.lit(NONE_IN_FORCE))
    highest = F.max(F.when(declares, place)).over(so_far)
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
    is_valid &= F.col("epoch") > F.lit(NONE_IN_FORCE)
    return controls.filter(is_valid).drop("epoch", "in_force")


def named(records: DataFrame, skip: Collection[tuple[int, int]], begins: Mapping[int, int]) -> tuple[Named, ...]:
    """What the named records say, of partitions that begin at these offsets; those before are not read any more."""
    offsets = sorted({offset for partition, offset in skip if partition in begins})
    found = records.filter(F.col("offset").isin(offsets)).select("partition", "offset", "value").collect()
    read = [Named(r.partition, r.offset, _epoch_of(r.value)) for r in found if (r.partition, r.offset) in skip]
    return (*read, *(Named(p, at, None) for p, at in sorted(skip) if at < begins.get(p, 0)))


def _epoch_of(value: bytes | None) -> int | None:
    try:
        return decode(None if value is None else bytes(value)).epoch
    except CorruptRecord:
        return None


def require_takeovers(topic: str, controls: DataFrame, corrupt: Sequence[Corrupt], left_out: Sequence[Named]) -> None:
    """Raise CorruptRecord where one of the corrupt records is a takeover, or commits lack theirs.

    Those that were left out by name, with a record of their epoch or one that nobody can read, are warned of.
    """
    for one in corrupt:
        if (one.value or b"")[1:2] == TAKEOVER:
            raise _refused(topic, one, "it is a takeover record")
    for row in _without_takeover(controls):
        epoch = int.from_bytes(row.epoch, "big")
        if not any(_speaks_for(one, row, epoch) for one in left_out):
            raise _lost(topic, row, epoch, corrupt)
        log.warning(
            "commits of an epoch without a takeover record were passed over",
            topic=topic,
            partition=row.partition,
            epoch=epoch,
            first_offset=row.first,
            commits=row.number,
        )


def _speaks_for(one: Named, row: Row, epoch: int) -> bool:
    if one.partition != row.partition or one.offset >= row.first:
        return False
    return one.epoch == epoch or (one.epoch is None and one.offset > row.taken_offset)


def _without_takeover(controls: DataFrame) -> list[Row]:
    """By partition, epoch and takeover in force the first progress record above that epoch, and their number."""
    in_force = F.coalesce("in_force", F.lit(NONE_IN_FORCE))
    lacks = (F.col("operation") == F.lit(PROGRESS)) & (F.col("epoch") > in_force)
    bounds = (F.min("offset").alias("first"), F.count(F.lit(1)).alias("number"), F.first(in_force).alias("in_force"))
    rows = controls.filter(lacks).groupBy("partition", "epoch", "taken_offset").agg(*bounds).collect()
    return sorted(rows, key=lambda row: (row.partition, row.first))


def _lost(topic: str, row: Row, epoch: int, corrupt: Sequence[Corrupt]) -> CorruptRecord:
    """Why commits without a takeover are refused: a corrupt record before them may have been it."""
    if before := [one for one in corrupt if one.partition == row.partition and one.offset < row.first]:
        told = f"commits of epoch {epoch} follow (offset {row.first} is the first), and no takeover record of it"
        return _refused(topic, before[0], told)
    said = without_takeover(epoch, int.from_bytes(row.in_force, "big"))
    return CorruptRecord(f"{topic}-{row.partition} at offset {row.first}: {said}. {way_out(row.partition, row.first)}")


def _refused(topic: str, one: Corrupt, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{topic}-{one.partition} at offset {one.offset}: {one.reason}; {why}. It is not left out unnamed: nothing "
        "that the epoch's owner committed would count. Put the topic back from a copy, or start afresh (`penstock "
        f"streams reset`). To do without those commits, name it: skip_changelog_records="
        f'"{one.partition}:{one.offset}"; see docs/changelog-format.md, Foreign and corrupt records'
    )
