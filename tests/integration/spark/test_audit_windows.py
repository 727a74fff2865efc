"""The audit of windows that do not merge, over a real worker's topics, before and after they are tampered with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark.audit import Report, run_audit
from penstock.services.spark.audit_checks import Inputs
from penstock.services.spark.audit_report import as_object, print_report
from penstock.services.spark.audit_windows import compare_windows
from penstock.services.spark.compact import Compaction
from penstock.services.spark.settings import AuditSettings, CompactSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations import Count, CountDistinct, Max, Sum
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.topology import Topology
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


COUNTED = log.AggregationSchema.of("n", Count()), log.AggregationSchema.of("sum", Sum("id"))
AT = (10, 120, 130, 260, 90, 400, 20)
"""Times of records: the fifth comes when [0, 100) is closed, the last when all that it lies in is."""


def compared(spark: Any, kind: str, advance_ms: int, *, without: int | None) -> list[tuple[str, int]]:
    """The differences (check, time) of windows of 100 ms and no grace, of which one start may be missing."""
    store = log.StoreSchema(
        *("s", kind, "string", 0, 0, "on_close", "in", None, "late", "dlq"), COUNTED, size_ms=100, advance_ms=advance_ms
    )
    windows: dict[int, list[int]] = {}
    for offset, at in enumerate(AT):
        close = max(AT[: offset + 1])
        for start in range(0, at + 1, advance_ms):
            if start <= at < start + 100 and start + 100 > close:
                windows.setdefault(start, []).append(offset)
    late = [offset for offset in range(len(AT)) if not any(offset in of for of in windows.values())]
    assert late
    if without is not None:
        del windows[without]
    rows = [(0, b"k", start, start + 100, (len(of), float(sum(of)), len(of))) for start, of in windows.items()]
    records = [(0, offset, at, b"k", b'{"id":%d}' % offset) for offset, at in enumerate(AT)]
    state = "struct<n_n: bigint, sum_sum: double, sum_n: bigint>"
    columns = f"partition int, key binary, start_ms bigint, end_ms bigint, state {state}"
    places = "partition int, offset bigint"
    inputs = Inputs(
        spark.createDataFrame(records, "partition int, offset bigint, timestamp_ms bigint, key binary, value binary"),
        spark.createDataFrame([(0, offset) for offset in late], places),
        spark.createDataFrame([], places),
        spark.createDataFrame(rows, columns),
        spark.createDataFrame([], columns),
        None,
        None,
        store,
        once=True,
    )
    found = compare_windows(inputs).differences.select("check", "at_ms").collect()
    return [(row["check"], row.at_ms) for row in found]


@pytest.mark.parametrize(("kind", "advance_ms", "missing"), [("tumbling", 100, 100), ("hopping", 50, 50)])
def test_a_window_that_is_missing_is_found(spark: Any, kind: str, advance_ms: int, missing: int) -> None:
    """Where all are there nothing differs, and of late records none; the one that is not is named by its start."""
    assert compared(spark, kind, advance_ms, without=None) == []
    assert compared(spark, kind, advance_ms, without=missing) == [("windows", missing)]
