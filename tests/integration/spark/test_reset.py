"""Soak: after `penstock streams reset`, dead letters and late records from before belong to the earlier incarnation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.services.aggregator.main import Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.streams_command import main as reset_main
from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.compaction.compact import CompactionJob, CompactionReport
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.reading import closed, late, live
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ProducerRecord
from tests.integration.test_stream_worker import Chain, chain_of
from tests.shared_broker import Broker

pytestmark = pytest.mark.soak
DAY_MS = 86_400_000
TOPOLOGY = """
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder


def build(topic, grace):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(100, int(grace))
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()
"""


@asynccontextmanager
async def aggregator(chain: Chain, module: str, lake: Path, grace_ms: int, future_days: int) -> AsyncIterator[Any]:
    """A whole aggregator of the application that is named after the topic, without its own compactions."""
    flags = {
        "kafka.bootstrap-servers": chain.kafka.bootstrap_servers,
        "http.port": "0",
        "topology": f"{module}:build",
        "topology-options": f'{{"topic": "{chain.topic}", "grace": "{grace_ms}"}}',
        "streams.application-id": chain.topic,
        "streams.lake": str(lake),
        "streams.commit-interval-ms": "50",
        "streams.max-future-ms": str(future_days * DAY_MS),
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    service = Aggregator(AggregatorSettings.load([*given, "--no-compaction.enabled"], environ={}))
    await service.startup()
    loop = asyncio.create_task(service.main_loop())
    try:
        yield service
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        await service.shutdown()


async def send(chain: Chain, at_ms: int) -> None:
    """One record a partition."""
    first = len(chain.sent)
    new = [(p, b"ahead", at_ms, first + p) for p in range(chain.partitions)]
    records = [ProducerRecord(chain.topic, b'{"id":%d}' % i, key, (), p, at) for p, key, at, i in new]
    async with Producer(chain.kafka) as producer:
        assert not [r for r in await (await producer.send_many(records)) if isinstance(r, BaseException)]
    chain.sent += new


async def test_records_rejected_before_a_reset_count_once(
    kafka: Broker, topic_name: str, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second incarnation accepts some records that were late for the first, and all that were dead letters. Each
    record counts once, and the audit finds no difference."""
    module, lake = f"reset_{os.getpid()}_{abs(hash(tmp_path))}", tmp_path / "lake"
    (tmp_path / f"{module}.py").write_text(TOPOLOGY)
    monkeypatch.syspath_prepend(str(tmp_path))
    common: dict[str, Any] = {"application": topic_name, "lake": str(lake)}
    async with chain_of(kafka, topic_name) as chain:

        def compact() -> CompactionReport:
            return CompactionJob(spark, CompactSettings(**common, kafka=chain.kafka), print).run()

        await chain.send(600)
        await send(chain, chain.sent[-1][2] - 200)  # late for the first life alone
        await send(chain, int(time.time() * 1000) + 2 * DAY_MS)
        async with aggregator(chain, module, lake, grace_ms=20, future_days=1) as service:
            await chain.wait_processed(service.worker)
        first = await asyncio.to_thread(compact)
        assert first.late_rows > len(await chain.read(f"{topic_name}-dlq")) == 2

        monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", str(lake))
        words = ["reset", "--application-id", topic_name, "--bootstrap-servers", chain.kafka.bootstrap_servers]
        assert await asyncio.to_thread(reset_main, [*words, "--execute"]) == 0
        assert not lake.joinpath(topic_name).exists()

        async with aggregator(chain, module, lake, grace_ms=150, future_days=9) as service:
            await chain.wait_processed(service.worker)
        second = await asyncio.to_thread(compact)
        assert 0 < second.late_rows < first.late_rows
        report = await asyncio.to_thread(run_audit, spark, AuditSettings(**common, kafka=chain.kafka), print)
        assert report.ok, report
        assert (report.records, report.late, report.dead_letters) == (len(chain.sent), second.late_rows, 0)

        def counted() -> tuple[int, int]:
            where = spark, str(lake), topic_name, "s"
            rows = [row for of in (closed, live, late) for row in of(*where).selectExpr("n", "sum").collect()]
            return sum(row.n for row in rows), sum(row["sum"] for row in rows)

        assert await asyncio.to_thread(counted) == (len(chain.sent), sum(range(len(chain.sent))))
