"""The commits of each commit strategy, and a listener that commits at a rebalance: `python examples/committing.py`."""

from __future__ import annotations

import asyncio
from typing import Literal

from penstock.clients import (
    Consumer,
    ConsumerSettings,
    KafkaSettings,
    Producer,
    ProducerRecord,
    RebalanceListener,
    TopicPartition,
)
from penstock.testing import FakeCluster

ORDERS = 20
CommitStrategy = Literal["none", "auto", "sync", "async"]


class CommitFirst(RebalanceListener):
    """Commits before a rebalance. The records of earlier polls are processed by then, so no other member reads them."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.revoked = 0

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        await self.consumer.commit()
        self.revoked += 1


async def by_strategy(kafka: KafkaSettings, settings: ConsumerSettings, *, at_the_end: bool) -> None:
    """Read all orders. Under `none` only `commit` commits."""
    async with Consumer(kafka, settings) as consumer:
        consumer.subscribe(["orders"])
        seen = 0
        while seen < ORDERS:
            seen += sum(map(len, (await consumer.poll(timeout_ms=1_000)).values()))
        if at_the_end:
            await consumer.commit()


async def two_members(kafka: KafkaSettings) -> tuple[int, int]:
    """Let one member read all orders before a second one joins; return the rebalances, and the orders read again."""
    settings = ConsumerSettings(group_id="two", auto_offset_reset="earliest", heartbeat_interval_ms=20)
    async with Consumer(kafka, settings) as first, Consumer(kafka, settings) as second:
        listener = CommitFirst(first)
        first.subscribe(["orders"], listener)
        seen = 0
        again = 0
        while seen < ORDERS:
            seen += sum(map(len, (await first.poll(timeout_ms=1_000)).values()))
        second.subscribe(["orders"])
        while not second.assignment():
            found, _ = await asyncio.gather(second.poll(timeout_ms=50), first.poll(timeout_ms=50))
            again += sum(map(len, found.values()))
        again += sum(map(len, (await second.poll(timeout_ms=200)).values()))
        return listener.revoked, again


async def main() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("orders", partitions=2)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            orders = [ProducerRecord("orders", b"%d" % n, partition=n % 2) for n in range(ORDERS)]
            await (await producer.send_many(orders)).first_error()
        strategies: list[tuple[str, CommitStrategy, bool]] = [
            ("nobody", "none", False),
            ("by hand", "none", True),
            ("auto", "auto", False),
            ("sync", "sync", False),
            ("async", "async", False),
        ]
        for group, strategy, at_the_end in strategies:
            settings = ConsumerSettings(group_id=group, auto_offset_reset="earliest", commit_strategy=strategy)
            await by_strategy(kafka, settings, at_the_end=at_the_end)
            committed = sum(position.offset for position in cluster.committed(group).values())
            print(f"{group}: {committed} of {ORDERS} committed")
        revoked, again = await two_members(kafka)
        print(f"{revoked} rebalance, {again} orders read again")


if __name__ == "__main__":
    asyncio.run(main())
# 1 rebalance, 0 orders read again
