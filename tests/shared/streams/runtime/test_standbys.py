"""Standbys of one instance on the fake broker: following, hand-over and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.standbys import Standbys
from penstock.shared.streams.runtime.stream_task_factory import StreamTaskFactory
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import FakeCluster
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

CHANGELOG = "app-changelog"
PARTITIONS = 3
WAIT_SECONDS = 30.0


def topology() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(100).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


class Instance:
    """The standbys of an instance, and the owner that writes to their partitions."""

    def __init__(self, cluster: FakeCluster) -> None:
        cluster.create_topic(CHANGELOG, PARTITIONS)
        self._kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        self._driver, self._written = TopologyTestDriver(topology()), 0
        settings, self.registry = StreamsSettings(application_id="app"), CollectorRegistry()
        task_factory = StreamTaskFactory(settings, topology(), SYSTEM_CLOCK, self.registry)
        self.standbys = Standbys(self._kafka, settings, task_factory, SYSTEM_CLOCK, self.registry)

    async def own(self, partition: int, *keys: str) -> None:
        """Lets the owner process a record of each key and commit."""
        for key in keys:
            self._driver.pipe("in", key=key.encode(), value=b"{}", timestamp=0)
        entries, self._written = self._driver.changelog[self._written :], len(self._driver.changelog)
        await self.write(partition, *entries)

    async def write(self, partition: int, *entries: tuple[bytes | None, bytes]) -> None:
        async with Producer(self._kafka, ProducerSettings(linger_ms=0)) as producer:
            records = [ProducerRecord(CHANGELOG, value, key, (), partition, None) for key, value in entries]
            await (await producer.send_many(records))

    def shown(self) -> list[tuple[int, str, int]]:
        return [(one["partition"], one["state"], one["state_rows"]) for one in self.standbys.describe()]

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                if done():
                    return
                await asyncio.sleep(0)

    def sample(self, partition: int) -> float | None:
        return self.registry.get_sample_value("penstock_streams_standby_lag", {"partition": str(partition)})


@asynccontextmanager
async def instance() -> AsyncIterator[Instance]:
    async with FakeCluster() as cluster:
        made = Instance(cluster)
        try:
            yield made
        finally:
            await made.standbys.close()


async def test_it_follows_the_owner_and_hands_over_what_it_has() -> None:
    """A standby has the owner's records from before and after its start. After the hand-over it is neither followed nor
    measured."""
    async with instance() as one:
        await one.own(1, "ann", "bob")
        await one.standbys.stand_by([1])
        await one.until(lambda: one.shown() == [(1, "current", 2)])
        await one.own(1, "cat")
        await one.until(lambda: one.shown() == [(1, "current", 3)] and one.sample(1) == 0)
        assert one.standbys.warm() == {1}
        restoring = await one.standbys.hand_over(1)
        assert restoring is not None
        assert sorted(row.key for row in restoring.task.stores["s"].rows()) == ["ann", "bob", "cat"]
        assert restoring.reader.progress is not None
        assert restoring.reader.progress.sources == {"in": 3}
        assert (one.shown(), one.standbys.warm(), one.sample(1)) == ([], set(), None)
        assert await one.standbys.hand_over(1) is None


async def test_unassigned_standbys_are_ended() -> None:
    """Other standbys are ended, except those of partitions owned here, which the hand-over ends. No owned partition
    gets a standby."""
    async with instance() as one:
        await one.standbys.stand_by([0, 1])
        await one.until(lambda: [state for _, state, _ in one.shown()] == ["current", "current"])
        await one.standbys.stand_by([1, 2], owned=[0, 2])
        assert repr(one.standbys) == "Standbys([0, 1])"
        await one.standbys.stand_by([2])
        assert repr(one.standbys) == "Standbys([2])"
        await one.standbys.close()
        assert repr(one.standbys) == "Standbys([])"


async def test_a_failed_standby_stops_no_other() -> None:
    """An unreadable changelog is logged, other standbys continue, and nothing is handed over for it."""
    async with instance() as one:
        await one.write(0, (b"k", b"\x01L and no more of an entry"))
        await one.own(1, "ann")
        await one.standbys.stand_by([0, 1])
        await one.until(lambda: one.shown() == [(0, "failed", 0), (1, "current", 1)])
        assert await one.standbys.hand_over(0) is None
        assert one.shown() == [(1, "current", 1)]


async def test_a_standby_that_read_nothing_hands_over_nothing() -> None:
    """A standby that has not read anything hands over nothing."""
    async with instance() as one:
        await one.standbys.stand_by([2])
        assert one.shown() == [(2, "catching up", 0)]
        handed: Any = await one.standbys.hand_over(2)
        assert handed is None
