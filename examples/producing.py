"""A producer with batches, a delivery timeout, an interceptor and a partitioner: `python examples/producing.py`.

The broker runs in this process. It rejects the last record until the record's delivery timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.clients import (
    Headers,
    KafkaSettings,
    Producer,
    ProducerInterceptor,
    ProducerRecord,
    ProducerSettings,
    RecordMetadata,
    string_serializer,
)
from penstock.errors import DeliveryTimeout
from penstock.testing import Api, ErrorCode, Fail, FakeCluster, Request


class Counting(ProducerInterceptor):
    """Counts records that are sent, stored and failed."""

    def __init__(self) -> None:
        self.sent = 0
        self.stored = 0
        self.failed = 0

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        self.sent += 1
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        if error is None:
            self.stored += 1
        else:
            self.failed += 1


def guests_last(topic: str, key: bytes | None, value: bytes | None, partitions: Sequence[int]) -> int | None:
    """Send orders of guests to the last partition. The key's hash decides for all others."""
    return partitions[-1] if key is not None and key.startswith(b"guest") else None


async def main() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("orders", partitions=3)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=1_500)
        settings = ProducerSettings(linger_ms=50, batch_size=65_536, delivery_timeout_ms=2_000)
        counting = Counting()
        async with Producer(
            kafka,
            settings,
            key_serializer=string_serializer,
            value_serializer=string_serializer,
            partitioner=guests_last,
            interceptors=[counting],
        ) as producer:
            requests: list[Request] = []
            cluster.control(Api.PRODUCE, requests.append)  # only looks
            deliveries = [await producer.send("orders", f"tea {n}", key=f"guest {n}") for n in range(20)]
            partitions = {(await delivery).partition for delivery in deliveries}
            print(f"{len(deliveries)} orders in {len(requests)} request, partitions {partitions}")
            cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS))
            try:
                await producer.send_and_wait("orders", "cake", key="ann")
            except DeliveryTimeout as error:
                print(f"not delivered in time; may be stored: {error.maybe_written}")
        print(f"sent {counting.sent}, stored {counting.stored}, failed {counting.failed}")


if __name__ == "__main__":
    asyncio.run(main())
# sent 21, stored 20, failed 1
