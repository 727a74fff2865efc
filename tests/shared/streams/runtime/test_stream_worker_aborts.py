"""After any aborted commit a task is discarded and restored, so that its outputs are written again, once.

The broker rejects one step of a commit in mid-stream. A task that kept its state would never write the removed windows
of that commit again.
"""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.shared.common.errors import PenstockError, ProducerFenced
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, LogReplaced
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import Action, Api, ErrorCode, Fail, FakeCluster, Request
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.test_stream_worker import (
    GAP_MS,
    GRACE_MS,
    Chain,
    chain_of,
    offline,
    running,
    topology,
    wait_or_raise,
)

TOPIC = "clicks"
QUICK = {"group.min.session.timeout.ms": "10"}
OUT, CHANGELOG = TopicPartition(f"{TOPIC}-out", 0), TopicPartition(f"{TOPIC}-changelog", 0)
Window = tuple[str, int, int, tuple[object, ...]]


def hopping() -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(TOPIC).group_by_key().hopping_window(GAP_MS, GAP_MS // 3, GRACE_MS)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{TOPIC}-out")
    return builder.build()


KINDS = {"session": topology(TOPIC), "hopping": hopping()}


def windows_of_an_unbroken_run(chain: Chain, kind: str) -> set[Window]:
    """The live windows after all that was sent."""
    driver = TopologyTestDriver(KINDS[kind])
    for _, key, timestamp, number in chain.sent:
        driver.pipe(TOPIC, key=key, value=b'{"id":%d}' % number, timestamp=timestamp)
    return {(s.key, s.start, s.end, tuple(s.states)) for s in driver.task.stores["s"].rows()}


@pytest.mark.parametrize(
    ("kind", "api", "code", "partition", "before"),
    [
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, OUT, 300),
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, CHANGELOG, 300),
        ("session", Api.TXN_OFFSET_COMMIT, ErrorCode.ILLEGAL_GENERATION, None, 300),
        ("session", Api.END_TXN, ErrorCode.UNKNOWN_SERVER_ERROR, None, 300),
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, OUT, 0),
        ("hopping", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, CHANGELOG, 300),
        ("hopping", Api.END_TXN, ErrorCode.UNKNOWN_SERVER_ERROR, None, 300),
    ],
)
async def test_an_aborted_commit_is_done_again(
    kind: str, api: Api, code: ErrorCode, partition: TopicPartition | None, before: int
) -> None:
    """Whichever step of the first or a later commit fails, results, late records and state are those of an
    uninterrupted run."""

    def fail(request: Request) -> Action | None:
        if partition is None or partition in request.partitions():
            return Fail(code)
        return None

    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        worker = chain.worker(KINDS[kind])
        async with running(worker):
            await chain.send(before)
            await chain.wait_processed(worker)
            fault = cluster.control(api, fail, times=1)
            await chain.send(600 - before)
            await chain.wait_processed(worker)
            assert fault.acted == 1
            (owned,) = worker.tasks().values()
            assert owned.task is not None
            assert owned.task.epoch == 2
            rows = {(s.key, s.start, s.end, tuple(s.states)) for s in owned.task.stores["s"].rows()}
            assert owned.task.vectorized_executors
        assert rows == windows_of_an_unbroken_run(chain, kind)
        assert (await chain.values("out"), await chain.values("late")) == offline(TOPIC, chain.sent, KINDS[kind])
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert progress.sources == {TOPIC: 600}


@pytest.mark.parametrize(
    ("error", "events"),
    [
        (LogReplaced("recreated"), ["task failed: restoring it"] * 2),
        (ProducerFenced("took too long"), ["fenced: the instance joins its group again"] * 2),
    ],
    ids=["replaced", "fenced"],
)
async def test_a_commit_that_always_fails_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError, events: list[str]
) -> None:
    """A changelog that is recreated again and again, or a transaction that is always too long, ends the worker after
    `restore_attempts_max` retries. Only a fenced task makes the instance join its group again."""

    async def fail(self: ChangelogPartition, *given: object) -> None:
        raise error

    monkeypatch.setattr(ChangelogPartition, "commit", fail)
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        await chain.send(10)
        with capture_logs() as logged, pytest.raises(type(error)):
            async with running(chain.worker(KINDS["session"], restore_attempts_max=2)) as loop:
                await wait_or_raise(loop, asyncio.Event().wait())
        attempts = [(one["event"], one["attempt"]) for one in logged if one["event"] in events]
        assert attempts == list(zip(events, (1, 2), strict=True))
