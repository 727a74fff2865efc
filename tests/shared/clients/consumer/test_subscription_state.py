"""What a consumer reads: the kinds of subscription, and reading without a group."""

from __future__ import annotations

import re

import pytest

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.consumer.subscription_state import SubscriptionState
from penstock.shared.common.errors import AuthorizationFailed, IllegalState
from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker import Api, ErrorCode, FakeCluster, Message, Respond

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def forbid(cluster: FakeCluster, *topics: str) -> Respond:
    """Returns the response to a metadata request of a principal that may not read these topics."""
    host, _, port = cluster.bootstrap_servers.partition(":")
    code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    rows = [Message(name=name, error_code=code, partitions=[]) for name in topics]
    broker = Message(node_id=1, host=host, port=int(port))
    return Respond(Message(brokers=[broker], controller_id=1, topics=rows))


def test_kinds_of_subscription() -> None:
    """A subscription is by topic names, by a pattern, or by partitions, and cannot be changed to another kind."""
    subscription = SubscriptionState("c")
    assert (subscription.is_subscribed, subscription.is_by_topic) == (False, False)
    subscription.subscribe(re.compile("a|b"))
    subscription.match(["a", "ab", "c"])
    assert (subscription.topics, subscription.is_by_topic) == ({"a"}, True)
    assert [topic for topic in ("a", "b", "ab") if subscription.wants(topic)] == ["a", "b"]
    listed = SubscriptionState("c")
    listed.subscribe(["a"])
    assert [topic for topic in ("a", "b") if listed.wants(topic)] == ["a"]
    for change in (lambda: subscription.subscribe(["a"]), subscription.assign):
        with pytest.raises(IllegalState, match="client c: "):
            change()
    partitions = SubscriptionState("c")
    partitions.assign()
    assert (partitions.is_subscribed, partitions.is_by_topic) == (True, False)
    names = SubscriptionState("c")
    names.subscribe(["a"])
    names.match(["b"])
    assert names.topics == {"a"}


async def test_without_a_group_all_partitions_are_read() -> None:
    """All partitions of matching topics are read, also later ones. The others keep their positions."""
    async with FakeCluster() as cluster:
        cluster.create_topic("a", partitions=2)
        async with Consumer(cluster.bootstrap_servers) as consumer:
            consumer.subscribe(re.compile("a|b"))
            await consumer._connection.refresh_metadata()
            assert consumer.assignment() == {A0, A1}
            consumer.pause(A0)
            consumer.seek(A0, 5)
            cluster.create_topic("b", partitions=1)
            cluster.create_topic("c", partitions=1)
            await consumer._connection.refresh_metadata()
            assert consumer.assignment() == {A0, A1, B0}
            assert (await consumer.position(A0), consumer.paused()) == (5, {A0})


@pytest.mark.parametrize("topics", [["a", "b"], re.compile("a|b")])
async def test_without_a_group_a_forbidden_topic_keeps_its_positions(topics: list[str] | re.Pattern[str]) -> None:
    """A topic that may not be read for a while keeps its partitions and positions. A deleted topic does not."""
    async with FakeCluster() as cluster:
        cluster.create_topic("a", partitions=2)
        cluster.create_topic("b", partitions=1)
        async with Consumer(cluster.bootstrap_servers) as consumer:
            consumer.subscribe(topics)
            await consumer._connection.refresh_metadata()
            consumer.pause(A0)
            consumer.seek(A0, 5)
            cluster.control(Api.METADATA, forbid(cluster, "a", "b"), times=1)
            await consumer._connection.refresh_metadata()
            assert consumer._connection.partitions("a") is None
            assert consumer.assignment() == {A0, A1, B0}
            await consumer._connection.refresh_metadata()
            assert (consumer.assignment(), consumer.paused()) == ({A0, A1, B0}, {A0})
            assert await consumer.position(A0) == 5
            cluster.delete_topic("a")
            await consumer._connection.refresh_metadata()
            assert consumer.assignment() == {B0}


async def test_assigned_partitions_are_not_the_group_s() -> None:
    """A consumer with a group may assign partitions itself. Then it cannot subscribe."""
    async with (
        FakeCluster() as cluster,
        Consumer(cluster.bootstrap_servers, ConsumerSettings(group_id="g")) as consumer,
    ):
        consumer.assign([A0])
        assert (consumer.assignment(), consumer.group_metadata().generation_id) == ({A0}, -1)
        with pytest.raises(IllegalState, match="topics and partitions"):
            consumer.subscribe(["a"])


async def test_a_forbidden_topic_is_an_error_for_assigned_partitions_too() -> None:
    """If the metadata of an assigned partition's topic may not be read, `poll` and `position` raise
    AuthorizationFailed."""
    async with FakeCluster() as cluster, Consumer(cluster.bootstrap_servers) as consumer:
        cluster.control(Api.METADATA, forbid(cluster, "a"))
        consumer.assign([A0])
        await consumer._connection.refresh_metadata()
        with pytest.raises(AuthorizationFailed, match="may not read a"):
            await consumer.poll(0)
        with pytest.raises(AuthorizationFailed, match="may not read a"):
            await consumer.position(A0)


async def test_time_since_the_last_poll() -> None:
    """A poll in progress counts as now, however long it waits."""
    coordinator = Consumer("localhost:9092", ConsumerSettings(group_id="g"))._coordinator
    coordinator._polled_ms -= 5_000
    assert coordinator.idle_ms >= 5_000
    with coordinator.polling(), coordinator.polling():
        assert coordinator.idle_ms == 0
    assert coordinator.idle_ms < 5_000
