"""The progress record that ends a task's commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shared.streams.changelog.format import Progress

if TYPE_CHECKING:
    from penstock.shared.streams.task.context import TaskContext


def progress_of(task: TaskContext, now_ms: int) -> Progress:
    """Return the progress record: the task's positions and all else that a restart needs besides its stores."""
    return Progress(
        application=task.application,
        guarantee=task.guarantee,
        sources=dict(task.sources),
        stream_time_ms=task.stream_time_ms,
        operator_times_ms=task.times.by_store(),
        close_times_ms=task.times.close_times(),
        grids_ms=task.schedules.grids_ms(),
        stores=task.topology.schemas(),
        wall_ms=now_ms,
        source_ids=dict(task.source_ids),
        idle_ms=task.idle_ms,
        input=task.input,
    )
