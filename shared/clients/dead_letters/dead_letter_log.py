"""Reads a dead-letter topic, and sends its dead letters back to their source topics.

The replays of a dead-letter topic share one consumer group, in which each commits its progress. The commit's metadata
also contains the offsets of the dead letters that were sent although an earlier record was not. So after a replay of
some dead letters (by stage, by exception) another replay sends only the rest. Delivery is at least once: dead letters
that were acknowledged but not committed before a crash are sent again.

Kafka deletes the progress `offsets.retention.minutes` after the last replay. A group that lost its progress looks
like one that never had any, so the next replay then sends all dead letters again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, parse_dead_letter, replay_record
from penstock.shared.clients.parallel_consumer.commit_metadata import Ranges, decode_finished
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution, KeyScheduler
from penstock.shared.clients.parallel_consumer.partition_progress import Work
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import DataError, IllegalState, InvalidRequest, PenstockError
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, RecordMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings

POLL_TIMEOUT_MS = 1_000
IN_FLIGHT_MAX = 1_000
"""The maximum number of replayed records that are not acknowledged yet."""
LEFT_OUT_MAX = 100_000
"""A replay that has left out this many records of one partition raises InvalidRequest: it keeps each in memory."""
LARGEST_RECORD_BYTES = 64 * 1024 * 1024
"""The largest record that a replay sends. A dead letter was a stored record, so the broker's limit decides."""
NEVER_MS = 2**62
ERRORS_MAX = 10
"""The maximum number of errors in a replay's result."""

Wanted = Callable[[DeadLetter], bool]
Parse = Callable[[ConsumerRecord], DeadLetter]
"""Parses a record of the topic into a dead letter. Raises DataError if it is not one that the topic is for."""


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A record of the topic with its position.

    If the record is not a dead letter, `dead_letter` is None and `fault` has the reason.
    """

    topic_partition: TopicPartition
    offset: int
    written_ms: int
    dead_letter: DeadLetter | None
    replayed: bool = False
    fault: str = ""

    def is_replayable(self, wanted: Wanted, *, include_replayed: bool) -> bool:
        """Return whether `DeadLetterLog.replay` with these arguments sends the record."""
        if self.dead_letter is None or self.dead_letter.cut or (self.replayed and not include_replayed):
            return False
        return wanted(self.dead_letter)


@dataclass(slots=True)
class ReplayResult:
    """The result of a replay: the number of records sent, failed and skipped, and of records that are no dead letters.

    A skipped dead letter is not wanted, or was cut. One that an earlier replay sent is not counted.
    """

    sent: int = 0
    failed: int = 0
    skipped: int = 0
    faults: int = 0
    errors: tuple[str, ...] = ()


def replay_group(dead_letter_topic: str) -> str:
    """Return the consumer group in which replays of a dead-letter topic keep their progress."""
    return f"penstock-dlq-replay-{dead_letter_topic}"


def replay_producer_settings() -> ProducerSettings:
    """Return the settings of the producer that replays dead letters: its buffer holds two of LARGEST_RECORD_BYTES."""
    return ProducerSettings(
        max_request_size=LARGEST_RECORD_BYTES, buffer_memory=2 * LARGEST_RECORD_BYTES, compression_type="zstd"
    )


class DeadLetterLog:
    """One dead-letter topic, from its beginning to the end that it has when it is opened; an async context manager.

    `async with` raises UnknownTopicOrPartition if the topic does not exist. Each call of `batches`, `entries` and
    `replay` reads from the beginning. Use one at a time: they share a consumer. If the commit metadata of the topic's
    `replay_group` is damaged, the dead letters from the committed offset on count as not replayed.
    """

    def __init__(self, kafka: KafkaSettings, topic: str, parse: Parse = parse_dead_letter) -> None:
        self.topic = topic
        self._parse = parse
        settings = ConsumerSettings(
            group_id=replay_group(topic),
            auto_offset_reset="earliest",
            commit_strategy="none",
            isolation_level="read_committed",
        )
        self._kafka = kafka
        self._consumer = Consumer(kafka, settings)
        self._ends: dict[TopicPartition, int] = {}
        self.committed: dict[TopicPartition, OffsetAndMetadata | None] = {}
        self._finished: dict[TopicPartition, Ranges] = {}

    async def __aenter__(self) -> DeadLetterLog:
        async with Admin(self._kafka) as admin:
            described = (await admin.describe_topics([self.topic]))[self.topic]
        partitions = [TopicPartition(self.topic, each.partition) for each in described.partitions]
        await self._consumer.__aenter__()
        try:
            self._consumer.assign(partitions)
            self._ends = await self._consumer.end_offsets(partitions)
            self._set_committed(await self._consumer.committed(partitions))
        except BaseException:
            await self._consumer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._consumer.close()

    def _set_committed(self, committed: Mapping[TopicPartition, OffsetAndMetadata | None]) -> None:
        self.committed.update(committed)
        self._finished.update({p: _finished_ranges(c) for p, c in committed.items() if c})

    @property
    def has_progress(self) -> bool:
        """Whether there is progress of an earlier replay. Otherwise all dead letters count as not replayed."""
        return any(self.committed.values())

    async def batches(self) -> AsyncGenerator[Columns, None]:
        """Yield all records, up to the end. Each batch has records of one partition, in offset order."""
        await self._consumer.seek_to_beginning(*self._ends)
        left = set(self._ends)
        while left:
            for partition, columns in (await self._consumer.poll(POLL_TIMEOUT_MS)).items():
                yield columns[: int(columns.offsets.searchsorted(self._ends[partition]))]
            left = {p for p in left if await self._consumer.position(p) < self._ends[p]}

    async def entries(self) -> AsyncGenerator[DeadLetterEntry, None]:
        """Yield every record as an entry, with whether it was replayed."""
        async for columns in self.batches():
            for record in columns.records():
                yield self._parse_entry(record, self.replayed(record.topic_partition, record.offset))

    def _parse_entry(self, record: ConsumerRecord, replayed: bool) -> DeadLetterEntry:
        try:
            dead_letter = self._parse(record)
            fault = ""
        except DataError as e:
            dead_letter = None
            fault = str(e)
        return DeadLetterEntry(record.topic_partition, record.offset, record.timestamp, dead_letter, replayed, fault)

    def replayed(self, partition: TopicPartition, offset: int) -> bool:
        """Whether an earlier replay sent the record."""
        committed = self.committed[partition]
        if committed is None:
            return False
        return offset < committed.offset or any(first <= offset <= last for first, last in self._finished[partition])

    def _replayed_parts(self, columns: Columns) -> Iterator[Columns]:
        """Yield the records of a batch that earlier replays sent, in offset order."""
        committed = self.committed[columns.topic_partition]
        if committed is None:
            return
        for first, last in ((0, committed.offset - 1), *self._finished[columns.topic_partition]):
            part = columns[int(columns.offsets.searchsorted(first)) : int(columns.offsets.searchsorted(last + 1))]
            if len(part):
                yield part

    async def replay(
        self, producer: Producer, wanted: Wanted, *, limit: int, include_replayed: bool = False, to: str | None = None
    ) -> ReplayResult:
        """Send the dead letters that `wanted` selects, at most `limit`, to their source topics, or all to the topic
        `to`. Records that Kafka rejects count towards `limit`; those whose topic cannot be used do not.

        Dead letters that were cut are never sent. Those that were replayed before are sent again only if
        `include_replayed` is True. In its source topic a record goes to its original partition if that exists.
        In every other case the producer's partitioner chooses.

        Each record that could not be sent counts as failed. If Kafka rejects it (DataError), or if its topic does not
        exist or cannot be used, the replay continues. After any other error, no further batch is read.

        If the call is cancelled, it waits for the requests in flight and commits what they have stored. It calls
        `abort_pending` of the producer, so that no other record is sent.

        Raises InvalidRequest if too many records of a partition are left out: LEFT_OUT_MAX, or more than a commit's
        metadata can hold. Raises DataError if the metadata of the last replay's commit is damaged and
        `include_replayed` is False.
        """
        # 1. Begin with the progress of earlier replays: the scheduler skips the dead letters that they sent.
        scheduler = KeyScheduler("unordered", IN_FLIGHT_MAX, buffered_records_max=LEFT_OUT_MAX)
        # Has the dead letters that were replayed before. To send them again does not change the progress.
        again = KeyScheduler("unordered", IN_FLIGHT_MAX)
        for partition, committed in self.committed.items():
            again.assign(partition, None)
            try:
                scheduler.assign(partition, committed)
            except DataError as e:
                if committed is None or not include_replayed:
                    raise DataError(
                        f"{partition}: {e}. It is not known which later dead letters were replayed: replay all again "
                        "with include_replayed"
                    ) from None
                # "damaged" has no progress, and differs from the metadata of every commit: the next commit replaces it.
                scheduler.assign(partition, committed._replace(metadata="damaged"))
        result = ReplayResult()
        unusable: dict[str, PenstockError] = {}
        tried = 0
        is_complete = True
        try:
            # 2. Send the wanted dead letters, batch by batch.
            async for columns in self.batches():
                if include_replayed:
                    for replayed in self._replayed_parts(columns):
                        again.deliver(replayed)
                position = self.committed[columns.topic_partition]
                if position is not None:
                    columns = columns[int(columns.offsets.searchsorted(position.offset)) :]
                scheduler.deliver(columns)
                for each in (again, scheduler):
                    while chosen := self._choose_dead_letters(each, wanted, limit - tried, result):
                        sent, goes_on = await self._send_dead_letters(producer, each, chosen, result, to, unusable)
                        tried += sent
                        is_complete &= goes_on
                # 3. Raise if the partition has too many records that were not sent. There are two limits: the length of
                #    a commit's metadata, and the number of records in memory.
                failed = ", ".join(f"{topic} ({type(error).__name__})" for topic, error in unusable.items())
                cause = f". These topics cannot be used: {failed}" if failed else ""
                match scheduler.paused().get(columns.topic_partition):
                    case "metadata":
                        raise InvalidRequest(
                            f"{columns.topic_partition}: more dead letters are left out than a commit can remember; "
                            f"replay the earlier ones first{cause}"
                        )
                    case "buffer":
                        raise InvalidRequest(
                            f"{columns.topic_partition}: {LEFT_OUT_MAX} records or more are left out, including those "
                            f"that are no dead letters; replay or delete the earlier ones first{cause}"
                        )
                if tried >= limit or not is_complete:
                    break
        finally:
            # 4. Commit what was sent, also after an error. Commit the other partitions again, although their progress
            #    is the same: each partition's expires by its own last commit. Another replay may have committed them
            #    since this one began, so read their offsets again.
            before = [partition for partition, committed in self.committed.items() if committed]
            newest = await self._consumer.committed(before)
            offsets = {partition: committed for partition, committed in newest.items() if committed}
            if result.sent:
                offsets |= scheduler.committable()
            if offsets:
                await self._consumer.commit(offsets)
                self._set_committed(offsets)
        return result

    def _choose_dead_letters(
        self, scheduler: KeyScheduler, wanted: Wanted, room: int, result: ReplayResult
    ) -> list[tuple[Execution, Work, DeadLetter]]:
        """Return the next dead letters to send, at most `room`.

        Of the other records, those that an earlier replay sent are settled as finished. All others stay unfinished, so
        that a later replay finds them.
        """
        chosen: list[tuple[Execution, Work, DeadLetter]] = []
        count_max = min(room, IN_FLIGHT_MAX)
        size = 0
        # All fit into the buffer of `replay_producer_settings`: a `send_many` that is cancelled as it waits for the
        # buffer has no outcomes.
        while len(chosen) < count_max and size < LARGEST_RECORD_BYTES and (execution := scheduler.take(0)):
            (work,) = execution.works
            dead_letter = None
            try:
                dead_letter = self._parse(work.record)
            except DataError:
                result.faults += 1
            if dead_letter is not None and dead_letter.cut and wanted(dead_letter) and len(result.errors) < ERRORS_MAX:
                at = f"{execution.topic_partition}@{work.offset}"
                result.errors += (f"{at}: not sent, because it was cut (before: {dead_letter.cut})",)
            if dead_letter is not None and not dead_letter.cut and wanted(dead_letter):
                chosen.append((execution, work, dead_letter))
                size += len(dead_letter.record.key or b"") + len(dead_letter.record.value or b"")
            elif self.replayed(execution.topic_partition, work.offset):
                scheduler.settle(execution, finished=[work])
            else:
                result.skipped += dead_letter is not None
                scheduler.settle(execution, retry=[work], due_ms=NEVER_MS)
        return chosen

    async def _send_dead_letters(
        self,
        producer: Producer,
        scheduler: KeyScheduler,
        chosen: list[tuple[Execution, Work, DeadLetter]],
        result: ReplayResult,
        to: str | None,
        unusable: dict[str, PenstockError],
    ) -> tuple[int, bool]:
        """Send the chosen dead letters, except those whose topics are unusable.

        Returns the number of those it tried to send, and whether each of these was sent or rejected by Kafka. Adds to
        `unusable` the topics whose partitions cannot be found, each with the error.
        """
        known: dict[str, set[int]] = {}
        for topic in {to or dead_letter.record.topic for _, _, dead_letter in chosen} - unusable.keys():
            try:
                known[topic] = set(await producer.partitions_for(topic))
            except IllegalState:
                raise
            except PenstockError as e:
                unusable[topic] = e
        sent = []
        goes_on = True
        for execution, work, dead_letter in chosen:
            topic = to or dead_letter.record.topic
            if topic in unusable:
                _note_outcome(scheduler, execution, work, unusable[topic], result)
                continue
            partition = dead_letter.record.partition
            if topic == dead_letter.record.topic:
                record = replay_record(dead_letter, partition if partition in known[topic] else None)
            else:
                record = replace(replay_record(dead_letter, None), topic=topic)
            sent.append((execution, work, record))
        deliveries = await producer.send_many([record for _, _, record in sent])
        interrupted: asyncio.CancelledError | None = None
        try:
            outcomes = await deliveries
        except asyncio.CancelledError as e:
            # Records of a request may be stored: wait for its response. The others must not be sent by the close.
            interrupted = e
            producer.abort_pending()
            outcomes = await deliveries
        # Note each outcome as soon as it is known, so that an interrupted replay commits what it has sent.
        rejected = []
        for (execution, work, record), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, DataError):
                rejected.append((execution, work, record))
            else:
                goes_on &= _note_outcome(scheduler, execution, work, outcome, result)
        if interrupted is not None:
            raise interrupted
        # Kafka may reject a whole batch because of one record: if it names no record, or if an earlier attempt may have
        # stored the batch. So send each rejected record again, alone.
        for execution, work, record in rejected:
            (outcome,) = await (await producer.send_many([record]))
            goes_on &= _note_outcome(scheduler, execution, work, outcome, result)
        return len(sent), goes_on


def _note_outcome(
    scheduler: KeyScheduler, execution: Execution, work: Work, outcome: RecordMetadata | Exception, result: ReplayResult
) -> bool:
    """Settle a record by the outcome of its send. Returns whether it was sent, or rejected by Kafka."""
    if isinstance(outcome, RecordMetadata):
        scheduler.settle(execution, finished=[work])
        result.sent += 1
        return True
    scheduler.settle(execution, retry=[work], due_ms=NEVER_MS)
    result.failed += 1
    if len(result.errors) < ERRORS_MAX:
        at = f"{execution.topic_partition}@{work.offset}"
        result.errors += (f"{at}: {type(outcome).__name__}: {outcome}",)
    return isinstance(outcome, DataError)


def _finished_ranges(committed: OffsetAndMetadata) -> Ranges:
    """Return the finished ranges in a commit's metadata, none if it is damaged."""
    try:
        return decode_finished(committed)
    except DataError:
        return ()


def dead_letter_filter(
    stage: str | None, exception: str | None, source_partitions: Iterable[int] = (), source: str | None = None
) -> Wanted:
    """Return a filter of the dead letters in a `DeadLetterLog` by stage, exception class, source partitions and topic.

    `exception` is the full name of the class, or the name's last part.
    """
    partitions = frozenset(source_partitions)

    def is_wanted_dead_letter(dead_letter: DeadLetter) -> bool:
        return (
            (stage is None or dead_letter.stage == stage)
            and (exception is None or exception in (dead_letter.exception, dead_letter.exception.rpartition(".")[2]))
            and (not partitions or dead_letter.record.partition in partitions)
            and source in (None, dead_letter.record.topic)
        )

    return is_wanted_dead_letter
