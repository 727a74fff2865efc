"""Counting and reading dead letters that were written in transactions, on the fake broker.

Transaction markers have offsets but are not dead letters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.admin.kafka_dead_letters import DeadLetterCount, DeadLetterCounter, KafkaDeadLetters, Span
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import ConsumerRecord, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

TOPIC = "clicks-dlq"
AT = TopicPartition(TOPIC, 0)
SOURCE = ConsumerRecord("clicks", 0, 0, 1, b"k", b"v")


@pytest.fixture
async def kafka() -> AsyncIterator[KafkaSettings]:
    async with FakeCluster() as cluster:
        for topic in ("clicks", TOPIC):
            cluster.create_topic(topic, partitions=1)
        yield KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)


@asynccontextmanager
async def writer(kafka: KafkaSettings) -> AsyncIterator[Producer]:
    async with Producer(kafka, ProducerSettings(transactional_id="app-0")) as producer:
        await producer.init_transactions()
        yield producer


async def write(producer: Producer, *numbers: int, aborted: int = 0) -> None:
    """Write this many records in each transaction, and abort one transaction before each."""
    for number in numbers:
        for records, commits in ((aborted, False), (number, True)):
            if records:
                await producer.begin_transaction()
                sent = await producer.send_many([ProducerRecord(TOPIC, b"v", b"k", (), 0, i) for i in range(records)])
                assert await sent.first_error() is None
                await (producer.commit_transaction() if commits else producer.abort_transaction())


async def test_transaction_markers_are_not_counted(kafka: KafkaSettings) -> None:
    """Markers and aborted records do not count: 50 dead letters in 19 transactions are 50, not 69.

    New dead letters are added to the count.
    """
    async with Admin(kafka) as admin, writer(kafka) as producer:
        dead_letters = KafkaDeadLetters(kafka, admin)
        await write(producer, *[3] * 12, *[2] * 7)
        assert (await admin.list_offsets({AT: "latest"}))[AT] == 69
        (row,) = await dead_letters.topics()
        assert row == {"topic": TOPIC, "kind": "dead_letters", "source": "clicks", "records": 50, "exact": True}
        await write(producer, 4, aborted=5)
        assert (await dead_letters.topics())[0]["records"] == 54
        await admin.delete_records({AT: 8})
        assert (await dead_letters.topics())[0]["records"] == 54 - 6
        await admin.delete_topics([TOPIC])
        assert await dead_letters.topics() == []


async def test_a_partition_without_a_leader_does_not_block_others() -> None:
    """The other partitions are counted and read, and the count of the topic is not exact."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic(TOPIC, partitions=2, replication_factor=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            await (await producer.send_many([ProducerRecord(TOPIC, b"v", partition=at) for at in (0, 1, 1)]))
            stopped = cluster.leader(TOPIC, 0)
            assert stopped is not None
            await cluster.stop_node(stopped)
            dead_letters = KafkaDeadLetters(kafka, admin)
            (row,) = await dead_letters.topics()
            assert (row["records"], row["exact"]) == (2, False)
            assert len((await dead_letters.read_newest(TOPIC, 10, None))["records"]) == 2


async def test_the_source_of_a_dead_letter_topic_may_be_a_late_topic(kafka: KafkaSettings) -> None:
    """Only the suffix that gives a topic its kind is removed from its name."""
    async with Admin(kafka) as admin:
        await admin.create_topics([NewTopic("clicks-late", 1), NewTopic("clicks-late-dlq", 1)])
        rows = await KafkaDeadLetters(kafka, admin).topics()
    assert [(row["topic"], row["kind"], row["source"]) for row in rows] == [
        (TOPIC, "dead_letters", "clicks"),
        ("clicks-late", "late", "clicks"),
        ("clicks-late-dlq", "dead_letters", "clicks-late"),
    ]


async def test_read_newest_returns_the_requested_number(kafka: KafkaSettings) -> None:
    """The requested number is returned although the newest offsets are mostly markers and aborted records."""
    async with Admin(kafka) as admin, writer(kafka) as producer:
        await write(producer, *[1] * 30, aborted=3)
        response = await KafkaDeadLetters(kafka, admin).read_newest(TOPIC, 20, None)
    assert len(response["records"]) == 20


async def test_the_newest_dead_letters_come_first(kafka: KafkaSettings) -> None:
    """Dead letters that were written in the same millisecond are listed by offset, the newest first."""
    async with Admin(kafka) as admin, Producer(kafka) as producer:
        await (await producer.send_many([ProducerRecord(TOPIC, b"v", timestamp=at) for at in (7, 5, 7)]))
        rows = (await KafkaDeadLetters(kafka, admin).read_newest(TOPIC, 3, None))["records"]
    assert [(row["offset"], row["written_ms"]) for row in rows] == [(2, 7), (0, 7), (1, 5)]


async def test_the_newest_late_records_are_read_by_offset(kafka: KafkaSettings) -> None:
    """A late record has its event time as timestamp, so the newest offsets of each partition are taken in turn."""
    late = "clicks-late"
    records = [ProducerRecord(late, b"v", partition=0, timestamp=at) for at in (100, 101)]
    records += [ProducerRecord(late, b"v", partition=1, timestamp=at) for at in (3, 2, 1)]
    async with Admin(kafka) as admin, Producer(kafka) as producer:
        await admin.create_topics([NewTopic(late, 2)])
        await (await producer.send_many(records))
        dead_letters = KafkaDeadLetters(kafka, admin)
        rows = (await dead_letters.read_newest(late, 2, None))["records"]
        assert {(row["partition"], row["offset"]) for row in rows} == {(0, 1), (1, 2)}
        assert not any("written_ms" in row for row in rows)
        assert len((await dead_letters.read_newest(late, 5, None))["records"]) == 5


async def test_an_unfinished_count_is_an_upper_bound(kafka: KafkaSettings) -> None:
    """A count that ran out of time is marked as an upper bound, and later calls continue it."""
    span = Span("id", 0, 0)
    async with writer(kafka) as producer:
        await write(producer, *[1] * 5)
    span = span._replace(end=10)
    hurried, counter = DeadLetterCounter(kafka, limit_ms=0), DeadLetterCounter(kafka)
    assert await hurried.count({AT: span}) == {AT: DeadLetterCount(10, exact=False)}
    assert await counter.count({AT: span}) == {AT: DeadLetterCount(5, exact=True)}
    assert await counter.count({AT: span._replace(topic_id="another")}) == {AT: DeadLetterCount(5, exact=True)}
    assert await counter.count({AT: span._replace(first=2)}) == {AT: DeadLetterCount(4, exact=True)}
    assert await counter.count({}) == {}


async def test_a_dry_run_counts_what_a_replay_sends(kafka: KafkaSettings) -> None:
    """A dead letter that was cut, and a record that is no dead letter, are not counted, since no replay sends them."""
    cut = ("penstock.dlq.cut", b"value=3000000")
    records = [dead_letter_record(TOPIC, DeadLetter(SOURCE, "process", "E", "no", 1, "g"))] * 3
    records[1] = replace(records[1], headers=(*records[1].headers, cut))
    async with Admin(kafka) as admin, Producer(kafka) as producer:
        await (await producer.send_many([ProducerRecord(TOPIC, b"{"), *records]))
        dead_letters = KafkaDeadLetters(kafka, admin)
        every: dict[str, Any] = {"stage": None, "exception": None, "include_replayed": False}
        assert await dead_letters.replay(TOPIC, limit=10, dry_run=True, **every) == {"would_send": 2}
        assert (await dead_letters.replay(TOPIC, limit=10, dry_run=False, to="clicks", **every))["sent"] == 2
        assert await dead_letters.replay(TOPIC, limit=10, dry_run=True, **every) == {"would_send": 0}
