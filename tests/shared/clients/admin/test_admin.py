"""The admin client: calls with one deadline each, offset resets, deletions, and topics for event-time data."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.shared.clients.admin import Admin, NewTopic, ShiftBy
from penstock.shared.clients.admin.types import MemberDescription, event_time_topic
from penstock.shared.clients.connection.connection import UNKNOWN_TOPIC_GRACE_MS
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import KafkaTimeout, UnknownTopicOrPartition
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Delay, Drop, ErrorCode, FakeCluster, Message, Request, Respond


async def test_waiting_for_leaders_counts_against_the_timeout() -> None:
    """If the broker creates the topic and then stops answering, the call ends after its `timeout_ms`."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=5_000)
        async with Admin(kafka) as admin:
            await admin.list_topics()
            cluster.control(Api.METADATA, Drop())
            started = time.monotonic()
            with pytest.raises(KafkaTimeout):
                await admin.create_topics([NewTopic("new", 1)], timeout_ms=300)
            assert time.monotonic() - started < 2


async def test_a_created_topic_is_awaited_until_the_broker_knows_it() -> None:
    """A broker can hear of a new topic late. The call waits for longer than for a topic that may not exist."""
    late_ms = 2 * UNKNOWN_TOPIC_GRACE_MS
    created: list[float] = []
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        host, port = cluster.bootstrap_servers.split(":")
        unknown = Message(
            brokers=[Message(node_id=cluster.nodes[0], host=host, port=int(port))],
            controller_id=cluster.nodes[0],
            topics=[Message(name="new", error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)],
        )

        def note_creation(_: Request) -> None:
            created.append(time.monotonic())

        def hide_topic(_: Request) -> Respond | None:
            return Respond(unknown) if created and (time.monotonic() - created[0]) * 1000 < late_ms else None

        cluster.control(Api.CREATE_TOPICS, note_creation)
        cluster.control(Api.METADATA, hide_topic)
        await admin.create_topics([NewTopic("new", 1)])
        assert (time.monotonic() - created[0]) * 1000 >= late_ms
        assert await admin.list_topics() == ["new"]


A = TopicPartition("t", 0)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Consumer(kafka, ConsumerSettings(group_id="g")) as consumer:
            consumer.assign([A])
            await consumer.commit({A: 3})
        yield cluster


@pytest.mark.parametrize("call", ["group_lag", "reset_group_offsets"])
async def test_requests_of_one_call_share_its_timeout(cluster: FakeCluster, call: str) -> None:
    """A call ends at its own timeout, even if each of its responses arrives within the limit."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=5_000)) as admin:
        await admin.group_lag("g")
        for api in (Api.OFFSET_FETCH, Api.DESCRIBE_GROUPS, Api.LIST_OFFSETS, Api.OFFSET_COMMIT):
            cluster.control(api, lambda _: Delay(300))
        started = time.monotonic()
        with pytest.raises(KafkaTimeout):
            await getattr(admin, call)("g", *(["earliest"] if call == "reset_group_offsets" else []), timeout_ms=500)
        assert 0.4 < time.monotonic() - started < 0.85
        assert cluster.committed("g") == {A: OffsetAndMetadata(3)}
        assert (await admin.group_offsets("g", timeout_ms=3_000))[A].offset == 3  # the next has its own time


@pytest.mark.parametrize("to", [-1, -2, -7, True, 1.5, "earlist", "", None, {A: -5}, {A: "x"}, ShiftBy(True)], ids=repr)
async def test_reset_to_a_negative_time_is_rejected(cluster: FakeCluster, to: Any) -> None:
    """A negative time is rejected before it is sent, because brokers give negative times special meanings."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        for dry_run in (False, True):
            with pytest.raises((ValueError, TypeError)):
                await admin.reset_group_offsets("g", to, dry_run=dry_run)
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


async def test_a_reset_needs_an_offset_of_each_partition(cluster: FakeCluster) -> None:
    """A partition that the offsets lack is named, and nothing is changed."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        with pytest.raises(ValueError, match=str(TopicPartition(A.topic, 7))):
            await admin.reset_group_offsets("g", {A: 1}, [A, TopicPartition(A.topic, 7)])
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


@pytest.mark.parametrize("offset", [-5, True, "x", None, OffsetAndMetadata(2, "x" * 5_000)], ids=repr)
async def test_an_invalid_offset_is_not_committed(cluster: FakeCluster, offset: Any) -> None:
    """An invalid offset is rejected with an error that names the partition. A broker would accept -5 silently as "no
    offset"."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        with pytest.raises((ValueError, TypeError), match="t-0"):
            await admin.alter_group_offsets("g", {A: offset})
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


async def test_a_deletion_is_retried_at_the_new_controller() -> None:
    """While the controller moves, a broker answers NOT_CONTROLLER. The topic is deleted nevertheless."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic("a", 1)])
        moved = Message(topics=[Message(name="a", error_code=ErrorCode.NOT_CONTROLLER)])
        cluster.control(Api.DELETE_TOPICS, Respond(moved), times=1)
        await admin.delete_topics(["a"])
        assert await admin.list_topics() == []
        with pytest.raises(UnknownTopicOrPartition, match="topic a"):
            await admin.delete_topics(["a"])


def test_event_time_topic() -> None:
    """Event-time topics never expire and accept any timestamp. The caller's own configs take precedence."""
    topic = event_time_topic("t", 4, cleanup_policy="compact", segment_ms="5")
    assert topic.configs == {
        "retention.ms": "-1",
        "segment.ms": "5",
        "message.timestamp.after.max.ms": str(2**63 - 1),
        "cleanup.policy": "compact",
    }
    assert (topic.partitions, topic.replication_factor) == (4, -1)


def test_text_of_a_member_has_id_client_id_and_host() -> None:
    """A member's text has its id, client id and host."""
    assert str(MemberDescription("m", "c", "/10.0.0.1", None, frozenset())) == "m (client c, host /10.0.0.1)"
