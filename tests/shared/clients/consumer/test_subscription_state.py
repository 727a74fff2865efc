"""What is read without a group: the partitions that the user assigns, or all partitions of the topics."""

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
    """Is told nothing where there is no group."""

    async def on_revoked(self, partitions: Partitions, *, lost: bool) -> None:
        raise AssertionError("no group, no rebalance")

    async def on_assigned(self, assigned: Partitions, added: Partitions) -> None:
        raise AssertionError("no group, no rebalance")


async def nothing_committed(partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {}


async def test_topics_are_read_whole_without_a_group() -> None:
    """All partitions of what a pattern matches are read; those that come later too, and the others keep their place."""
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


async def test_by_hand_or_by_topic() -> None:
    """Partitions that are assigned by hand and a subscription exclude each other."""
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


async def test_how_long_nobody_polls() -> None:
    """A poll under way counts as now, however long it waits."""
    subscription = SubscriptionState(KafkaSettings(), ConsumerSettings(group_id="g"))
    subscription._polled_ms -= 5_000
    assert subscription.idle_ms >= 5_000
    with subscription.polling(), subscription.polling():
        assert subscription.idle_ms == 0
    assert subscription.idle_ms < 5_000
