"""What the parts of the bench of compaction do: compactions, and restores as an aggregator's instance makes them.

An instance restores all its partitions at once, on one loop, so that is what a restore is here: how long it takes until
the last one is there, its connections among it.
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
from penstock.services.spark.compact import Compaction
from penstock.services.spark.fold import Summary
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.partition import ChangelogPartition
from penstock.shared.streams.restoring import RestoreReport
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.stream_task import StreamTask

RESTORES = 5  # from each snapshot; the median is taken


class Restored(NamedTuple):
    """How long all partitions took, in seconds, and what each of them says."""

    seconds: float
    reports: list[RestoreReport]

    @property
    def snapshot_windows(self) -> int:
        """Windows that the snapshot had."""
        return sum(report.snapshot_windows for report in self.reports)


class Compactions:
    """One Spark session, one broker and one lake for all applications."""

    def __init__(self, spark: Any, kafka: KafkaSettings, folder: Path) -> None:
        self.spark, self.kafka, self.lake = spark, kafka, str(folder / "lake")

    async def application(self, kind: Kind, partitions: int = 1) -> ChangelogWriter:
        """A new one, whose changelog is made and has no entries yet."""
        writer = ChangelogWriter(self.kafka, f"bench-{uuid.uuid4().hex[:8]}", kind, partitions)
        await writer.create()
        return writer

    async def compact(self, writer: ChangelogWriter) -> float:
        """Fold all that was written; how many seconds that took."""
        seconds, _ = await asyncio.to_thread(self._compact, writer.application)
        return seconds

    async def compact_delta(self, writer: ChangelogWriter, each: int) -> float:
        """Write a change (see `ChangelogWriter`) and compact it; how many seconds the compaction took."""
        entries = await writer.change(each)
        seconds, runs = await asyncio.to_thread(self._compact, writer.application)
        (done,) = runs
        assert (done.entries, done.merged_rows, done.deleted_rows, done.finals) == (entries, 2 * each, each, each)
        assert done.live_rows == len(writer.live), done
        return seconds

    async def median_restores(self, writers: Sequence[ChangelogWriter]) -> list[Restored]:
        """Of each one's restores from its snapshot, in turns, the median."""
        rounds = [[await self.restore(writer, self.lake) for writer in writers] for _ in range(RESTORES)]
        return [sorted(of, key=lambda found: found.seconds)[RESTORES // 2] for of in zip(*rounds, strict=True)]

    async def restore(self, writer: ChangelogWriter, lake: str | None) -> Restored:
        """Restore all partitions, from the snapshot in `lake` or from the whole changelog.

        What is there then is what was written.
        """
        started = time.monotonic()
        restores = [self._restore(writer, partition, lake) for partition in range(writer.partitions)]
        found = await asyncio.gather(*restores)
        seconds = time.monotonic() - started
        assert [live for live, _ in found] == writer.live_by_partition(), found
        return Restored(seconds, [report for _, report in found])

    async def forget(self, writer: ChangelogWriter) -> None:
        """Leave the disk as it was."""
        await writer.delete()
        await asyncio.to_thread(shutil.rmtree, f"{self.lake}/{writer.application}")

    def _compact(self, application: str) -> tuple[float, list[Summary]]:
        """Seconds, and the runs that it took."""
        settings = CompactSettings(application=application, lake=self.lake, kafka=self.kafka)
        started, runs = time.monotonic(), list[Summary]()
        while not runs or runs[-1].remaining_records:
            runs.append(Compaction(self.spark, settings, lambda text: None).run())
        return time.monotonic() - started, runs

    async def _restore(self, writer: ChangelogWriter, partition: int, lake: str | None) -> tuple[int, RestoreReport]:
        """Live sessions that are there then, and the report."""
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
