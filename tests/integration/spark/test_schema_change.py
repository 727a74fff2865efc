"""A topology that gets another aggregation, from worker to lake and back, and corrupt records that are left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.services.aggregator.sessions_command import sessions_query_options
from penstock.services.aggregator.settings import SessionsSettings
from penstock.services.aggregator.stored_windows import StoredWindowsQuery
from penstock.services.spark.compaction.compact import CompactionJob, CompactionReport
from penstock.services.spark.compaction.rewrite import rows_to_keep
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import CorruptRecord, SchemaMismatch
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count, Max, Sum
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import Chain, chain_of, kafka_of, running
from tests.shared_broker import Broker

OLD: dict[str, Aggregation[Any]] = {"n": Count(), "sum": Sum("id")}
NEW: dict[str, Aggregation[Any]] = {"n": Count(), "most": Max("id"), "sum": Sum("id")}


def topology(topic: str, aggregations: dict[str, Aggregation[Any]]) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(100, 50)
    windows.aggregate("s", **aggregations).on_close().to(f"{topic}-out")
    return builder.build()


@pytest.fixture
def compact(spark: Any, kafka: Broker, topic_name: str, tmp_path: Path) -> Callable[..., CompactionReport]:
    """Runs a compaction of the test's application."""

    def run(**more: Any) -> CompactionReport:
        settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=kafka_of(kafka), **more)
        return CompactionJob(spark, settings, print).run()

    return run


def rows(path: Path, columns: str, where: str = "true") -> list[dict[str, Any]]:
    query = f"SELECT {columns} FROM t WHERE {where}"
    found = QueryBuilder().register("t", DeltaTable(str(path))).execute(query).read_all()
    return list(pa.table(found).to_pylist())


async def work(chain: Chain, build: Topology, number: int, lake: Path) -> int:
    """Sends so many events, lets a new worker process them, and returns the number of windows that it read from the
    lake."""
    await chain.send(number)
    worker = chain.worker(build, lake=str(lake))
    async with running(worker):
        await chain.wait_processed(worker)
        return sum(owned.report.snapshot_windows for owned in worker.tasks().values())


async def sessions_are_published(chain: Chain, lake: Path) -> None:
    """`penstock sessions` prints the published and the open sessions of one key."""
    settings_of_query = SessionsSettings.load(
        ["--application", chain.topic, "--lake", str(lake), "--key", "key-1", "--from", "0"],
        environ={"PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": chain.kafka.bootstrap_servers},
    )
    _, found = await StoredWindowsQuery(sessions_query_options(settings_of_query)).run()
    results_found = sorted((one.results["n"], one.results["sum"]) for one in found if one.status == "closed")
    results = map(json.loads, await chain.values("out"))
    assert results_found == sorted((row["n"], row["sum"]) for row in results if row["key"] == "key-1")
    assert [one.status for one in found].count("open") >= 1


@pytest.mark.soak
async def test_an_added_aggregation_is_migrated_and_a_removed_one_rejected(
    kafka: Broker, topic_name: str, compact: Callable[..., CompactionReport], tmp_path: Path
) -> None:
    """Windows keep their counts and sums, and the new aggregation begins empty, in the store, the changelog and the
    lake."""
    async with chain_of(kafka, topic_name) as chain:
        await work(chain, topology(topic_name, OLD), 200, tmp_path)
        await asyncio.to_thread(compact)
        await work(chain, topology(topic_name, OLD), 100, tmp_path)
        assert await work(chain, topology(topic_name, NEW), 200, tmp_path) > 0
        await sessions_are_published(chain, tmp_path)  # from a tail of both generations
        await asyncio.to_thread(compact)  # over commits of both generations
        assert await work(chain, topology(topic_name, NEW), 200, tmp_path) > 0
        await asyncio.to_thread(compact)
        closed = rows(tmp_path / topic_name / "closed" / "s", "n, sum, most, state")
        late = len(await chain.read(f"{topic_name}-late"))
        columns = "partition, store, key, start_ms, changelog_offset, live, s"
        windows = pa.Table.from_pylist(rows(tmp_path / topic_name / "state", columns, "row = 'window'"))
        parts = [windows.filter(pa.compute.equal(windows.column("partition"), p)) for p in range(chain.partitions)]
        states = [row["s"] for part in parts for row in rows_to_keep(part).to_pylist()]
        assert sum(row["n"] for row in closed) + sum(s["n_n"] for s in states) + late == len(chain.sent)
        assert {row["most"] is None for row in closed} == {True, False}
        assert all(row["state"]["sum_sum"] == row["sum"] for row in closed)
        assert all(s["most_max"] is not None for s in states)
        # `penstock sessions` reads lake and changelog together: compacted, newer and open sessions.
        await work(chain, topology(topic_name, NEW), 100, tmp_path)
        await sessions_are_published(chain, tmp_path)

        with pytest.raises(SchemaMismatch, match=r"'s'.*sum"):
            await work(chain, topology(topic_name, {"n": Count(), "most": Max("id")}), 1, tmp_path)


async def test_corrupt_records_stop_a_compaction(
    kafka: Broker, topic_name: str, compact: Callable[..., CompactionReport], tmp_path: Path
) -> None:
    """The error names the coordinates of a state that cannot be decoded."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, topology(topic_name, OLD), 100, tmp_path)
        reader = await chain.confirmed(0)
        assert reader.progress is not None
        short = log.encode_live(0, reader.epoch, 77, 1, 2, b"short")
        bad = [(b"k", short), (None, log.encode_progress(reader.epoch, 77, reader.progress))]
        offsets = await put(chain, f"{topic_name}-changelog", bad)
        with pytest.raises(CorruptRecord, match=rf"{topic_name}-changelog-0 at offset {offsets[0]}: "):
            await asyncio.to_thread(compact)


async def put(chain: Chain, topic: str, records: list[tuple[bytes | None, bytes]]) -> list[int]:
    """Writes records to partition 0 and returns their offsets."""
    from penstock.shared.clients.producer import Producer, ProducerSettings
    from penstock.shared.common.records import ProducerRecord, RecordMetadata

    async with Producer(chain.kafka, ProducerSettings(linger_ms=0)) as producer:
        sent = await (await producer.send_many([ProducerRecord(topic, v, k, (), 0, None) for k, v in records]))
    return [one.offset for one in sent if isinstance(one, RecordMetadata)]
