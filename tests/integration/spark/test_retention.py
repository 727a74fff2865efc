"""Closed windows that retention deletes: the windows that stay, and those that are corrected."""

from __future__ import annotations

import asyncio
from datetime import UTC
from pathlib import Path
from typing import Any

from examples.lake_duckdb import connect
from penstock import spark as penstock_spark
from penstock.services.spark.compaction.compact import CompactionJob, CompactionReport
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.lake_tables import LakeTables
from penstock.services.spark.merge_on_read import merged_windows
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, Max, Min, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.documents import DOCS, block
from tests.shared_broker import Broker

HOUR, DAY = 3_600_000, 86_400_000


def test_late_records_of_deleted_windows_make_none(
    spark: Any, topics: Any, kafka: Broker, topic_name: str, tmp_path: Path
) -> None:
    """The late records of a deleted window or session do not make one of their own. Windows that are kept are
    corrected."""
    builder = StreamsBuilder()
    by_key = builder.stream("in").group_by_key()
    for name, window in (("hours", by_key.tumbling_window(HOUR)), ("sessions", by_key.session_window(HOUR))):
        window.aggregate(name, n=Count()).on_close().to(f"out-{name}")
    driver = TopologyTestDriver(builder.build(), max_future_ms=None)
    driver.task.keeps_late = True
    asyncio.run(topics.create(topic_name, 1))
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=broker)

    def compact(*days: float, retention: int | None = 3) -> CompactionReport:
        for day in days:
            driver.pipe("in", key=b"k", value=b"{}", timestamp=int(day * DAY))
        topics.send_changelog(topic_name, driver.changelog)
        report = CompactionJob(spark, settings.model_copy(update={"closed_retention_days": retention}), print).run()
        assert report.failed == ()
        return report

    def counted(rows: Any) -> dict[float, int]:
        return {row.window_start.replace(tzinfo=UTC).timestamp() * 1000 / DAY: row.n for row in rows.collect()}

    assert compact(1, 1, 9, 1, 9.5, 9, 10, retention=None).late_rows == 4  # of days 1 and 9, in both stores
    compact(11)
    tables = LakeTables(spark, f"{tmp_path}/{topic_name}")
    for store in tables.stores:
        assert counted(tables.closed(store)) == {9: 1, 9.5: 1, 10: 1}
        late = tables.late(store).collect()
        assert [row.event_time.day for row in late] == [10], "those of deleted windows are gone too"
        assert counted(merged_windows(tables, store)) == {9: 2, 9.5: 1, 10: 1, 11: 1}
    compact(11.5)
    tables = LakeTables(spark, f"{tmp_path}/{topic_name}")
    for store in tables.stores:
        assert 1 not in counted(merged_windows(tables, store))


def test_the_sql_of_the_document_leaves_out_deleted_windows(
    spark: Any, topics: Any, kafka: Broker, topic_name: str, tmp_path: Path
) -> None:
    """Their late records are deleted one retention period later, and must not make windows of their own."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().tumbling_window(HOUR)
    sales = {"orders": Count(), "total": Sum("price"), "least": Min("price"), "most": Max("price")}
    windows.aggregate("sales", **sales).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), max_future_ms=None)
    driver.task.keeps_late = True
    for day in (6, 6, 6, 9, 6, 12):
        driver.pipe("in", key=b"k", value=b'{"price": 2}', timestamp=day * DAY)
    asyncio.run(topics.create(topic_name, 1))
    topics.send_changelog(topic_name, driver.changelog)
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=broker, closed_retention_days=3)
    assert CompactionJob(spark, settings, print).run().failed == ()
    late = penstock_spark.late(spark, str(tmp_path), topic_name, "sales").collect()
    assert [row.event_time.day for row in late] == [7], "the late record of a deleted window is still there"
    rows = connect(str(tmp_path / topic_name), "sales").sql(block(DOCS / "lake.md", "sql", "WITH covered"))
    found = [(row["window_start"].day, row["orders"]) for row in rows.to_arrow_table().to_pylist()]
    assert sorted(found) == [(10, 1), (13, 1)]
