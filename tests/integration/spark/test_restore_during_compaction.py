"""A restore while a real compaction rewrites the tables, removes their old files and deletes from the changelog."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.spark.compaction.compact import CompactionJob, CompactionReport
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.lake import state_snapshot
from penstock.shared.common.records import TopicPartition
from tests.integration.test_stream_worker import Chain, chain_of, offline, running, wait_or_raise
from tests.shared_broker import Broker


async def work(chain: Chain, lake: Path) -> None:
    """A worker that processes all records."""
    worker = chain.worker(lake=str(lake))
    async with running(worker) as loop:
        await wait_or_raise(loop, chain.wait_processed(worker))


async def test_a_restore_reads_the_newer_version_if_its_files_are_removed(
    spark: Any, kafka: Broker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compaction runs after the restore chose its version of `state`, and before it reads the files."""
    monkeypatch.setattr("penstock.services.spark.compaction.compact.REWRITE_ROWS_MIN", 0)
    async with chain_of(kafka, topic_name, 1) as chain:
        given = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=chain.kafka)
        settings = given.model_copy(
            update={"optimize_files_max": 1, "delete_covered": True, "retention_hours": 0, "vacuum_every": 1}
        )
        read_windows, versions, reports = state_snapshot.read_window_changes, list[int](), list[CompactionReport]()

        def compact() -> None:
            reports.append(CompactionJob(spark, settings, print).run())

        def read_after_compaction(*where: Any) -> Iterator[Any]:
            versions.append(where[4])
            if len(versions) == 1:
                thread = threading.Thread(target=compact)
                thread.start()
                thread.join()
            return read_windows(*where)

        await chain.send(200)
        await work(chain, tmp_path)
        await asyncio.to_thread(compact)
        await chain.send(100)
        await work(chain, tmp_path)
        monkeypatch.setattr(state_snapshot, "read_window_changes", read_after_compaction)
        await chain.send(100)
        await work(chain, tmp_path)
        assert len(versions) == 2
        assert versions[0] < versions[1]
        assert (reports[1].rewritten_partitions, reports[1].vacuumed) == (1, True)
        changelog = TopicPartition(f"{topic_name}-changelog", 0)
        async with Admin(chain.kafka) as admin:
            earliest = (await admin.list_offsets({changelog: "earliest"}))[changelog]
        assert earliest == reports[0].to_offsets[0]
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
