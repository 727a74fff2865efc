"""What was fetched for a task and not processed yet, by the parts of its topology.

Each part (sub-topology) takes the records of its topics in the order of their timestamps, see `partition_group`. A
part with one topic takes them as they come. While a task is paused everything stays here.
"""

from __future__ import annotations

import numpy as np

from shared.common.errors import DataError
from shared.common.records import Columns
from shared.streams.partition_group import Lags, PartitionGroup
from shared.streams.stream_task import StreamTask
from shared.streams.topology import SourceNode, Topology

BUFFERED_RECORDS_MAX = 1_000  # a partition with more at hand is not fetched from


class TaskInputs:
    """Hands a task its records; `max_task_idle_ms` as in `partition_group`, `max_future_ms` as in `process_in_time`."""

    def __init__(
        self, task: StreamTask, topology: Topology, max_task_idle_ms: int = 0, max_future_ms: int | None = None
    ) -> None:
        self._task = task
        task.max_future_ms = max_future_ms
        self.is_paused = False
        self._groups = []
        for names in topology.sub_topologies():
            nodes = [topology.nodes[name] for name in names]
            topics = [node.topic for node in nodes if isinstance(node, SourceNode)]
            self._groups.append(PartitionGroup(topics, max_task_idle_ms))
        self._group_of = {topic: group for group in self._groups for topic in group.queues}

    def __repr__(self) -> str:
        return f"TaskInputs({self._groups}{', paused' if self.is_paused else ''})"

    def add(self, columns: Columns) -> None:
        """Take records that follow those that are here."""
        self._group_of[columns.topic].queues[columns.topic].add(columns)

    def process(self, now_ms: int, lags: Lags) -> None:
        """Have the task process what may be processed now; raises what `StreamTask.process` raises."""
        if self.is_paused:
            return
        for group in self._groups:
            alone = len(group.queues) == 1
            while len(group) and (alone or group.is_ready(now_ms, lags)):
                process_in_time(self._task, group.next_run(), now_ms)

    def is_full(self, topic: str) -> bool:
        """Whether so many of the topic's records are here that no more should be fetched."""
        return self.is_paused or len(self._group_of[topic].queues[topic]) > BUFFERED_RECORDS_MAX

    def holds(self, topic: str) -> bool:
        """Whether records of the topic are here: the task's position is not the consumer's then."""
        return len(self._group_of[topic].queues[topic]) > 0

    def clear(self) -> None:
        """Forget everything: the consumer goes back to the task's positions."""
        for group in self._groups:
            group.clear()


def process_in_time(task: StreamTask, columns: Columns, now_ms: int) -> None:
    """Have a run of one topic's records processed, and those refused that lie too far ahead of the clock.

    A record that is more than the task's `max_future_ms` ahead would close every window there is, and make all that
    comes after it late: it is refused before it moves any time. Raises what `StreamTask.process` raises.
    """
    limit = task.max_future_ms
    if limit is None or columns.timestamps.max() <= now_ms + limit:
        task.process(columns, now_ms)
        return
    start = 0
    for at in np.flatnonzero(columns.timestamps > now_ms + limit).tolist():
        if at > start:
            task.process(columns[start:at], now_ms)
        ahead_ms = int(columns.timestamps[at]) - now_ms
        said = f"{columns.topic}: the record lies {ahead_ms} ms in the future; max_future_ms={limit}"
        task.refuse(columns.record(at), DataError(said))
        start = at + 1
    if start < len(columns):
        task.process(columns[start:], now_ms)
