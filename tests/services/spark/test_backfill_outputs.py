"""What a backfill writes to other topics, on the fake broker."""

from __future__ import annotations

from pyspark.sql import Row

from penstock.services.spark.backfill_outputs import write_outputs
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

PARTITIONS = 7


async def test_the_source_key_chooses_the_partition() -> None:
    """Of a row that has one, as in a task's commit; of others the key does."""
    names = ("topic", "key", "value", "headers", "partition", "timestamp_ms", "source_key")
    keys = [(b"a", None), (b"window of b", b"b"), (b"window of c", b"c")]
    rows = [Row(*names)("out", key, b"{}", [], None, 5, source_key) for key, source_key in keys]
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin:
            await admin.create_topics([NewTopic("out", PARTITIONS, 1)])
        assert await write_outputs(kafka, 1_000, rows) == {"out": 3}
        found: dict[bytes, int] = {}
        async with Consumer(kafka, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
            consumer.assign([TopicPartition("out", p) for p in range(PARTITIONS)])
            while len(found) < len(keys):
                for columns in (await consumer.poll(100)).values():
                    found |= {record.key or b"": record.partition for record in columns.records()}
    assert found == {key: for_key(source_key or key, PARTITIONS) for key, source_key in keys}
