"""What was fetched for a task and not processed yet, by the parts of its topology.

Each part (sub-topology) takes the records of its topics in the order of their timestamps, see `partition_group`. A
part with one topic takes them as they come. While a task is paused everything stays here, and so does what a turn has
no time for.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from penstock.shared.clients.consumer.dead_letters import STAGE_PROCESS
from penstock.shared.common.errors import DataError, RecordTooSlow
from penstock.shared.common.records import Columns
from penstock.shared.streams.runtime.slow_records import Step
from penstock.shared.streams.runtime.time_slices import HasTime, RunLength, Share, TurnTime, always
from penstock.shared.streams.settings import BUFFERED_RECORDS_MAX
from penstock.shared.streams.task.idleness import take_watermark
from penstock.shared.streams.task.partition_group import Lags, PartitionGroup
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.watermarks import watermarks_in
from penstock.shared.streams.topology import SourceNode, Topology


class TaskInputs:
    """Hands a task its records; `max_task_idle_ms` as in `partition_group`, `max_future_ms` as in `process_in_time`.

    A topic with more than `buffered_records_max` at hand is full; from the default on, not before one run can take it.
    """

    def __init__(
        self,
        task: StreamTask,
        topology: Topology,
        max_task_idle_ms: int = 0,
        max_future_ms: int | None = None,
        buffered_records_max: int = BUFFERED_RECORDS_MAX,
    ) -> None:
        self._task, self._buffered_records_max = task, buffered_records_max
        task.max_future_ms = max_future_ms
        self.is_paused = False
        self.is_cut = False
        """Whether there are records that could have been processed, had there been more time."""
        self.longest: Step | None = None
        """Of the last turn: what took the longest at once."""
        self.too_slow: tuple[str, int, RecordTooSlow] | None = None
        """The topic and offset of a record that is refused, and why."""
        self._groups: list[PartitionGroup] = []
        self._lengths: list[RunLength] = []
        for names in topology.sub_topologies():
            nodes = [topology.nodes[name] for name in names]
            topics = [node.topic for node in nodes if isinstance(node, SourceNode)]
            self._groups.append(PartitionGroup(topics, max_task_idle_ms))
            self._lengths.append(RunLength())
        self._internal = frozenset(topology.internal_topics())
        self._group_of = {topic: group for group in self._groups for topic in group.queues}

    def __repr__(self) -> str:
        return f"TaskInputs({self._groups}{', paused' if self.is_paused else ''})"

    def add(self, columns: Columns) -> None:
        """Take records that follow those that are here."""
        self._group_of[columns.topic].queues[columns.topic].add(columns)

    @property
    def waiting(self) -> int:
        """How many parts have records here that are to be processed."""
        return 0 if self.is_paused else sum(len(group) > 0 for group in self._groups)

    def process(self, now_ms: int, lags: Lags, time: TurnTime | None = None) -> None:
        """Have the task process what may be processed now; raises what `StreamTask.process` raises.

        With a turn's `time` it ends when that is used up, and says so by `is_cut`.
        """
        self.is_cut, self.longest = False, None
        if self.is_paused:
            return
        for group, length in zip(self._groups, self._lengths, strict=True):
            is_ready = partial(self._is_ready, group, now_ms, lags)
            if time is None:
                while is_ready():
                    self._process(group.next_run(), now_ms)
            elif len(group):
                share = time.share()
                while is_ready():
                    self._process_run(group, length, share, now_ms)
                    if not share.is_left():
                        self.is_cut |= is_ready()
                        break

    def _is_ready(self, group: PartitionGroup, now_ms: int, lags: Lags) -> bool:
        return len(group) > 0 and (len(group.queues) == 1 or group.is_ready(now_ms, lags))

    def _process_run(self, group: PartitionGroup, length: RunLength, share: Share, now_ms: int) -> None:
        """Have as much processed at once as may fit into the share, and keep what did not."""
        columns, before_ms = group.next_run(length.records_max), share.used_ms()
        self._process(columns, now_ms, share.is_left)
        next_offset, ms = self._task.sources[columns.topic], share.used_ms() - before_ms
        done = int(np.searchsorted(columns.offsets, next_offset))
        if self.longest is None or ms > self.longest.ms:  # one record that takes long is the last of its run
            path = self._task.vectorized_executors.get(columns.topic)
            self.longest = Step(columns.topic, next_offset - 1, ms, path is not None and done >= path.records_min)
        length.took(done, ms, share.ms)
        if done < len(columns):
            group.queues[columns.topic].put_back(columns[done:])

    def _process(self, columns: Columns, now_ms: int, has_time: HasTime = always) -> None:
        """Have a run processed, with the marks of time that are in it, and what is too slow refused."""
        if self.too_slow is not None and self.too_slow[0] == columns.topic:
            at = int(np.searchsorted(columns.offsets, self.too_slow[1]))
            if at < len(columns) and columns.offsets[at] == self.too_slow[1]:
                self._process_around(columns, at, self.too_slow[2], now_ms, has_time)
                return
        start = 0
        for at, mark in watermarks_in(columns) if columns.topic in self._internal else ():
            if at > start:
                process_in_time(self._task, columns[start:at], now_ms, has_time)
                if not has_time():
                    return
            take_watermark(self._task, columns.topic, int(columns.offsets[at]), mark)
            start = at + 1
        if start < len(columns):
            process_in_time(self._task, columns[start:] if start else columns, now_ms, has_time)

    def _process_around(self, columns: Columns, at: int, error: RecordTooSlow, now_ms: int, has_time: HasTime) -> None:
        """Have a run processed except for one record, which is refused."""
        if at:
            self._process(columns[:at], now_ms, has_time)
            if self._task.sources[columns.topic] <= columns.offsets[at - 1]:  # there was no time for all of them
                return
        self._task.refuse(columns.record(at), error, STAGE_PROCESS)
        if at + 1 < len(columns) and has_time():
            self._process(columns[at + 1 :], now_ms, has_time)

    @property
    def bytes(self) -> int:
        """Of all records here, as `RecordQueue.bytes`."""
        return sum(queue.bytes for group in self._groups for queue in group.queues.values())

    def is_full(self, topic: str) -> bool:
        """Whether so many of the topic's records are here that no more should be fetched."""
        group, room = self._group_of[topic], self._buffered_records_max
        if room >= BUFFERED_RECORDS_MAX:
            room = max(room, self._lengths[self._groups.index(group)].records_max)
        return self.is_paused or len(group.queues[topic]) > room

    def holds(self, topic: str) -> bool:
        """Whether records of the topic are here: the task's position is not the consumer's then."""
        return len(self._group_of[topic].queues[topic]) > 0

    def clear(self) -> None:
        """Forget everything: the consumer goes back to the task's positions."""
        self.is_cut = False
        for group in self._groups:
            group.clear()


def process_in_time(task: StreamTask, columns: Columns, now_ms: int, has_time: HasTime = always) -> None:
    """Have a run of one topic's records processed, and those refused that lie too far ahead of the clock.

    A record that is more than the task's `max_future_ms` ahead would close every window there is, and make all that
    comes after it late: it is refused before it moves any time. Raises what `StreamTask.process` raises; `has_time` as
    there.
    """
    limit = task.max_future_ms
    if limit is None or columns.timestamps.max() <= now_ms + limit:
        task.process(columns, now_ms, has_time)
        return
    start = 0
    for at in np.flatnonzero(columns.timestamps > now_ms + limit).tolist():
        if at > start:
            task.process(columns[start:at], now_ms, has_time)
            if not has_time():
                return
        ahead_ms = int(columns.timestamps[at]) - now_ms
        said = f"{columns.topic}: the record lies {ahead_ms} ms in the future; max_future_ms={limit}"
        task.refuse(columns.record(at), DataError(said))
        start = at + 1
    if start < len(columns):
        task.process(columns[start:], now_ms, has_time)
