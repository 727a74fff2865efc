"""The offsets that jobs request from Kafka before they read, on the fake broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.services.spark.topic_offsets import (
    TopicOffsets,
    Undecided,
    offsets_after_open_transactions,
    offsets_at,
    topic_offsets,
)
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import KafkaTimeout, UnknownTopicOrPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

LIMIT_MS = 5_000


@pytest.fixture
async def kafka() -> AsyncIterator[KafkaSettings]:
    async with FakeCluster() as cluster:
        settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(settings) as admin:
            await admin.create_topics([NewTopic("a", 2), NewTopic("b", 1)])
        yield settings


async def send(kafka: KafkaSettings, *records: tuple[str, int, int]) -> None:
    """A record for each topic, partition and time."""
    async with Producer(kafka) as producer:
        for topic, partition, ms in records:
            await producer.send_and_wait(topic, b"v", partition=partition, timestamp=ms)


async def test_offsets_of_topics_and_of_times(kafka: KafkaSettings) -> None:
    """Offsets are by topic and partition. If a partition has no record so late, its offset is its end."""
    await send(kafka, ("a", 0, 100), ("a", 0, 200), ("b", 0, 50))
    async with Admin(kafka) as admin:
        ids = {name: one.topic_id for name, one in (await admin.describe_topics(["a", "b"])).items()}
    held = await asyncio.to_thread(topic_offsets, kafka, ["a", "b"], LIMIT_MS)
    assert held == {
        "a": TopicOffsets("a", ids["a"], {0: 0, 1: 0}, {0: 2, 1: 0}),
        "b": TopicOffsets("b", ids["b"], {0: 0}, {0: 1}),
    }
    assert await asyncio.to_thread(offsets_at, kafka, held, 150, LIMIT_MS) == {"a": {0: 1, 1: 0}, "b": {0: 1}}


async def test_a_topic_that_is_not_there_is_named(kafka: KafkaSettings) -> None:
    """An unreachable broker is named by its address, with the setting of the timeout."""
    with pytest.raises(UnknownTopicOrPartition, match="topic none"):
        await asyncio.to_thread(topic_offsets, kafka, ["none"], LIMIT_MS)
    nowhere = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    with pytest.raises(KafkaTimeout, match=r"=127.0.0.1:1.*a, b.*kafka_timeout_ms"):
        await asyncio.to_thread(topic_offsets, nowhere, ["a", "b"], 50)


async def test_an_end_counts_once_open_transactions_are_decided(kafka: KafkaSettings) -> None:
    """An open transaction is named by its first offset. Records committed after it are included once it ends."""
    async with Producer(kafka, ProducerSettings(transactional_id="x")) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send_and_wait("b", b"v", partition=0)
        await send(kafka, ("b", 0, 100))
        with pytest.raises(Undecided, match=r"b-0.*offset 0.*200 ms"):
            await asyncio.to_thread(offsets_after_open_transactions, kafka, "b", 200)
        pending = asyncio.create_task(asyncio.to_thread(offsets_after_open_transactions, kafka, "b", LIMIT_MS))
        await producer.abort_transaction()
        assert (await pending).latest == {0: 3}, "two records and the mark of the end"
