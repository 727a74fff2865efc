"""Reading and replaying a dead-letter topic, on the fake broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters import dead_letter_log
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record
from penstock.shared.clients.dead_letters.dead_letter_log import DeadLetterLog, replay_group
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DataError, IllegalState
from penstock.shared.common.records import ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

TOPIC = "clicks-dlq"
AT = TopicPartition(TOPIC, 0)


@pytest.fixture
async def kafka() -> AsyncIterator[KafkaSettings]:
    async with FakeCluster() as cluster:
        for topic in ("clicks", TOPIC):
            cluster.create_topic(topic, partitions=1)
        yield KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)


async def write(kafka: KafkaSettings, dead_letters: int, others: int = 0) -> None:
    sources = [ConsumerRecord("clicks", 0, offset, 1, b"k", b"v") for offset in range(dead_letters)]
    records = [dead_letter_record(TOPIC, DeadLetter(of, "process", "E", "", 1, "g")) for of in sources]
    async with Producer(kafka) as producer:
        sent = await producer.send_many([*records, *[ProducerRecord(TOPIC, b"v")] * others])
        assert await sent.first_error() is None


async def test_damaged_progress_of_replays(kafka: KafkaSettings) -> None:
    """The dead letters can be listed. A replay raises DataError, unless it sends all of them again."""
    await write(kafka, 3)
    async with Consumer(kafka, ConsumerSettings(group_id=replay_group(TOPIC))) as consumer:
        consumer.assign([AT])
        await consumer.commit({AT: OffsetAndMetadata(1, "p1r:!")})
    async with DeadLetterLog(kafka, TOPIC) as log:
        assert [entry.replayed async for entry in log.entries()] == [True, False, False]
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        with pytest.raises(DataError, match=r"clicks-dlq-0.*include_replayed"):
            await log.replay(producer, lambda _: True, limit=9)
        assert (await log.replay(producer, lambda _: True, limit=9, include_replayed=True)).sent == 3


@pytest.mark.parametrize(("dead_letters", "others"), [(5, 0), (0, 5)])
async def test_too_many_records_are_left_out(
    kafka: KafkaSettings, dead_letters: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the limit, and does not claim that all of the records are dead letters."""
    monkeypatch.setattr(dead_letter_log, "LEFT_OUT_MAX", 4)
    await write(kafka, dead_letters, others)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        with pytest.raises(IllegalState, match=r"clicks-dlq-0: 4 records"):
            await log.replay(producer, lambda _: False, limit=9)
