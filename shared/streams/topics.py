"""The topics of an application: its sources must be there, what it writes to is created where it is not."""

from __future__ import annotations

import asyncio

from shared.clients.admin import Admin, NewTopic, event_time_topic
from shared.common.clock import Clock
from shared.common.errors import UnknownTopicOrPartition
from shared.common.settings import KafkaSettings
from shared.streams.settings import StreamsSettings
from shared.streams.topology import Topology

TOPIC_CHECK_INTERVAL_MS = 500

CHANGELOG_CONFIGS = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}


async def prepare_topics(kafka: KafkaSettings, settings: StreamsSettings, topology: Topology, clock: Clock) -> None:
    """Wait for the source topics, then create result, late, dead-letter and changelog topics with as many partitions.

    Raises UnknownTopicOrPartition naming the source topics that did not appear within `topic_wait_ms`.
    """
    sources = topology.source_topics()
    async with Admin(kafka) as admin:
        deadline = clock.monotonic_ms() + settings.topic_wait_ms
        while missing := set(sources) - set(await admin.list_topics()):
            if clock.monotonic_ms() > deadline:
                names = ", ".join(sorted(missing))
                raise UnknownTopicOrPartition(f"no topic {names} after {settings.topic_wait_ms} ms; create it first")
            await asyncio.sleep(TOPIC_CHECK_INTERVAL_MS / 1000)
        described = await admin.describe_topics(sources)
        partitions = max(len(topic.partitions) for topic in described.values())
        replication = settings.replication_factor
        outputs = [
            event_time_topic(name, partitions, replication_factor=replication) for name in topology.output_topics()
        ]
        changelog = NewTopic(settings.changelog_topic, partitions, replication, CHANGELOG_CONFIGS)
        await admin.create_topics([*outputs, changelog], exist_ok=True)
