"""A producer and a consumer in one program: `python examples/orders.py`. The broker runs in this process."""

from __future__ import annotations

import asyncio

from penstock import Consumer, ConsumerSettings, KafkaSettings, Producer, ProducerRecord
from penstock.testing import FakeCluster


async def main() -> tuple[int, int]:
    """Return the first record's offset, and the number of records read."""
    async with FakeCluster() as cluster:  # a real one is KafkaSettings(bootstrap_servers="kafka:9092")
        cluster.create_topic("orders", partitions=4)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            delivery = await producer.send("orders", b"tea", key=b"ann")  # waits only for buffer memory
            stored = await delivery  # waits for the broker: returns a RecordMetadata or raises an error
            cups = [ProducerRecord("orders", b"cup %d" % number, b"bob") for number in range(1000)]
            await (await producer.send_many(cups)).first_error()  # waits for all of them; None: all stored
        settings = ConsumerSettings(group_id="shop", auto_offset_reset="earliest", commit_strategy="async")
        async with Consumer(kafka, settings) as consumer:
            consumer.subscribe(["orders"])
            seen = 0
            while seen < 1001:
                for columns in (await consumer.poll(timeout_ms=1000)).values():
                    seen += len(columns)  # `async for record in consumer` works as well
        return stored.offset, seen


if __name__ == "__main__":
    print(asyncio.run(main()))
# (0, 1001)
