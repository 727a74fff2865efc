"""Restores one partition's state into a task that does not run yet: from disk or a snapshot, then from the changelog.

A new owner reads to the log's end and then to its own takeover record (`changelog_partition`). A standby reads on and
on (`standbys`). Both use `ChangelogReader`, so a standby has the state that a new owner would have restored up to the
same offset. Therefore a new owner can continue from the standby's state and position.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from penstock.shared.clients.consumer import Consumer
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import (
    ChangelogHole,
    CorruptRecord,
    KafkaTimeout,
    LakeUnavailable,
    OffsetOutOfRange,
    SchemaMismatch,
)
from penstock.shared.common.lake import state_snapshot
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.changelog_reader import (
    ChangelogReader,
    CorruptEntry,
    feed_records,
    locate_corrupt_entry,
    reader_start_offset,
)
from penstock.shared.streams.changelog.format import (
    PROGRESS,
    Progress,
    decode_entry,
    decode_progress,
    is_foreign_record,
)
from penstock.shared.streams.changelog.store_schema import StoreSchema, check_restorable
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer, fetch_changelog_topic_id
from penstock.shared.streams.runtime.restore_progress import RestoreProgress, RestoreReport
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.local_restore import continue_from_local_state, write_restored_rows
from penstock.shared.streams.task.restore import restore_changes, restore_progress, restore_windows
from penstock.shared.streams.task.stream_task import StreamTask

log = get_logger(__name__)

# Heartbeats and running tasks get a turn after at most this many records.
RESTORE_RECORDS_MAX = 2_000
# Heartbeats and running tasks get a turn after at most this many rows of a snapshot.
RESTORE_ROWS_MAX = 50_000
RESTORE_POLL_MS = 500
NEWEST_RECORDS = 1_000
"""The records at the changelog's end that are read before a long restore. The newest commit's progress record is among
them, unless as many records of failed commits and takeovers follow it."""
# Beyond this, the restore begins with the newest progress record that was found, if any.
NEWEST_MS = 2_000
# A restore fails if its position does not advance for this long.
RESTORE_IDLE_MS_MAX = 60_000


class PartitionRestore:
    """Restores one partition's task, which nothing else uses meanwhile."""

    def __init__(self, kafka: KafkaSettings, settings: StreamsSettings, task: StreamTask, clock: Clock) -> None:
        self._kafka = kafka
        self._settings = settings
        self._clock = clock
        self.task = task
        self.report = RestoreReport()
        self.progress = RestoreProgress(task.partition)
        self.at = TopicPartition(settings.changelog_topic, task.partition)
        self.reader = ChangelogReader(partial(restore_changes, task), stores=task.schemas)
        self.topic_id: str | None = None
        self._applied_before = 0
        self._foreign_before = 0

    def __repr__(self) -> str:
        return f"PartitionRestore({self.at}, {self.reader})"

    def consumer(self) -> Consumer:
        """Create the consumer that it reads with; not open yet."""
        return changelog_consumer(self._kafka)

    async def begin(self, consumer: Consumer) -> int:
        """Find the start of the restore and seek to it; return the log's current end.

        A restore that has read before (a standby) continues from its position. Raises OffsetOutOfRange if the restore
        must start again. There are two reasons. Either a newer snapshot has replaced the loaded one. Or the log lacks
        the standby's position, or is another topic. In this case the state on disk is deleted.

        Raises ChangelogHole if the log does not continue the newest snapshot, or if there is none and the log does not
        begin at 0.
        """
        consumer.assign([self.at])
        reader = self.reader
        start = (
            await self._find_start(consumer) if reader.next_offset is None else await self._resume_position(consumer)
        )
        reader.next_offset = start
        consumer.seek(self.at, start)
        return (await consumer.end_offsets([self.at]))[self.at]

    async def compare_newest(self, end: int, consumer: Consumer) -> None:
        """Set `progress.is_accepted` if the stores of the newest commit found before `end` fit the topology.

        Otherwise nothing happens: a fenced owner may have written that commit. The restore itself checks each commit
        that counts, and raises the error. A restore of at most NEWEST_RECORDS records skips this check.
        """
        start = await consumer.position(self.at)
        # A short restore finds out itself, and as quickly.
        if end - start <= NEWEST_RECORDS:
            return
        consumer.seek(self.at, end - NEWEST_RECORDS)
        newest = None
        deadline_ms = self._clock.monotonic_ms() + NEWEST_MS
        while await consumer.position(self.at) < end and self._clock.monotonic_ms() < deadline_ms:
            for columns in (await consumer.poll(RESTORE_POLL_MS, NEWEST_RECORDS)).values():
                newest = self._newest_progress(columns) or newest
        consumer.seek(self.at, start)
        if newest is not None:
            # An owner takes over only if its topology can read the commits before it. So if the newest commit fits, the
            # earlier ones are taken to fit too. A commit that does not fit may be of a fenced owner, and then does not
            # count.
            with suppress(SchemaMismatch):
                check_restorable(newest.stores, self.task.schemas)
                self.progress.is_accepted = True

    @staticmethod
    def _newest_progress(columns: Columns) -> Progress | None:
        """Return the last progress record of a batch; records that cannot be decoded are skipped."""
        for value in reversed(columns.values):
            with suppress(CorruptRecord):
                if not is_foreign_record(value) and (entry := decode_entry(value)).operation == PROGRESS:
                    return decode_progress(entry.body)
        return None

    async def read_until(self, end: int, consumer: Consumer) -> None:
        """Read and apply the records before the offset `end`. The last fetch may contain later ones, which are applied
        too.

        Raises KafkaTimeout if the position does not advance for RESTORE_IDLE_MS_MAX.
        """
        position = await consumer.position(self.at)
        moved = self._clock.monotonic_ms()
        self.progress.moved(position, end, moved)
        while position < end:
            await self.poll(consumer)
            before = position
            position = await consumer.position(self.at)
            now = self._clock.monotonic_ms()
            self.progress.moved(position, end, now)
            if position > before:
                moved = now
            elif now - moved > RESTORE_IDLE_MS_MAX:
                raise KafkaTimeout(f"{self.at}: no record came for {now - moved} ms at offset {position} of {end}")

    async def poll(self, consumer: Consumer) -> int:
        """Wait a short time for records, apply them and return their number. May be cancelled at any moment.

        Raises OffsetOutOfRange, LogTruncation included, if the log lacks the position or has lost records that were
        read; the state on disk is deleted then.
        """
        # Heartbeats and running tasks get a turn between the fetched records.
        await asyncio.sleep(0)
        try:
            batches = await consumer.poll(RESTORE_POLL_MS, RESTORE_RECORDS_MAX)
        except OffsetOutOfRange as e:
            self._discard_local(str(e))
            raise
        return sum(self._feed_changelog_records(columns) for columns in batches.values())

    def write(self) -> None:
        """Write the restored state to disk, if the state is kept there."""
        if self.task.local is not None:
            write_restored_rows(self.reader, self.task.local, self.topic_id, self.task.schemas)

    def finish(self, epoch: int) -> None:
        """Finish the restore: the task continues from the last progress record, as the owner of `epoch`."""
        reader = self.reader
        report = self.report
        if reader.progress is not None:
            restore_progress(self.task, reader.progress)
        self.task.epoch = epoch
        self.task.changelog_id = self.topic_id
        self.write()
        report.changelog_windows = reader.entries_applied - self._applied_before
        report.foreign_records = reader.foreign_records - self._foreign_before
        if report.foreign_records:
            log.warning(
                "records that are no changelog entries were skipped",
                topic=self.at.topic,
                partition=self.at.partition,
                first_offset=reader.first_foreign_offset,
                records=reader.foreign_records,
            )

    def next_epoch(self) -> int:
        """Return the epoch of the next owner. Raises CorruptRecord if the current epoch is the highest possible."""
        try:
            return self.reader.next_epoch
        except CorruptEntry as e:
            raise locate_corrupt_entry(self.at, e) from e
        except CorruptRecord as e:
            raise CorruptRecord(f"{self.at}: {e}. Start afresh (`penstock streams reset`)") from e

    # --- inside ---

    def _feed_changelog_records(self, columns: Columns) -> int:
        feed_records(self.reader, columns)
        self.report.changelog_records += len(columns)
        # The buffer of a restore is limited, because the state may be larger than memory.
        if self.task.local is not None and self.task.local.is_full:
            self.write()
        return len(columns)

    async def _find_start(self, consumer: Consumer) -> int:
        # Before anything is read. If the topic is replaced meanwhile, a later comparison shows it.
        self.topic_id = await fetch_changelog_topic_id(self._kafka, self.at.topic)
        # First choice: the state on disk. Then the snapshot, then the log from its beginning.
        if (found := await self._take_up_local(consumer)) is not None:
            return found.covered_offset
        covered = await self._load_snapshot()
        first = (await consumer.beginning_offsets([self.at]))[self.at]
        end = (await consumer.end_offsets([self.at]))[self.at]
        try:
            return reader_start_offset(self.at, covered, first, end, self._settings.lake)
        except ChangelogHole as e:
            newest = await self._newest_snapshot()
            if (None if newest is None else newest[1].covered_offset) == covered:
                raise
            # Two compactions ended while the snapshot was loaded. The second deleted the changelog after the snapshot.
            raise OffsetOutOfRange(f"{e}; there is a newer snapshot now") from e

    async def _resume_position(self, consumer: Consumer) -> int:
        first = (await consumer.beginning_offsets([self.at]))[self.at]
        end = (await consumer.end_offsets([self.at]))[self.at]
        start = self.reader.next_offset or 0
        topic_id = await fetch_changelog_topic_id(self._kafka, self.at.topic)
        if topic_id != self.topic_id or not first <= start <= end:
            was = f"offset {start} of the topic with id {self.topic_id}"
            reason = f"{self.at}: from {was}; it has {first} to {end} and id {topic_id}"
            self._discard_local(reason)
            raise OffsetOutOfRange(reason)
        # Rows that the standby has buffered are written with its offset.
        self.write()
        self._applied_before = self.reader.entries_applied
        self._foreign_before = self.reader.foreign_records
        self.report = RestoreReport(standby_windows=sum(map(len, self.task.stores.values())))
        return start

    async def _take_up_local(self, consumer: Consumer) -> Checkpoint | None:
        """Continue from the state on disk, and return its checkpoint; None if there is none or it is not valid."""
        task = self.task
        if (local := task.local) is None:
            return None
        first = (await consumer.beginning_offsets([self.at]))[self.at]
        end = (await consumer.end_offsets([self.at]))[self.at]
        found = continue_from_local_state(self.reader, local, task.schemas, self.topic_id, first, end)
        if found is not None:
            self.report.local_windows = sum(map(len, task.stores.values()))
        return found

    def _discard_local(self, reason: str) -> None:
        # Rows on disk may be of lost records. If the log grows past their checkpoint, it no longer shows that.
        if self.task.local is not None:
            self.task.local.discard(reason)

    async def _newest_snapshot(self) -> tuple[int, state_snapshot.PartitionSnapshot] | None:
        """Return the table's version and this partition's coverage in it; None if no snapshot covers it."""
        settings = self._settings
        own = self.at.partition
        if settings.lake is None:
            return None
        options = settings.lake_options or None
        found = await asyncio.to_thread(
            state_snapshot.read_snapshot, settings.lake, settings.application_id, [own], options
        )
        return None if found is None or own not in found.partitions else (found.version, found.partitions[own])

    async def _load_snapshot(self) -> int | None:
        """Load this partition's rows, and return the offset at which the changelog continues; None without snapshot."""
        settings = self._settings
        if (found := await self._newest_snapshot()) is None:
            return None
        version, snapshot = found
        assert settings.lake is not None
        # Its offsets mean nothing in the new topic.
        if snapshot.topic_id not in (None, self.topic_id):
            raise ChangelogHole(
                f"the snapshot was made from topic {self.at.topic} with id {snapshot.topic_id}, but its id is "
                f"{self.topic_id}: it was deleted and created again. To start afresh, move the application's tables "
                f"({table_uri(settings.lake, settings.application_id)}) to another place"
            )
        progress = decode_progress(snapshot.progress)
        report = self.report
        restore_progress(self.task, progress)
        try:
            for schema in progress.stores:
                await self._load_windows(schema, version)
        except LakeUnavailable as e:
            newest = await self._newest_snapshot()
            if newest is None or newest[0] == version:
                raise
            # Maintenance has deleted a file of that version while it was read.
            raise OffsetOutOfRange(f"{e}; there is a newer snapshot now") from e
        if self.task.local is not None:
            self.task.local.write(None)
        report.snapshot_windows = sum(map(len, self.task.stores.values()))
        self.reader.epoch = snapshot.epoch
        self.reader.progress = progress
        report.snapshot_version = version
        return snapshot.covered_offset

    async def _load_windows(self, schema: StoreSchema, version: int) -> None:
        """Restore one store's windows from a version of the snapshot. A thread reads the next slice meanwhile."""
        settings = self._settings
        local = self.task.local
        assert settings.lake is not None
        columns = [column.name for column in schema.state_columns()]
        slices = state_snapshot.read_window_changes(
            settings.lake,
            settings.application_id,
            self.at.partition,
            schema.name,
            version,
            columns,
            settings.lake_options or None,
        )
        # A thread, because reading Parquet blocks.
        reading = asyncio.create_task(asyncio.to_thread(next, slices, None))
        try:
            while (read := await reading) is not None:
                reading = asyncio.create_task(asyncio.to_thread(next, slices, None))
                for batch in read.to_batches(RESTORE_ROWS_MAX):
                    # Heartbeats and running tasks get a turn.
                    await asyncio.sleep(0)
                    restore_windows(self.task, schema, batch)
                    if local is not None and local.is_full:
                        local.write(None)
        finally:
            reading.cancel()
