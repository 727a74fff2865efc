"""Behaviour of the clients that must be the same on both brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    GroupNotEmpty,
    GroupNotFound,
    InvalidTopic,
    InvalidTxnState,
    OffsetOutOfRange,
    ProducerFenced,
    TopicAlreadyExists,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.contract.conftest import Broker, until

PARTITIONS = 3
PATIENCE_S = 20


@pytest.fixture
def settings(broker: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=10)


@pytest.fixture
async def admin(settings: KafkaSettings) -> AsyncIterator[Admin]:
    async with Admin(settings) as one:
        yield one


@pytest.fixture
async def topic(admin: Admin, name: str) -> str:
    await admin.create_topics([NewTopic(name, PARTITIONS)])
    return name


async def write_numbers(broker: Broker, topic: str, count: int, *, first: int = 0) -> None:
    """Write this many numbers to the partitions in turn."""
    async with Producer(KafkaSettings(bootstrap_servers=broker.bootstrap_servers)) as producer:
        records = [
            ProducerRecord(topic, b"%d" % n, partition=n % PARTITIONS, timestamp=1_000 + n)
            for n in range(first, first + count)
        ]
        assert await (await producer.send_many(records)).first_error() is None


def transactional(settings: KafkaSettings, name: str, **more: int) -> Producer:
    """A producer with a transactional id and without linger."""
    return Producer(settings, ProducerSettings(transactional_id=name, linger_ms=0, **more))


async def read_numbers(consumer: Consumer, count: int) -> dict[int, list[int]]:
    """Read this many numbers, by partition, in the order of arrival."""
    found: dict[int, list[int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(len, found.values())) < count:
            for tp, columns in (await consumer.poll(100)).items():
                found.setdefault(tp.partition, []).extend(int(value or b"") for value in columns.values)
    return found


async def test_order_is_kept(broker: Broker, settings: KafkaSettings, topic: str) -> None:
    """All records of a partition are consumed in order, once."""
    await write_numbers(broker, topic, 600)
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        found = await read_numbers(consumer, 600)
    assert found == {p: list(range(p, 600, PARTITIONS)) for p in range(PARTITIONS)}


async def test_a_group_shares_partitions_and_stores_offsets(
    broker: Broker, settings: KafkaSettings, topic: str, name: str
) -> None:
    """Two members share the partitions, and the next member starts at the committed offsets."""
    await write_numbers(broker, topic, 300)
    group = ConsumerSettings(group_id=f"{name}-group", auto_offset_reset="earliest")
    async with Consumer(settings, group) as first, Consumer(settings, group) as second:
        for consumer in (first, second):
            consumer.subscribe([topic])

        async def is_shared() -> bool:
            await asyncio.gather(first.poll(10), second.poll(10))
            owned = [first.assignment(), second.assignment()]
            return all(owned) and sum(map(len, owned)) == PARTITIONS

        await until(is_shared)
    await write_numbers(broker, topic, 30, first=300)
    async with Consumer(settings, group) as third:
        third.subscribe([topic])
        found = await read_numbers(third, 30)
        await third.commit()
        last = {p: numbers[-1] for p, numbers in found.items()}
    assert last == {0: 327, 1: 328, 2: 329}
    async with Admin(settings) as admin:
        offsets = await admin.group_offsets(f"{name}-group")
        lag = await admin.group_lag(f"{name}-group")
    assert {tp.partition: value.offset for tp, value in offsets.items()} == {0: 110, 1: 110, 2: 110}
    assert [one.lag for one in lag] == [0, 0, 0]


@pytest.mark.parametrize("isolation_level", ["read_committed", "read_uncommitted"])
async def test_transactions_are_isolated(
    broker: Broker, settings: KafkaSettings, topic: str, name: str, isolation_level: str
) -> None:
    """Aborted records are read with read_uncommitted only."""
    async with transactional(settings, name) as producer:
        await producer.init_transactions()
        for number in range(6):
            await producer.begin_transaction()
            await (await producer.send(topic, b"%d" % number, partition=0))
            await (producer.commit_transaction() if number % 2 else producer.abort_transaction())
    await write_numbers(broker, topic, 1, first=99)
    reading = ConsumerSettings(auto_offset_reset="earliest", isolation_level=isolation_level)
    async with Consumer(settings, reading) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        expected = [1, 3, 5, 99] if isolation_level == "read_committed" else [0, 1, 2, 3, 4, 5, 99]
        assert await read_numbers(consumer, len(expected)) == {0: expected}


async def test_consume_transform_produce(admin: Admin, settings: KafkaSettings, topic: str, name: str) -> None:
    """Offsets sent with a transaction are committed with it, and a newer producer of the same id fences the older."""
    tp, group = TopicPartition(topic, 0), GroupMetadata(f"{name}-group")
    async with transactional(settings, name) as old:
        await old.init_transactions()
        async with old.transaction():
            await old.send(topic, b"1", partition=0)
            await old.send_offsets_to_transaction({tp: OffsetAndMetadata(5)}, group)

        async def is_there() -> bool:  # A first commit is not returned until its transaction is completed.
            return tp in await admin.group_offsets(group.group_id, require_stable=True)

        await until(is_there)
        assert (await admin.group_offsets(group.group_id))[tp].offset == 5
        await old.begin_transaction()
        await (await old.send(topic, b"2", partition=0))
        async with transactional(settings, name) as new:
            await new.init_transactions()
            with pytest.raises(ProducerFenced, match="a newer producer"):
                await old.commit_transaction()
            async with new.transaction():
                await new.send(topic, b"3", partition=0)
    reading = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed")
    async with Consumer(settings, reading) as consumer:
        consumer.assign([tp])
        assert await read_numbers(consumer, 2) == {0: [1, 3]}


async def test_a_transaction_that_times_out(admin: Admin, settings: KafkaSettings, topic: str, name: str) -> None:
    """The coordinator aborts the transaction; the producer gets an error, aborts too, and
    continues with its next epoch.
    """
    tp = TopicPartition(topic, 0)
    async with transactional(settings, name, transaction_timeout_ms=1_500) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await (await producer.send(topic, b"1", partition=0))

        async def is_aborted() -> bool:
            return (await admin.list_offsets({tp: "latest"}, "read_committed"))[tp] == 2

        await until(is_aborted)
        late = await producer.send(topic, b"2", partition=0)
        with pytest.raises((ProducerFenced, InvalidTxnState), match=r"INVALID_PRODUCER_EPOCH|INVALID_TXN_STATE"):
            await late
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send(topic, b"3", partition=0)
    reading = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed")
    async with Consumer(settings, reading) as consumer:
        consumer.assign([tp])
        assert await read_numbers(consumer, 1) == {0: [3]}


@pytest.mark.parametrize("acks", ["0", "1", "all"])
async def test_acks(broker: Broker, settings: KafkaSettings, topic: str, acks: str) -> None:
    """Records are stored in order, and their offsets are known unless acks is 0."""
    # With acks=0, records that arrive before a partition's leader is ready would be lost.
    await write_numbers(broker, topic, 1)
    async with Producer(settings, ProducerSettings(acks=acks, linger_ms=0)) as producer:
        deliveries = [await producer.send(topic, b"%d" % n, partition=0) for n in range(1, 20)]
        offsets = [(await delivery).offset for delivery in deliveries]
    assert offsets == ([-1] * 19 if acks == "0" else list(range(1, 20)))
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        assert await read_numbers(consumer, 20) == {0: list(range(20))}


async def test_a_position_out_of_range_is_reset(broker: Broker, settings: KafkaSettings, topic: str) -> None:
    """A consumer whose offset is deleted continues at the position of its reset policy."""
    tp = TopicPartition(topic, 0)
    await write_numbers(broker, topic, 30)
    async with Admin(settings) as admin:
        assert await admin.delete_records({tp: 4}) == {tp: 4}
        with pytest.raises(OffsetOutOfRange):
            await admin.delete_records({tp: 99})
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([tp])
        consumer.seek(tp, 1)
        assert await read_numbers(consumer, 6) == {0: [12, 15, 18, 21, 24, 27]}


async def test_offsets_of_a_topic(broker: Broker, admin: Admin, topic: str) -> None:
    """Offsets are found as earliest, latest, and by time; after the last record's time it is the latest."""
    await write_numbers(broker, topic, 30)
    tps = [TopicPartition(topic, p) for p in range(PARTITIONS)]
    assert await admin.list_offsets(dict.fromkeys(tps, "earliest")) == dict.fromkeys(tps, 0)
    assert await admin.list_offsets(dict.fromkeys(tps, "latest"), "read_committed") == dict.fromkeys(tps, 10)
    assert await admin.list_offsets(dict.fromkeys(tps, 1_014)) == dict(zip(tps, (5, 5, 4), strict=True))
    assert await admin.list_offsets(dict.fromkeys(tps, 5_000)) == dict.fromkeys(tps, 10)


async def test_errors_have_the_same_names(admin: Admin, topic: str, name: str) -> None:
    """Missing, existing and invalid topics and groups raise the same exceptions."""
    unknown = f"{name}-none"
    with pytest.raises(UnknownTopicOrPartition, match=unknown):
        await admin.describe_topics([unknown])
    with pytest.raises(UnknownTopicOrPartition, match=unknown):
        await admin.delete_topics([unknown])
    with pytest.raises(UnknownTopicOrPartition, match=f"{topic}-7"):
        await admin.list_offsets({TopicPartition(topic, 7): "latest"}, timeout_ms=3_000)
    with pytest.raises(TopicAlreadyExists, match=topic):
        await admin.create_topics([NewTopic(topic, 1)])
    with pytest.raises(InvalidTopic):
        await admin.create_topics([NewTopic("a/b", 1)])
    with pytest.raises(GroupNotFound, match=unknown):
        await admin.delete_group(unknown)


async def test_offsets_of_an_active_group_cannot_be_changed(
    settings: KafkaSettings, admin: Admin, topic: str, name: str
) -> None:
    """A group with members cannot be deleted and its offsets cannot be changed; without members both are possible."""
    tp, group_id = TopicPartition(topic, 0), f"{name}-group"
    async with Consumer(settings, ConsumerSettings(group_id=group_id, auto_offset_reset="earliest")) as consumer:
        consumer.subscribe([topic])

        async def is_in() -> bool:
            await consumer.poll(10)
            return (await admin.describe_group(group_id)).state == "Stable"

        await until(is_in)
        (member,) = (await admin.describe_group(group_id)).members
        assert len(member.assignment) == PARTITIONS
        with pytest.raises(GroupNotEmpty):
            await admin.alter_group_offsets(group_id, {tp: 1})
        with pytest.raises(GroupNotEmpty):
            await admin.delete_group(group_id)
    await admin.alter_group_offsets(group_id, {tp: 1})
    assert (await admin.group_offsets(group_id))[tp].offset == 1
    assert (await admin.describe_group(group_id)).state == "Empty"
    await admin.delete_group(group_id)
    assert (await admin.describe_group(group_id)).state == "Dead"
