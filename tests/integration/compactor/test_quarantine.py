"""What a compaction leaves out is kept once, and what Spark hands to Python is bounded by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from services.compactor import quarantine
from services.compactor.changelog import Corrupt
from services.compactor.spark import ARROW_BATCH_BYTES


def test_a_run_that_is_begun_again_keeps_what_it_meets_then(spark: Any, tmp_path: Path) -> None:
    """A run of the same number that reads further keeps its new corrupt records, and those of before once."""
    five, eight = Corrupt(0, 5, b"k", b"v", "x"), Corrupt(0, 8, None, None, "y")
    for corrupt in ([five], [five, eight], [five, eight]):
        quarantine.keep(spark, str(tmp_path), "log", 3, corrupt)
    quarantine.keep(spark, str(tmp_path), "log", 4, [five._replace(value=b"of the topic made again")])
    kept = spark.read.format("delta").load(str(tmp_path / "quarantine")).select("offset", "run").collect()
    assert sorted(tuple(row) for row in kept) == [(5, 3), (5, 4), (8, 3)]


def test_batches_are_bounded_by_bytes(spark: Any) -> None:
    """Rows of 100 kB come in batches of no more than the limit and one row, not 50,000 at once."""

    def sizes(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            yield pa.record_batch([pa.array([batch.nbytes])], names=["bytes"])

    wide = spark.range(0, 500, 1, 1).select(F.expr("CAST(repeat('x', 100000) AS BINARY)").alias("value"))
    found = [row.bytes for row in wide.mapInArrow(sizes, "bytes bigint").collect()]
    assert sum(found) > 50_000_000
    assert max(found) < ARROW_BATCH_BYTES + 200_000
