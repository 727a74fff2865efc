"""The stream worker with its state on disk: killed, overtaken, and with a recreated changelog."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, ProducerFenced
from penstock.shared.streams.runtime.restore_progress import RestoreReport
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.state.state_directory import StateDirectory
from tests.integration.test_stream_worker import (
    GUARANTEES,
    WAIT_SECONDS,
    Chain,
    chain_of,
    child,
    commit,
    delete_changelog,
    offline,
    owner,
    process_records,
    running,
    until,
)
from tests.shared_broker import Broker


def on_disk(folder: Path) -> dict[str, Any]:
    """Settings of a worker that keeps its state in `folder`, without a cache in memory."""
    return {"default_dsl_store": "rocksDB", "state_dir": str(folder), "statestore_cache_max_bytes": 0}


async def processed(chain: Chain, worker: StreamWorker) -> RestoreReport:
    """Process all records with a worker, and return the restore report of partition 0."""
    async with running(worker):
        await chain.wait_processed(worker)
        return worker.tasks()[0].report


@pytest.mark.parametrize(
    "guarantee", [GUARANTEES[0], *(pytest.param(g, marks=pytest.mark.soak) for g in GUARANTEES[1:])]
)
async def test_a_killed_worker_restores_only_the_tail(
    kafka: Broker, topic_name: str, tmp_path: Path, guarantee: str
) -> None:
    """After SIGKILL the rows on disk are those of a commit, only later entries are restored, and the output is
    exact.
    """
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(3_000)
        async with child(chain, guarantee, **on_disk(tmp_path)) as process:
            assert await process.has_committed(WAIT_SECONDS)
            with pytest.raises(ConfigError, match="locked by another"):
                await chain.worker(**on_disk(tmp_path)).startup()

            async def has_committed_often() -> bool:
                progress = (await chain.confirmed(0)).progress
                return progress is not None and progress.sources[topic_name] >= 300

            await until(has_committed_often)  # each commit has fifty records: only the last may be missing on disk
            os.kill(process.pid, signal.SIGKILL)
        written = await chain.confirmed(0)
        assert written.progress is not None
        assert 0 < written.progress.sources[topic_name] < 3_000
        await chain.send(200)
        given = {"processing_guarantee": guarantee, **on_disk(tmp_path)}
        report = await processed(chain, chain.worker(**given))
        assert report.local_windows > 0
        assert report.changelog_windows < written.entries_applied / 2, report
        closed, late = offline(topic_name, chain.sent)
        got = await chain.values("out"), await chain.values("late")
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))
        again = await processed(chain, chain.worker(**given))
        assert (again.changelog_windows, again.local_windows > 0) == (0, True)
        assert again.changelog_records <= 2  # its own takeover: all earlier records are in the rows on disk


async def test_a_fenced_commit_is_not_written_to_disk(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """A fenced commit of a former owner is not written to its disk, so its rows there are valid."""
    directory = StateDirectory(str(tmp_path), "old", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    local = directory.state_of(0)
    async with chain_of(kafka, topic_name, 1) as chain:
        async with owner(chain, "at_least_once", local) as (old, old_task):
            process_records(old_task, chain, 0, 10)
            await commit(old, old_task, chain)
            async with owner(chain, "at_least_once") as (new, new_task):
                process_records(old_task, chain, 11, 12, 13)
                with pytest.raises(ProducerFenced, match=r"changelog-0.*offset 3"):
                    await commit(old, old_task, chain)
                process_records(new_task, chain, 20)
                await commit(new, new_task, chain)
            assert local.checkpoint is not None
            assert local.checkpoint.covered_offset == 3
        async with owner(chain, "at_least_once", local) as (_, third):
            (session,) = third.stores["s"].rows()
            assert (session.end, session.states[0], third.sources) == (20, 3, {topic_name: 3})
        local.close()


async def test_rows_of_a_recreated_changelog_are_deleted(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """If the changelog was recreated, the rows on disk belong to the old one and are deleted."""
    local = StateDirectory(str(tmp_path), "a", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    async with chain_of(kafka, topic_name, 1) as chain:
        async with owner(chain, "exactly_once", local) as (changelog, task):
            process_records(task, chain, 0, 10)
            await commit(changelog, task, chain)
        await delete_changelog(chain)
        async with owner(chain, "exactly_once", local) as (_, task):
            assert (list(task.stores["s"].rows()), task.sources, task.epoch) == ([], {}, 1)
        local.close()
