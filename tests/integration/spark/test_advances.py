"""Time that a quiet topic moved on, in the lake and in the changelog past it, as the audit sees it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import advances, audit_rules, tables
from penstock.services.spark.audit import Report, run_audit
from penstock.services.spark.audit_part import Part
from penstock.services.spark.compact import Compaction
from penstock.services.spark.origins import NotAuditable
from penstock.services.spark.settings import AuditSettings, CompactSettings
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations import Count, Sum
from penstock.shared.streams.changelog.format import PROGRESS, decode, decode_progress
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.stream_worker import StreamWorker
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.test_stream_worker import Chain, chain_of, kafka_of, running, until
from tests.integration.test_stream_worker_parts import send

IDLE_TIMEOUT_MS = 150
SPAN_MS = 300
LONG_MS = 100 * SPAN_MS


KINDS = ("session", "tumbling", "hopping", "sliding")


def topology(topic: str, kinds: tuple[str, ...] = KINDS) -> Topology:
    """One stream in windows of these kinds."""
    builder = StreamsBuilder()
    grouped = builder.stream(topic).group_by_key()
    windows = {
        "session": grouped.session_window(SPAN_MS),
        "tumbling": grouped.tumbling_window(SPAN_MS),
        "hopping": grouped.hopping_window(SPAN_MS, SPAN_MS // 3),
        "sliding": grouped.sliding_window(SPAN_MS),
    }
    for kind in kinds:
        windows[kind].aggregate(kind, n=Count(), sum=Sum("id")).on_close().to(f"{topic}-{kind}")
    return builder.build()


@pytest.fixture
def jobs(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> tuple[Callable[..., Any], Callable[..., Report]]:
    """`compact()` and `audit(store)` of the test's application."""
    common: dict[str, Any] = {"application": topic_name, "lake": str(tmp_path), "kafka": kafka_of(kafka)}
    return (
        lambda: Compaction(spark, CompactSettings(**common), print).run(),
        lambda store: run_audit(spark, AuditSettings(**common, store=store), print),
    )


def time_of(worker: StreamWorker) -> int:
    """The one task's stream time."""
    return max((o.task.stream_time_ms for o in worker.tasks().values() if o.task is not None), default=-1)


async def feed(
    chain: Chain, worker: StreamWorker, times: Callable[[int], list[int]], keys: tuple[bytes, ...] = (b"k",)
) -> None:
    """Send records at the times that follow from the worker's own, and wait until time has moved on past them all."""

    async def is_there() -> bool:
        return any(o.task is not None for o in worker.tasks().values())

    await until(is_there)
    at = times(time_of(worker))
    await send(chain, *(ProducerRecord(chain.topic, b'{"id":%d}' % ms, key, (), 0, ms) for ms in at for key in keys))
    limit = max(max(at), time_of(worker)) + 2 * SPAN_MS

    async def moved() -> bool:
        tasks = [o.task for o in worker.tasks().values() if o.task is not None]
        return time_of(worker) > limit and not any(task.needs_commit for task in tasks)

    await until(moved)


async def idle_application(
    chain: Chain, lake: Path, kinds: tuple[str, ...] = KINDS, keys: tuple[bytes, ...] = (b"k",)
) -> None:
    """Records of these keys, after which time moves on by itself; what is near them in time and of key "k" comes too
    late, and so on."""
    worker = chain.worker(topology(chain.topic, kinds), idle_timeout_ms=IDLE_TIMEOUT_MS, lake=str(lake))
    async with running(worker):
        await feed(chain, worker, lambda now: [max(now, 1_000), max(now, 1_000) + SPAN_MS - 1], keys)
        await feed(chain, worker, lambda now: [now - 3 * SPAN_MS, now - SPAN_MS // 2, now - 1])


def advances_of(application: Path, spark: Any) -> tuple[str, list[Any]]:
    """The table in Spark SQL, and its rows of the store of sessions."""
    table = tables.delta(advances.path_of(str(application)))
    return table, spark.table(table).filter("store = 'session'").orderBy("position").collect()


@pytest.mark.soak
async def test_an_audit_knows_when_time_moved_by_itself(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, jobs: Any, tmp_path: Path
) -> None:
    """Sessions that a quiet topic closed are no difference, with advances in the lake and past it; without them they
    are."""
    compact, audit = jobs
    async with chain_of(kafka, topic_name, 1) as chain:
        await idle_application(chain, tmp_path, ("session",))
        await asyncio.to_thread(compact)
        await idle_application(chain, tmp_path, ("session",))
    report = await asyncio.to_thread(audit, "session")
    assert report.ok, report
    assert report.late > 0
    table, rows = advances_of(tmp_path / topic_name, spark)
    assert len(rows) >= 2
    spark.sql(f"UPDATE {table} SET time_ms = 0")
    report = await asyncio.to_thread(audit, "session")
    assert "lateness" in {check.name for check in report.checks if check.differences}, report


@pytest.mark.soak
async def test_windows_of_all_kinds_see_the_same_time(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, jobs: Any, tmp_path: Path
) -> None:
    """Time that moved by itself closes windows of each kind as a record would, before any compaction and after it;
    where an advance is gone the audit compares nothing, and says of which partition."""
    compact, audit = jobs
    async with chain_of(kafka, topic_name, 1) as chain:
        for keys in ((b"k", b"on time"), (b"k",)):  # an audit compares no sliding windows of a key with late records
            await idle_application(chain, tmp_path, KINDS, keys)
            for kind in KINDS:
                report = await asyncio.to_thread(audit, kind)
                assert report.ok, (kind, report)
            await asyncio.to_thread(compact)
    for kind in KINDS:
        report = await asyncio.to_thread(audit, kind)
        assert report.ok, (kind, report)
    table, rows = advances_of(tmp_path / topic_name, spark)
    assert len(rows) >= 4
    spark.sql(f"UPDATE {table} SET time_ms = 0")
    for kind in KINDS[1:]:
        assert not (await asyncio.to_thread(audit, kind)).ok, kind
    spark.sql(f"DELETE FROM {table} WHERE position = {rows[1].position}")
    lost = rows[1].total_ms - rows[1].from_ms
    with pytest.raises(NotAuditable, match=rf"partitions 0 \({lost} of {rows[-1].total_ms} ms\) was moved on"):
        await asyncio.to_thread(audit, "session")


@pytest.mark.soak
async def test_advances_from_before_the_source_begins_become_one(
    kafka: EmbeddedKafka,
    spark: Any,
    topics: Any,
    topic_name: str,
    jobs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compaction keeps no more of them than the topic has records, and they still add up."""
    compact, _ = jobs
    monkeypatch.setattr(advances, "SPENT_MAX", 1)
    async with chain_of(kafka, topic_name, 1) as chain:
        await idle_application(chain, tmp_path, ("session",))
        await asyncio.to_thread(compact)
        _, before = advances_of(tmp_path / topic_name, spark)
        await asyncio.to_thread(topics.delete_before, topic_name, {0: before[1].position})
        await idle_application(chain, tmp_path, ("session",))
        await asyncio.to_thread(compact)
    _, rows = advances_of(tmp_path / topic_name, spark)
    assert (rows[0].position, rows[0].from_ms) == (before[1].position, 0)
    assert len(rows) > len(before)
    assert sum(row.total_ms - row.from_ms for row in rows) == rows[-1].total_ms


def progress_rows(spark: Any, driver: TopologyTestDriver, first: int) -> Any:
    """The progress records among a driver's changelog entries from `first` on, as a compaction has them."""
    values = [value for _, value in driver.changelog[first:] if decode(value).operation == PROGRESS]
    return spark.createDataFrame([(0, value) for value in values], "partition int, value binary")


def tumbling(topic: str, grace_ms: int) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().tumbling_window(SPAN_MS, grace_ms)
    windows.aggregate("tumbling", n=Count()).on_close().to(f"{topic}-out")
    return builder.build()


@pytest.mark.soak
async def test_a_shorter_grace_that_is_taken_back_unused_is_no_matter_to_an_audit(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, jobs: Any
) -> None:
    """Where time had been moved on before it, and a commit without a record is all that there was of it: what it would
    have closed is open, and nothing is refused or differs, before a compaction and after it."""
    compact, audit = jobs
    async with chain_of(kafka, topic_name, 1) as chain:
        async with running(worker := chain.worker(tumbling(topic_name, LONG_MS), idle_timeout_ms=IDLE_TIMEOUT_MS)):
            await feed(chain, worker, lambda now: [1_000])
        newest = (await chain.confirmed(0)).progress
        assert newest is not None
        time_ms = newest.operator_times_ms["tumbling"]
        async with running(worker := chain.worker(tumbling(topic_name, 0))):

            async def has_committed() -> bool:
                for task in [o.task for o in worker.tasks().values() if o.task is not None]:
                    if task.commit_number or task.is_committing:
                        return not task.is_committing
                    task.needs_commit = True  # as a punctuation does
                return False

            await until(has_committed)
        newest = (await chain.confirmed(0)).progress
        assert newest is not None
        assert newest.close_times_ms == {"tumbling": time_ms - LONG_MS}
        times = [time_ms - 2 * SPAN_MS, 1_000, time_ms + 1, time_ms + 3 * LONG_MS]
        await send(chain, *(ProducerRecord(topic_name, b'{"id":1}', b"k", (), 0, ms) for ms in times))
        chain.sent += [(0, b"k", ms, 1) for ms in times]
        async with running(worker := chain.worker(tumbling(topic_name, LONG_MS), idle_timeout_ms=10_000_000)):
            await chain.wait_processed(worker)
    for _ in range(2):
        report = await asyncio.to_thread(audit, "tumbling")
        assert report.ok, report
        assert report.late == 0
        await asyncio.to_thread(compact)


@pytest.mark.soak
async def test_a_longer_grace_after_quiet_is_audited_from_behind_what_was_closed(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, jobs: Any, tmp_path: Path
) -> None:
    """What the shorter grace closed while the topic was quiet is late under the longer one: the refusals name a start
    behind it, from which on nothing differs."""

    def start_of(refused: NotAuditable) -> int:
        found = re.search(r"--start (\d+)", str(refused))
        assert found is not None
        return int(found[1])

    async with chain_of(kafka, topic_name, 1) as chain:
        async with running(worker := chain.worker(tumbling(topic_name, 0), idle_timeout_ms=IDLE_TIMEOUT_MS)):
            await feed(chain, worker, lambda now: [1_000])
        newest = (await chain.confirmed(0)).progress
        assert newest is not None
        closed_ms = newest.operator_times_ms["tumbling"]
        later = [closed_ms + n * SPAN_MS for n in (0, 1, 2, 3, 4, LONG_MS // SPAN_MS + 4)]
        times = [closed_ms - SPAN_MS, *later]
        await send(chain, *(ProducerRecord(topic_name, b'{"id":1}', b"k", (), 0, ms) for ms in times))
        chain.sent += [(0, b"k", ms, 1) for ms in times]
        async with running(worker := chain.worker(tumbling(topic_name, LONG_MS), idle_timeout_ms=10_000_000)):
            await chain.wait_processed(worker)
        assert [record.timestamp for record in await chain.read(f"{topic_name}-late")] == times[:1]
    base: dict[str, Any] = {"application": topic_name, "lake": str(tmp_path), "kafka": kafka_of(kafka)}
    for start, why in ((None, "grace was 0 ms and is"), (times[0], "had a shorter gap or grace")):
        given: dict[str, Any] = {} if start is None else {"start": str(start)}
        with pytest.raises(NotAuditable, match=why) as refused:
            await asyncio.to_thread(run_audit, spark, AuditSettings(**base, **given), print)
        assert start_of(refused.value) == closed_ms
    report = await asyncio.to_thread(run_audit, spark, AuditSettings(**base, start=str(closed_ms)), print)
    assert report.ok, report


def test_what_may_be_late_by_a_shorter_rule_is_known_by_offset_and_time(spark: Any) -> None:
    """Of each partition where gap and grace had been shorter: by the advances until then, not by later ones."""
    rows = [(0, "s", 4, 1_000, 0, 10), (0, "s", 5, 2_000, 10, 20), (0, "s", 9, 9_000, 20, 30), (1, "s", 1, 5_000, 0, 9)]
    moved = spark.createDataFrame(rows, advances._SCHEMA)
    shorter = [audit_rules.Shorter(0, 4, 100), audit_rules.Shorter(0, 5, 600), audit_rules.Shorter(2, 7, 1)]
    closed = audit_rules.closed_to(spark, shorter, moved)
    assert closed == {0: (4, 1_400)}
    assert audit_rules.closed_to(spark, shorter, None) == audit_rules.closed_to(spark, [], moved) == {}
    store = topology("in", ("session",)).schemas()[0]

    def require_none_late(*places: tuple[int, int, int], start_ms: int | None = None) -> None:
        records = spark.createDataFrame(list(places), "partition INT, offset BIGINT, timestamp_ms BIGINT")
        audit_rules.require_none_late(records, store, Part(start_ms, None, {}), closed)

    require_none_late((0, 3, 1_300), (0, 4, 1_400), (1, 9, 0))
    require_none_late((0, 4, 1_300), start_ms=1_301)
    with pytest.raises(NotAuditable, match=r"in-0 \(2 records\).*--start 1400 audits"):
        require_none_late((0, 4, 1_300), (0, 5, 1_399), (0, 6, 1_400), start_ms=1_300)


def test_rows_are_kept_once_and_as_long_as_the_source_has_their_records(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is begun again adds nothing; while nothing comes a row grows; what lies before the source is one; and
    of windows behind a filter, which no audit takes, there is none."""
    builder = StreamsBuilder()
    events = builder.stream("in")
    for name, stream in (("first", events), ("tumbling", events), ("few", events.filter(lambda record: True))):
        stream.group_by_key().tumbling_window(SPAN_MS).aggregate(name, n=Count()).on_close().to(f"out-{name}")
    built = builder.build()
    driver = TopologyTestDriver(built, idle_timeout_ms=100)
    folder = str(tmp_path)

    def kept() -> list[tuple[int, ...]]:
        rows = advances.kept(spark, folder).filter("store = 'tumbling'").orderBy("position").collect()
        return [(row.position, row.time_ms, row.from_ms, row.total_ms) for row in rows]

    assert kept() == []
    advances.keep(spark, folder, advances.said(progress_rows(spark, driver, 0), built.schemas()))
    assert not Path(advances.path_of(folder)).exists(), "nothing to keep makes no table"
    for timestamp in (20, 30, 500):
        driver.pipe("in", key=b"k", value=b'{"id":1}', timestamp=timestamp)
        driver.advance_wall_clock(100)
    first = len(driver.changelog)
    for _ in range(2):
        advances.keep(spark, folder, advances.said(progress_rows(spark, driver, 0), built.schemas()))
        assert kept() == [(1, 120, 0, 100), (2, 220, 100, 200), (3, 600, 200, 300)]
    driver.advance_wall_clock(150)
    advances.keep(spark, folder, advances.said(progress_rows(spark, driver, first), built.schemas()))
    assert kept() == [(1, 120, 0, 100), (2, 220, 100, 200), (3, 750, 200, 450)]
    newest = decode_progress(decode(driver.changelog[-1][1]).body)
    assert advances.moved_on_ms({0: newest}) == {0: 450}
    advances.forget(spark, folder, "tumbling", {0: 2})
    assert len(kept()) == 3
    monkeypatch.setattr(advances, "SPENT_MAX", 1)
    for _ in range(2):
        advances.forget(spark, folder, "tumbling", {0: 2})
        assert kept() == [(2, 220, 0, 200), (3, 750, 200, 450)]
    assert {row.store for row in advances.kept(spark, folder).select("store").collect()} == {"first", "tumbling"}
    assert advances.kept(spark, folder).filter("store = 'first'").count() == 3
