"""One owner's hold on one changelog partition: take over, restore, commit.

Taking over. Under exactly_once the producer's first request fences the former owner and ends its open transaction.
Then the log is read to its end to learn the epoch in force, a takeover record with the next epoch is written, and
reading goes on until that record comes by: whatever a zombie wrote before it has been applied by then, whatever it
writes after it counts for nobody. Should another owner have taken over meanwhile, ours is written anew, one higher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.clients.admin import Admin
from shared.clients.consumer import Consumer, ConsumerSettings
from shared.clients.producer import Producer, ProducerSettings
from shared.common import lake
from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.errors import (
    ChangelogHole,
    CorruptRecord,
    DataError,
    InvalidTimestamp,
    KafkaTimeout,
    OffsetOutOfRange,
    RecordTooLarge,
)
from shared.common.log import get_logger
from shared.common.records import (
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    RecordColumns,
    RecordMetadata,
    TopicPartition,
)
from shared.common.settings import KafkaSettings
from shared.streams.changelog_format import Takeover, decode_progress, encode_takeover, way_out
from shared.streams.changelog_reader import ChangelogReader, CorruptEntry
from shared.streams.local_restore import Overtaken, check_overtaken, discard, refusal, take_up, write_restored
from shared.streams.restore import restore_change, restore_progress, restore_windows
from shared.streams.settings import REFUSAL_BYTES_MAX, StreamsSettings
from shared.streams.state.checkpoint import Checkpoint, CommitPlace, LogPlace
from shared.streams.stream_task import StreamTask
from shared.streams.task_outputs import ResultColumns, TaskCommit, TaskOutputs

if TYPE_CHECKING:
    from shared.streams.state.local_state import LocalState

log = get_logger(__name__)

PRODUCER_BATCH_BYTES = 256 * 1024
KEY_BYTES_SHOWN = 100
RESTORE_POLL_MS = 500
RESTORE_IDLE_MS_MAX = 60_000  # no record and no movement for this long while restoring is an error
SNAPSHOT_ATTEMPTS_MAX = 5  # times a restore that lost the ground under it starts again from a newer snapshot
TAKEOVER_ATTEMPTS_MAX = 10


@dataclass(slots=True)
class RestoreReport:
    """What a restore did; `snapshot_version` is None where there was no snapshot.

    `changelog_records` are all that were read, takeovers and progress records among them; `changelog_windows` are the
    changes of windows that were applied. `foreign_records` are no entries and were passed over. Loading the snapshot's
    windows took `snapshot_milliseconds` of the `milliseconds`. `local_windows` were on the instance's disk.
    """

    snapshot_version: int | None = None
    snapshot_windows: int = 0
    changelog_records: int = 0
    changelog_windows: int = 0
    foreign_records: int = 0
    milliseconds: int = 0
    snapshot_milliseconds: int = 0
    local_windows: int = 0


Bulk = list[ProducerRecord] | RecordColumns


class RecordRefused(DataError):
    """The producer or the broker does not take `record`, one of a commit's; nothing of the commit holds."""

    def __init__(self, record: ProducerRecord, reason: BaseException) -> None:
        size = len(record.key or b"") + len(record.value or b"")
        super().__init__(
            f"topic {record.topic}: the record of key {(record.key or b'')[:KEY_BYTES_SHOWN]!r}, {size} bytes, "
            f"timestamp {record.timestamp}, was refused: {reason}"
        )
        self.record = record


def _raise_refusal(records: Bulk, results: list[RecordMetadata | Exception]) -> None:
    """Raise for the one record that explains a refusal: a broker refuses a batch, and the rest of it is innocent."""
    pairs = list(zip(records, results, strict=True))
    large = [(r, e) for r, e in pairs if isinstance(e, RecordTooLarge)]
    untimely = [(r, e) for r, e in pairs if isinstance(e, InvalidTimestamp)]
    if large:
        record, reason = max(large, key=lambda pair: len(pair[0].key or b"") + len(pair[0].value or b""))
        raise RecordRefused(record, reason) from reason
    if untimely:
        record, late = max(untimely, key=lambda pair: pair[0].timestamp or 0)
        raise RecordRefused(record, late) from late


class ChangelogPartition:
    """Owns one partition's changelog from `open` to `close`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: StreamsSettings,
        partition: int,
        instance: str,
        clock: Clock = SYSTEM_CLOCK,
        refusal_bytes_max: int = 0,
    ) -> None:
        self._kafka, self._settings, self._instance, self._clock = kafka, settings, instance, clock
        self.topic_partition = TopicPartition(settings.changelog_topic, partition)
        self._topic_id: str | None = None
        self._place: LogPlace
        self.exactly_once = settings.processing_guarantee == "exactly_once"
        transactional = settings.transactional_id(partition) if self.exactly_once else None
        self._producer = Producer(
            kafka,
            ProducerSettings(
                transactional_id=transactional,
                transaction_timeout_ms=settings.transaction_timeout_ms,
                # Results are held to max_request_size at their sinks; a refused record must fit as it came.
                max_request_size=max(settings.max_request_size + REFUSAL_BYTES_MAX, refusal_bytes_max),
                batch_size=PRODUCER_BATCH_BYTES,
                linger_ms=0,
            ),
        )

    async def open(self) -> None:
        """Start the producer; under exactly_once this fences the former owner."""
        await self._producer.__aenter__()
        if self.exactly_once:
            await self._producer.init_transactions()

    async def close(self, timeout_ms: float | None = None) -> None:
        """Close the producer; an open transaction is aborted, for up to `timeout_ms` (None: as long as it takes)."""
        await self._producer.close(timeout_ms)

    async def take_over(self, make_task: Callable[[], StreamTask]) -> tuple[StreamTask, RestoreReport]:
        """Restore a task and become its changelog's one writer.

        `make_task` gives an empty task; it is called again where a restore has to start afresh. Raises ChangelogHole,
        SchemaMismatch or CorruptRecord, naming the place, where the state cannot be had back whole.
        """
        started = self._clock.monotonic_ms()
        for attempt in range(1, SNAPSHOT_ATTEMPTS_MAX + 1):
            task, report = make_task(), RestoreReport()
            try:
                await self._restore(task, report)
            except Overtaken as e:
                assert task.local is not None
                discard(task.local, str(e))
            except OffsetOutOfRange as e:
                if attempt == SNAPSHOT_ATTEMPTS_MAX:
                    raise ChangelogHole(f"{self.topic_partition}: {e}") from e
                log.warning("the changelog moved on during a restore", partition=task.partition, attempt=attempt)
            else:
                report.milliseconds = self._clock.monotonic_ms() - started
                return task, report
        raise AssertionError("unreachable")

    async def commit(self, commit: TaskCommit, group: GroupMetadata) -> CommitPlace:
        """Write one commit and say where it stands; raises where it did not, or may not, hold.

        Then the task must be discarded.
        """
        partition = self.topic_partition.partition
        offsets = {TopicPartition(topic, partition): OffsetAndMetadata(at) for topic, at in commit.sources.items()}
        entries, progress = self._entries(commit.changelog[:-1]), self._entries(commit.changelog[-1:])
        outputs = _in_bulk(commit.produced)
        if self.exactly_once:
            async with self._producer.transaction():
                last = await self._write(*outputs, entries, progress)
                if offsets:
                    await self._producer.send_offsets_to_transaction(offsets, group)
        else:
            await self._write(*outputs, entries)
            last = await self._write(progress)  # it confirms the entries: only when all are written
        return self._place.written(len(entries), last.offset)

    # --- restore ---

    async def _restore(self, task: StreamTask, report: RestoreReport) -> None:
        reader = ChangelogReader(
            lambda change: restore_change(task, change),
            stores=task.topology.schemas(),
            skip=self._settings.skipped_changelog_offsets(self.topic_partition.partition),
        )
        settings = ConsumerSettings(
            isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none", max_poll_records=None
        )
        async with Consumer(self._kafka, settings) as consumer:
            at = self.topic_partition
            consumer.assign([at])
            kept = await self._take_up_local(task, reader, report, consumer)
            covered = None if kept is not None else await self._load_snapshot(task, reader, report)
            first = (await consumer.beginning_offsets([at]))[at]
            end = (await consumer.end_offsets([at]))[at]
            consumer.seek(at, self._checked_start(covered, first, end) if kept is None else kept.verified_offset)
            reading = consumer, reader, task.local, report, kept
            await self._read_until(end, *reading)
            for _ in range(TAKEOVER_ATTEMPTS_MAX):
                epoch = reader.epoch + 1
                metadata = await self._write_takeover(epoch)
                await self._read_until(metadata.offset + 1, *reading)
                if reader.takeover_offset == metadata.offset:
                    break
                log.warning("another owner took over meanwhile", partition=at.partition, epoch=reader.epoch)
            else:
                raise KafkaTimeout(f"{at}: {TAKEOVER_ATTEMPTS_MAX} takeovers were overtaken by other owners'")
        if reader.progress is not None:
            restore_progress(task, reader.progress)
        task.epoch = epoch
        marks = 1 if self.exactly_once else 0  # a transaction's end takes an offset
        self._place = LogPlace(self._topic_id, metadata.offset + 1 + marks, marks)
        if task.local is not None:
            write_restored(reader, task.local, self._topic_id)
        report.changelog_windows = reader.entries_applied
        report.foreign_records = reader.foreign_records
        if reader.foreign_records:
            log.warning(
                "records that are no changelog entries were passed over",
                topic=at.topic,
                partition=at.partition,
                first_offset=reader.first_foreign_offset,
                records=reader.foreign_records,
            )

    async def _load_snapshot(self, task: StreamTask, reader: ChangelogReader, report: RestoreReport) -> int | None:
        """Load this partition's rows and return the offset from which the changelog goes on; None without snapshot."""
        settings, own = self._settings, self.topic_partition.partition
        if settings.lake is None:
            return None
        found = await asyncio.to_thread(
            lake.read_snapshot, settings.lake, settings.application_id, [own], settings.lake_options or None
        )
        if found is None or own not in found.partitions:
            return None
        snapshot = found.partitions[own]
        self._topic_id = await self._fetch_topic_id()
        if snapshot.topic_id not in (None, self._topic_id):
            raise ChangelogHole(
                f"the snapshot was made from topic {self.topic_partition.topic} with id {snapshot.topic_id}, but its "
                f"id is {self._topic_id}: it was deleted and created again. To start afresh, remove the application's "
                "tables from the lake."
            )
        progress = decode_progress(snapshot.progress)
        restore_progress(task, progress)
        started = self._clock.monotonic_ms()
        for schema in progress.stores:
            columns = [column.name for column in schema.state_columns()]
            batches = lake.read_windows(
                settings.lake,
                settings.application_id,
                own,
                schema.name,
                found.version,
                columns,
                settings.lake_options or None,
            )
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                restore_windows(task, schema, batch)
                report.snapshot_windows += batch.num_rows
                if task.local is not None and task.local.is_full:
                    task.local.write(None)
        report.snapshot_milliseconds = self._clock.monotonic_ms() - started
        reader.epoch, reader.progress = snapshot.epoch, progress
        report.snapshot_version = found.version
        return snapshot.covered_offset

    async def _take_up_local(
        self, task: StreamTask, reader: ChangelogReader, report: RestoreReport, consumer: Consumer
    ) -> Checkpoint | None:
        """Go on from what is on disk: up to where that is the state; None where it is not, or there is none."""
        if (local := task.local) is None:
            return None
        at, self._topic_id = self.topic_partition, await self._fetch_topic_id()
        if take_up(reader, local, task.topology.schemas()) is None or (found := local.checkpoint) is None:
            return None
        first = (await consumer.beginning_offsets([at]))[at]
        end = (await consumer.end_offsets([at]))[at]
        if (reason := refusal(found, self._topic_id, first, end)) is not None:
            discard(local, reason)
            reader.epoch, reader.progress = 0, None
            return None
        report.local_windows = sum(map(len, task.stores.values()))
        return found

    async def _fetch_topic_id(self) -> str | None:
        async with Admin(self._kafka) as admin:
            topic = self.topic_partition.topic
            return (await admin.describe_topics([topic]))[topic].topic_id

    def _checked_start(self, covered: int | None, first: int, end: int) -> int:
        at = self.topic_partition
        if covered is None:
            if first > 0:
                raise ChangelogHole(
                    f"{at}: offsets 0 to {first - 1} were deleted, and there is no snapshot that covers them"
                )
            return first
        if first > covered:
            raise ChangelogHole(f"{at}: offsets {covered} to {first - 1} are missing: the snapshot ends before them")
        if end < covered:
            raise ChangelogHole(f"{at}: the log ends at {end}, but the snapshot covers it up to {covered}")
        return covered

    async def _read_until(
        self,
        end: int,
        consumer: Consumer,
        reader: ChangelogReader,
        local: LocalState | None,
        report: RestoreReport,
        kept: Checkpoint | None,
    ) -> None:
        """Feed the reader up to `end`; what `kept` covers is only looked at, for another owner's takeover."""
        at = self.topic_partition
        position = await consumer.position(at)
        moved = self._clock.monotonic_ms()
        while position < end:
            for columns in (await consumer.poll(RESTORE_POLL_MS)).values():
                for offset, key, value in zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True):
                    try:
                        if kept is not None and offset < kept.covered_offset:
                            check_overtaken(kept, offset, value)
                        else:
                            reader.feed(offset, key, value)
                    except CorruptEntry as e:
                        where = f"{at} at offset {e.offset}"
                        raise CorruptRecord(f"{where}: {e.reason}. {way_out(at.partition, e.offset)}") from e
                report.changelog_records += len(columns)
                if local is not None and local.is_full:
                    write_restored(reader, local, self._topic_id)
            before, position, now = position, await consumer.position(at), self._clock.monotonic_ms()
            if position > before:
                moved = now
            elif now - moved > RESTORE_IDLE_MS_MAX:
                raise KafkaTimeout(f"{at}: restore stands at {position} of {end} for {now - moved} ms")

    # --- writing ---

    async def _write_takeover(self, epoch: int) -> RecordMetadata:
        takeover = Takeover(self._settings.application_id, self._instance, self._clock.now_ms())
        record = self._entries([(None, encode_takeover(epoch, takeover))])
        if not self.exactly_once:
            return await self._write(record)
        async with self._producer.transaction():
            return await self._write(record)

    def _entries(self, entries: list[tuple[bytes | None, bytes]]) -> RecordColumns:
        topic, partition = self.topic_partition
        return RecordColumns(topic, [key for key, _ in entries], [value for _, value in entries], None, partition)

    async def _write(self, *bulks: Bulk) -> RecordMetadata:
        """Write all of it: where the last record is; raises what explains why some of it was not."""
        deliveries = [(bulk, await self._producer.send_many(bulk)) for bulk in bulks if len(bulk)]
        errors = [await delivery.first_error() for _, delivery in deliveries]
        for (bulk, delivery), error in zip(deliveries, errors, strict=True):
            if error is not None:
                _raise_refusal(bulk, await delivery)
        for error in errors:
            if error is not None:
                raise error
        last = deliveries[-1][1].last()
        assert isinstance(last, RecordMetadata)
        return last


def _in_bulk(outputs: TaskOutputs) -> list[Bulk]:
    """The outputs in their order, records that follow each other as one list."""
    bulks: list[Bulk] = []
    for item in outputs.items:
        if isinstance(item, ResultColumns):
            bulks.append(RecordColumns(item.topic, item.keys, item.values, item.timestamps))
        elif bulks and isinstance(bulks[-1], list):
            bulks[-1].append(item)
        else:
            bulks.append([item])
    return bulks
