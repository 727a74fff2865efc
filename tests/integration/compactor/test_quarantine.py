"""What a compaction leaves out is kept once, and what Spark hands to Python is bounded by bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.compactor import quarantine
from penstock.services.compactor.compact import Compaction
from penstock.services.compactor.epochs import Corrupt
from penstock.services.compactor.fold import Summary
from penstock.services.compactor.settings import CompactSettings
from penstock.services.compactor.spark import ARROW_BATCH_BYTES
from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams import changelog_format as log
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.changelog_format import FINAL, decode
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

NS_PER_MS = 1_000_000


def test_a_run_that_is_begun_again_keeps_what_it_meets_then(spark: Any, tmp_path: Path) -> None:
    """A run of the same number that reads further keeps its new corrupt records, and those of before once."""
    five, eight = Corrupt(0, 5, b"k", b"v", "x"), Corrupt(0, 8, None, None, "y")
    for corrupt in ([five], [five, eight], [five, eight]):
        quarantine.keep(spark, str(tmp_path), "log", 3, corrupt)
    quarantine.keep(spark, str(tmp_path), "log", 4, [five._replace(value=b"of the topic made again")])
    kept = spark.read.format("delta").load(str(tmp_path / "quarantine")).select("offset", "run").collect()
    assert sorted(tuple(row) for row in kept) == [(5, 3), (5, 4), (8, 3)]


def test_corrupt_records_of_a_partition_without_new_commits(
    spark: Any, topics: Any, kafka: EmbeddedKafka, simulate: Any, topic_name: str, tmp_path: Path
) -> None:
    """They are kept and said by each run, though it covers nothing new; a takeover among them stops it by its place,
    until it is named."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    asyncio.run(topics.create(topic_name, 1))
    common: dict[str, Any] = {"kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), "lake": str(tmp_path)}
    said: list[Any] = []

    def compact(**more: Any) -> Summary:
        settings = CompactSettings(application=topic_name, skip_corrupt=True, **common, **more)
        return Compaction(spark, settings, said.append).run()

    simulation.feed(60, seed=1)
    unknown = len(task.changelog)
    task.changelog.append((b"k", b"\x01X" + bytes(20)))
    topics.send_changelog(topic_name, task.changelog)
    place = f"{topic_name}-changelog-0 at offset {unknown}: unknown changelog operation"
    for run in (1, 1):
        done = compact()
        assert (done.run, done.quarantined, done.to_offsets) == (run, 1, {0: unknown})
    assert sum(place in text for text in said) == 2
    task.epoch += 1
    damaged = len(task.changelog)
    task.changelog.append((None, b"\x03" + log.encode_takeover(task.epoch, log.Takeover(topic_name, "test", 0))[1:]))
    simulation.feed(60, seed=2)
    topics.send_changelog(topic_name, task.changelog)
    refused = rf"-changelog-0 at offset {damaged}: changelog format version 3.*skip_changelog_records=\"0:{damaged}\""
    with pytest.raises(CorruptRecord, match=refused):
        compact()
    passed_over = compact(skip_changelog_records=f"0:{damaged},0:{unknown}")
    assert (passed_over.run, passed_over.quarantined, passed_over.to_offsets) == (1, 0, {0: unknown})
    (kept,) = spark.read.format("delta").load(str(tmp_path / topic_name / "quarantine")).collect()
    assert (kept.offset, kept.run) == (unknown, 1)


@pytest.mark.soak
def test_windows_in_nanoseconds_are_refused_or_kept_aside(
    spark: Any, topics: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    """A closed window that no timestamp can say stops a compaction by its place; on demand it is in the quarantine, not
    in `closed`, and no more in `state`. What it closed early is there, at a time that is not known."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(100).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), max_future_ms=None, errors=ErrorHandlers())
    first = 1_700_000_000_000
    for timestamp in (first, first * NS_PER_MS, (first + 200) * NS_PER_MS):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=timestamp)
    asyncio.run(topics.create(topic_name, 1))
    topics.send_changelog(topic_name, driver.changelog)
    finals = [at for at, (_, value) in enumerate(driver.changelog) if decode(value).operation == FINAL]
    common: dict[str, Any] = {"kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), "lake": str(tmp_path)}
    settings = CompactSettings(application=topic_name, **common)
    place = f"{topic_name}-changelog-0 at offset {finals[1]}: a closed window from {first * NS_PER_MS}"
    with pytest.raises(CorruptRecord, match=re.escape(place)):
        Compaction(spark, settings, print).run()
    done = Compaction(spark, settings.model_copy(update={"skip_corrupt": True}), print).run()
    assert (done.quarantined, done.finals, done.live_rows) == (1, 1, 1)
    folder = tmp_path / topic_name
    (kept,) = spark.read.format("delta").load(str(folder / "quarantine")).collect()
    assert (kept.offset, bytes(kept.value)) == (finals[1], driver.changelog[finals[1]][1])
    (closed,) = spark.read.format("delta").load(str(folder / "closed" / "s")).collect()
    assert (closed.start_ms, closed.n, closed.closed_at) == (first, 1, None)
    (live,) = spark.read.format("delta").load(str(folder / "state")).filter("row = 'window'").collect()
    assert live.start_ms == (first + 200) * NS_PER_MS


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
