"""The audit of windows that do not merge, over a real worker's topics, before and after they are tampered with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.compactor.audit import Report, run_audit
from services.compactor.audit_report import as_object, print_report
from services.compactor.compact import Compaction
from services.compactor.settings import AuditSettings, CompactSettings
from services.local.kafka import EmbeddedKafka
from shared.clients.producer import Producer, ProducerSettings
from shared.common.records import ProducerRecord
from shared.streams import changelog_format as log
from shared.streams.aggregations import Count, CountDistinct, Max, Sum
from shared.streams.dsl import StreamsBuilder
from shared.streams.topology import Topology
from tests.integration.test_stream_worker import Chain, chain_of, kafka_of, running

KINDS = ("tumbling", "hopping", "sliding")


def topology(topic: str) -> Topology:
    """One stream in three kinds of windows, each with results of its own."""
    builder = StreamsBuilder()
    grouped = builder.stream(topic).group_by_key()
    windows = (
        grouped.tumbling_window(100, grace=150),
        grouped.hopping_window(100, 40, grace=150),
        grouped.sliding_window(60, grace=450),
    )
    for kind, window in zip(KINDS, windows, strict=True):
        table = window.aggregate(kind, n=Count(), sum=Sum("id"), most=Max("id"), ids=CountDistinct("id"))
        table.on_close().to(f"{topic}-{kind}")
    return builder.build()


@pytest.fixture
def audit(spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path) -> Callable[..., Report]:
    """Audits a store of the test's application."""

    def run(store: str, **more: Any) -> Report:
        common: dict[str, Any] = {"application": topic_name, "lake": str(tmp_path), "kafka": kafka_of(kafka)}
        return run_audit(spark, AuditSettings(**common, store=store, **more), print)

    return run


async def forge(chain: Chain) -> None:
    """Another owner's commit says that a tumbling window holds 99 records which it does not."""
    reader = await chain.confirmed(0)
    assert reader.progress is not None
    state = log.StateCodec(reader.progress.stores[0].state_columns()).pack([5, 99, 1, 99, 1, 1, b""])
    at = (0, reader.epoch, 10**6)
    entries = [(b"forged", log.encode_live(*at, 100_000, 100_100, state))]
    entries.append((None, log.encode_progress(reader.epoch, 10**6, reader.progress)))  # type: ignore[arg-type]
    async with Producer(chain.kafka, ProducerSettings(linger_ms=0)) as producer:
        records = [ProducerRecord(f"{chain.topic}-changelog", v, k, (), 0, None) for k, v in entries]
        records.append(ProducerRecord(f"{chain.topic}-hopping", b'{"key":"x","start":0,"end":9}', b"x", (), 0, 9))
        await (await producer.send_many(records))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
async def test_windows_are_what_spark_makes_of_the_source(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, audit: Callable[..., Report], tmp_path: Path, kind: str
) -> None:
    """Windows in lake and changelog pass, a sample of them too; with a forged one or a forged result they do not."""
    settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=kafka_of(kafka))
    async with chain_of(kafka, topic_name, 1) as chain:
        for number in (100, 100):
            await chain.send(number)
            worker = chain.worker(topology(topic_name), lake=str(tmp_path))
            async with running(worker):
                await chain.wait_processed(worker)
            if number == len(chain.sent):
                await asyncio.to_thread(Compaction(spark, settings, print).run)
        await forge(chain)
        report = await asyncio.to_thread(lambda: audit(kind, expect_records=200))
        print_report(report, as_json=True)
        found = {c.name: c.differences for c in report.checks if c.differences}
        forged = {"tumbling": {"conserved": 99, "windows": 1}, "hopping": {"published": 1}, "sliding": {}}
        assert found == forged[kind], (as_object(report), report.checks)
        assert (report.kind, report.sessions_closed > 20) == (kind, True)
        assert kind != "tumbling" or report.late > 0
        times = sorted(at for _, _, at, _ in chain.sent)
        start, end = times[60], times[140]
        part = await asyncio.to_thread(lambda: audit(kind, start=str(start), end=str(end)))
        assert part.ok, (as_object(part), part.checks)
        assert part.unaccounted == 0
        assert part.left_out > 0
        assert 0 < part.sessions_closed + part.sessions_open < report.sessions_closed + report.sessions_open
        assert min(part.edges) > 0
        if kind == "hopping":
            part = await asyncio.to_thread(lambda: audit(kind, sample=0.5))
            assert part.ok
            assert 0 < part.records < 200
            assert part.unaccounted == 0
