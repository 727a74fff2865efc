"""Reads the tail of an application's changelog: the records after the newest snapshot in its lake.

1. The snapshot is read, if there is one. If it has a topic id, this must be the id of the changelog topic.
2. Each partition is read from its covered offset, or from 0 if no snapshot covers it.
3. A compaction that ends meanwhile may delete records before they are read. In this case both steps are repeated with
   the newer snapshot.

`TailChanges` keeps the changes of the windows that a query requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.shared.clients.admin import TopicDescription
from penstock.shared.common.errors import ChangelogHole, ConfigError, OffsetOutOfRange
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake import state_snapshot
from penstock.shared.common.lake.state_snapshot import PartitionSnapshot, Snapshot
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.changelog_reader import (
    Change,
    ChangelogReader,
    feed_records,
    reader_start_offset,
)
from penstock.shared.streams.changelog.format import DELETED, FINAL
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer
from penstock.shared.streams.runtime.partition_restore import RESTORE_POLL_MS

LogOffsets = Mapping[TopicPartition, int]
CheckProgress = Callable[[LogOffsets, LogOffsets], None]
"""Gets the positions and the ends before each poll. Raises KafkaTimeout if reading takes too long."""

CHANGES_MAX = 200_000
"""The most windows of one partition's tail for the queried keys and times. They stay in memory until the response."""


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
    """Return the lake's snapshot, or None, and by partition a reader that was fed the changelog records after it, at
    least up to `ends` (default: the current ends).

    `make_check` takes the number of records to read, and returns a function that is called before each poll. Raises
    ChangelogHole or OffsetOutOfRange if records are missing, CorruptRecord, LakeUnavailable, and the errors of that
    function.
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
            # If a compaction has moved the changelog's beginning meanwhile, read again after its snapshot, with new
            # readers.
            if snapshot is None or snapshot.partitions == covered:
                raise


async def _read_snapshot(location: ChangelogLocation, topic: TopicDescription) -> Snapshot | None:
    if location.lake is None:
        return None
    snapshot = await asyncio.to_thread(
        state_snapshot.read_snapshot,
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
            start = reader_start_offset(at, offset, first[at], current[at], location.lake, location.lake_name)
            consumer.seek(at, start)
        ends = current if ends is None else ends
        positions = {at: await consumer.position(at) for at in readers}
        check = make_check(sum(max(0, ends[at] - positions[at]) for at in readers))
        while any(positions[at] < ends[at] for at in readers):
            check(positions, ends)
            for at, columns in (await consumer.poll(RESTORE_POLL_MS)).items():
                feed_records(readers[at], columns)
            positions = {at: await consumer.position(at) for at in readers}


class TailChange(NamedTuple):
    """A change of a window in the tail, confirmed by a progress record.

    The keys of `state` are the names of the columns that the change was written with.
    """

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: dict[str, Any]


def decode_tail_change(change: Change) -> TailChange:
    """Return a change of the tail with its decoded state. Raises CorruptRecord if the state cannot be decoded."""
    state = {} if change.operation == DELETED else _state_decoder(change.written_as)(change.state)
    return TailChange(change.operation, change.store, change.key, change.start, change.end, state)


@lru_cache
def _state_decoder(written: StoreSchema) -> Callable[[bytes], dict[str, Any]]:
    columns = written.state_columns()
    codec = StateCodec(columns)
    names = [column.name for column in columns]
    return lambda state: dict(zip(names, codec.unpack(state), strict=True))


class TailChanges:
    """The newest changes in a changelog's tail, in log order: one for each window of the queried keys that overlaps
    `time_range`.

    `time_range` are two times in ms, both inclusive. A deletion has no end. So it is kept if its window does not start
    after `time_range`. If `store` is None, all stores are queried.
    """

    def __init__(self, keys: KeyRange, time_range: tuple[int, int], store: str | None = None) -> None:
        self._keys = keys
        self._time_range = time_range
        self._store = store
        # One change for each window: a busy key costs memory for its windows, not for its records.
        self._changes: dict[tuple[str, bytes, int, int | None], TailChange] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[TailChange]:
        return iter(self._changes.values())

    def keep(self, change: Change) -> None:
        """Add the next change of the tail, if it belongs to the queried windows.

        Raises ConfigError beyond CHANGES_MAX, CorruptRecord if the change cannot be decoded.
        """
        low, high = self._time_range
        if change.start > high or self._store not in (None, change.store) or not self._keys.has(change.key):
            return
        at = (change.store, change.key, change.start)
        # Of one start there is one open window, but several can have closed, with different ends.
        self._changes.pop((*at, None), None)
        # The start of a window never changes and its end only grows. So a window that ends before `time_range` in the
        # tail also does so in the lake. A deletion has no end: it may delete a window in the lake that overlaps the
        # range.
        if change.operation != DELETED and change.end < low:
            return
        if len(self._changes) == CHANGES_MAX:
            raise ConfigError(
                f"a partition's changelog has over {CHANGES_MAX} windows of these keys and times: query fewer keys "
                "or a shorter time"
            )
        self._changes[*at, change.end if change.operation == FINAL else None] = decode_tail_change(change)
