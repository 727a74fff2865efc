"""Putting a task's state back from what a changelog (and a snapshot before it) confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shared.common.errors import CorruptRecord
from shared.streams.changelog_format import DELETED, FINAL, LIVE, Progress
from shared.streams.changelog_reader import Change, check_schema
from shared.streams.stream_task import StreamTask


def restore_task(task: StreamTask, changes: Iterable[Change], progress: Progress | None) -> None:
    """Put confirmed changes, in log order, and the last progress record into a task that is not initialized yet.

    Raises SchemaMismatch where the state was written by another topology.
    """
    if progress is not None:
        restore_progress(task, progress)
    for change in changes:
        restore_change(task, change)


def restore_progress(task: StreamTask, progress: Progress) -> None:
    """Check the schema that the state was written under, and take up time, offsets and grids."""
    check_schema(progress.stores, task.topology.schemas())
    task.restore_progress(progress)


def restore_change(task: StreamTask, change: Change) -> None:
    """Put one confirmed change into a task's store; CorruptRecord where its key or state cannot be read."""
    try:
        if change.operation == LIVE:
            columns = task.codecs[change.store].unpack(change.state)
            restore_window(task, change.store, change.key, change.start, change.end, columns)
        else:
            assert change.operation in (DELETED, FINAL)
            task.stores[change.store].unload(_key(task, change.store, change.key), change.start)
    except (ValueError, msgspec.MsgspecError) as e:
        raise CorruptRecord(f"an entry of store {change.store!r} cannot be read: {e}") from e


def restore_window(task: StreamTask, store: str, key: bytes, start: int, end: int, columns: Sequence[Any]) -> None:
    """Put one live window back from its state's column values."""
    states, at = [], 0
    for aggregation in task.topology.stores[store].aggregations:
        width = len(aggregation.state_columns)
        states.append(aggregation.from_columns(columns[at : at + width]))
        at += width
    task.stores[store].load(_key(task, store, key), start, end, states)


def _key(task: StreamTask, store: str, key: bytes) -> str | bytes:
    return key.decode() if task.topology.stores[store].schema.key == "string" else key
