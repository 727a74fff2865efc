"""Consumers that use an application's group id, on the fake broker."""

from __future__ import annotations

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import InconsistentGroupProtocol
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.testing.fake_broker import FakeCluster
from tests.integration.test_stream_worker import Chain, chain_of, running, until
from tests.integration.test_stream_worker_losses import run_until_error

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


async def test_instances_with_another_strategy_are_no_strangers() -> None:
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
