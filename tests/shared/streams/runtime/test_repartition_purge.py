"""Records that the application has read from its own topics are deleted, and no others."""

from __future__ import annotations

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.repartition_purge import RepartitionPurge
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import FakeCluster
from penstock.shared.testing.manual_clock import ManualClock

OWN = TopicPartition("app-by-user-repartition", 0)


def topology() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").key_by(lambda record: "k", name="by-user").repartition().to("out")
    return builder.build().of_application("app")


async def test_what_was_committed_is_deleted() -> None:
    """At most once an interval, records of a repartition topic are deleted up to the last committed position."""
    async with FakeCluster() as cluster:
        kafka, clock = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), ManualClock(0)
        cluster.create_topic(OWN.topic, 1)
        async with Producer(kafka) as producer, Admin(kafka) as admin:
            await (await producer.send_many([ProducerRecord(OWN.topic, b"{}", b"k")] * 10))

            async def first_offset() -> int:
                return (await admin.list_offsets({OWN: "earliest"}))[OWN]

            purge = RepartitionPurge(kafka, topology(), clock, 1_000)
            purge.committed(0, {"in": 50, OWN.topic: 4})
            await purge.run()
            assert await first_offset() == 0
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 4
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 4
            purge.committed(0, {"in": 90, OWN.topic: 9})
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 9


async def test_what_cannot_be_deleted_waits_for_the_next_time() -> None:
    """A missing topic is logged and ends nothing. An application without repartition topics sends no request."""
    clock = ManualClock(0)
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        purge = RepartitionPurge(kafka, topology(), clock, 1_000, timeout_ms=50)
        purge.committed(0, {OWN.topic: 4})
        clock.advance(1_000)
        await purge.run()
        assert purge._deleted == {}
    plain = StreamsBuilder()
    plain.stream("in").to("out")
    await RepartitionPurge(kafka, plain.build(), clock, 0).run()
