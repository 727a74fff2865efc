"""A worker's tasks, each with its ownership of the changelog partition, from assignment to close."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from penstock.shared.common.log import get_logger
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.rejection_log import RejectionLog
from penstock.shared.streams.runtime.restore_progress import RestoreReport
from penstock.shared.streams.runtime.source_positions import GroupAhead
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.idleness import Idleness
from penstock.shared.streams.task.inputs import TaskInputs
from penstock.shared.streams.task.metrics import RestoreMetrics
from penstock.shared.streams.task.stream_task import StreamTask

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A restored task, with its inputs and its idleness."""

    task: StreamTask
    inputs: TaskInputs
    idle: Idleness | None
    """None without `idle_timeout_ms`."""
    begun_ms: int
    """The monotonic time at which the task began to run."""


class RestoringTaskDescription(TypedDict):
    """A restoring task, as plain values. The progress is absent or None until the restore reads the changelog."""

    partition: int
    state: Literal["restoring"]
    remaining_records: NotRequired[int | None]
    records_per_second: NotRequired[int | None]
    eta_ms: NotRequired[int | None]


class RunningTaskDescription(TypedDict):
    """A running task as plain values. `TaskState` in `penstock.api.streams.task_views` states what each one means."""

    partition: int
    state: Literal["running"]
    epoch: int
    sources: dict[str, int]
    stream_time_ms: int
    operator_times_ms: dict[str, int]
    state_rows: int
    records: int
    closed_windows: int
    late_records: int
    dead_letters: int
    skipped_records: int
    restore_ms: int
    restored_windows: int
    restored_changelog_records: int
    restored_changelog_windows: int
    restored_local_windows: int
    restored_standby_windows: int
    snapshot_version: int | None


TaskDescription = RestoringTaskDescription | RunningTaskDescription


class OwnedTask:
    """A partition's changelog, with its task.

    `running` is None until the worker has collected the restored task, and once the task is closed.
    """

    def __init__(self, changelog: ChangelogPartition) -> None:
        self.changelog = changelog
        self.running: RunningTask | None = None
        self.report = RestoreReport()
        self.restoring: asyncio.Task[StreamTask] | None = None
        self.rejection_log = RejectionLog(changelog.topic_partition.partition)
        self.local: LocalState | None = None
        self.discard_reason: str | None = None
        """The reason why the state on disk must not be used again; None if it may be."""
        self.ahead: GroupAhead | None = None
        """The error that prevents the start: offsets committed for its partition are ahead of its changelog."""

    def begin(self, task: StreamTask, settings: StreamsSettings, now_ms: int) -> None:
        """Start a restored task; `now_ms` is a monotonic time."""
        inputs = TaskInputs(
            task,
            max_task_idle_ms=settings.max_task_idle_ms,
            buffered_records_max=settings.buffered_records_per_partition,
            blocking_ms_max=settings.blocking_ms_max,
        )
        idle = None if settings.idle_timeout_ms is None else Idleness(settings.idle_timeout_ms)
        self.running = RunningTask(task, inputs, idle, now_ms)

    @property
    def task(self) -> StreamTask | None:
        """The running task; None if `running` is None."""
        return None if self.running is None else self.running.task

    def log_restored(self, metrics: RestoreMetrics) -> None:
        """Log and measure the finished restore."""
        task = self.task
        report = self.report
        assert task is not None
        restored = report.snapshot_windows + report.changelog_records
        metrics.restored(self.partition, report.milliseconds, restored, report.foreign_records)
        log.info(
            "task restored",
            partition=self.partition,
            epoch=task.epoch,
            sources=task.sources,
            snapshot_version=report.snapshot_version,
            snapshot_windows=report.snapshot_windows,
            local_windows=report.local_windows,
            standby_windows=report.standby_windows,
            changelog_records=report.changelog_records,
            restore_ms=report.milliseconds,
        )

    @property
    def is_accepted(self) -> bool:
        """Whether the topology is known to fit the state: from the newest commit, or after the restore."""
        progress = self.changelog.progress
        return self.task is not None or (progress is not None and progress.is_accepted)

    @property
    def partition(self) -> int:
        """The partition of the task."""
        return self.changelog.topic_partition.partition

    async def close(self, timeout_ms: float | None = None) -> None:
        """Stop restoring, and close the processors, the state on disk and the producer; further calls do nothing.

        An error of a processor's `close` is only logged, because it must not keep the partition from its next owner.
        After `timeout_ms` (None: no limit) requests to the broker are abandoned.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        task = self.task
        self.running = None
        restoring = self.restoring
        self.restoring = None
        try:
            if task is not None:
                task.close()
        except Exception as e:
            log.error("a task was not closed as it should be", partition=self.partition, reason=str(e), exc_info=e)
        finally:
            if restoring is not None:
                # Retrieve the outcome, or asyncio logs that nobody did.
                restoring.add_done_callback(lambda done: done.cancelled() or done.exception())
                restoring.cancel()
                # At most half of the time. The rest is for the producer.
                await asyncio.wait({restoring}, timeout=None if timeout_ms is None else timeout_ms / 2000)
            if self.local is not None:
                if self.discard_reason is not None:
                    self.local.discard(self.discard_reason)
                self.local.close()
            await self.changelog.close(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000)

    def describe(self) -> TaskDescription:
        """Return the task as plain values. The counts of records and closed windows are those of the last commit."""
        task = self.task
        report = self.report
        if task is None:
            progress = self.changelog.progress
            if progress is None:
                return {"partition": self.partition, "state": "restoring"}
            return {"partition": self.partition, "state": "restoring", **progress.describe()}
        done = task.metrics.committed
        return {
            "partition": self.partition,
            "state": "running",
            "epoch": task.epoch,
            "sources": dict(task.sources),
            "stream_time_ms": task.stream_time_ms,
            "operator_times_ms": task.times.by_store(),
            "state_rows": sum(map(len, task.stores.values())),
            "records": done.records,
            "closed_windows": done.closed,
            "late_records": done.late,
            "dead_letters": done.dead_letters,
            "skipped_records": done.skipped,
            "restore_ms": report.milliseconds,
            "restored_windows": report.snapshot_windows,
            "restored_changelog_records": report.changelog_records,
            "restored_changelog_windows": report.changelog_windows,
            "restored_local_windows": report.local_windows,
            "restored_standby_windows": report.standby_windows,
            "snapshot_version": report.snapshot_version,
        }


RunningTasks = Mapping[int, RunningTask]
"""Restored tasks by partition."""


class WorkerTasks:
    """The tasks of one worker by partition.

    `owned` are the tasks that run or are being restored. `suspended` are the tasks of revoked partitions. The next
    assignment decides whether they continue.
    """

    def __init__(self) -> None:
        self.owned: dict[int, OwnedTask] = {}
        self.suspended: dict[int, OwnedTask] = {}

    def __repr__(self) -> str:
        return f"WorkerTasks(owned {sorted(self.owned)}, suspended {sorted(self.suspended)})"

    def running(self) -> dict[int, RunningTask]:
        """Return the restored tasks that are owned, by partition."""
        return {partition: owned.running for partition, owned in self.owned.items() if owned.running is not None}

    def holds(self, partition: int) -> bool:
        """Return whether the partition's task is here, owned or suspended."""
        return partition in self.owned or partition in self.suspended

    def all(self) -> list[OwnedTask]:
        """Return all tasks."""
        return [*self.owned.values(), *self.suspended.values()]

    def clear(self) -> None:
        """Drop all tasks, which must be closed separately."""
        self.owned.clear()
        self.suspended.clear()

    def closed(self, outcomes: Sequence[BaseException | None]) -> None:
        """Drop the tasks, which were closed in the order of `all()`; log those that failed."""
        for owned, error in zip(self.all(), outcomes, strict=True):
            if error is not None:
                log.error("a task cannot be closed", partition=owned.partition, reason=str(error), exc_info=error)
        self.clear()

    def describe(self) -> list[TaskDescription]:
        """Return the tasks of `owned` as plain values, sorted by partition."""
        return [owned.describe() for _, owned in sorted(self.owned.items())]
