"""The ownership of one changelog partition: take over, restore, commit.

Taking over:

1. Open the producer. Under exactly_once this fences the previous owner and ends that owner's open transaction.
2. Read the log to its end, to know the highest epoch.
3. Write a takeover record with the next epoch.
4. Read up to that record. Commits that the previous owner ended before it are applied. Everything that the previous
   owner writes after it is ignored.
5. If another owner took over meanwhile, go to step 3 with an epoch above that owner's.

Detecting a takeover. Without transactions, a zombie (an owner that was suspended and has lost the partition) can still
write. No reader counts its commits, so they must not move the group's offsets. Therefore each commit checks whether it
begins where the previous one ended. If it does not, the owner reads the records between the two and looks for a
takeover record. It reads uncommitted records too, because a takeover in an open transaction counts from its offset. If
the log was replaced by another topic, the commit fails, with transactions too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import (
    ChangelogHole,
    CorruptRecord,
    DataError,
    InvalidTimestamp,
    KafkaTimeout,
    OffsetOutOfRange,
    PenstockError,
    ProducerFenced,
    RecordTooLarge,
    SchemaMismatch,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import (
    Columns,
    GroupMetadata,
    ProducerRecord,
    RecordColumns,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.changelog_reader import CorruptEntry, locate_corrupt_entry
from penstock.shared.streams.changelog.entry_columns import EntryColumns
from penstock.shared.streams.changelog.format import (
    PROGRESS,
    TAKEOVER,
    Takeover,
    decode_entry,
    decode_progress,
    encode_takeover,
    is_foreign_record,
    operation_of,
)
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer, fetch_changelog_topic_id
from penstock.shared.streams.runtime.partition_restore import (
    RESTORE_IDLE_MS_MAX,
    RESTORE_POLL_MS,
    RESTORE_RECORDS_MAX,
    PartitionRestore,
)
from penstock.shared.streams.runtime.restore_progress import RestoreProgress, RestoreReport
from penstock.shared.streams.runtime.source_positions import committed_position
from penstock.shared.streams.settings import DEAD_LETTER_OVERHEAD_MAX, StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.task.outputs import OutputBulk, TaskCommit, output_partition
from penstock.shared.streams.task.stream_task import StreamTask

if TYPE_CHECKING:
    from penstock.shared.streams.task.metrics import RestoreMetrics

log = get_logger(__name__)

PRODUCER_BATCH_BYTES = 256 * 1024
KEY_BYTES_SHOWN = 100
# A restore starts again if a compaction deletes records that it needs. Beyond this many attempts, it fails.
SNAPSHOT_ATTEMPTS_MAX = 5
TAKEOVER_ATTEMPTS_MAX = 10


class LogReplaced(PenstockError):
    """The changelog is not the one that its owner wrote to: a new topic of that name, or one that lost its end.

    The partition still has the same owner, which restores the task from the present changelog.
    """


class ChangelogPosition:
    """The position in a changelog partition at which its owner writes, and whether others write there too.

    `end` is the offset after the owner's last record. A commit is a number of entries, then its progress record.
    Between two commits are `markers` transaction markers. If the progress record has a higher offset than expected,
    others have written since the previous commit. If it has a lower offset, the log was replaced. A negative offset
    means that the broker did not return one.

    >>> position = ChangelogPosition("id", 10, markers=1)
    >>> position.between(entries=4, offset=15), position.between(entries=4, offset=17)
    (range(10, 10), range(10, 17))
    >>> position.written(offset=15)
    CommitPosition(topic_id='id', covered_offset=16)
    """

    def __init__(self, topic_id: str | None, end: int, markers: int) -> None:
        self.topic_id = topic_id
        self._end = end
        self._markers = markers

    def between(self, entries: int, offset: int) -> range:
        """Return the offsets at which others may have written before the owner's commit.

        The commit has `entries` entries, and its progress record is at `offset`. Raises LogReplaced if `offset` is too
        low to be in the same log as the previous commit.
        """
        least = self._end + self._markers + entries
        if 0 <= offset < least:
            raise LogReplaced(
                f"a commit is at offset {offset}, but the log ended at {least} before it: the topic (id "
                f"{self.topic_id} before) was recreated, or has lost its end"
            )
        # Others may have written before the marker of the previous commit, too.
        return range(self._end, offset if offset > least else self._end)

    def written(self, offset: int) -> CommitPosition:
        """Record the owner's commit that ends at `offset`, and return its position in the changelog."""
        if offset >= 0:
            self._end = offset + 1
        return CommitPosition(self.topic_id, offset + 1)


class RecordRejected(DataError):
    """The producer or the broker rejects one of a commit's records, because of its size or its timestamp.

    `is_entry` is whether the record is for the changelog.
    """

    def __init__(
        self,
        record: ProducerRecord,
        partition: int | None,
        bytes_max: int,
        reason: BaseException,
        *,
        is_entry: bool = False,
    ) -> None:
        size = record_size(record.key, record.value, list(record.headers))
        where = f"topic {record.topic}, partition {'unknown' if partition is None else partition}"
        # A dead letter or a late record may be larger than `max_request_size`.
        advice = f"the topic's max.message.bytes must be at least {size}, and not below max_request_size={bytes_max}"
        if isinstance(reason, InvalidTimestamp):
            advice = "max_future_ms must not be above the topic's message.timestamp.after.max.ms"
        super().__init__(
            f"{where}: {_describe_record(record, is_entry)}, {size} bytes, timestamp {record.timestamp}, was rejected: "
            f"{reason}; {advice}"
        )


def _describe_record(record: ProducerRecord, is_entry: bool) -> str:
    if record.key is not None:
        return f"the record of key {record.key[:KEY_BYTES_SHOWN]!r}"
    if is_entry and (entry := decode_entry(record.value)).operation == PROGRESS:
        schedules = len(decode_progress(entry.body).grids_ms)
        return f"the progress record (source offsets and {schedules} named schedules)"
    return "a record without a key"


def _find_rejected_record(
    records: OutputBulk, results: list[RecordMetadata | Exception]
) -> tuple[ProducerRecord, Exception] | None:
    """Return which record of a bulk was rejected, with its error; None if no error is about a single record.

    Of several records that are too large, return the largest. Of several with an invalid timestamp, return the one with
    the highest.
    """
    pairs = list(zip(records, results, strict=True))
    large = [(r, e) for r, e in pairs if isinstance(e, RecordTooLarge)]
    untimely = [(r, e) for r, e in pairs if isinstance(e, InvalidTimestamp)]
    if large:
        return max(large, key=lambda pair: len(pair[0].key or b"") + len(pair[0].value or b""))
    return max(untimely, key=lambda pair: pair[0].timestamp or 0) if untimely else None


RECORD_BYTES_MAX = 32 * 1024 * 1024
"""The bytes of a dead letter or a late record that the producer accepts, and of its buffer, unless
`streams.max_request_size` is larger."""


class ChangelogPartition:
    """Takes over one changelog partition for this instance, and writes the commits of its task."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: StreamsSettings,
        partition: int,
        instance: str,
        clock: Clock = SYSTEM_CLOCK,
        metrics: RestoreMetrics | None = None,
    ) -> None:
        self._kafka = kafka
        self._settings = settings
        self._instance = instance
        self._clock = clock
        self.topic_partition = TopicPartition(settings.changelog_topic, partition)
        self._log_position: ChangelogPosition
        self._epoch: int
        self._metrics = metrics
        self.progress: RestoreProgress | None = None
        """The progress of the restore; None before it begins."""
        self.exactly_once = settings.processing_guarantee == "exactly_once"
        transactional = settings.transactional_id(partition) if self.exactly_once else None
        # Outputs and entries are measured when they are made. A dead letter or a late record has a whole source record,
        # which its topic may have accepted compressed. So up to RECORD_BYTES_MAX only the limits of the topics apply.
        bytes_max = max(settings.max_request_size + DEAD_LETTER_OVERHEAD_MAX, RECORD_BYTES_MAX)
        self._producer = Producer(
            kafka,
            ProducerSettings(
                transactional_id=transactional,
                transaction_timeout_ms=settings.transaction_timeout_ms,
                max_request_size=bytes_max,
                buffer_memory=bytes_max,
                batch_size=PRODUCER_BATCH_BYTES,
                # A commit is handed over as a whole. To wait for more records would only delay it.
                linger_ms=0,
            ),
        )

    async def open(self) -> None:
        """Start the producer; under exactly_once this fences the former owner."""
        await self._producer.__aenter__()
        if self.exactly_once:
            await self._producer.init_transactions()

    async def close(self, timeout_ms: float | None = None) -> None:
        """Close the producer; an open transaction is aborted within `timeout_ms` (None: no limit)."""
        await self._producer.close(timeout_ms)

    async def take_over(
        self, make_task: Callable[[], StreamTask], standby: PartitionRestore | None = None
    ) -> tuple[StreamTask, RestoreReport]:
        """Restore a task and become the owner of its changelog.

        `make_task` returns an empty task. It is called for each attempt that does not continue the `standby`. Raises
        ChangelogHole, SchemaMismatch or CorruptRecord if the state cannot be restored completely.
        """
        started = self._clock.monotonic_ms()
        attempt = 0
        while True:
            attempt += 1
            # A standby is used once, and continues if the log still has the records that follow its position. A restore
            # that starts again begins with an empty task.
            restoring = standby or PartitionRestore(self._kafka, self._settings, make_task(), self._clock)
            standby = None
            restoring.progress = RestoreProgress(self.topic_partition.partition, self._metrics)
            self.progress = restoring.progress
            try:
                await self._restore_stores(restoring)
            except SchemaMismatch as e:
                raise SchemaMismatch(f"{self.topic_partition}: {e}") from e
            except OffsetOutOfRange as e:
                # Records after the start of the restore were deleted. A compaction does that after it has committed a
                # snapshot, so the next attempt finds a newer one.
                if attempt == SNAPSHOT_ATTEMPTS_MAX:
                    raise ChangelogHole(f"{self.topic_partition}: {e}") from e
                partition = self.topic_partition.partition
                log.warning("a restore starts again", partition=partition, attempt=attempt, reason=str(e))
            else:
                restoring.report.milliseconds = self._clock.monotonic_ms() - started
                return restoring.task, restoring.report
            finally:
                if self._metrics is not None:
                    self._metrics.remove_progress(self.topic_partition.partition)

    async def commit(self, commit: TaskCommit, group: GroupMetadata) -> CommitPosition:
        """Write one commit and return its position in the log. After an error the task must be discarded.

        Raises ProducerFenced if another owner has taken over the partition, or if the transaction took longer than
        `transaction_timeout_ms`. Raises LogReplaced if the changelog is another topic now, or has lost its end. Raises
        CorruptRecord if others have written a takeover record that cannot be decoded.
        """
        partition = self.topic_partition.partition
        offsets = {TopicPartition(topic, partition): committed_position(at) for topic, at in commit.sources.items()}
        entries = self._changelog_records(commit.changelog[:-1])
        progress = self._changelog_records(commit.changelog[-1:])
        topics = commit.produced.topics_by_source_key()
        commit.produced.assign_partitions({topic: await self._producer.partitions_for(topic) for topic in topics})
        outputs = commit.produced.bulks()
        if self.exactly_once:
            # Results, changelog and source offsets take effect together. With the group's metadata the coordinator
            # rejects a member of an old generation (KIP-447).
            async with self._producer.transaction():
                last = await self._write_records(*outputs, entries, progress)
                # The broker has fenced former owners. This finds a log that was replaced, before the transaction
                # commits.
                await self._require_in_force(self._foreign_write_offsets(len(entries), last))
                if offsets:
                    await self._producer.send_offsets_to_transaction(offsets, group)
        else:
            if len(entries) or outputs:
                before = await self._write_records(*outputs, entries)
                if len(entries):
                    # In a replaced log nothing may be confirmed.
                    self._foreign_write_offsets(len(entries) - 1, before)
            # The progress record confirms the entries, so all of them must be in the log before it.
            last = await self._write_records(progress)
            # Another owner may have taken over since the previous commit.
            await self._require_in_force(self._foreign_write_offsets(len(entries), last))
        return self._log_position.written(last.offset)

    # --- restore ---

    async def _restore_stores(self, restoring: PartitionRestore) -> None:
        reader = restoring.reader
        at = self.topic_partition
        async with restoring.consumer() as consumer:
            # Step 2.
            end = await restoring.begin(consumer)
            await restoring.compare_newest(end, consumer)
            await restoring.read_until(end, consumer)
            for _ in range(TAKEOVER_ATTEMPTS_MAX):
                # Step 3.
                epoch = restoring.next_epoch()
                metadata = await self._write_takeover(epoch)
                # Step 4.
                await restoring.read_until(metadata.offset + 1, consumer)
                # Step 5. Another owner's record may have come first, with the same epoch or a higher one.
                if reader.takeover_offset == metadata.offset:
                    break
                log.warning("another owner took over meanwhile", partition=at.partition, epoch=reader.epoch)
            else:
                raise KafkaTimeout(f"{at}: {TAKEOVER_ATTEMPTS_MAX} takeovers were overtaken by other owners'")
        restoring.finish(epoch)
        self._epoch = epoch
        # The marker that ends a transaction takes an offset.
        markers = 1 if self.exactly_once else 0
        self._log_position = ChangelogPosition(restoring.topic_id, metadata.offset + 1, markers)

    def _foreign_write_offsets(self, entries: int, last: RecordMetadata) -> range:
        """Return the offsets at which others may have written before a commit. Raises LogReplaced for another log."""
        try:
            return self._log_position.between(entries, last.offset)
        except LogReplaced as e:
            raise LogReplaced(f"{self.topic_partition}: {e}") from None

    async def _require_in_force(self, others: range) -> None:
        """Raise ProducerFenced if a takeover record with a higher epoch is at one of the offsets `others`.

        `others` are the offsets at which others may have written before a commit. If there are any, raises LogReplaced
        if the changelog was deleted and created again, and CorruptRecord if a takeover record cannot be decoded.
        """
        if not others:
            return
        was = self._log_position.topic_id
        now = await fetch_changelog_topic_id(self._kafka, self.topic_partition.topic)
        if now != was:
            raise LogReplaced(
                f"{self.topic_partition}: the topic was deleted and created again: its id was {was} and is now {now}"
            )
        # A read_uncommitted consumer does not wait for open transactions. It also finds takeovers that were aborted.
        # These cause a needless restore, which does no harm.
        async with changelog_consumer(self._kafka, "read_uncommitted") as consumer:
            offset = await find_takeover(consumer, self.topic_partition, others, self._epoch)
        if offset is not None:
            raise ProducerFenced(f"{self.topic_partition}: another owner has taken it over at offset {offset}")

    # --- writing ---

    async def _write_takeover(self, epoch: int) -> RecordMetadata:
        takeover = Takeover(self._settings.application_id, self._instance, self._clock.now_ms())
        record = self._changelog_records(EntryColumns.of([(None, encode_takeover(epoch, takeover))]))
        if not self.exactly_once:
            return await self._write_records(record)
        async with self._producer.transaction():
            return await self._write_records(record)

    def _changelog_records(self, entries: EntryColumns) -> RecordColumns:
        topic, partition = self.topic_partition
        return RecordColumns(topic, entries.keys, entries.values, None, partition)

    async def _write_records(self, *bulks: OutputBulk) -> RecordMetadata:
        """Write all records and return the last one's metadata; raises the error that explains a failure."""
        deliveries = [(bulk, await self._producer.send_many(bulk)) for bulk in bulks if len(bulk)]
        errors = [await delivery.first_error() for _, delivery in deliveries]
        # An error that names a record is the cause. Others may only say that the transaction cannot be committed.
        for (bulk, delivery), error in zip(deliveries, errors, strict=True):
            if error is not None and (found := _find_rejected_record(bulk, await delivery)) is not None:
                record, reason = found
                partition = record.partition
                if partition is None and record.key is not None:
                    partition = output_partition(record.key, await self._producer.partitions_for(record.topic))
                is_entry = record.topic == self.topic_partition.topic
                bytes_max = self._settings.max_request_size
                raise RecordRejected(record, partition, bytes_max, reason, is_entry=is_entry) from reason
        for error in errors:
            if error is not None:
                raise error
        last = deliveries[-1][1].last()
        assert isinstance(last, RecordMetadata)
        return last


async def find_takeover(
    consumer: Consumer, at: TopicPartition, span: range, epoch: int, timeout_ms: int = RESTORE_IDLE_MS_MAX
) -> int | None:
    """Return the first offset in `span` at which an owner above `epoch` took over the changelog partition, or None.

    The `consumer` must be read_uncommitted, so takeovers of aborted transactions are found too. Raises OffsetOutOfRange
    if the span was deleted, KafkaTimeout if its records do not come within `timeout_ms`, and CorruptRecord if a
    takeover record cannot be decoded.
    """
    consumer.assign([at])
    consumer.seek(at, span.start)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while await consumer.position(at) < span.stop:
                for columns in (await consumer.poll(RESTORE_POLL_MS, RESTORE_RECORDS_MAX)).values():
                    if (offset := _find_takeover(columns, span, epoch)) is not None:
                        return offset
    except TimeoutError:
        spanned = f"offsets {span.start} to {span.stop - 1}"
        raise KafkaTimeout(f"{at}: the records at {spanned} were not received within {timeout_ms} ms") from None
    return None


def _find_takeover(columns: Columns, span: range, epoch: int) -> int | None:
    for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
        # Readers stop at other entries that cannot be decoded, but the owner's commits count.
        if offset not in span or is_foreign_record(value) or operation_of(value) != TAKEOVER:
            continue
        try:
            entry = decode_entry(value)
        except CorruptRecord as e:
            # Its epoch is not known, so commits after it may not count.
            raise locate_corrupt_entry(columns.topic_partition, CorruptEntry(offset, str(e))) from None
        if entry.takes_over_from(epoch):
            return int(offset)
    return None
