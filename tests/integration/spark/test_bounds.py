"""Windows beyond the range of timestamps, and the limit of bytes that Spark passes to Python at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.spark_session import ARROW_BATCH_BYTES
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import FINAL, decode_entry
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared_broker import Broker

NS_PER_MS = 1_000_000


@pytest.mark.soak
def test_windows_in_nanoseconds_are_rejected(
    spark: Any, topics: Any, kafka: Broker, topic_name: str, tmp_path: Path
) -> None:
    """A compaction fails at a closed window beyond the range of timestamps, and names topic, partition and offset."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(100).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), max_future_ms=None, errors=ErrorHandlers())
    first = 1_700_000_000_000
    for timestamp in (first, first * NS_PER_MS, (first + 200) * NS_PER_MS):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=timestamp)
    asyncio.run(topics.create(topic_name, 1))
    topics.send_changelog(topic_name, driver.changelog)
    finals = [at for at, (_, value) in enumerate(driver.changelog) if decode_entry(value).operation == FINAL]
    common: dict[str, Any] = {"kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), "lake": str(tmp_path)}
    settings = CompactSettings(application=topic_name, **common)
    with pytest.raises(CorruptRecord, match=rf"{topic_name}-changelog-0 at offset {finals[1]}: .*{first * NS_PER_MS}"):
        CompactionJob(spark, settings, print).run()


def test_batches_are_bounded_by_bytes(spark: Any) -> None:
    """Batches of 100 kB rows exceed the byte limit by less than two rows."""

    def sizes(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            yield pa.record_batch([pa.array([batch.nbytes])], names=["bytes"])

    wide = spark.range(0, 500, 1, 1).select(F.expr("CAST(repeat('x', 100000) AS BINARY)").alias("value"))
    found = [row.bytes for row in wide.mapInArrow(sizes, "bytes bigint").collect()]
    assert sum(found) > 50_000_000
    assert max(found) < ARROW_BATCH_BYTES + 200_000
