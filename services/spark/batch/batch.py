"""`penstock batch`: processes the records that the source topics hold now with a topology, on Spark.

The first batch can process rows of files in place of the records of one source topic.

Steps of a batch over topics:

1. Stop with BatchRejected if the group has members, because the members own the partitions.
2. Compact if there is a changelog, so that tasks restore from the lake and the tables have each partition's progress.
   Stop with ChangelogHole if there are only tables, because their changelog was deleted.
3. Create the topics as a starting worker does, and choose the end offset of each partition.
4. Run one Spark task for each partition that has records to read (see `batch_task`).
5. Compact the changelog records that the tasks committed, in the same Spark session.

The next batch continues where the previous one ended, whether that succeeded or failed. A batch over topics without
records to read runs no tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from penstock.services.spark.batch.batch_task import (
    FileInput,
    PartitionRange,
    TaskOptions,
    TaskResult,
    begin_files,
    find_live_instances,
    require_same_files,
    run_files,
    run_topics,
)
from penstock.services.spark.batch.file_rows import fingerprint_of, partitioned_rows
from penstock.services.spark.batch.settings import EXPLICIT_OFFSETS, BatchSettings
from penstock.services.spark.compaction import compact
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.delta_reader import progress_rows
from penstock.services.spark.compaction.table_maintenance import FailedSteps
from penstock.services.spark.errors import translated
from penstock.services.spark.table_columns import STATE
from penstock.services.spark.topic_offsets import Offsets, TopicOffsets, offsets_at, run_with_timeout, topic_offsets
from penstock.shared.clients.admin import Admin
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ChangelogHole, ConfigError, FatalError
from penstock.shared.common.lake import delta_tables
from penstock.shared.common.time_text import time_ms
from penstock.shared.streams.changelog.format import BatchInput, Progress, decode_progress, require_whole_input
from penstock.shared.streams.lake_names import require_lake_names
from penstock.shared.streams.runtime.application_topics import prepare_topics
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.topology_loading import load_topology

Log = Callable[[str], object]
T = TypeVar("T")
Held = Mapping[str, TopicOffsets]
"""The offsets of the source topics, by topic."""


class BatchRejected(FatalError):
    """A batch cannot run while live instances run. The message names them."""


class BatchFenced(FatalError):
    """A live instance started during the batch and owns the partitions now. Earlier commits of the batch are kept."""


class BatchReport(NamedTuple):
    """The result of a batch: the number of `partitions` that it processed, and the sums of its tasks' counts.

    A task that Spark retried counts only its last attempt. The commits before the first rows of files are not counted.
    """

    partitions: int
    read: int
    closed: int
    late: int
    dead_letters: int
    skipped: int
    commits: int
    to_offsets: Offsets
    """By source topic and partition, the offset at which the next batch or a live instance continues. After a batch
    over files it is the offset at which the live instance begins.
    """
    seconds: float
    compaction: dict[str, Any] | None = None
    """The report of the last compaction after the tasks; None if there were no tasks and no after hook."""
    failed: tuple[str, ...] = ()
    """The failed steps after the commits of all the batch's compactions."""


class BatchJob:
    """Runs batches of one application on a Spark session. `run()` may be called any number of times."""

    def __init__(self, spark: SparkSession, settings: BatchSettings, log: Log) -> None:
        """Raises ConfigError if the topology has internal topics, global tables, or names that the lake rejects.

        Also raises ConfigError for several source topics if `files` is set.
        """
        self.spark = spark
        self.settings = settings
        self.log = log
        # The tasks restore from the lake, and Spark's executors do not have the AWS_ variables of this process.
        of_tasks = settings.model_copy(update={"lake_options": settings.storage_options})
        self.task_options = TaskOptions(of_tasks, str(Path.cwd()))
        self.failed = FailedSteps()
        """The failed steps after the commits of all compactions of the last batch."""
        self.topology = load_topology(settings.topology, settings.topology_options).of_application(settings.application)
        require_whole_partitions(self.topology)
        if settings.files is not None:
            require_one_source(self.topology)
        require_lake_names(self.topology.schemas())

    def run(self) -> BatchReport:
        """Run one batch.

        Raises BatchRejected if live instances run before the tasks begin, BatchFenced if a task finds a live instance,
        and ChangelogHole if there are tables without their changelog. Also raises ConfigError and the errors of Kafka,
        tasks and compactions. Commits before an error are kept.
        """
        started = time.monotonic()
        self.failed = FailedSteps()
        partitions, held, known = self._prepare_batch()
        try:
            if self.settings.files is None:
                for partition, progress in sorted(known.items()):
                    require_whole_input(self.settings.application, partition, progress.input)
                ends = self._end_offsets(held)
                results = self._run_ranges(partitions, ranges_to_read(ends, held, known))
            else:
                ends = self._live_start_offsets(held, known)
                results = self._run_files(partitions, held, known, ends)
        except (Py4JError, PySparkException, ConnectionError) as e:
            raise translated(e) from e
        # A failed task ends the batch before the compaction. The commits of the other tasks are kept, and the next
        # batch continues from them.
        self._require_done(results)
        compaction = self._compact_changelog(with_hook=True) if results or self.settings.after is not None else None
        seconds = round(time.monotonic() - started, 3)
        report = batch_report(
            results, next_offsets(results, known, ends), seconds, None if compaction is None else compaction._asdict()
        )
        return report._replace(failed=self.failed.lines())

    # --- before ---

    def _prepare_batch(self) -> tuple[int, Held, dict[int, Progress]]:
        settings = self.settings
        self._wait_for_kafka(self._require_no_live_instances())
        if settings.changelog_topic in self._wait_for_kafka(self._list_topics()):
            # Tasks then restore most of their state from the lake, not from the changelog. The compaction may take
            # long, so check again that no live instance has started.
            self._compact_changelog(with_hook=False)
            self._wait_for_kafka(self._require_no_live_instances())
        elif self._read_progress():
            # In a new changelog nothing of what these tables count as done would be there, such as rows of files.
            raise ChangelogHole(
                f"{settings.folder} was made from {settings.changelog_topic}, which does not exist: it was deleted. "
                "To start afresh, run `penstock streams reset --execute` with streams.lake set"
            )
        partitions = asyncio.run(prepare_topics(settings.kafka, settings.streams(), self.topology, SYSTEM_CLOCK))
        held = topic_offsets(settings.kafka, self.topology.source_topics(), settings.kafka_timeout_ms)
        return partitions, held, self._read_progress()

    def _read_progress(self) -> dict[int, Progress]:
        """Return the tables' newest progress of each partition."""
        state = delta_tables.open_table(f"{self.settings.folder}/{STATE}", self.settings.storage_options)
        rows = {} if state is None else progress_rows(state)
        return {p: decode_progress(of[0]["progress"].encode()) for p, of in rows.items()}

    async def _require_no_live_instances(self) -> None:
        if live := await find_live_instances(self.settings.kafka, self.settings.application):
            raise BatchRejected(f"{live}. Stop the live instances first: a batch takes their partitions over")

    async def _list_topics(self) -> set[str]:
        async with Admin(self.settings.kafka) as admin:
            return set(await admin.list_topics())

    def _wait_for_kafka(self, coroutine: Awaitable[T]) -> T:
        return run_with_timeout(coroutine, self.settings.kafka, self.settings.kafka_timeout_ms)

    def _compact_changelog(self, *, with_hook: bool) -> compact.CompactionReport:
        """Compact until no records are left. Returns the report of the last compaction.

        With `with_hook`, the after hook is called after each compaction.
        """
        settings = self.settings if with_hook else self.settings.model_copy(update={"after": None})
        while True:
            job = CompactionJob(self.spark, settings, self.log)
            report = job.run()
            self.failed += job.maintenance.failed
            if not report.remaining_records:
                return report

    # --- plan ---

    def _end_offsets(self, held: Held) -> Offsets:
        if self.settings.until is None:
            return {topic: of.latest for topic, of in held.items()}
        return self._offsets_at_time(held, self.settings.until)

    def _offsets_at_time(self, held: Held, time: str) -> Offsets:
        return offsets_at(self.settings.kafka, held, time_ms(time), self.settings.kafka_timeout_ms)

    def _live_start_offsets(self, held: Held, known: Mapping[int, Progress]) -> Offsets:
        """Return the offsets at which the live instance begins.

        They come from an earlier batch over the same files if there was one, else from the settings.
        """
        # The topics may have got records since the first attempt. `latest` or a time would now be another offset, and
        # partitions that are done have the first one.
        for progress in known.values():
            if isinstance(progress.input, BatchInput) and progress.input.live_from:
                return progress.input.live_from
        return {topic: self._start_offsets(of, self.settings.live_from or "") for topic, of in held.items()}

    def _start_offsets(self, held: TopicOffsets, text: str) -> dict[int, int]:
        """Return the `live_from` in `text` as an offset for each partition of a topic.

        Raises the errors of `live_from_offsets` and `topic_offsets`.
        """
        topic = held.topic
        earliest = held.earliest
        latest = held.latest
        if text in ("earliest", "latest"):
            return dict(earliest if text == "earliest" else latest)
        if not EXPLICIT_OFFSETS.fullmatch(text):
            return self._offsets_at_time({topic: held}, text)[topic]
        return live_from_offsets(topic, text, earliest, latest)

    # --- run ---

    def _run_ranges(self, partitions: int, ranges: list[PartitionRange]) -> list[TaskResult]:
        if not ranges:
            self.log("nothing new")
            return []
        self.log(f"reading {len(ranges)} of {partitions} partitions")
        encoded = [msgspec.msgpack.encode(one) for one in ranges]
        # One Spark task for each partition, so that a retry repeats one partition only.
        rdd = self.spark.sparkContext.parallelize(encoded, len(encoded)).flatMap(run_topics(self.task_options))
        return [msgspec.msgpack.decode(one, type=TaskResult) for one in rdd.collect()]

    def _run_files(
        self, partitions: int, held: Held, known: Mapping[int, Progress], live_from: Offsets
    ) -> list[TaskResult]:
        settings = self.settings
        (topic,) = self.topology.source_topics()
        fingerprint = fingerprint_of(self.spark, settings, topic, partitions)
        done = partitions_done(settings.application, known, fingerprint)
        if len(done) == partitions:
            self.log("these files are already read completely; the aggregator can be started")
            return []
        rows = partitioned_rows(self.spark, settings, partitions)
        source = FileInput(fingerprint, topic, live_from, {t: of.topic_id for t, of in held.items()}, done)
        # Until all files are read, each partition's progress must say so: otherwise a live instance, or a batch over a
        # topic, would begin a partition that has no commit yet without its history.
        if new := [p for p in range(partitions) if p not in known]:
            begin = begin_files(self.task_options, source)
            begun = self.spark.sparkContext.parallelize(new, len(new)).flatMap(begin).collect()
            self._require_done([msgspec.msgpack.decode(one, type=TaskResult) for one in begun])
        found = rows.mapInArrow(run_files(self.task_options, source), "outcome binary").collect()
        results = [msgspec.msgpack.decode(bytes(row.outcome), type=TaskResult) for row in found]
        return [one for one in results if one.partition not in done]

    def _require_done(self, results: Sequence[TaskResult]) -> None:
        """Raise the error of a failed task if there is one, otherwise BatchFenced if a task was fenced."""
        failed = [one for one in results if one.failure is not None]
        fenced = [one for one in results if one.fenced is not None]
        # A failure is reported first: it needs a change, while a live instance continues without help.
        if failed and failed[0].failure is not None:
            raise failed[0].failure.to_error(f"partition {failed[0].partition}: ")
        if fenced:
            at = ", ".join(str(one.partition) for one in sorted(fenced, key=lambda one: one.partition))
            raise BatchFenced(
                f"a live instance has started and owns partitions {at} now: {fenced[0].fenced}. "
                "Earlier commits are kept, and the live instance continues from them"
            )


def require_whole_partitions(topology: Topology) -> None:
    """Raises ConfigError if a task needs records other than its partition of the source topics."""
    beyond = [*topology.internal_topics(), *(table.topic for table in topology.global_tables.values())]
    if beyond:
        raise ConfigError(
            f"topology: a batch runs each partition separately, and this topology needs {', '.join(beyond)} as well: "
            "a topic that it writes itself, or a global table"
        )


def require_one_source(topology: Topology) -> None:
    """Raises ConfigError if the topology has several source topics, for a batch over files."""
    # The files have the history of one topic. The aggregator begins at `live_from` in all of them, so it would never
    # read the earlier records of the others.
    if len(sources := topology.source_topics()) > 1:
        raise ConfigError(f"files: they replace the only source topic; this topology reads {', '.join(sources)}")


def partitions_done(application: str, known: Mapping[int, Progress], fingerprint: str) -> tuple[int, ...]:
    """Return the application's partitions for which all rows of the files were read.

    Raises ConfigError if a partition's state is from another input: topics, other files, or the same files read in
    another way.
    """
    done = []
    for partition, progress in sorted(known.items()):
        where = f"{application}, partition {partition}"
        if not isinstance(progress.input, BatchInput):
            raise ConfigError(
                f"files: {where} has state already: history from files is an application's first batch. Give it "
                "another id, or start it afresh (`penstock streams reset`)"
            )
        require_same_files(where, progress.input, fingerprint)
        if progress.input.is_done:
            done.append(partition)
    return tuple(done)


def ranges_to_read(ends: Offsets, held: Held, known: Mapping[int, Progress]) -> list[PartitionRange]:
    """Return the partitions whose records a batch reads, those with the most records first.

    A partition is also included if its committed position is beyond the topic's end, or belongs to an earlier topic of
    the same name. Its task then reports the error.
    """
    left: dict[int, int] = {}
    for topic, of in ends.items():
        for partition, end in of.items():
            progress = known.get(partition)
            at = None if progress is None else progress.sources.get(topic)
            available = held[topic]
            start = available.earliest[partition] if at is None else at
            is_other = progress is not None and progress.source_ids.get(topic, available.topic_id) != available.topic_id
            # Count a record for a partition that cannot continue, so that a task runs and reports the error.
            records = 1 if is_other or start > available.latest[partition] else max(0, end - start)
            left[partition] = left.get(partition, 0) + records
    wanted = sorted((p for p, records in left.items() if records), key=lambda p: (-left[p], p))
    return [PartitionRange(p, {topic: of[p] for topic, of in ends.items()}) for p in wanted]


def next_offsets(results: Sequence[TaskResult], known: Mapping[int, Progress], ends: Offsets) -> Offsets:
    """Return the offsets at which the next batch or a live instance continues."""
    at = {p: progress.sources for p, progress in known.items()} | {one.partition: one.sources for one in results}
    return {topic: {p: at.get(p, {}).get(topic, end) for p, end in of.items()} for topic, of in ends.items()}


def live_from_offsets(topic: str, text: str, earliest: Mapping[int, int], latest: Mapping[int, int]) -> dict[int, int]:
    """Return the offsets of `live_from`, given as `partition:offset,…`, by partition.

    Raises ConfigError if a partition has no offset or two, if an offset's partition does not exist, or if an offset is
    before the partition's `earliest` or after its `latest`.

    >>> live_from_offsets("clicks", "0:5,1:7", {0: 0, 1: 0}, {0: 9, 1: 7})
    {0: 5, 1: 7}
    """
    offsets = dict[int, int]()
    for pair in text.split(","):
        partition, offset = map(int, pair.split(":"))
        if partition in offsets:
            raise ConfigError(f"live_from: {topic}-{partition}: two offsets in {text}")
        offsets[partition] = offset
    if wrong := sorted(offsets.keys() ^ latest.keys()):
        rule = "an offset for each partition is needed, and no other"
        raise ConfigError(f"live_from: {topic}: {text}: {rule} (partitions {wrong})")
    for partition, offset in sorted(offsets.items()):
        if not earliest[partition] <= offset <= latest[partition]:
            held = f"the topic holds {earliest[partition]} to {latest[partition]}"
            raise ConfigError(f"live_from: {topic}-{partition}: offset {offset}; {held}")
    return offsets


def batch_report(
    results: Sequence[TaskResult], to_offsets: Offsets, seconds: float, compaction: dict[str, Any] | None
) -> BatchReport:
    """Return the report of a batch: the sums of its tasks' results."""
    totals = [one.totals for one in results]
    return BatchReport(
        partitions=len(results),
        read=sum(one.read for one in results),
        closed=sum(one.closed for one in totals),
        late=sum(one.late for one in totals),
        dead_letters=sum(one.dead_letters for one in totals),
        skipped=sum(one.skipped for one in totals),
        commits=sum(one.commits for one in results),
        to_offsets=to_offsets,
        seconds=seconds,
        compaction=compaction,
    )
