"""The position at which a task resumes in a source partition, and the checks that it is valid.

A position is an offset in one topic. It becomes invalid if the topic is deleted and created again, if the partition
loses its end, or if the records at the position are deleted before they are read. By default, Kafka's clients reset
such a position to the beginning or the end and continue silently. Here these cases are reported. `start_position_of`
decides where to start. `SourcePositions` looks up the first and end offsets of the partitions for it, and sets the
positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import (
    ChangelogHole,
    KafkaTimeout,
    SchemaMismatch,
    SourceOffsetsMissing,
    SourceTopicChanged,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import counter
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import REPARTITION_SUFFIX, is_repartition_topic
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.watermarks import holds_records

log = get_logger(__name__)

# Beyond this, a lookup fails, because other partitions may wait for it.
LOOKUP_TIMEOUT_MS = 10_000
UNREAD_POLL_MS = 500
# A restore fails if the search for unread records does not advance for this long.
UNREAD_TIMEOUT_MS = 60_000

OnMissing = Literal["fail", "skip"]
START_AFRESH = (
    "The state belongs to the old topic's records. To start again, give the application another application_id, or "
    "stop all its instances and run `penstock streams reset`: it deletes the group's offsets, the changelog, the "
    "repartition topics and the tables in the lake."
)

COMMIT_METADATA = "penstock-streams"
"""The metadata of every offset that an application commits. An offset without it was committed by another client."""


class PartitionExtent(NamedTuple):
    """The extent of a source partition: its topic's id, its first offset, and the offset after its last."""

    topic_id: str
    first: int
    end: int


class StartPosition(NamedTuple):
    """The position to read from; `skipped` offsets before it were deleted unread."""

    offset: int
    skipped: int = 0


class AheadPartition(NamedTuple):
    """A source partition whose committed offset is past `known`, the changelog's position (None: it has none)."""

    at: TopicPartition
    committed: int
    known: int | None
    by_application: bool
    """Whether the application committed the offset itself."""

    def __str__(self) -> str:
        return f"{self.at} (committed {self.committed}, changelog {'none' if self.known is None else self.known})"


class GroupAhead(ChangelogHole):
    """The group's committed offsets are ahead of the changelog: state was lost, or another client committed them.

    The message names every partition of `ahead`, the cause if it is known, and the command that sets the group back to
    the changelog's positions.
    """

    def __init__(self, group: str, ahead: Iterable[AheadPartition]) -> None:
        # A commit never writes the group's offsets before the changelog, so the application's own commits cannot cause
        # this error.
        self.group = group
        self.ahead = tuple(sorted(ahead))
        command = f"penstock streams restore-offsets --application-id {group} --execute"
        known = [one for one in self.ahead if one.known is not None]
        unknown = [one for one in self.ahead if one.known is None]
        parts = [f"group {group}: committed offsets are ahead of the changelog"]
        if foreign := [one for one in known if not one.by_application]:
            parts.append(
                f"{_format_ahead(foreign)}: another client has committed these offsets, the application has not. This "
                "is not lost state: the changelog has its own position for each partition"
            )
        if lost := [one for one in known if one.by_application]:
            parts.append(
                f"{_format_ahead(lost)}: the application has committed these offsets, and the changelog has lost the "
                "commits. From the changelog's position on, records are processed again with the state of then, and "
                "their results may come twice"
            )
        if gone := [one for one in unknown if one.by_application]:
            parts.append(
                f"{_format_ahead(gone)}: the application has committed these offsets, and the changelog has no "
                "position: the state was lost"
            )
        if unread := [one for one in unknown if not one.by_application]:
            parts.append(
                f"{_format_ahead(unread)}: another client has committed these offsets, and the changelog has no "
                "position. Either the application has never read these partitions, or its state was lost"
            )
        if unknown:
            parts.append(
                "--start-over in the command reads a topic's partitions without a position from the beginning, as if "
                "none of their records had been read; streams.start_from_group_offsets=true goes on at the committed "
                "offsets instead"
            )
            command += "".join(f" --start-over {topic}" for topic in sorted({one.at.topic for one in unknown}))
        parts.append(
            f"To set the group back to the changelog's positions, also while the application restarts, run `{command}` "
            "with the aggregator's settings"
        )
        super().__init__(". ".join(parts))


def _format_ahead(ahead: Iterable[AheadPartition]) -> str:
    return ", ".join(map(str, ahead))


def committed_position(offset: int) -> OffsetAndMetadata:
    """Return a source position to commit to the group, with the metadata that marks it as the application's own."""
    return OffsetAndMetadata(offset, COMMIT_METADATA)


def ahead_of(
    at: TopicPartition, known: int | None, committed: OffsetAndMetadata | None, *, from_group: bool
) -> AheadPartition | None:
    """Return the partition with both positions if the group is ahead of the changelog's position `known`, else None.

    A partition without a position in the changelog (None) counts as at offset 0. With `from_group` it starts at the
    group's offset instead, so it is not ahead.
    """
    if committed is None or committed.offset <= (known or 0) or (known is None and from_group):
        return None
    return AheadPartition(at, committed.offset, known, committed.metadata == COMMIT_METADATA)


def position_of(known: int | None, committed: OffsetAndMetadata | None, *, from_group: bool) -> int | None:
    """Return the changelog's position (`known`), else the group's offset if `from_group` allows it, else None.

    >>> position_of(5, OffsetAndMetadata(3), from_group=False), position_of(None, OffsetAndMetadata(3), from_group=True)
    (5, 3)
    """
    if known is not None or committed is None or not from_group:
        return known
    return committed.offset


def unread_repartition_topics(sources: Mapping[str, int], read: Collection[str], application: str) -> list[str]:
    """Return the application's own topics that have a position and that its topology no longer reads.

    >>> known = {"clicks": 7, "app-key_by-2-repartition": 5}
    >>> unread_repartition_topics(known, ["clicks", "app-key_by-3-repartition"], "app")
    ['app-key_by-2-repartition']
    """
    return sorted(topic for topic in sources.keys() - set(read) if is_repartition_topic(topic, application))


def raise_unread(at: TopicPartition, position: int, read: Collection[str], application: str) -> None:
    """Raise SchemaMismatch, because a topic that the topology no longer reads has records from `position` on."""
    now = sorted(topic for topic in read if is_repartition_topic(topic, application))
    name = at.topic.removeprefix(f"{application}-").removesuffix(REPARTITION_SUFFIX)
    raise SchemaMismatch(
        f"{at} holds records from offset {position} on that were not read, and the topology does not read it any more; "
        f"its own topics are {', '.join(now) or 'none'}. A key_by without a name is named by its position: "
        f"name={name!r} keeps its topic. Otherwise run the topology as it was until everything is read, or delete "
        "everything with `penstock streams reset`."
    )


def start_position_of(
    at: TopicPartition, position: int | None, known_id: str | None, held: PartitionExtent, on_missing: OnMissing
) -> StartPosition:
    """Return the offset at which a task starts to read the partition `at`: its last `position`, or the first if None.

    `known_id` is the id of the topic that `position` belongs to, None if unknown. Raises SourceTopicChanged if the
    topic now has another id, or ends before `position`. If the records at `position` were deleted, the task starts at
    the first offset if `on_missing` is `skip`; otherwise raises SourceOffsetsMissing.
    """
    _require_same_topic(at.topic, known_id, held.topic_id)
    if position is None:
        return StartPosition(held.first)
    # If no id was recorded, this finds a topic that was created again. It also finds records that were lost in an
    # unclean leader election.
    if position > held.end:
        raise SourceTopicChanged(
            f"{at}: the position is {position}, but the partition ends at {held.end}: the topic was deleted and made "
            f"again, or it lost records. {START_AFRESH}"
        )
    if position >= held.first:
        return StartPosition(position)
    if on_missing == "fail":
        raise SourceOffsetsMissing(
            f"{at}: offsets {position} to {held.first - 1} were deleted before they were read, by the topic's "
            "retention or by hand. To continue without them, set streams.on_missing_source_offsets to skip."
        )
    return StartPosition(held.first, held.first - position)


def _require_same_topic(topic: str, known_id: str | None, held_id: str) -> None:
    # Offsets of a topic mean nothing in another one of the same name, even if they are in its range.
    if known_id is not None and known_id != held_id:
        raise SourceTopicChanged(
            f"{topic} was deleted and created again: its id is {held_id}, the state was made from the topic with id "
            f"{known_id}. {START_AFRESH}"
        )


async def has_record_between(consumer: Consumer, at: TopicPartition, position: int, end: int) -> bool:
    """Return whether the consumer can read a record of the partition from `position` on. The search ends at `end`.

    Transaction markers and the watermarks of tasks do not count. Assigns the partition to the consumer. Raises
    KafkaTimeout if the consumer's position does not advance for UNREAD_TIMEOUT_MS, for example because a transaction is
    open.
    """
    consumer.assign([at])
    first = await consumer.beginning_offsets([at])
    reached = max(position, first[at])
    consumer.seek(at, reached)
    while reached < end:
        try:
            async with asyncio.timeout(UNREAD_TIMEOUT_MS / 1000):
                while (following := await consumer.position(at)) == reached:
                    if any(map(holds_records, (await consumer.poll(UNREAD_POLL_MS)).values())):
                        return True
        except TimeoutError:
            unread = f"the records at offsets {reached} to {end - 1}"
            raise KafkaTimeout(
                f"{at}: {unread} were not received within {UNREAD_TIMEOUT_MS} ms; a transaction may be open"
            ) from None
        reached = following
    return False


class SourcePositions:
    """Sets the positions at which tasks resume.

    All methods raise SourceTopicChanged, and KafkaTimeout if a lookup takes too long. `find` and `check` also raise
    SourceOffsetsMissing, as `start_position_of` does. `find` also raises SchemaMismatch if a repartition topic that the
    topology no longer reads has unread records, and GroupAhead if the group has committed offsets beyond those in the
    changelog.
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
        """Set a restored task's positions: the changelog's, else (if configured) the group's, else the beginning."""
        application = self._settings.application_id
        from_group = self._settings.start_from_group_offsets
        found: dict[TopicPartition, int | None] = {}
        ahead: list[AheadPartition] = []
        for at in partitions:
            known = task.sources.get(at.topic)
            committed = await consumer.committed(at)
            # The position in the changelog belongs to the state. If a user resets the group's offset, as is usual for a
            # consumer, the records before the position would be counted twice.
            if committed is not None and committed.offset < (known or 0):
                log.warning(
                    "the group's offset was set back: continuing at the changelog's position. To read records again, "
                    "set another application_id, or stop all instances and run `penstock streams reset`",
                    topic_partition=str(at),
                    committed=committed.offset,
                    position=known,
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
        """Compare a restored task's positions with the partitions' extents.

        With `on_missing_source_offsets` = `skip`, move positions whose records were deleted.
        """
        await self._set_start_offsets(task, consumer, {at: task.sources.get(at.topic) for at in partitions})

    async def check_topics(self, tasks: Collection[StreamTask], consumer: Consumer) -> None:
        """Compare the ids of the assigned topics with those that the restored tasks have read, in one request.

        It needs no leader, so a partition without one delays no task.
        """
        if not tasks:
            return
        async with Admin(self._kafka, timeout_ms=LOOKUP_TIMEOUT_MS) as admin:
            described = await admin.describe_topics({at.topic for at in consumer.assignment()})
        for task in tasks:
            for topic, held in described.items():
                _require_same_topic(topic, task.source_ids.get(topic), held.topic_id)

    async def _drop_unread_topics(self, task: StreamTask) -> None:
        """Forget positions in repartition topics that the topology no longer reads.

        Raises SchemaMismatch if such a topic has records that were not read.
        """
        application = self._settings.application_id
        read = task.topology.source_topics()
        dropped = unread_repartition_topics(task.sources, read, application)
        if not dropped:
            return
        async with Admin(self._kafka, timeout_ms=LOOKUP_TIMEOUT_MS) as admin:
            known = await admin.list_topics()
            kept = [TopicPartition(topic, task.partition) for topic in dropped if topic in known]
            # Not the last stable offset. A transaction that is still open may end with a commit.
            ends = await admin.list_offsets(dict.fromkeys(kept, "latest"))
        settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none")
        for topic in dropped:
            at = TopicPartition(topic, task.partition)
            position = task.sources[topic]
            if at in ends:
                async with Consumer(self._kafka, settings) as consumer:
                    if await has_record_between(consumer, at, position, ends[at]):
                        raise_unread(at, position, read, application)
            log.info("a topic that the topology no longer reads was read to its end", topic_partition=str(at))
            del task.sources[topic]
            task.source_ids.pop(topic, None)
            task.needs_commit = True

    async def _set_start_offsets(
        self, task: StreamTask, consumer: Consumer, positions: Mapping[TopicPartition, int | None]
    ) -> None:
        for at, held in (await self._fetch_held_offsets(consumer, positions)).items():
            position = positions[at]
            start = start_position_of(
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
    ) -> dict[TopicPartition, PartitionExtent]:
        wanted = list(partitions)
        async with Admin(self._kafka, timeout_ms=LOOKUP_TIMEOUT_MS) as admin:
            described = await admin.describe_topics({at.topic for at in wanted})
            # The consumer's end is the last stable offset. A group's offset may be in an open transaction after it.
            end = await admin.list_offsets(dict.fromkeys(wanted, "latest"))
        first = await consumer.beginning_offsets(wanted)
        return {at: PartitionExtent(described[at.topic].topic_id, first[at], end[at]) for at in wanted}
