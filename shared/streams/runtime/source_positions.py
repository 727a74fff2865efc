"""Looks up the extents of source partitions and sets a task's positions; the rule is in `source_offsets`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import counter
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.source_offsets import (
    Ahead,
    GroupAhead,
    Held,
    ahead_of,
    left_topics,
    position_of,
    raise_unread,
    start_of,
)
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.watermarks import holds_records

log = get_logger(__name__)

LOOKUP_TIMEOUT_MS = 10_000  # other partitions may wait for a lookup
UNREAD_POLL_MS = 500


class SourcePositions:
    """Sets the positions at which tasks resume.

    Its methods raise SourceTopicChanged and SourceOffsetsMissing; `find` also raises GroupAhead and SchemaMismatch.
    """

    def __init__(self, kafka: KafkaSettings, settings: StreamsSettings, registry: CollectorRegistry) -> None:
        self._kafka = kafka
        self._settings = settings
        self._skipped = counter(
            registry,
            "streams_skipped_offsets",
            "Source offsets that were deleted before they were read.",
            "topic",
            "partition",
        )

    async def find(self, task: StreamTask, consumer: Consumer, partitions: Iterable[TopicPartition]) -> None:
        """Set a restored task's positions: the changelog's, else the group's offsets, else the beginning."""
        application = self._settings.application_id
        from_group = self._settings.start_from_group_offsets
        found: dict[TopicPartition, int | None] = {}
        ahead: list[Ahead] = []
        for at in partitions:
            known = task.sources.get(at.topic)
            committed = await consumer.committed(at)
            # The position in the changelog belongs to the state. If a user resets the group's offset, as is usual for a
            # consumer, the records before the position would be counted twice.
            if committed is not None and committed.offset < (known or 0):
                log.warning(
                    "the group's offset was set back: continuing at the changelog's position", topic_partition=str(at)
                )
            if (one := ahead_of(at, known, committed, from_group=from_group)) is not None:
                ahead.append(one)
            # Kafka Streams resumes at the group's offset. Here the changelog has the position, in the same commit as
            # the state, so the two cannot differ.
            found[at] = position_of(known, committed, from_group=from_group)
        # One error for all partitions, because one command sets all of them back.
        if ahead:
            raise GroupAhead(application, ahead)
        await self._set_start_offsets(task, consumer, found)
        await self._drop_unread_topics(task)

    async def check(self, task: StreamTask, consumer: Consumer, partitions: Iterable[TopicPartition]) -> None:
        """Compare a running task's positions with the partitions' extents; move positions where that is allowed."""
        await self._set_start_offsets(task, consumer, {at: task.sources.get(at.topic) for at in partitions})

    async def _drop_unread_topics(self, task: StreamTask) -> None:
        """Drop the application's own topics that the topology no longer reads. SchemaMismatch if one has records."""
        application = self._settings.application_id
        read = task.topology.source_topics()
        dropped = left_topics(task.sources, read, application)
        if not dropped:
            return
        async with Admin(self._kafka, timeout_ms=LOOKUP_TIMEOUT_MS) as admin:
            known = await admin.list_topics()
        for topic in dropped:
            at = TopicPartition(topic, task.partition)
            position = task.sources[topic]
            if topic in known and await self._has_record_from(at, position):
                raise_unread(at, position, read, application)
            log.info("a topic that the topology no longer reads was read to its end", topic_partition=str(at))
            del task.sources[topic]
            task.source_ids.pop(topic, None)
            task.needs_commit = True

    async def _has_record_from(self, at: TopicPartition, position: int) -> bool:
        """Return whether there is a record at or after the position; transaction markers and watermarks are none."""
        settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none")
        async with Consumer(self._kafka, settings) as consumer:
            consumer.assign([at])
            first = await consumer.beginning_offsets([at])
            end = await consumer.end_offsets([at])
            if first[at] < end[at] > position:
                consumer.seek(at, max(position, first[at]))
                while await consumer.position(at) < end[at]:
                    if any(map(holds_records, (await consumer.poll(UNREAD_POLL_MS)).values())):
                        return True
        return False

    async def _set_start_offsets(
        self, task: StreamTask, consumer: Consumer, positions: Mapping[TopicPartition, int | None]
    ) -> None:
        for at, held in (await self._fetch_held_offsets(consumer, positions)).items():
            position = positions[at]
            start = start_of(
                at, position, task.source_ids.get(at.topic), held, self._settings.on_missing_source_offsets
            )
            if start.skipped:
                self._skipped.labels(topic=at.topic, partition=at.partition).inc(start.skipped)
                log.error(
                    "source offsets were deleted before they were read: continuing without them",
                    topic=at.topic,
                    partition=at.partition,
                    from_offset=position,
                    to_offset=start.offset - 1,
                    offsets=start.skipped,
                )
                # The next start would otherwise report the same gap again.
                task.needs_commit = True
            task.sources[at.topic] = start.offset
            task.source_ids[at.topic] = held.topic_id

    async def _fetch_held_offsets(
        self, consumer: Consumer, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, Held]:
        wanted = list(partitions)
        async with Admin(self._kafka, timeout_ms=LOOKUP_TIMEOUT_MS) as admin:
            described = await admin.describe_topics({at.topic for at in wanted})
        first = await consumer.beginning_offsets(wanted)
        end = await consumer.end_offsets(wanted)
        return {at: Held(described[at.topic].topic_id, first[at], end[at]) for at in wanted}
