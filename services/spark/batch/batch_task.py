"""A batch's task: takes one partition over, reads its input and commits, in a Python worker of Spark.

The input is the partition of the source topics up to their end offsets, or rows of files. The task processes it as a
live worker does; only the loop differs. Its transactional id fences the previous owner. Its state is restored from the
lake and the changelog's tail. A commit is one transaction of results, late records, changelog and source offsets. With
rows of files, only the last commit has source offsets. Commits are large, so that a window that opens and closes within
one commit is written once. A task that Spark retries restores the state of the last commit and continues from there.

An error that Spark must not retry is returned as a result instead of raised:

1. A live instance started. A task looks up the group's members before it takes its partition over and when it is
   fenced. If there are members, they own the partition.
2. A retry would raise the same error: state of another topology or of other files, a record that cannot be handled.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from prometheus_client import CollectorRegistry
from pyspark import TaskContext

from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.errors import TaskFailure
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.arrow_arrays import packed
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    PRODUCER_LOST,
    ConfigError,
    DataError,
    FatalError,
    KafkaTimeout,
    OffsetOutOfRange,
    SourceOffsetsMissing,
)
from penstock.shared.common.log import configure, get_logger
from penstock.shared.common.records import Columns, GroupMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import BatchInput, require_whole_input
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, LogReplaced
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer
from penstock.shared.streams.runtime.source_positions import SourcePositions
from penstock.shared.streams.runtime.stream_task_factory import StreamTaskFactory
from penstock.shared.streams.task.inputs import TaskInputs, process_input_records
from penstock.shared.streams.task.metrics import Totals
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology_loading import load_topology

log = get_logger(__name__)

POLL_MS = 500
POLL_RECORDS = 50_000
# A fetch returns at most this much of a partition. A task reads few partitions, so it can afford large fetches.
FETCH_BYTES = 8 * 1024 * 1024
# A task fails if it waits for records this long without progress before the end offset.
IDLE_MS_MAX = 60_000
STABLE_POLL_S = 0.01
# A task waits this long for the markers of its last transaction, which are written after the commit's response.
STABLE_MS_MAX = 10_000


class TaskOptions(NamedTuple):
    """The options of all tasks of a batch. `folder` is added to Python's path, for the topology's module."""

    settings: BatchSettings
    folder: str


class PartitionRange(msgspec.Struct, frozen=True):
    """A partition for a batch to read, with its end offset by source topic."""

    partition: int
    ends: dict[str, int]


class FileInput(msgspec.Struct, frozen=True):
    """Files as the input of a batch, in place of the records of `topic`.

    `live_from` has, by topic and partition, the offset at which the live instance begins. `done` are the partitions
    of which all rows have been read.
    """

    fingerprint: str
    topic: str
    live_from: dict[str, dict[int, int]]
    source_ids: dict[str, str]
    done: tuple[int, ...]

    def reached(self, rows: int, *, is_done: bool = False) -> BatchInput:
        """Return the input that a commit records after `rows` rows of its partition."""
        return BatchInput(self.fingerprint, rows, is_done, self.live_from)


class TaskResult(msgspec.Struct, frozen=True):
    """The result of a batch's task. `fenced` names the live instances if the task ended because some run."""

    partition: int
    read: int = 0
    totals: Totals = Totals()
    commits: int = 0
    sources: dict[str, int] = {}
    fenced: str | None = None
    failure: TaskFailure | None = None


async def find_live_instances(kafka: KafkaSettings, group: str) -> str | None:
    """Return a sentence that names the live instances, which are the group's members; None if none run.

    A batch's task would fence them. So the driver checks this before a batch, and each task before it takes its
    partition over.
    """
    async with Admin(kafka) as admin:
        found = (await admin.describe_group(group)).members
    names = ", ".join(sorted(f"{one.client_id} at {one.host.lstrip('/')}" for one in found))
    return f"the group {group} has members: {names}" if found else None


def run_topics(options: TaskOptions) -> Callable[[bytes], Iterator[bytes]]:
    """Return the function of a batch's task that reads topics.

    It takes a PartitionRange and yields its TaskResult, both as msgpack.
    """

    def read_topics_of_range(encoded: bytes) -> Iterator[bytes]:
        of = msgspec.msgpack.decode(encoded, type=PartitionRange)
        yield msgspec.msgpack.encode(_run_task(options, of.partition, lambda batch: batch.read_topics(of.ends)))

    return read_topics_of_range


def run_files(options: TaskOptions, source: FileInput) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function of a batch's task that reads rows of files, for mapInArrow.

    It takes a partition's ordered rows (timestamp_ms, key, value) and yields one row, `outcome`: its TaskResult as
    msgpack. The partitions in `source.done` are not processed.
    """

    def read_rows_of_partition(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        if partition in source.done:
            result = TaskResult(partition)
        else:
            result = _run_task(options, partition, lambda batch: batch.read_rows(source, batches))
        yield pa.record_batch([pa.array([msgspec.msgpack.encode(result)], pa.binary())], names=["outcome"])

    return read_rows_of_partition


def begin_files(options: TaskOptions, source: FileInput) -> Callable[[int], Iterator[bytes]]:
    """Return the function of a task that makes a new partition's first commit, before rows of files are read."""

    def begin_rows_of_partition(partition: int) -> Iterator[bytes]:
        yield msgspec.msgpack.encode(_run_task(options, partition, lambda batch: batch.begin_rows(source)))

    return begin_rows_of_partition


Work = Callable[["PartitionBatch"], Any]


def _run_task(options: TaskOptions, partition: int, work: Work) -> TaskResult:
    configure(options.settings.log, "batch")
    return asyncio.run(_run_partition_batch(options, partition, work))


async def _run_partition_batch(options: TaskOptions, partition: int, work: Work) -> TaskResult:
    kafka = options.settings.kafka
    group = options.settings.application
    try:
        # Before the takeover, since it would fence a live instance that works correctly.
        if live := await find_live_instances(kafka, group):
            return TaskResult(partition, fenced=live)
        async with PartitionBatch(options, partition).owned() as batch:
            await work(batch)
            return batch.result()
    # 1. A live instance fenced this task, if the group has members now. Otherwise another attempt of the task has the
    #    partition, the transaction timed out, the broker lost the producer's state, or the changelog was created again:
    #    then Spark may attempt the task again.
    except (*PRODUCER_LOST, LogReplaced) as e:
        if live := await find_live_instances(kafka, group):
            return TaskResult(partition, fenced=f"{live} ({e})")
        raise
    # 2. Records of a source were deleted. For those of the changelog, the restore raises ChangelogHole.
    except OffsetOutOfRange as e:
        missing = SourceOffsetsMissing(f"source records were deleted while they were read: {e}")
        return TaskResult(partition, failure=TaskFailure.of(missing))
    # 3. Another attempt would raise the same error. After any other error Spark attempts the task again.
    except (FatalError, DataError, ConfigError) as e:
        return TaskResult(partition, failure=TaskFailure.of(e))


class PartitionBatch:
    """A batch's task for one partition, from its takeover to its last commit."""

    def __init__(self, options: TaskOptions, partition: int) -> None:
        settings = options.settings
        self._settings = settings
        self._streams = settings.streams()
        self._partition = partition
        topology = load_topology(settings.topology, settings.topology_options, options.folder)
        self._topology = topology.of_application(self._streams.application_id)
        self._registry = CollectorRegistry()
        self._task_factory = StreamTaskFactory(self._streams, self._topology, SYSTEM_CLOCK, self._registry)
        context = TaskContext.get()
        attempt = 0 if context is None else context.attemptNumber()
        instance = f"batch-{socket.gethostname()}-{os.getpid()}-{attempt}"
        self._changelog = ChangelogPartition(settings.kafka, self._streams, partition, instance)
        self._group = GroupMetadata(self._streams.application_id)
        self._task: StreamTask
        self._committed = -1
        self._records = 0
        self._bytes = 0
        self._read = 0
        self._commits = 0

    @asynccontextmanager
    async def owned(self) -> AsyncIterator[PartitionBatch]:
        """Take the partition over and restore its task. Uncommitted work is discarded when the context ends."""
        try:
            await self._changelog.open()
            make = partial(self._task_factory.task, self._partition, None)
            self._task, _ = await self._changelog.take_over(make)
            try:
                yield self
            finally:
                self._close_task()
            # The driver's next compaction reads the changelog only up to its last stable offset. Before that, it must
            # include the last commit.
            await self._wait_until_commit_stable()
        finally:
            await self._changelog.close()

    def _close_task(self) -> None:
        """Close the processors if they were initialized. An error is only logged, because the commits stay valid."""
        if not self._task.is_initialized:
            return
        try:
            self._task.close()
        except Exception as e:
            log.error("a task was not closed as it should be", partition=self._partition, reason=str(e), exc_info=e)

    def result(self) -> TaskResult:
        """Return the task's result so far."""
        return TaskResult(
            self._partition,
            self._read,
            self._task.metrics.totals(),
            self._commits,
            dict(self._task.sources),
        )

    # --- topics ---

    async def read_topics(self, ends: Mapping[str, int]) -> None:
        """Process the records from the offsets of `SourcePositions.find` up to `ends` (exclusive), and commit."""
        task = self._task
        # If a batch over files did not finish, records of the topic would come before the rest of the history.
        require_whole_input(task.application, self._partition, task.input)
        partitions = {topic: TopicPartition(topic, self._partition) for topic in self._topology.source_topics()}
        reads = min(POLL_RECORDS, self._settings.commit_records)
        async with Consumer(self._settings.kafka, _task_consumer_settings(self._streams.application_id)) as consumer:
            consumer.assign(partitions.values())
            positions = SourcePositions(self._settings.kafka, self._streams, self._registry)
            await positions.find(task, consumer, partitions.values())
            for topic, at in partitions.items():
                consumer.seek(at, task.sources[topic])
            self._task_factory.start(task, {})
            inputs = TaskInputs(task)
            left = {topic: ends[topic] - task.sources[topic] for topic in partitions}
            idle_ms = 0
            while any(lag > 0 for lag in left.values()):
                _pause_topics_at_end(consumer, partitions, left, inputs)
                polled_ms = SYSTEM_CLOCK.monotonic_ms()
                polled = await consumer.poll(POLL_MS, reads)
                # Only this wait counts. Nothing is fetched while a topology processes records, which may take long.
                idle_ms += SYSTEM_CLOCK.monotonic_ms() - polled_ms
                for at, columns in polled.items():
                    # A poll may return records after the planned end. They belong to the next batch.
                    before_end = columns[: int(np.searchsorted(columns.offsets, ends[at.topic]))]
                    inputs.add(before_end)
                    self._count_records(before_end)
                before = left
                left = {topic: ends[topic] - _source_position(consumer, at, task) for topic, at in partitions.items()}
                inputs.process(SYSTEM_CLOCK.now_ms(), {topic: max(0, lag) for topic, lag in left.items()})
                if left != before:
                    idle_ms = 0
                # The planned end is at most the last stable offset, so no open transaction precedes it and records
                # must arrive.
                elif idle_ms > IDLE_MS_MAX:
                    raise KafkaTimeout(
                        f"partition {self._partition}: no record came for {IDLE_MS_MAX} ms; still to read: {left}"
                    )
                if self._is_commit_due():
                    await self._commit_task()
            # The offsets before the end may be transaction markers or aborted records. Commit the end itself, or each
            # later batch would find something to read.
            for topic in partitions:
                task.advance_position(topic, ends[topic])
            await self._commit_task()

    # --- rows of files ---

    async def read_rows(self, source: FileInput, batches: Iterator[Any]) -> None:
        """Process the rows of the files that no earlier attempt has committed, and commit them in parts.

        The last of these commits has the source offsets `live_from`, at which the live instance begins to read.
        """
        task = self._task
        reached = first_row_to_read(self._task, source)
        if reached is None:
            return
        self._task_factory.start(task, {})
        task.sources = {source.topic: reached}
        row = 0
        for batch in batches:
            columns = record_columns(batch, source.topic, self._partition, row)
            row += len(columns)
            # Another attempt gets the same rows in the same order, so a row's number identifies it. Leave out the
            # committed ones.
            columns = columns[max(0, reached - (row - len(columns))) :]
            while len(columns):
                part = columns[: max(1, self._settings.commit_records - self._records)]
                process_input_records(task, part, SYSTEM_CLOCK.now_ms())
                columns = columns[len(part) :]
                self._count_records(part)
                if self._is_commit_due():
                    await self._commit_rows(source.reached(task.sources[source.topic]))
        # Only the last commit has source offsets, and says that the input is done. A live instance that starts
        # earlier is rejected and does not skip the rest of the history.
        own = {topic: offsets[self._partition] for topic, offsets in source.live_from.items()}
        task.source_ids = dict(source.source_ids)
        await self._commit_rows(source.reached(row, is_done=True), own)

    async def begin_rows(self, source: FileInput) -> None:
        """Commit that no row is read yet, unless another attempt of this task has committed."""
        if first_row_to_read(self._task, source) == 0 and not isinstance(self._task.input, BatchInput):
            self._task_factory.start(self._task, {})
            await self._commit_rows(source.reached(0))

    async def _commit_rows(self, reached: BatchInput, live_from: Mapping[str, int] | None = None) -> None:
        """Commit without source offsets, as rows have none, or with those at which the live instance begins."""
        # While rows are read, `task.sources` has row numbers. They are not offsets of the topic, so the commit must
        # not send them to the group.
        task = self._task
        rows = self._task.sources
        task.input = reached
        task.sources = dict(live_from or {})
        task.needs_commit = True
        await self._commit_task()
        if live_from is None:
            task.sources = rows

    # --- commits ---

    def _count_records(self, columns: Columns) -> None:
        self._records += len(columns)
        self._read += len(columns)
        self._bytes += int(columns.sizes().sum())

    def _is_commit_due(self) -> bool:
        return self._records >= self._settings.commit_records or self._bytes >= self._settings.commit_bytes

    async def _commit_task(self) -> None:
        self._records = 0
        self._bytes = 0
        # An empty commit would add a transaction and a progress record without effect.
        if not self._task.needs_commit:
            return
        commit = self._task.prepare_commit(SYSTEM_CLOCK.now_ms())
        committed = await self._changelog.commit(commit, self._group)
        self._task.commit_succeeded(committed)
        self._committed = committed.covered_offset
        self._commits += 1

    async def _wait_until_commit_stable(self) -> None:
        """Wait until readers of the changelog see the last commit: its markers are written after the response."""
        at = self._changelog.topic_partition
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + STABLE_MS_MAX
        if self._committed < 0:
            return
        async with changelog_consumer(self._settings.kafka) as consumer:
            consumer.assign([at])
            # Under `read_committed` the end offset is the last stable one: it stays before a transaction until its
            # marker is written.
            while (await consumer.end_offsets([at]))[at] < self._committed:
                if SYSTEM_CLOCK.monotonic_ms() > deadline_ms:
                    raise KafkaTimeout(f"{at}: the last commit is not readable after {STABLE_MS_MAX} ms")
                await asyncio.sleep(STABLE_POLL_S)


def _task_consumer_settings(group: str) -> ConsumerSettings:
    """Return the settings of the consumer of one batch task. It reads assigned partitions and never joins the group.

    The settings have the group's id, with which the consumer looks up the group's offsets.
    """
    return ConsumerSettings(
        group_id=group,
        auto_offset_reset="none",
        isolation_level="read_committed",
        commit_strategy="none",
        max_poll_records=None,
        max_partition_fetch_bytes=FETCH_BYTES,
    )


def _source_position(consumer: Consumer, at: TopicPartition, task: StreamTask) -> int:
    # The consumer's position passes transaction markers, which the task never sees. It is unknown until the first
    # fetch.
    known = consumer.known_position(at)
    return task.sources[at.topic] if known is None else known


def _pause_topics_at_end(
    consumer: Consumer, partitions: Mapping[str, TopicPartition], left: Mapping[str, int], inputs: TaskInputs
) -> None:
    """Pause the topics that are read to their end or whose input is full, and resume the others."""
    # A topic at its end would fetch records of the next batch. A full input waits for records of the other topics,
    # because records are processed in the order of their time.
    paused = consumer.paused()
    for topic, at in partitions.items():
        stops = left[topic] <= 0 or inputs.is_full(topic)
        if stops and at not in paused:
            consumer.pause(at)
        elif not stops and at in paused:
            consumer.resume(at)


def first_row_to_read(task: StreamTask, source: FileInput) -> int | None:
    """Return the number of the first row of the files that a batch's task must read, or None if all are processed.

    Raises ConfigError if the state was made from another input.
    """
    found = task.input
    where = f"{task.application}, partition {task.partition}"
    # State from topics may have closed the windows of the history. Its rows would then be late.
    if not isinstance(found, BatchInput):
        if task.sources:
            raise ConfigError(f"files: {where} has state already: history from files is an application's first batch")
        return 0
    # Row numbers of other files identify other rows: some would be skipped and others processed twice.
    require_same_files(where, found, source.fingerprint)
    return None if found.is_done else found.rows


def require_same_files(where: str, found: BatchInput, fingerprint: str) -> None:
    """Raise ConfigError if a task's state was made from other files, or from the same files read in another way."""
    if found.fingerprint == fingerprint:
        return
    state = "was made from" if found.is_done else f"holds {found.rows} rows of"
    raise ConfigError(
        f"files: the state of {where} {state} other files, or of files that were read otherwise (fingerprint "
        f"{found.fingerprint}, now {fingerprint}): run the batch as it was, or start afresh (`penstock streams reset`)"
    )


def record_columns(batch: Any, topic: str, partition: int, first: int) -> Columns:
    """Return the rows (timestamp_ms, key, value) that a batch's task gets from Spark as records of a topic.

    Their offsets are row numbers, from `first` on.
    """
    return Columns(
        topic,
        partition,
        packed(batch.column("key")),
        packed(batch.column("value")),
        np.array(batch.column("timestamp_ms"), np.int64),
        np.arange(first, first + batch.num_rows, dtype=np.int64),
    )
