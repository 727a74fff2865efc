"""Which life of an application wrote a late record or a dead letter: `penstock streams reset` begins another.

What was refused before a reset stays in its topic, and names source records that the application reads again. So each
says by the id of the changelog topic, which a reset makes anew, which life it is of. Earlier releases did not say: of
theirs those are of an earlier life that stand before one of an earlier life in their partition.
"""

from __future__ import annotations

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

LIFE = "life"
IS_EARLIER = "is_earlier"


def with_earlier(records: DataFrame, own: str | None, partition: str, offset: str) -> DataFrame:
    """The records with a column IS_EARLIER: whether they are of a life before `own`, by their column LIFE.

    `partition` and `offset` name the columns that say where they stand. Nobody knows where `own` is None.
    """
    if own is None:
        return records.withColumn(IS_EARLIER, F.lit(False))
    is_other: SparkColumn = F.col(LIFE) != own
    last_other = F.max(F.when(is_other, F.col(offset))).over(SparkWindow.partitionBy(partition))
    return records.withColumn(IS_EARLIER, F.coalesce(is_other, F.col(offset) < last_other, F.lit(False)))
