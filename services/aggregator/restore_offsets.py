"""`penstock streams restore-offsets`: sets an application's group back to the positions in its changelog.

An application continues at the source offsets in its changelog (the changelog's positions), and compares the group's
committed offsets with them. If committed offsets are ahead, the aggregator does not start (`GroupAhead`). A possible
cause is another consumer that committed under the application's group id. This command commits the changelog's
positions for these partitions.

The command may run at any time, also while the aggregator restarts over and over:

1. The command reads the group's offsets first. Then it reads the changelog up to its end at that moment, and waits for
   transactions that are open there. A healthy instance writes the changelog and commits the offset in one transaction.
   So its commit is in the changelog before its offset can be read. Its partitions are never ahead, and never changed.
2. The command commits the offsets in a transaction, without a member id. Brokers accept such a commit while the group
   has members. They would reject a plain commit until the last member has left, which may never happen while the
   aggregator restarts over and over.
3. Setting a group back is always safe: an instance that starts meanwhile continues at its changelog's position. If the
   group has members that are not instances of the application, the command fails, since they would commit again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.services.aggregator.changelog_tail import ChangelogLocation, CheckProgress, LogOffsets, read_tail
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    CommitFailed,
    ConfigError,
    GroupNotEmpty,
    GroupNotFound,
    KafkaTimeout,
)
from penstock.shared.common.lake.state_snapshot import PartitionSnapshot
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ignore_changes
from penstock.shared.streams.changelog.format import Progress, decode_progress
from penstock.shared.streams.runtime.foreign_members import describe_foreign_members, is_foreign_group
from penstock.shared.streams.runtime.partition_restore import RESTORE_IDLE_MS_MAX
from penstock.shared.streams.runtime.source_positions import AheadPartition, ahead_of, committed_position
from penstock.shared.streams.settings import StreamsSettings

log = get_logger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
BEGINNING = 0
"""The committed offset of a partition to read from the beginning. The application treats it as no offset."""


class RestorePlan(NamedTuple):
    """The committed offsets that are ahead of the changelog, in three groups. Only those of `back` are set back."""

    application: str
    back: list[AheadPartition]
    """Set back to the changelog's position, or to the beginning if the changelog has none."""
    unknown: list[AheadPartition]
    """The changelog has no position for these partitions, and `start_over` does not name their topics."""
    unread: list[AheadPartition]
    """According to the changelog, the application does not read these partitions."""

    def values(self) -> dict[str, object]:
        """Return the plan as plain values, for JSON; `position` is the changelog's, null if it has none."""

        def describe_ahead(ahead: Collection[AheadPartition]) -> list[dict[str, object]]:
            return [
                {
                    "topic": one.at.topic,
                    "partition": one.at.partition,
                    "committed": one.committed,
                    "position": one.known,
                    "by_application": one.by_application,
                }
                for one in ahead
            ]

        return {
            "application": self.application,
            "back": describe_ahead(self.back),
            "unknown": describe_ahead(self.unknown),
            "unread": describe_ahead(self.unread),
        }

    def lines(self) -> list[str]:
        """Return the plan in words."""
        if not (self.back or self.unknown or self.unread):
            return [f"application {self.application}: no committed offset is ahead of the changelog"]
        lines = []
        for one in self.back:
            committer = "the application" if one.by_application else "another client"
            to = f"back to {one.known}" if one.known is not None else "to be read from the beginning"
            lines.append(f"{one.at}: {committer} committed {one.committed}: {to}")
        lines += [
            f"{one.at}: committed {one.committed}, the changelog has no position: stays (--start-over {one.at.topic} "
            "reads the topic's partitions that have none from the beginning, as if none of their records had been read)"
            for one in self.unknown
        ]
        lines += [
            f"{one.at}: committed {one.committed}: stays, the application does not read this partition"
            for one in self.unread
        ]
        return lines


async def plan_restore(
    admin: Admin, kafka: KafkaSettings, settings: StreamsSettings, start_over: Collection[str] = ()
) -> RestorePlan:
    """Return the committed offsets that are ahead of the changelog. Partitions of topics in `start_over` that have no
    position in the changelog are read from the beginning.

    Instances of the application may run. Raises GroupNotEmpty if the group has other members, GroupNotFound if it has
    no committed offsets, and ConfigError if it has none for a topic in `start_over`. Raises UnknownTopicOrPartition
    without a changelog topic, and the errors of `read_tail`.
    """
    application = settings.application_id
    group = await admin.describe_group(application)
    if is_foreign_group(group):
        raise GroupNotEmpty(
            f"group {application} has members that are not instances of this application: "
            f"{describe_foreign_members(group)}. Stop them first: they would commit their offsets again"
        )
    committed = await admin.group_offsets(application, require_stable=True)
    if not committed:
        raise GroupNotFound(f"group {application} has no committed offsets")
    if missing := set(start_over) - {at.topic for at in committed}:
        raise ConfigError(f"--start-over {', '.join(sorted(missing))}: the group has no offset of this topic")
    return compare(settings, committed, await read_changelog_progress(admin, kafka, settings), start_over)


def compare(
    settings: StreamsSettings,
    committed: Offsets,
    progress: Mapping[int, Progress | None],
    start_over: Collection[str] = (),
) -> RestorePlan:
    """Return the plan for these committed offsets and each changelog partition's newest progress."""
    read = {topic for one in progress.values() if one is not None for topic in one.sources}
    plan = RestorePlan(settings.application_id, [], [], [])
    for at, offset in sorted(committed.items()):
        newest = progress.get(at.partition)
        known = None if newest is None else newest.sources.get(at.topic)
        ahead = ahead_of(at, known, offset, from_group=settings.start_from_group_offsets)
        if ahead is None:
            continue
        if at.partition not in progress or (read and at.topic not in read and at.topic not in start_over):
            plan.unread.append(ahead)
        elif known is None and at.topic not in start_over:
            plan.unknown.append(ahead)
        else:
            plan.back.append(ahead)
    return plan


async def apply_restore(admin: Admin, kafka: KafkaSettings, plan: RestorePlan) -> None:
    """Commit the plan's offsets, then read them back. Raises CommitFailed if another client has overwritten them."""
    application = plan.application
    offsets = {one.at: committed_position(BEGINNING if one.known is None else one.known) for one in plan.back}
    settings = ProducerSettings(transactional_id=f"{application}-restore-offsets")
    async with Producer(kafka, settings) as producer:
        await producer.init_transactions()
        async with producer.transaction():
            await producer.send_offsets_to_transaction(offsets, GroupMetadata(application))
    now = await admin.group_offsets(application, require_stable=True)
    if over := [
        at for at, offset in offsets.items() if now.get(at) != offset and not _is_application_offset(now.get(at))
    ]:
        raise CommitFailed(f"group {application}: another client committed {', '.join(map(str, over))} meanwhile")


def _is_application_offset(offset: OffsetAndMetadata | None) -> bool:
    """Return whether the application committed over a restored offset: an owner that started meanwhile may have."""
    return offset is not None and offset.metadata == committed_position(0).metadata


async def read_changelog_progress(
    admin: Admin, kafka: KafkaSettings, settings: StreamsSettings
) -> dict[int, Progress | None]:
    """Return the newest valid progress record of each changelog partition, or None for a partition without one.

    Reads the lake's snapshot, if there is one, and the changelog's tail after it. The caller compares the progress with
    the group's committed offsets.
    """
    topic = settings.changelog_topic
    description = (await admin.describe_topics([topic]))[topic]
    partitions_of_topic = [TopicPartition(topic, one.partition) for one in description.partitions]
    # The ends include open transactions: reading waits for them.
    ends = await admin.list_offsets(dict.fromkeys(partitions_of_topic, "latest"))
    location = ChangelogLocation(kafka, settings.application_id, settings.lake, settings.lake_options)
    _, readers = await read_tail(location, description, _make_progress_reader, _check_restore_idleness, ends)
    return {partition: reader.progress for partition, reader in readers.items()}


def _make_progress_reader(_partition: int, covered: PartitionSnapshot | None) -> ChangelogReader:
    if covered is None:
        return ChangelogReader(ignore_changes)
    return ChangelogReader(ignore_changes, epoch=covered.epoch, progress=decode_progress(covered.progress))


def _check_restore_idleness(records: int) -> CheckProgress:
    """Return a check for `restore-offsets`.

    It raises KafkaTimeout if no position has moved towards its end for RESTORE_IDLE_MS_MAX.
    """
    log.info("reading the changelog", records=records)
    last: LogOffsets = {}
    moved_ms = SYSTEM_CLOCK.monotonic_ms()

    def check(positions: LogOffsets, ends: LogOffsets) -> None:
        nonlocal last, moved_ms
        # A partition that was read to its end is no progress, even if an instance goes on to write to it.
        reached = {at: min(position, ends[at]) for at, position in positions.items()}
        if reached != last:
            last = reached
            moved_ms = SYSTEM_CLOCK.monotonic_ms()
        elif SYSTEM_CLOCK.monotonic_ms() - moved_ms > RESTORE_IDLE_MS_MAX:
            at = next(at for at in positions if positions[at] < ends[at])
            raise KafkaTimeout(
                f"{at}: reading has been at offset {positions[at]} of {ends[at]} for {RESTORE_IDLE_MS_MAX} ms"
            )

    return check
