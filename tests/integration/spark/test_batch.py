"""Batches on Spark over a real topic: between live workers, tried again, killed, fenced, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark.batch import Batch, Summary
from penstock.services.spark.batch_settings import BatchSettings
from penstock.services.spark.compact import Compaction
from penstock.services.spark.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from tests.integration.test_stream_worker import Chain, chain_of, offline, or_its_error, running

TOPOLOGY = '''
"""Topologies of a test."""

import os
from pathlib import Path

from penstock.shared.streams.aggregations import Count, Sum
from penstock.shared.streams.dsl import StreamsBuilder


def sessions(topic):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def fatal(topic, mark, number, error=""):
    """The same, and the process of the record of that number ends, once; or its user's code raises."""

    def see(value):
        if value["id"] == int(number):
            if error:
                raise RuntimeError(error)
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return value
            os._exit(1)
        return value

    builder = StreamsBuilder()
    windows = builder.stream(topic).map_values(see).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def slow(topic, mark, seconds="20"):
    """The same, and the first record of all waits until a file is there."""
    import time

    def see(value):
        if value["id"] == 0:
            Path(mark + "-waits").touch()
            for _ in range(int(seconds) * 100):
                if Path(mark).exists():
                    break
                time.sleep(0.01)
        return value

    builder = StreamsBuilder()
    windows = builder.stream(topic).map_values(see).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def by_another_key(topic):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by(lambda value: value["id"]).session_window(100, 50)
    windows.aggregate("s", n=Count()).on_close().to(f"{topic}-out")
    return builder.build()


def with_global_table(topic):
    builder = StreamsBuilder()
    table = builder.global_table(f"{topic}-table")
    builder.stream(topic).join_global(table, lambda value: value["id"], lambda a, b: a).to(f"{topic}-out")
    return builder.build()
'''
MODULE = "topologies_of_batches"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's working folder, which has the topologies' module."""
    (tmp_path / f"{MODULE}.py").write_text(TOPOLOGY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of(chain: Chain, folder: Path, build: str = "sessions", **given: Any) -> BatchSettings:
    options = {"topic": chain.topic} | given.pop("topology_options", {})
    names = {"application": chain.topic, "lake": str(folder / "lake"), "kafka": chain.kafka}
    return BatchSettings(
        **{**names, "topology": f"{MODULE}:{build}", "topology_options": options, "kafka_timeout_ms": 10_000, **given}
    )


async def batch(spark: Any, settings: BatchSettings) -> Summary:
    """One batch, in a thread: a driver has a loop of its own."""
    return await asyncio.to_thread(lambda: Batch(spark, settings, print).run())


async def live(chain: Chain, folder: Path) -> None:
    """A live worker that reads what there is."""
    worker = chain.worker(lake=str(folder / "lake"))
    async with running(worker) as loop:
        await or_its_error(loop, chain.wait_processed(worker))


def rows_of(folder: Path, application: str, table: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(folder / "lake" / application / table)).to_pyarrow_table().to_pylist()
    return sorted(tuple(row[name] for name in columns) for row in rows)


def in_lake(folder: Path, application: str) -> tuple[list[Any], list[Any]]:
    """Closed windows and late records."""
    closed = rows_of(folder, application, "closed/s", ("key", "window_start", "window_end", "n", "sum"))
    late = rows_of(folder, application, "late/s", ("key", "event_time", "source_offset", "partition"))
    return closed, late


async def test_live_then_batch_then_live(spark: Any, kafka: EmbeddedKafka, topic_name: str, folder: Path) -> None:
    """Results, late records and tables are those of live alone; each part goes on from the one before."""
    async with chain_of(kafka, topic_name) as chain, chain_of(kafka, f"{topic_name}-alone") as alone:
        await chain.send(300)
        await live(chain, folder)
        await chain.send(300)
        done = await batch(spark, settings_of(chain, folder, commit_records=70))
        assert (done.partitions, done.read, done.commits) == (2, 300, 6)
        assert done.to_offsets == {topic_name: {0: 300, 1: 300}}
        again = await batch(spark, settings_of(chain, folder))
        assert (again.partitions, again.read, again.compaction) == (0, 0, None)
        assert [(await chain.confirmed(p)).epoch for p in range(2)] == [2, 2]
        await chain.send(300)
        await live(chain, folder)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        async with Admin(chain.kafka) as admin:
            offsets = await admin.group_offsets(topic_name)
        assert {at.partition: to.offset for at, to in offsets.items()} == {0: 450, 1: 450}

        for _ in range(3):
            await alone.send(300)
        await live(alone, folder)
        for one in (chain, alone):
            settings = CompactSettings(application=one.topic, lake=str(folder / "lake"), kafka=one.kafka)
            await asyncio.to_thread(lambda given=settings: Compaction(spark, given, print).run())
        assert in_lake(folder, chain.topic) == in_lake(folder, alone.topic)
