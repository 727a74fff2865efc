"""The records that were fetched for a task and are not processed yet, by sub-topology.

A sub-topology with several topics processes their records in the order of timestamps (`partition_group`). A
sub-topology with one topic processes its records in offset order. Records that a turn has no time for stay here.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.shared.common.errors import DataError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import INT64_MAX, Columns
from penstock.shared.streams.settings import BUFFERED_RECORDS_MAX
from penstock.shared.streams.task.partition_group import Lags, PartitionGroup
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.time_shares import HasTime, RunLength, TimeShare, TimeShares, always_has_time
from penstock.shared.streams.task.watermarks import watermarks_in

log = get_logger(__name__)


class TaskInputs:
    """Holds a task's fetched records, and passes them to the task in runs.

    A run is a sequence of records of one partition that the task processes at once.

    See `partition_group` for `max_task_idle_ms`, and `is_full` for `buffered_records_max`. If `process` gets time
    shares, it logs a run that takes longer than `blocking_ms_max`.
    """

    def __init__(
        self,
        task: StreamTask,
        max_task_idle_ms: int = 0,
        buffered_records_max: int = BUFFERED_RECORDS_MAX,
        blocking_ms_max: float = math.inf,
    ) -> None:
        topology = task.topology
        self._task = task
        self._buffered_records_max = buffered_records_max
        self._blocking_ms_max = blocking_ms_max
        self.is_cut = False
        """Whether the last turn left records that it could have processed with more time."""
        self._groups: list[PartitionGroup] = []
        self._lengths: list[RunLength] = []
        for topics in dict.fromkeys(topology.source_topics_by_node().values()):
            self._groups.append(PartitionGroup(topics, max_task_idle_ms))
            self._lengths.append(RunLength())
        self._internal = frozenset(topology.internal_topics())
        self._group_of = {topic: group for group in self._groups for topic in group.queues}

    def __repr__(self) -> str:
        return f"TaskInputs({self._groups})"

    def add(self, columns: Columns) -> None:
        """Append records that follow those that are here."""
        self._group_of[columns.topic].queues[columns.topic].add(columns)

    @property
    def waiting(self) -> int:
        """Return the number of sub-topologies that have records to process here."""
        return sum(len(group) > 0 for group in self._groups)

    def process(self, now_ms: int, lags: Lags, time: TimeShares | None = None) -> None:
        """Let the task process the records that are ready. Raises what `StreamTask.process` raises.

        With `time`, each sub-topology stops when its share of the turn's time is used up. If records that are ready are
        left then, `is_cut` is set.
        """
        self.is_cut = False
        latest_ms = _latest_ms(self._task, now_ms)
        for group, length in zip(self._groups, self._lengths, strict=True):
            is_ready = partial(self._group_is_ready, group, now_ms, lags)
            if time is None:
                while is_ready():
                    self._process_records(group.next_run(None, latest_ms), now_ms)
            elif len(group):
                share = time.share()
                while is_ready():
                    self._process_run(group, length, share, now_ms, latest_ms)
                    if not share.is_left():
                        # Only records that are ready make the next turn poll without waiting. Others wait for a fetch.
                        self.is_cut |= is_ready()
                        break

    def _group_is_ready(self, group: PartitionGroup, now_ms: int, lags: Lags) -> bool:
        return len(group) > 0 and (len(group.queues) == 1 or group.is_ready(now_ms, lags))

    def _process_run(
        self, group: PartitionGroup, length: RunLength, share: TimeShare, now_ms: int, latest_ms: int
    ) -> None:
        """Process as many records at once as may fit into the share, and put back the rest."""
        # A batch of columns cannot be left midway, so its length is chosen before.
        columns = group.next_run(length.records_max, latest_ms)
        before_ms = share.used_ms()
        failed = 1
        try:
            self._process_records(columns, now_ms, share.is_left)
            failed = 0
        finally:
            ms = share.used_ms() - before_ms
            done = int(np.searchsorted(columns.offsets, self._task.sources[columns.topic]))
            # `has_time` ends a run after a slow record, so the slow record is the last one, or the one that failed.
            if ms > self._blocking_ms_max:
                # A punctuation that fails comes after its record, which may be the last one.
                count = min(done + failed, len(columns))
                where = f"{columns.topic}-{self._task.partition}@{columns.offsets[count - 1]}"
                log_blocked_heartbeats(f"{count} records up to {where}", ms)
        length.adapt(done, ms, share.ms)
        if done < len(columns):
            group.queues[columns.topic].put_back(columns[done:])

    def _process_records(self, columns: Columns, now_ms: int, has_time: HasTime = always_has_time) -> None:
        """Process a run with the watermarks in it."""
        start = 0
        # A watermark applies to the records before it, so they are processed first.
        for at, watermark in watermarks_in(columns) if columns.topic in self._internal else ():
            if at > start:
                process_input_records(self._task, columns[start:at], now_ms, has_time)
                # The watermark is put back with the records that follow.
                if not has_time():
                    return
            self._task.take_watermark(columns.topic, int(columns.offsets[at]), watermark)
            start = at + 1
        if start < len(columns):
            process_input_records(self._task, columns[start:] if start else columns, now_ms, has_time)

    @property
    def bytes(self) -> int:
        """Return the size of all records here, as `RecordQueue.bytes`."""
        return sum(queue.bytes for group in self._groups for queue in group.queues.values())

    def is_full(self, topic: str) -> bool:
        """Return whether the topic has so many records here that no more should be fetched."""
        group = self._group_of[topic]
        capacity = self._buffered_records_max
        # If the maximum length of a run is higher than `buffered_records_max`, it is the limit. Otherwise a partition
        # would pause before a whole run is here. A setting below the default is the user's own limit, and stays.
        if capacity >= BUFFERED_RECORDS_MAX:
            capacity = max(capacity, self._lengths[self._groups.index(group)].records_max)
        return len(group.queues[topic]) > capacity

    def holds(self, topic: str) -> bool:
        """Return whether records of the topic are here. If so, the task's position is behind the consumer's."""
        return len(self._group_of[topic].queues[topic]) > 0

    def clear(self) -> None:
        """Drop all records; the consumer then seeks to the task's positions."""
        self.is_cut = False
        for group in self._groups:
            group.clear()


def log_blocked_heartbeats(step: str, ms: int) -> None:
    """Log a run of a task's inputs, or another step, that blocked the heartbeats for almost a session timeout."""
    log.error("a step blocked the heartbeats almost for a session timeout", step=step, ms=ms)


def process_input_records(task: StreamTask, columns: Columns, now_ms: int, has_time: HasTime = always_has_time) -> None:
    """Let a task process a run of records of one topic, and reject records too far ahead of the wall clock.

    The limit is the task's `max_future_ms`. For rejected records see `StreamTask.reject`. For `has_time` and the errors
    see `StreamTask.process`.
    """
    latest_ms = _latest_ms(task, now_ms)
    if task.max_future_ms is None or columns.timestamps.max() <= latest_ms:
        task.process(columns, now_ms, has_time)
        return
    start = 0
    for at in np.flatnonzero(columns.timestamps > latest_ms).tolist():
        if at > start:
            task.process(columns[start:at], now_ms, has_time)
            if not has_time():
                return
        # The record would close every window and make later records late. It is rejected before it advances stream
        # time.
        ahead_ms = int(columns.timestamps[at]) - now_ms
        message = f"{columns.topic}: the record lies {ahead_ms} ms in the future; max_future_ms={task.max_future_ms}"
        task.reject(columns.record(at), DataError(message))
        start = at + 1
    if start < len(columns):
        task.process(columns[start:], now_ms, has_time)


def _latest_ms(task: StreamTask, now_ms: int) -> int:
    """Return the latest time that a record may have; a record with a later one is rejected."""
    return INT64_MAX if task.max_future_ms is None else now_ms + task.max_future_ms
