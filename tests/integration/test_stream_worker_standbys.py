"""Standbys on a real broker: when the owner ends, another instance continues from its standby's state."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.common.errors import IllegalState
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import (
    GAP_MS,
    GRACE_MS,
    WAIT_SECONDS,
    Chain,
    chain_of,
    child,
    offline,
    running,
    until,
)
from tests.integration.test_stream_worker_losses import put
from tests.shared_broker import Broker

STORES = ("in_memory", "rocksDB")


def settings_of(store: str, folder: Path) -> dict[str, Any]:
    return {
        "num_standby_replicas": 1,
        "default_dsl_store": store,
        "state_dir": str(folder),
        "partition_assignment_strategy": "cooperative-sticky",
    }


async def until_current(chain: Chain, *workers: StreamWorker) -> None:
    """Wait until each worker owns a partition and has a current standby of the other."""

    async def done() -> bool:
        ends = {p: (await chain.confirmed(p)).next_offset for p in range(chain.partitions)}
        for worker in workers:
            standbys = worker._standbys._own
            if not (len(worker.tasks()) == len(standbys) == 1 and not worker.tasks().keys() & standbys.keys()):
                return False
            for partition, standby in standbys.items():
                read = None if standby.restoring is None else standby.restoring.reader.next_offset
                if not standby.is_current or read != ends[partition]:
                    return False
        return True

    await until(done)


async def until_standby(worker: StreamWorker, state: str) -> None:
    """Wait until the worker's one standby has this state."""

    async def done() -> bool:
        return [standby["state"] for standby in worker.describe()["standbys"]] == [state]

    await until(done)


def patient(topic: str, grace_ms: int) -> Topology:
    """The usual topology with another grace."""
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(GAP_MS, grace_ms)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


@pytest.mark.parametrize("store", STORES)
async def test_a_standby_takes_over_with_the_tail_alone(
    kafka: Broker, topic_name: str, tmp_path: Path, store: str
) -> None:
    """A standby that takes over reads only the end of the changelog, and the output is that of an uninterrupted run."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(1_000)
        first, second = (chain.worker(**settings_of(store, tmp_path / name)) for name in ("a", "b"))
        async with running(second):
            async with running(first):
                await chain.wait_processed(first, second)
                await until_current(chain, first, second)
                ((partition, standby),) = second._standbys._own.items()
                assert standby.restoring is not None
                with pytest.raises(IllegalState, match=f"partition {partition}.*schedule"):
                    standby.restoring.task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)

                async def shows() -> bool:
                    (shown,) = second.describe()["standbys"]
                    return bool(shown["state"] == "current" and shown["state_rows"] > 0 and shown["lag"] == 0)

                await until(shows)
            written = (await chain.confirmed(partition)).entries_applied
            await chain.send(100)
            await chain.wait_processed(second)
            report = second.tasks()[partition].report
            assert report.standby_windows > 0
            assert (report.snapshot_version, report.local_windows) == (None, 0)
            assert report.changelog_windows < written / 10
            assert report.changelog_records < 20
            assert second._standbys._own == {}
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_a_standby_of_a_killed_owner_takes_over(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """After SIGKILL of the only owner its standby takes over, with the output of an uninterrupted run."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(2_000)
        given = settings_of("rocksDB", tmp_path / "a")
        async with child(chain, "exactly_once", **given) as process:
            assert await process.has_committed(WAIT_SECONDS)
            worker = chain.worker(**settings_of("rocksDB", tmp_path / "b"))
            async with running(worker):

                async def stands_by() -> bool:
                    return any(standby.is_current for standby in worker._standbys._own.values())

                await until(stands_by)
                os.kill(process.pid, signal.SIGKILL)
                await chain.wait_processed(worker)
                assert worker.tasks()[0].report.standby_windows > 0
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


@pytest.mark.parametrize("store", STORES)
async def test_a_standby_stops_at_a_record_that_cannot_be_read(
    kafka: Broker, topic_name: str, tmp_path: Path, store: str
) -> None:
    """A standby fails at an unreadable changelog record and names its offset; the owner continues."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(300)
        owner = chain.worker(**settings_of(store, tmp_path / "a"))
        async with running(owner):
            await chain.wait_processed(owner)
            at = await put(chain, f"{topic_name}-changelog", (b"k", b"\x02L of a layout to come"))
            standby = chain.worker(**settings_of(store, tmp_path / "b"))
            async with running(standby):
                await until_standby(standby, "failed")
                assert f"at offset {at}: " in standby._standbys._own[0].failed
                await chain.send(50)
                await chain.wait_processed(owner)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


@pytest.mark.parametrize(
    ("store", "grace_ms"),
    [("in_memory", GRACE_MS * 6), ("rocksDB", GRACE_MS * 6)],
)
async def test_a_standby_with_another_grace_takes_over_as_a_restore_does(
    kafka: Broker, topic_name: str, tmp_path: Path, store: str, grace_ms: int
) -> None:
    """A standby with another grace than the owner's closes the same windows as after a restore."""
    outputs = []
    for name in ("standby", "restore"):
        topic = f"{topic_name}-{name}"
        async with chain_of(kafka, topic, partitions=1) as chain:
            await chain.send(500)
            owner = chain.worker(**settings_of(store, tmp_path / name / "a"))
            after = chain.worker(patient(topic, grace_ms), **settings_of(store, tmp_path / name / "b"))
            async with contextlib.AsyncExitStack() as later:
                async with running(owner):
                    await chain.wait_processed(owner)
                    if name == "standby":
                        await later.enter_async_context(running(after))
                        await until_standby(after, "current")
                if name == "restore":
                    await later.enter_async_context(running(after))
                await chain.send(500)
                await chain.wait_processed(after)
                assert (after.tasks()[0].report.standby_windows > 0) == (name == "standby")
            outputs.append((await chain.values("out"), await chain.values("late")))
    assert outputs[0] == outputs[1]
    assert outputs[0] != offline(topic, chain.sent), "another grace has other windows"
