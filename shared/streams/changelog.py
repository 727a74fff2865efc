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
from shared.streams.restore import restore_change, restore_progress, restore_windows
from shared.streams.settings import REFUSAL_BYTES_MAX, StreamsSettings
from shared.streams.stream_task import StreamTask
from shared.streams.task_outputs import ResultColumns, TaskCommit, TaskOutputs

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
    windows took `snapshot_milliseconds` of the `milliseconds`.
    """

    snapshot_version: int | None = None
    snapshot_windows: int = 0
    changelog_records: int = 0
    changelog_windows: int = 0
    foreign_records: int = 0
    milliseconds: int = 0
    snapshot_milliseconds: int = 0


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
            except OffsetOutOfRange as e:
                if attempt == SNAPSHOT_ATTEMPTS_MAX:
                    raise ChangelogHole(f"{self.topic_partition}: {e}") from e
                log.warning("the changelog moved on during a restore", partition=task.partition, attempt=attempt)
            else:
                report.milliseconds = self._clock.monotonic_ms() - started
                return task, report
        raise AssertionError("unreachable")

    async def commit(self, commit: TaskCommit, group: GroupMetadata) -> None:
        """Write one commit; raises where it did not, or may not, hold: then the task must be discarded."""
        partition = self.topic_partition.partition
        offsets = {TopicPartition(topic, partition): OffsetAndMetadata(at) for topic, at in commit.sources.items()}
        entries, progress = self._entries(commit.changelog[:-1]), self._entries(commit.changelog[-1:])
        outputs = _in_bulk(commit.produced)
        if self.exactly_once:
            async with self._producer.transaction():
                await self._write(*outputs, entries, progress)
                if offsets:
                    await self._producer.send_offsets_to_transaction(offsets, group)
        else:
            await self._write(*outputs, entries)
            await self._write(progress)  # it confirms the entries: only when all are written

    # --- restore ---

    async def _restore(self, task: StreamTask, report: RestoreReport) -> None:
        reader = ChangelogReader(
            lambda change: restore_change(task, change),
            stores=task.topology.schemas(),
            skip=self._settings.skipped_changelog_offsets(self.topic_partition.partition),
        )
        start = await self._load_snapshot(task, reader, report)
        settings = ConsumerSettings(
            isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none", max_poll_records=None
        )
        async with Consumer(self._kafka, settings) as consumer:
            at = self.topic_partition
            consumer.assign([at])
            first = (await consumer.beginning_offsets([at]))[at]
            end = (await consumer.end_offsets([at]))[at]
            start = await self._checked_start(start, first, end)
            consumer.seek(at, start)
            await self._read_until(consumer, reader, end, report)
            for _ in range(TAKEOVER_ATTEMPTS_MAX):
                epoch = reader.epoch + 1
                metadata = await self._write_takeover(epoch)
                await self._read_until(consumer, reader, metadata.offset + 1, report)
                if reader.takeover_offset == metadata.offset:
                    break
                log.warning("another owner took over meanwhile", partition=at.partition, epoch=reader.epoch)
            else:
                raise KafkaTimeout(f"{at}: {TAKEOVER_ATTEMPTS_MAX} takeovers were overtaken by other owners'")
        if reader.progress is not None:
            restore_progress(task, reader.progress)
        task.epoch = epoch
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
        await self._check_topic_id(snapshot.topic_id)
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
        report.snapshot_milliseconds = self._clock.monotonic_ms() - started
        reader.epoch, reader.progress = snapshot.epoch, progress
        report.snapshot_version = found.version
        return snapshot.covered_offset

    async def _check_topic_id(self, expected: str | None) -> None:
        async with Admin(self._kafka) as admin:
            topic = self.topic_partition.topic
            actual = (await admin.describe_topics([topic]))[topic].topic_id
        if expected is not None and actual != expected:
            raise ChangelogHole(
                f"the snapshot was made from topic {topic} with id {expected}, but its id is {actual}: it was deleted "
                "and created again. To start afresh, remove the application's tables from the lake."
            )

    async def _checked_start(self, covered: int | None, first: int, end: int) -> int:
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

    async def _read_until(self, consumer: Consumer, reader: ChangelogReader, end: int, report: RestoreReport) -> None:
        at = self.topic_partition
        position = await consumer.position(at)
        moved = self._clock.monotonic_ms()
        while position < end:
            for columns in (await consumer.poll(RESTORE_POLL_MS)).values():
                for offset, key, value in zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True):
                    try:
                        reader.feed(offset, key, value)
                    except CorruptEntry as e:
                        where = f"{at} at offset {e.offset}"
                        raise CorruptRecord(f"{where}: {e.reason}. {way_out(at.partition, e.offset)}") from e
                report.changelog_records += len(columns)
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
            return await self._write_one(record)
        async with self._producer.transaction():
            return await self._write_one(record)

    def _entries(self, entries: list[tuple[bytes | None, bytes]]) -> RecordColumns:
        topic, partition = self.topic_partition
        return RecordColumns(topic, [key for key, _ in entries], [value for _, value in entries], None, partition)

    async def _write(self, *bulks: Bulk) -> None:
        """Write all of it; raises what explains why some of it was not."""
        deliveries = [(bulk, await self._producer.send_many(bulk)) for bulk in bulks if len(bulk)]
        errors = [await delivery.first_error() for _, delivery in deliveries]
        for (bulk, delivery), error in zip(deliveries, errors, strict=True):
            if error is not None:
                _raise_refusal(bulk, await delivery)
        for error in errors:
            if error is not None:
                raise error

    async def _write_one(self, record: RecordColumns) -> RecordMetadata:
        [result] = await (await self._producer.send_many(record))
        if isinstance(result, Exception):
            raise result
        return result


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
