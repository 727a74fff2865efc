"""Progress records that are none, as every other reader finds them: by decoding them.

What a field may be is said in one place then, and no reader counts a commit that another one refuses. The driver does
so, since a cluster's workers have none of this code, and has each shape once: of records that differ in their numbers
alone, all can be read or none.
"""

from __future__ import annotations

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams.changelog.format import ENVELOPE, PROGRESS, decode_progress

BYTES = "ISO-8859-1"  # a character a byte, whatever the bytes are
NUMBER = r"(?<=[:,\[])-?(0|[1-9][0-9]{0,17})(?=[,}\]])"  # of so many digits each is an int64


def unread_progress(spark: SparkSession, parts: DataFrame) -> DataFrame | None:
    """The places (partition, offset) of progress records with a body that is none, of whatever epoch; None if there are
    none. `parts` have whole envelopes."""
    controls = parts.filter(F.col("operation") == F.lit(PROGRESS)).select("partition", "offset", _shape())
    shapes = (row.shape for row in controls.select("shape").distinct().toLocalIterator())
    if not (wrong := [(shape,) for shape in shapes if not _is_progress(shape.encode(BYTES))]):
        return None
    return controls.join(spark.createDataFrame(wrong, "shape string"), "shape").select("partition", "offset")


def _shape() -> SparkColumn:
    body = F.substring("value", ENVELOPE.size + 1, 2**31 - 1)
    return F.regexp_replace(F.decode(body, BYTES), NUMBER, "1").alias("shape")


def _is_progress(body: bytes) -> bool:
    try:
        decode_progress(body)
    except CorruptRecord:
        return False
    return True
