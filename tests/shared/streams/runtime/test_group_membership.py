"""The application's group: rebalances of its worker, and consumers of others that use its group id."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import ConfigError, InconsistentGroupProtocol
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Request
from tests.integration.test_stream_worker import Chain, chain_of, running, topology, until, wait_or_raise
from tests.integration.test_stream_worker_losses import run_until_error
from tests.shared.clients.cancelled_close import Close, cancel_close_at_each_turn

TOPIC = "clicks"
POLL_MS = 20
QUICK = {"group.min.session.timeout.ms": "10"}


def stray(chain: Chain) -> Consumer:
    """A consumer that was given the application's id as its group id."""
    kafka = chain.kafka.model_copy(update={"client_id": "stray"})
    return Consumer(kafka, ConsumerSettings(group_id=chain.topic, commit_strategy="auto"))


async def test_a_stranger_gets_no_partition() -> None:
    """The broker rejects a plain consumer in the application's group. The application's tasks continue."""
    async with (
        FakeCluster(configs=QUICK) as cluster,
        chain_of(cluster, TOPIC) as chain,
        Admin(chain.kafka) as admin,
        running(chain.worker()) as loop,
        stray(chain) as consumer,
    ):
        await until(lambda: _has_offsets(chain, admin))
        consumer.subscribe([TOPIC])
        with pytest.raises(InconsistentGroupProtocol, match="INCONSISTENT_GROUP_PROTOCOL"):
            await _polled(consumer)
        assert not loop.done()
        group = await admin.describe_group(TOPIC)
        assert (group.protocol, len(group.members)) == ("penstock-streams-range", 1)


async def test_a_stranger_that_is_there_first_is_named() -> None:
    """The start fails with its client id and strategy, and leaves it its partitions."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain, stray(chain) as consumer:
        consumer.subscribe([TOPIC])
        await _polled(consumer)
        with pytest.raises(InconsistentGroupProtocol, match=r"'range'.*'stray'"):
            await run_until_error(chain.worker())
        await consumer.poll(POLL_MS)
        assert len(consumer.assignment()) == 2


async def test_instances_with_another_strategy_are_not_foreign() -> None:
    """The error names both values of the setting, and the remedy."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        worker = chain.worker()
        async with running(worker):
            await until(lambda: _has_tasks(worker))
            message = r"streams\.partition_assignment_strategy=range.* cooperative-sticky"
            with pytest.raises(InconsistentGroupProtocol, match=message):
                await run_until_error(chain.worker(partition_assignment_strategy="cooperative-sticky"))


async def _polled(consumer: Consumer) -> None:
    """Poll until it has partitions."""
    while not consumer.assignment():
        await consumer.poll(POLL_MS)


async def _has_offsets(chain: Chain, admin: Admin) -> bool:
    await chain.send(1)
    return bool(await admin.group_offsets(TOPIC))


async def _has_tasks(worker: StreamWorker) -> bool:
    return bool(worker.tasks())


async def test_partitions_that_are_added_end_the_worker() -> None:
    """A source topic that gets more partitions has no task for them. The error names the topic and the old number."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        worker = chain.worker()
        async with running(worker):
            await until(lambda: _has_tasks(worker))
            with pytest.raises(ConfigError, match=r"clicks got more partitions.* started for 2"):
                await worker.on_partitions_assigned(frozenset({TopicPartition(TOPIC, 1), TopicPartition(TOPIC, 2)}))


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


@pytest.mark.parametrize("api", [Api.LEAVE_GROUP, Api.METADATA])
async def test_a_cancelled_turn_that_joins_again_is_repeated(api: Api) -> None:
    """The turn is cancelled while the old member leaves, or while the new one connects."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        worker = chain.worker()

        async def turns() -> None:
            while True:
                await worker.run_once()

        async def process_more() -> None:
            loop = asyncio.create_task(turns())
            await chain.send(10)
            await wait_or_raise(loop, chain.wait_processed(worker))
            loop.cancel()
            await asyncio.wait([loop])

        await worker.startup()
        try:
            await process_more()
            came, released = asyncio.Event(), asyncio.Event()

            async def hold(_: Request) -> None:
                came.set()
                await released.wait()

            held = cluster.control(api, hold)
            worker._fenced = True
            turn = asyncio.create_task(worker.run_once())
            await came.wait()
            turn.cancel()
            held.remove()
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await turn
            await process_more()
        finally:
            await worker.shutdown()


async def test_a_cancelled_shutdown_leaves_nothing_running() -> None:
    """All its tasks end in the background."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, 1) as chain:

        async def start() -> Close:
            worker = chain.worker()
            await worker.startup()
            while not worker.tasks():
                await worker.run_once()
            return worker.shutdown

        assert await cancel_close_at_each_turn(start, again=False, step=20) > 1
