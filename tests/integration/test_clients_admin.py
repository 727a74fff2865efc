"""Every method of the admin client against a real broker."""

from __future__ import annotations

import asyncio
import re

import pytest

from penstock.shared.clients.admin import Admin, NewTopic, OffsetChange, PartitionLag, ShiftBy, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    GroupNotEmpty,
    GroupNotFound,
    IllegalState,
    InvalidRequest,
    InvalidTopic,
    OffsetOutOfRange,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker


def settings_of(kafka: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


async def fill(kafka: Broker, topic: str, records: int) -> None:
    async with Producer(settings_of(kafka)) as producer:
        sent = [ProducerRecord(topic, b"%d" % i, partition=0, timestamp=1_000 + i) for i in range(records)]
        assert await (await producer.send_many(sent)).first_error() is None


async def test_topics(kafka: Broker, topic_name: str) -> None:
    """A topic is created with its configs, gets more partitions, is described with a new id each time it is created,
    and deleted."""
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 3, configs={"cleanup.policy": "compact"})])
        await admin.create_topics([NewTopic(topic_name, 3)], exist_ok=True)
        with pytest.raises(TopicAlreadyExists, match=topic_name):
            await admin.create_topics([NewTopic(topic_name, 3)])
        described = (await admin.describe_topics([topic_name]))[topic_name]
        assert [p.partition for p in described.partitions] == [0, 1, 2]
        assert all(p.leader is not None and p.leader in p.isr for p in described.partitions)
        assert re.fullmatch(r"[A-Za-z0-9_-]{22}", described.topic_id)
        assert (await admin.describe_configs(topic_name))["cleanup.policy"] == "compact"
        entries = {entry.name: entry for entry in (await admin.topic_configs([topic_name]))[topic_name]}
        assert (entries["cleanup.policy"].source, entries["cleanup.policy"].is_default) == (
            "DYNAMIC_TOPIC_CONFIG",
            False,
        )
        assert [s.source for s in entries["cleanup.policy"].synonyms] == ["DYNAMIC_TOPIC_CONFIG", "DEFAULT_CONFIG"]
        assert (entries["flush.ms"].source, entries["flush.ms"].is_default) == ("DEFAULT_CONFIG", True)
        await admin.create_partitions({topic_name: 5})
        assert len((await admin.describe_topics([topic_name]))[topic_name].partitions) == 5
        with pytest.raises(InvalidRequest, match=topic_name):
            await admin.create_partitions({topic_name: 4})
        assert topic_name in await admin.list_topics()
        assert "__consumer_offsets" not in await admin.list_topics()
        await admin.delete_topics([topic_name])
        async with asyncio.timeout(10):
            while topic_name in await admin.list_topics():  # noqa: ASYNC110 - the controller knows first
                await asyncio.sleep(0.02)
        for call in (admin.delete_topics([topic_name]), admin.describe_topics([topic_name])):
            with pytest.raises(UnknownTopicOrPartition, match=topic_name):
                await call
        with pytest.raises(UnknownTopicOrPartition, match=topic_name):
            await admin.describe_configs(topic_name)
        await admin.create_topics([NewTopic(topic_name, 1)])
        assert (await admin.describe_topics([topic_name]))[topic_name].topic_id != described.topic_id


async def test_errors_of_topic_creation_name_the_topic(kafka: Broker, topic_name: str) -> None:
    """A topic that cannot be created is an error with its name and the broker's reason."""
    async with Admin(settings_of(kafka)) as admin:
        with pytest.raises(InvalidTopic, match="a b"):
            await admin.create_topics([NewTopic("a b", 1)])
        with pytest.raises(InvalidRequest, match=rf"{topic_name}.*retention\.ms"):
            await admin.create_topics([NewTopic(topic_name, 1, configs={"retention.ms": "x"})])
        with pytest.raises(InvalidRequest, match=rf"{topic_name}.*replication"):
            await admin.create_topics([NewTopic(topic_name, 1, replication_factor=7)])
        with pytest.raises(InvalidRequest, match=topic_name):
            await admin.create_topics([NewTopic(topic_name, 0)])
    with pytest.raises(IllegalState, match="not open"):
        await admin.list_topics()


async def test_event_time_topic(kafka: Broker, topic_name: str) -> None:
    """A topic for event times never expires records, and accepts timestamps far in the past and in the future."""
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([event_time_topic(topic_name, 1, max_message_bytes="2000000")])
        configs = await admin.describe_configs(topic_name)
        assert configs["retention.ms"] == "-1"
        assert configs["message.timestamp.type"] == "CreateTime"
        for unlimited in ("segment.ms", "message.timestamp.before.max.ms", "message.timestamp.after.max.ms"):
            assert configs[unlimited] == str(2**63 - 1)
        assert configs["max.message.bytes"] == "2000000"
    async with Producer(settings_of(kafka)) as producer:
        records = [ProducerRecord(topic_name, b"", timestamp=t) for t in (0, 32_503_680_000_000)]
        assert await (await producer.send_many(records)).first_error() is None


async def test_offsets_and_records(kafka: Broker, topic_name: str) -> None:
    """Offsets are found at either end and by timestamp; deleting records moves the start offset."""
    tp = TopicPartition(topic_name, 0)
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
        await fill(kafka, topic_name, 10)
        assert await admin.list_offsets({tp: "earliest"}) == {tp: 0}
        assert await admin.list_offsets({tp: "latest"}) == {tp: 10}
        assert await admin.list_offsets({tp: 1_004}) == {tp: 4}
        assert await admin.list_offsets({tp: 9_999}) == {tp: 10}
        assert await admin.delete_records({tp: 6}) == {tp: 6}
        assert await admin.list_offsets({tp: "earliest"}) == {tp: 6}
        with pytest.raises(OffsetOutOfRange, match=f"{topic_name}-0 at offset 11"):
            await admin.delete_records({tp: 11})
        assert await admin.delete_records({tp: -1}) == {tp: 10}
        with pytest.raises(UnknownTopicOrPartition, match=f"{topic_name}-3.*1 partitions"):
            await admin.list_offsets({TopicPartition(topic_name, 3): "latest"})


async def test_last_stable_offset(kafka: Broker, topic_name: str) -> None:
    """Under read_committed the latest offset is the first offset of an open transaction."""
    tp = TopicPartition(topic_name, 0)
    settings = ProducerSettings(transactional_id=topic_name)
    async with Admin(settings_of(kafka)) as admin, Producer(settings_of(kafka), settings) as producer:
        await admin.create_topics([NewTopic(topic_name, 1)])
        await fill(kafka, topic_name, 2)
        await producer.init_transactions()
        async with producer.transaction():
            await (await producer.send(topic_name, b""))
            assert await admin.list_offsets({tp: "latest"}) == {tp: 3}
            assert await admin.list_offsets({tp: "latest"}, "read_committed") == {tp: 2}


async def test_groups(kafka: Broker, topic_name: str) -> None:
    """A group's offsets can be listed, reset and deleted while it is empty, and not while it has members."""
    group, tp = topic_name, TopicPartition(topic_name, 0)
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
        await fill(kafka, topic_name, 10)
        assert (await admin.describe_group(group)).state == "Dead"
        assert await admin.group_offsets(group) == {}
        assert await admin.group_lag(group) == []
        with pytest.raises(GroupNotFound, match=group):
            await admin.delete_group(group)
        with pytest.raises(GroupNotFound, match=group):
            await admin.reset_group_offsets(group, "latest")
        await admin.alter_group_offsets(group, {tp: OffsetAndMetadata(4, "by hand")})
        assert await admin.group_offsets(group) == {tp: OffsetAndMetadata(4, "by hand")}
        assert await admin.group_lag(group) == [PartitionLag(tp, 4, 10, 6)]
        assert group in {listing.group_id for listing in await admin.list_groups()}

        for to, after in (
            ("earliest", 0),
            ("latest", 10),
            (1_007, 7),
            (ShiftBy(-3), 1),
            (ShiftBy(-99), 0),
            ({tp: 99}, 10),
        ):
            before = (await admin.group_offsets(group))[tp].offset
            expected = {tp: OffsetChange(4, after)}
            assert await admin.reset_group_offsets(group, to, dry_run=True) == expected
            assert (await admin.group_offsets(group))[tp].offset == before
            assert await admin.reset_group_offsets(group, to) == expected
            assert (await admin.group_offsets(group))[tp].offset == after
            await admin.alter_group_offsets(group, {tp: 4})

        settings = ConsumerSettings(group_id=group, auto_offset_reset="earliest")
        async with Consumer(settings_of(kafka), settings) as consumer:
            consumer.subscribe([topic_name])
            await consumer.poll(20_000)
            (only,) = (await admin.describe_group(group)).members
            assert only.assignment == {tp}
            assert only.host.startswith("/")
            member = rf"{only.member_id} \(client {only.client_id}, host {only.host}\)"
            for call in (
                admin.alter_group_offsets(group, {tp: 1}),
                admin.reset_group_offsets(group, "latest"),
                admin.delete_group(group),
            ):
                with pytest.raises(GroupNotEmpty, match=member):
                    await call
            assert (await admin.reset_group_offsets(group, "latest", dry_run=True))[tp].after == 10
        await admin.delete_group(group)
        assert (await admin.describe_group(group)).state == "Dead"


async def test_cluster(kafka: Broker) -> None:
    """The cluster is described by its id and its brokers' addresses."""
    async with Admin(settings_of(kafka)) as admin:
        found = await admin.cluster()
    assert found.cluster_id
    assert [f"{b.host}:{b.port}" for b in found.brokers] == [kafka.bootstrap_servers]


async def test_unreachable() -> None:
    """Without a broker the admin client does not open, and the error names the address that it tried."""
    with pytest.raises(BrokerNotAvailable, match=r"127\.0\.0\.1:1"):
        async with Admin(KafkaSettings(bootstrap_servers="127.0.0.1:1", request_timeout_ms=300)):
            pass


async def test_configs_are_altered_one_by_one(kafka: Broker, topic_name: str) -> None:
    """Altering a config leaves the others unchanged; None restores the default; an invalid value is an error with the
    topic.
    """
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1, configs={"retention.ms": "1000"})])
        await admin.create_topics([NewTopic(f"{topic_name}-default", 1)])
        default = (await admin.describe_configs(f"{topic_name}-default"))["retention.ms"]
        for changes, expected in (
            ({"max.message.bytes": "5000", "retention.ms": "2000"}, ("5000", "2000")),
            ({"retention.ms": None}, ("5000", default)),
        ):
            await admin.alter_configs(topic_name, changes)
            async with asyncio.timeout(10):
                configs = await admin.describe_configs(topic_name)
                while (configs["max.message.bytes"], configs["retention.ms"]) != expected:  # the change takes a moment
                    configs = await admin.describe_configs(topic_name)
        with pytest.raises(InvalidRequest, match=topic_name):
            await admin.alter_configs(topic_name, {"retention.ms": "soon"})


async def test_offsets_of_a_group_are_deleted(kafka: Broker, topic_name: str) -> None:
    """Offsets of the named partitions alone are deleted; while the group has members, the error names them."""
    connection = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    both = [TopicPartition(topic_name, p) for p in (0, 1)]
    async with Admin(connection) as admin:
        await admin.create_topics([NewTopic(topic_name, 2)])
        await admin.alter_group_offsets(topic_name, dict.fromkeys(both, 0))
        async with Consumer(connection, ConsumerSettings(group_id=topic_name)) as consumer:
            consumer.subscribe([topic_name])
            async with asyncio.timeout(20):
                while not consumer.assignment():
                    await consumer.poll(100)
            with pytest.raises(GroupNotEmpty, match=consumer.group_metadata().member_id):
                await admin.delete_group_offsets(topic_name, both)
        await admin.delete_group_offsets(topic_name, both[:1])
        assert list(await admin.group_offsets(topic_name)) == both[1:]
        with pytest.raises(GroupNotFound):
            await admin.delete_group_offsets(f"{topic_name}-none", both)
