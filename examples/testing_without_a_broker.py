"""Tests code that uses Kafka without a broker: a response is lost, a leader moves, a node stops.

    python examples/testing_without_a_broker.py

`take_order` stands for your code under test. Each test starts its own cluster in this process, within milliseconds.
There is nothing to install and nothing to clean up. The functions are pytest tests. As a script, the file runs them
all.
"""

from __future__ import annotations

import asyncio

from penstock.clients import Consumer, ConsumerSettings, KafkaSettings, Producer, TopicPartition
from penstock.errors import RecordTooLarge
from penstock.testing import Action, Api, Drop, ErrorCode, Fail, FakeCluster, Request

ORDERS = "orders"


async def take_order(producer: Producer, customer: str, order: bytes) -> int:
    """The code under test: an order is taken when it is stored. Returns its offset."""
    delivery = await producer.send(ORDERS, order, key=customer.encode())
    return (await delivery).offset


def settings(cluster: FakeCluster) -> KafkaSettings:
    """The cluster's address. Requests time out soon, so that a test of lost responses does not take half a minute."""
    return KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=500, retry_backoff_ms=20)


async def test_an_order_is_taken_though_the_broker_is_not_ready() -> None:
    """Two temporary errors are retried, and the caller does not notice."""
    async with FakeCluster(nodes=3) as cluster:
        cluster.create_topic(ORDERS)
        failures = cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS), times=2)
        async with Producer(settings(cluster)) as producer:
            assert await take_order(producer, "ann", b"tea") == 0
        assert failures.acted == 2
        assert [record.value for record in cluster.records(ORDERS)] == [b"tea"]


async def test_an_order_is_not_taken_twice() -> None:
    """The broker stores the order but its response is lost; the retry does not store it again."""
    async with FakeCluster() as cluster:
        cluster.create_topic(ORDERS)
        cluster.control(Api.PRODUCE, Drop(handled=True), times=1)
        async with Producer(settings(cluster)) as producer:
            await take_order(producer, "ann", b"tea")
        assert [record.value for record in cluster.records(ORDERS)] == [b"tea"]


async def test_an_order_follows_its_leader() -> None:
    """The partition's leader moves just before the order arrives."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic(ORDERS)
        partition = TopicPartition(ORDERS, 0)
        before = cluster.leader(ORDERS)
        after = next(node for node in cluster.nodes if node != before)

        def move(request: Request) -> Action | None:
            if request.node == before:
                cluster.move_leader(partition, after)
            return None  # the request goes on to the broker, which is no longer the leader

        cluster.control(Api.PRODUCE, move)
        async with Producer(settings(cluster)) as producer:
            assert await take_order(producer, "ann", b"tea") == 0
        assert cluster.leader(ORDERS) == after


async def test_an_order_survives_a_node() -> None:
    """A node stops between two orders, and another node leads."""
    async with FakeCluster(nodes=3) as cluster:
        cluster.create_topic(ORDERS)
        async with Producer(settings(cluster)) as producer:
            await take_order(producer, "ann", b"tea")
            gone = cluster.leader(ORDERS)
            assert gone is not None
            await cluster.stop_node(gone)
            assert await take_order(producer, "ann", b"cake") == 1
        assert cluster.leader(ORDERS) not in (None, gone)


async def test_a_too_large_order_is_rejected() -> None:
    """The broker's error is raised, and nothing is stored."""
    async with FakeCluster() as cluster:
        cluster.create_topic(ORDERS, configs={"max.message.bytes": "1000"})
        async with Producer(settings(cluster)) as producer:
            try:
                await take_order(producer, "ann", b"tea" * 1_000)
            except RecordTooLarge as error:
                assert "orders" in str(error)  # noqa: PT017 - an example needs no test framework
            else:
                raise AssertionError("the order was taken")
        assert cluster.records(ORDERS) == []


async def test_orders_are_worked_off_once() -> None:
    """A group reads the orders and commits; afterwards there is nothing left to read."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic(ORDERS, partitions=4)
        async with Producer(settings(cluster)) as producer:
            for number in range(20):
                await take_order(producer, f"customer {number}", b"%d" % number)
        seen: list[int] = []
        group = ConsumerSettings(group_id="kitchen", auto_offset_reset="earliest")
        async with Consumer(settings(cluster), group) as consumer:
            consumer.subscribe([ORDERS])
            while len(seen) < 20:
                for columns in (await consumer.poll(100)).values():
                    seen += [int(value) for value in columns.values if value is not None]
            await consumer.commit()
        assert sorted(seen) == list(range(20))
        assert sum(committed.offset for committed in cluster.committed("kitchen").values()) == 20


async def main() -> None:
    for test in [value for name, value in globals().items() if name.startswith("test_")]:
        await test()
        print(f"ok  {(test.__doc__ or '').splitlines()[0]}")


if __name__ == "__main__":
    asyncio.run(main())
