"""The same again through clients: what they make of the answers is what users see."""

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


async def written(broker: Broker, topic: str, count: int, *, first: int = 0) -> None:
    """So many numbers, round the partitions."""
    async with Producer(KafkaSettings(bootstrap_servers=broker.bootstrap_servers)) as producer:
        records = [
            ProducerRecord(topic, b"%d" % n, partition=n % PARTITIONS, timestamp=1_000 + n)
            for n in range(first, first + count)
        ]
        assert await (await producer.send_many(records)).first_error() is None


def transactional(settings: KafkaSettings, name: str, **more: int) -> Producer:
    """A producer with a transactional id, that does not linger."""
    return Producer(settings, ProducerSettings(transactional_id=name, linger_ms=0, **more))


async def read(consumer: Consumer, count: int) -> dict[int, list[int]]:
    """So many numbers by partition, as they come."""
    found: dict[int, list[int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(len, found.values())) < count:
            for tp, columns in (await consumer.poll(100)).items():
                found.setdefault(tp.partition, []).extend(int(value or b"") for value in columns.values)
    return found


async def test_order_is_kept(broker: Broker, settings: KafkaSettings, topic: str) -> None:
    """What is produced to a partition is consumed in its order, all of it, once."""
    await written(broker, topic, 600)
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        found = await read(consumer, 600)
    assert found == {p: list(range(p, 600, PARTITIONS)) for p in range(PARTITIONS)}


async def test_a_group_shares_and_remembers(broker: Broker, settings: KafkaSettings, topic: str, name: str) -> None:
    """Two members share the partitions; what they commit is where the next one starts."""
    await written(broker, topic, 300)
    group = ConsumerSettings(group_id=f"{name}-group", auto_offset_reset="earliest")
    async with Consumer(settings, group) as first, Consumer(settings, group) as second:
        for consumer in (first, second):
            consumer.subscribe([topic])

        async def is_shared() -> bool:
            await asyncio.gather(first.poll(10), second.poll(10))
            owned = [first.assignment(), second.assignment()]
            return all(owned) and sum(map(len, owned)) == PARTITIONS

        await until(is_shared)
    await written(broker, topic, 30, first=300)
    async with Consumer(settings, group) as third:
        third.subscribe([topic])
        found = await read(third, 30)
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
    """Under read_committed aborted records are never seen, under read_uncommitted they are."""
    async with transactional(settings, name) as producer:
        await producer.init_transactions()
        for number in range(6):
            await producer.begin_transaction()
            await (await producer.send(topic, b"%d" % number, partition=0))
            await (producer.commit_transaction() if number % 2 else producer.abort_transaction())
    await written(broker, topic, 1, first=99)
    reading = ConsumerSettings(auto_offset_reset="earliest", isolation_level=isolation_level)
    async with Consumer(settings, reading) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        expected = [1, 3, 5, 99] if isolation_level == "read_committed" else [0, 1, 2, 3, 4, 5, 99]
        assert await read(consumer, len(expected)) == {0: expected}


async def test_consume_transform_produce(admin: Admin, settings: KafkaSettings, topic: str, name: str) -> None:
    """Offsets sent with a transaction are committed with it, and a producer of the same id fences the one before."""
    tp, group = TopicPartition(topic, 0), GroupMetadata(f"{name}-group")
    async with transactional(settings, name) as old:
        await old.init_transactions()
        async with old.transaction():
            await old.send(topic, b"1", partition=0)
            await old.send_offsets_to_transaction({tp: OffsetAndMetadata(5)}, group)

        async def is_there() -> bool:  # a first commit is not told of until its transaction is completed
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
        assert await read(consumer, 2) == {0: [1, 3]}


async def test_a_transaction_that_took_too_long(admin: Admin, settings: KafkaSettings, topic: str, name: str) -> None:
    """The coordinator aborts it; the producer is told, aborts as well, and goes on under its next epoch."""
    tp = TopicPartition(topic, 0)
    async with transactional(settings, name, transaction_timeout_ms=100) as producer:
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
        assert await read(consumer, 1) == {0: [3]}


@pytest.mark.parametrize("acks", ["0", "1", "all"])
async def test_acks(broker: Broker, settings: KafkaSettings, topic: str, acks: str) -> None:
    """Records are there in order; with 0 nobody knows where, else a delivery says so."""
    await written(broker, topic, 1)  # with acks=0 what comes before a partition's leader is ready would be lost
    async with Producer(settings, ProducerSettings(acks=acks, linger_ms=0)) as producer:
        deliveries = [await producer.send(topic, b"%d" % n, partition=0) for n in range(1, 20)]
        offsets = [(await delivery).offset for delivery in deliveries]
    assert offsets == ([-1] * 19 if acks == "0" else list(range(1, 20)))
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        assert await read(consumer, 20) == {0: list(range(20))}


async def test_a_position_out_of_range_is_reset(broker: Broker, settings: KafkaSettings, topic: str) -> None:
    """A consumer whose offset is deleted goes on where it was told to, or says so."""
    tp = TopicPartition(topic, 0)
    await written(broker, topic, 30)
    async with Admin(settings) as admin:
        assert await admin.delete_records({tp: 4}) == {tp: 4}
        with pytest.raises(OffsetOutOfRange):
            await admin.delete_records({tp: 99})
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([tp])
        consumer.seek(tp, 1)
        assert await read(consumer, 6) == {0: [12, 15, 18, 21, 24, 27]}


async def test_offsets_of_a_topic(broker: Broker, admin: Admin, topic: str) -> None:
    """Earliest, latest, and by time; where no record is as late, the latest."""
    await written(broker, topic, 30)
    tps = [TopicPartition(topic, p) for p in range(PARTITIONS)]
    assert await admin.list_offsets(dict.fromkeys(tps, "earliest")) == dict.fromkeys(tps, 0)
    assert await admin.list_offsets(dict.fromkeys(tps, "latest"), "read_committed") == dict.fromkeys(tps, 10)
    assert await admin.list_offsets(dict.fromkeys(tps, 1_014)) == dict(zip(tps, (5, 5, 4), strict=True))
    assert await admin.list_offsets(dict.fromkeys(tps, 5_000)) == dict.fromkeys(tps, 10)


async def test_errors_have_the_same_names(admin: Admin, topic: str, name: str) -> None:
    """What does not exist, exists already or cannot be is the same error of the same kind."""
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


async def test_offsets_of_an_active_group_stay(settings: KafkaSettings, admin: Admin, topic: str, name: str) -> None:
    """A group with members cannot be deleted or moved; without them it can be both."""
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
