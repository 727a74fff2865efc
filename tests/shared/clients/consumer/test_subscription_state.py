"""Reading without a group: manually assigned partitions, or all partitions of the subscribed topics."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from penstock.shared.clients.consumer.consumer_coordinator import Rebalances
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscription_state import SubscriptionState
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

Partitions = frozenset[TopicPartition]
A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


class Nobody(Rebalances):
    """A listener that must not be called, because there is no group."""

    async def on_revoked(self, partitions: Partitions, *, lost: bool) -> None:
        raise AssertionError("no group, no rebalance")

    async def on_assigned(self, assigned: Partitions, added: Partitions) -> None:
        raise AssertionError("no group, no rebalance")


async def nothing_committed(partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {}


async def test_without_a_group_all_partitions_are_read() -> None:
    """All partitions of matching topics are read, also later ones. The others keep their positions."""
    async with FakeCluster() as cluster:
        cluster.create_topic("a", partitions=2)
        subscription = SubscriptionState(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), ConsumerSettings())
        await subscription.start(nothing_committed, lambda tp, move: None)
        try:
            subscription.subscribe(re.compile("a|b"), Nobody())
            await subscription.connection.refresh_metadata()
            assert subscription.assignment() == {A0, A1}
            subscription.pause([A0])
            subscription.seek(A0, 5)
            cluster.create_topic("b", partitions=1)
            cluster.create_topic("c", partitions=1)
            await subscription.connection.refresh_metadata()
            assert subscription.assignment() == {A0, A1, B0}
            assert (subscription.position(A0), subscription.paused()) == (5, {A0})
            assert (subscription._topics, subscription.is_managed, subscription.generation) == ({"a", "b"}, False, -1)
        finally:
            await subscription.close()


async def test_assign_and_subscribe_exclude_each_other() -> None:
    """Manual assignment and subscription exclude each other."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        subscription = SubscriptionState(kafka, ConsumerSettings(group_id="g"))
        await subscription.start(nothing_committed, lambda tp, move: None)
        try:
            assert not subscription.is_subscribed
            subscription.assign([A0])
            assert (subscription.assignment(), subscription.is_managed) == ({A0}, False)
            with pytest.raises(IllegalState, match="topics and partitions"):
                subscription.subscribe(["a"], Nobody())
        finally:
            await subscription.close()


async def test_time_since_the_last_poll() -> None:
    """A poll in progress counts as now, however long it waits."""
    subscription = SubscriptionState(KafkaSettings(), ConsumerSettings(group_id="g"))
    subscription._polled_ms -= 5_000
    assert subscription.idle_ms >= 5_000
    with subscription.polling(), subscription.polling():
        assert subscription.idle_ms == 0
    assert subscription.idle_ms < 5_000
