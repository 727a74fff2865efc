"""Reads an application's changelog past the newest snapshot in its lake, by the reader's rule.

1. The snapshot is read, if there is one. It must be of the same topic.
2. Each partition is read from its covered offset, or from 0 if no snapshot covers it.
3. A compaction that ends meanwhile may delete records that are still to be read. Then both steps are repeated with the
   newer snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.shared.clients.admin import TopicDescription
from penstock.shared.common.errors import ChangelogHole, OffsetOutOfRange
from penstock.shared.common.lake.state_snapshot import PartitionSnapshot, Snapshot, read_snapshot
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, CorruptEntry, locate_corrupt_entry
from penstock.shared.streams.runtime.restore_io import RESTORE_POLL_MS, changelog_consumer, checked_start

LogOffsets = Mapping[TopicPartition, int]
CheckProgress = Callable[[LogOffsets, LogOffsets], None]
"""Gets the positions and the ends before each poll. Raises KafkaTimeout if reading takes too long."""


class ChangelogLocation(NamedTuple):
    """The Kafka and the lake of an application; `lake_name` is the setting that `lake` comes from."""

    kafka: KafkaSettings
    application: str
    lake: str | None
    lake_options: dict[str, str]
    lake_name: str = "streams.lake"


async def read_tail(
    location: ChangelogLocation,
    topic: TopicDescription,
    make_reader: Callable[[int, PartitionSnapshot | None], ChangelogReader],
    make_check: Callable[[int], CheckProgress],
    ends: LogOffsets | None = None,
) -> tuple[Snapshot | None, dict[int, ChangelogReader]]:
    """Return the snapshot and, by partition, the readers that were fed the records after it.

    `make_reader` gets a partition and its part of the snapshot, `make_check` the number of records to read. Both are
    called again for each newer snapshot. The partitions are read to `ends`, by default their current ends.

    Raises ChangelogHole if records are missing or the snapshot is of a deleted topic, CorruptRecord for a record that
    cannot be decoded, and LakeUnavailable.
    """
    snapshot = await _read_snapshot(location, topic)
    while True:
        covered = {} if snapshot is None else snapshot.partitions
        partitions = {each.partition: TopicPartition(topic.name, each.partition) for each in topic.partitions}
        readers = {at: make_reader(partition, covered.get(partition)) for partition, at in partitions.items()}
        try:
            await _read_to_end(location, covered, readers, make_check, ends)
            return snapshot, {partition: readers[at] for partition, at in partitions.items()}
        except (ChangelogHole, OffsetOutOfRange):
            snapshot = await _read_snapshot(location, topic)
            # No compaction has moved the changelog's beginning meanwhile.
            if snapshot is None or snapshot.partitions == covered:
                raise


async def _read_snapshot(location: ChangelogLocation, topic: TopicDescription) -> Snapshot | None:
    if location.lake is None:
        return None
    snapshot = await asyncio.to_thread(
        read_snapshot,
        location.lake,
        location.application,
        [each.partition for each in topic.partitions],
        location.lake_options or None,
    )
    covered = {} if snapshot is None else snapshot.partitions
    if any(one.topic_id not in (None, topic.topic_id) for one in covered.values()):
        raise ChangelogHole(f"{topic.name} was deleted and created again: the lake is of another topic")
    return snapshot


async def _read_to_end(
    location: ChangelogLocation,
    covered: Mapping[int, PartitionSnapshot],
    readers: Mapping[TopicPartition, ChangelogReader],
    make_check: Callable[[int], CheckProgress],
    ends: LogOffsets | None,
) -> None:
    async with changelog_consumer(location.kafka) as consumer:
        consumer.assign(readers)
        first = await consumer.beginning_offsets(list(readers))
        # Read after the snapshot: a log that ends before the covered offset has lost records.
        current = await consumer.end_offsets(list(readers))
        for at in readers:
            offset = covered[at.partition].covered_offset if at.partition in covered else None
            start = checked_start(at, offset, first[at], current[at], location.lake, location.lake_name)
            consumer.seek(at, start)
        ends = current if ends is None else ends
        positions = {at: await consumer.position(at) for at in readers}
        check = make_check(sum(max(0, ends[at] - positions[at]) for at in readers))
        while any(positions[at] < ends[at] for at in readers):
            check(positions, ends)
            for at, columns in (await consumer.poll(RESTORE_POLL_MS)).items():
                feed(readers[at], columns)
            positions = {at: await consumer.position(at) for at in readers}


def feed(reader: ChangelogReader, columns: Columns) -> None:
    """Feed records to a reader. CorruptRecord names the record that cannot be decoded, and the ways out."""
    try:
        reader.feed(columns.offsets, columns.keys, columns.values)
    except CorruptEntry as e:
        raise locate_corrupt_entry(columns.topic_partition, e) from e
