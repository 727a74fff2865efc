"""A task with its hold on the changelog, from being assigned to being let go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from shared.common.records import TopicPartition
from shared.streams.changelog import ChangelogPartition, RestoreReport
from shared.streams.stream_task import StreamTask


class OwnedTask:
    """A partition's task with its changelog; `task` is None while it is restored.

    `starts` are the source offsets to read from once it is restored, those of sources without progress included.
    """

    def __init__(self, changelog: ChangelogPartition) -> None:
        self.changelog = changelog
        self.task: StreamTask | None = None
        self.report = RestoreReport()
        self.restoring: asyncio.Task[None] | None = None
        self.starts: dict[TopicPartition, int] = {}

    async def close(self) -> None:
        """Stop restoring, close the processors and the producer."""
        if self.restoring is not None:
            self.restoring.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self.restoring
        if self.task is not None:
            self.task.close()
        await self.changelog.close()

    def describe(self, partition: int) -> dict[str, Any]:
        """The task as plain values."""
        task, report = self.task, self.report
        if task is None:
            return {"partition": partition, "state": "restoring"}
        metrics = task.metrics
        return {
            "partition": partition,
            "state": "running",
            "epoch": task.epoch,
            "sources": dict(task.sources),
            "stream_time_ms": task.stream_time_ms,
            "open_sessions": sum(map(len, task.stores.values())),
            "records": metrics.records_total,
            "closed_sessions": metrics.closed_total,
            "late_records": metrics.late_total,
            "dead_letters": metrics.dead_letters_total,
            "skipped_records": metrics.skipped_total,
            "restore_ms": report.milliseconds,
            "restored_windows": report.snapshot_windows,
            "restored_changelog_records": report.changelog_records,
            "snapshot_version": report.snapshot_version,
        }
