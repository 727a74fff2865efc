"""A fake cluster with records in topic `t`, and a consumer that reacts quickly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import RecordColumns
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


@asynccontextmanager
async def filled(records: int, partitions: int = 1) -> AsyncIterator[FakeCluster]:
    """Writes the given number of records to each partition. Each record's value is its number."""
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t", partitions=partitions)
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
            values = [b"%d" % i for i in range(records)]
            for partition in range(partitions):
                columns = RecordColumns("t", [None] * records, values, None, partition)
                assert await (await producer.send_many(columns)).first_error() is None
        yield cluster


@asynccontextmanager
async def opened(cluster: FakeCluster, **given: object) -> AsyncIterator[Consumer]:
    """Opens a consumer in group `g` with the given settings, for at most 20 seconds."""
    bootstrap = cluster.bootstrap_servers
    kafka = KafkaSettings(bootstrap_servers=bootstrap, retry_backoff_ms=5)
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    async with asyncio.timeout(20), Consumer(kafka, ConsumerSettings.model_validate({**settings, **given})) as consumer:
        yield consumer
