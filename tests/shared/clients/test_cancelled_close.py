"""A cancelled close leaves nothing of a client running, at whichever turn of the event loop it is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Delivery, Producer, ProducerSettings
from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker import Api, FakeCluster, Request
from tests.shared.clients.cancelled_close import Close, cancel_close_at_each_turn
from tests.shared.clients.consumer.filled import filled

pytestmark = pytest.mark.parametrize("again", [False, True], ids=["once", "at every turn"])


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(1) as cluster:
        yield cluster


async def test_a_consumer_leaves_its_group(cluster: FakeCluster, again: bool) -> None:
    """The member leaves, so that its partitions are free at once."""

    class Commits(RebalanceListener):
        async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            await made[-1].commit()

    made: list[Consumer] = []
    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)

    async def start() -> Close:
        group = f"g{len(made)}"
        settings = ConsumerSettings(
            group_id=group, auto_offset_reset="earliest", commit_strategy="auto", fetch_max_wait_ms=20
        )
        made.append(consumer := Consumer(cluster.bootstrap_servers, settings))
        await consumer.start()
        consumer.subscribe(["t"], Commits())
        while not await consumer.poll(1_000):
            pass
        return consumer.close

    assert await cancel_close_at_each_turn(start, again=again) > 5
    assert len(left) == len(made)


@pytest.mark.parametrize("transactional_id", [None, "x"])
async def test_a_producer_disconnects(cluster: FakeCluster, transactional_id: str | None, again: bool) -> None:
    """The result of each record is known then."""

    sent: list[Delivery] = []

    async def start() -> Close:
        settings = ProducerSettings(linger_ms=0, transactional_id=transactional_id)
        producer = Producer(cluster.bootstrap_servers, settings)
        await producer.start()
        if transactional_id:
            await producer.init_transactions()
            await producer.begin_transaction()
        sent.append(await producer.send("t", b"v"))
        return producer.close

    assert await cancel_close_at_each_turn(start, again=again) > 5
    assert all(delivery.done() for delivery in sent)


async def test_an_admin_disconnects(cluster: FakeCluster, again: bool) -> None:
    """The sockets are closed."""

    async def start() -> Close:
        return (await Admin(cluster.bootstrap_servers).__aenter__()).close

    assert await cancel_close_at_each_turn(start, again=again) > 0
