"""The stream worker and its group, against a fake broker: where the listener finds the worker when it is called."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.integration.test_stream_worker import chain_of, topology, until, wait_or_raise

TOPIC = "clicks"
QUICK = {"group.min.session.timeout.ms": "10"}
Partitions = frozenset[TopicPartition]


class Watched(StreamWorker):
    """Records the listener's calls. A call that finds the lock held would wait for a poll that waits for the call."""

    calls: list[str]

    def called(self, name: str) -> None:
        assert not self._lock.locked(), f"{name} within a poll or close that holds the listener's lock"
        self.calls.append(name)

    async def on_partitions_assigned(self, partitions: Partitions) -> None:
        self.called("assigned")
        await super().on_partitions_assigned(partitions)

    async def on_partitions_revoked(self, partitions: Partitions) -> None:
        self.called("revoked")
        await super().on_partitions_revoked(partitions)

    async def on_partitions_lost(self, partitions: Partitions) -> None:
        self.called("lost")
        await super().on_partitions_lost(partitions)


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("rebalance", ["assigned", "revoked", "assigned", "revoked"]),
        ("loss", ["assigned", "lost", "assigned", "revoked"]),
        ("fenced", ["assigned", "revoked", "assigned", "revoked"]),
    ],
)
async def test_a_worker_neither_polls_nor_closes_with_the_listeners_lock(way: str, calls: list[str]) -> None:
    """The listener is called in a poll, and in the close of a rejoin and of the shutdown: never with the lock held."""

    async def turns() -> None:
        while True:
            await worker.run_once()

    async def again() -> bool:
        return worker.calls.count("assigned") == 2

    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        worker = Watched(chain.kafka, chain.settings(), topology(TOPIC))
        worker.calls = []
        await worker.startup()
        loop = asyncio.create_task(turns())
        try:
            await chain.send(10)
            await wait_or_raise(loop, chain.wait_processed(worker))
            match way:
                case "rebalance":
                    worker.consumer.enforce_rebalance()
                case "loss":
                    cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1)
                case "fenced":
                    worker._fenced = True
            await wait_or_raise(loop, until(again))
            await wait_or_raise(loop, chain.wait_processed(worker))
        finally:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop
            await worker.shutdown()
    assert worker.calls == calls
