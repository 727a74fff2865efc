"""The audit, and windows merged on read, over the output of a real worker and real compactions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from examples.lake_duckdb import connect
from penstock import spark as lake
from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Max, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import chain_of, kafka_of, running
from tests.shared_broker import Broker

KINDS = ("session", "hopping", "sliding")
SIZE, ADVANCE, GRACE = 100, 40, 150


def topology(topic: str, grace: int) -> Topology:
    """One stream in three kinds of windows."""
    builder = StreamsBuilder()
    grouped = builder.stream(topic).group_by_key()
    windows = (
        grouped.session_window(100, grace=grace),
        grouped.hopping_window(SIZE, ADVANCE, grace=grace),
        grouped.sliding_window(60, grace=grace + 300),
    )
    for kind, window in zip(KINDS, windows, strict=True):
        table = window.aggregate(kind, n=Count(), sum=Sum("id"), most=Max("id"), ids=CountDistinct("id"))
        table.on_close().to(f"{topic}-{kind}")
    return builder.build()


def records_of_hopping_windows(folder: Path) -> tuple[int, int]:
    """How many records all hopping windows hold, and how many records missed one, each counted once a window."""
    query = """
        WITH newest AS (
            SELECT * FROM state WHERE row = 'window' AND store = 'hopping'
            QUALIFY row_number() OVER (PARTITION BY partition, key, start_ms ORDER BY changelog_offset DESC) = 1
        )
        SELECT (SELECT sum(n) FROM closed) + (SELECT sum(hopping.n_n) FROM newest WHERE live),
            (SELECT sum(len(missed)) FROM late)"""
    ((in_windows, missed),) = connect(str(folder), "hopping").sql(query).fetchall()
    return int(in_windows), int(missed)


async def test_output_of_a_worker_passes(kafka: Broker, spark: Any, topic_name: str, tmp_path: Path) -> None:
    """A worker runs twice, with a compaction after each run. Then sliding windows are audited, hopping windows hold
    each record as often as they must, and the late records of sessions are merged. (test_demo.py audits sessions of a
    worker.)

    A third run is not compacted, so its records are not covered yet.
    """
    common: dict[str, Any] = {"application": topic_name, "lake": str(tmp_path), "kafka": kafka_of(kafka)}
    async with chain_of(kafka, topic_name, 2) as chain:
        for number in (150, 150, 50):
            await chain.send(number)
            worker = chain.worker(topology(topic_name, GRACE), lake=str(tmp_path))
            async with running(worker):
                await chain.wait_processed(worker)
            if number != 50:
                await asyncio.to_thread(CompactionJob(spark, CompactSettings(**common), print).run)
        settings = AuditSettings(**common, store="sliding")
        report = await asyncio.to_thread(run_audit, spark, settings, print)
        assert report.ok, report
        assert (report.records, report.unaccounted, report.uncovered) == (350, 0, 50)
        assert report.windows_closed > 20
    in_windows, missed = await asyncio.to_thread(records_of_hopping_windows, tmp_path / topic_name)
    assert in_windows + missed == sum(
        at < start + SIZE for _, _, at, _ in chain.sent[:300] for start in range(0, at + 1, ADVANCE)
    )
    assert missed > 0
    rows = await asyncio.to_thread(lake.corrected(spark, str(tmp_path), topic_name, "session").collect)
    assert sum(row.n for row in rows) == 300
