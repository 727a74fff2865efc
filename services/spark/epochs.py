"""Which epoch is in force where a record stands, and what hangs on a takeover record that is missing.

An epoch is in force from its takeover record on. Where that one cannot be read or is not there, nothing that its owner
committed counts: who passed over it would keep what was before, and say that nothing is new. It is as `ChangelogReader`
has it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams.changelog.format import PROGRESS, TAKEOVER, WAYS_OUT, without_takeover
from penstock.shared.streams.changelog.reader import NO_EPOCH

EPOCH_BYTES = 4
NONE_IN_FORCE = NO_EPOCH.to_bytes(EPOCH_BYTES, "big")


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


def require_takeovers(topic: str, controls: DataFrame) -> None:
    """Raise CorruptRecord where commits of an epoch lack its takeover record."""
    in_force = F.coalesce("in_force", F.lit(NONE_IN_FORCE))
    lacks = (F.col("operation") == F.lit(PROGRESS)) & (F.col("epoch") > in_force)
    places = controls.filter(lacks).orderBy("partition", "offset")
    for row in places.select("partition", "offset", "epoch", in_force.alias("in_force")).limit(1).collect():
        said = without_takeover(int.from_bytes(row.epoch, "big"), int.from_bytes(row.in_force, "big"))
        raise CorruptRecord(f"{topic}-{row.partition} at offset {row.offset}: {said}. {WAYS_OUT}")
