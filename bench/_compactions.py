"""Steps of the benchmark of compaction: compactions, and restores as an aggregator's instance makes them.

An instance restores all its partitions at once, on one loop. A restore here does the same. It is timed until the last
partition is restored, connections included.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench._changelogs import ChangelogWriter, Kind
from bench._processes import own_tree_cpu_s
from penstock.services.spark.compaction.compact import CompactionJob, CompactionPlan, CompactionReport
from penstock.services.spark.compaction.rewrite import RewriteInput
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.restore_progress import RestoreReport
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask

RESTORES = 5  # from each snapshot; the median counts


class Restored(NamedTuple):
    """The time of a restore of all partitions, in seconds, and their reports."""

    seconds: float
    reports: list[RestoreReport]

    @property
    def snapshot_windows(self) -> int:
        """The number of windows in the snapshot."""
        return sum(report.snapshot_windows for report in self.reports)


class Timed(NamedTuple):
    """The time of a compaction, and of its rewrite of `state`. CPU is that of driver, JVM and Python workers."""

    seconds: float
    cpu_s: float
    rewrite_rows: int
    rewrite_s: float
    reports: list[CompactionReport]


class _Observed(CompactionJob):
    """Measures its rewrite."""

    rewrite_rows, rewrite_s = 0, 0.0

    def _rewrite_due_partitions(self, plan: CompactionPlan) -> int:
        started = time.monotonic()
        done = super()._rewrite_due_partitions(plan)
        self.rewrite_s = time.monotonic() - started
        return done

    def _run_tasks(self, items: Any, size: Any, step: Any) -> Any:
        if isinstance(items[0], RewriteInput):
            self.rewrite_rows = sum(map(size, items))
        return super()._run_tasks(items, size, step)


class Compactions:
    """One Spark session, one broker and one lake for all applications."""

    def __init__(self, spark: Any, kafka: KafkaSettings, folder: Path, broker_pid: int) -> None:
        self.spark = spark
        self.kafka = kafka
        self.lake = str(folder / "lake")
        self.broker_pid = broker_pid

    async def application(self, kind: Kind, partitions: int = 1) -> ChangelogWriter:
        """A new application, with an empty changelog."""
        writer = ChangelogWriter(self.kafka, f"bench-{uuid.uuid4().hex[:8]}", kind, partitions)
        await writer.create()
        return writer

    async def compact(self, writer: ChangelogWriter) -> Timed:
        """Compact everything that was written."""
        return await asyncio.to_thread(self._compact, writer.application)

    async def compact_delta(self, writer: ChangelogWriter, each: int) -> Timed:
        """Write a change (see `ChangelogWriter`) and compact it."""
        entries = await writer.change(each)
        done = await self.compact(writer)
        (report,) = done.reports
        written = report.entries, report.live_rows, report.deleted_rows, report.closed_rows
        assert written == (entries, 2 * each, each, each), report
        return done

    async def median_restores(self, writers: Sequence[ChangelogWriter]) -> list[Restored]:
        """The median of each application's restores from its snapshot, taken in turns."""
        rounds = [[await self.restore(writer, self.lake) for writer in writers] for _ in range(RESTORES)]
        return [sorted(of, key=lambda found: found.seconds)[RESTORES // 2] for of in zip(*rounds, strict=True)]

    async def restore(self, writer: ChangelogWriter, lake: str | None) -> Restored:
        """Restore all partitions, from the snapshot in `lake` or from the whole changelog.

        The number of open sessions after it is checked.
        """
        started = time.monotonic()
        restores = [self._restore(writer, partition, lake) for partition in range(writer.partitions)]
        found = await asyncio.gather(*restores)
        seconds = time.monotonic() - started
        assert [live for live, _ in found] == writer.live_by_partition(), found
        return Restored(seconds, [report for _, report in found])

    async def forget(self, writer: ChangelogWriter) -> None:
        """Remove the application's files from the disk."""
        await writer.delete()
        await asyncio.to_thread(shutil.rmtree, f"{self.lake}/{writer.application}")

    def _compact(self, application: str) -> Timed:
        settings = CompactSettings(application=application, lake=self.lake, kafka=self.kafka)
        started = time.monotonic()
        cpu_s = own_tree_cpu_s(self.broker_pid)
        reports = list[CompactionReport]()
        while not reports or reports[-1].remaining_records:
            job = _Observed(self.spark, settings, lambda text: None)
            reports.append(job.run())
        took = time.monotonic() - started, own_tree_cpu_s(self.broker_pid) - cpu_s
        return Timed(*took, job.rewrite_rows, job.rewrite_s, reports)

    async def _restore(self, writer: ChangelogWriter, partition: int, lake: str | None) -> tuple[int, RestoreReport]:
        """The number of open sessions after the restore, and its report."""
        settings = StreamsSettings(application_id=writer.application, lake=lake)
        changelog = ChangelogPartition(self.kafka, settings, partition, "bench")
        topology = writer.kind.topology()
        await changelog.open()
        try:
            task, report = await changelog.take_over(
                lambda: StreamTask(topology, partition, application=writer.application)
            )
            return len(task.stores["s"]), report
        finally:
            await changelog.close()
