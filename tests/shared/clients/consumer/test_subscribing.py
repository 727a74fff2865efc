"""Who decides what is read, where it is not the group: the user by hand, or the topics as a whole."""

from __future__ import annotations

import re

import pytest

from penstock.shared.clients.consumer.group_coordinator import Rebalances
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscribing import Subscribing
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import TopicPartition
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


async def test_topics_are_read_whole_without_a_group() -> None:
    """All partitions of what a pattern matches are read; those that come later too, and the others keep their place."""
    told: list[tuple[Partitions, Partitions]] = []
    async with FakeCluster() as cluster:
        cluster.create_topic("a", partitions=2)
        subscribing = Subscribing(
            KafkaSettings(bootstrap_servers=cluster.bootstrap_servers),
            ConsumerSettings(),
            lambda assigned, kept: told.append((assigned, kept)),
        )
        await subscribing.open(set())
        try:
            subscribing.subscribe(re.compile("a|b"), Nobody())
            await subscribing.connection.refresh_metadata()
            assert subscribing.assignment() == {A0, A1}
            cluster.create_topic("b", partitions=1)
            cluster.create_topic("c", partitions=1)
            await subscribing.connection.refresh_metadata()
            assert told == [(frozenset({A0, A1}), frozenset()), (frozenset({A0, A1, B0}), frozenset({A0, A1}))]
            assert (subscribing._topics, subscribing.is_managed, subscribing.generation) == ({"a", "b"}, False, -1)
        finally:
            await subscribing.close()


async def test_by_hand_or_by_topic() -> None:
    """Partitions that are assigned by hand and a subscription exclude each other."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        subscribing = Subscribing(kafka, ConsumerSettings(group_id="g"), lambda assigned, kept: None)
        await subscribing.open(set())
        try:
            assert not subscribing.is_subscribed
            subscribing.assign([A0])
            assert (subscribing.assignment(), subscribing.is_managed) == ({A0}, False)
            with pytest.raises(IllegalState, match="topics and partitions"):
                subscribing.subscribe(["a"], Nobody())
        finally:
            await subscribing.close()


async def test_how_long_nobody_polls() -> None:
    """A poll under way counts as now, however long it waits."""
    subscribing = Subscribing(KafkaSettings(), ConsumerSettings(group_id="g"), lambda assigned, kept: None)
    subscribing._polled_ms -= 5_000
    assert subscribing.idle_ms >= 5_000
    with subscribing.polling(), subscribing.polling():
        assert subscribing.idle_ms == 0
    assert subscribing.idle_ms < 5_000
