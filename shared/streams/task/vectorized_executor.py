"""Aggregation of whole batches: columns go into the store without a Python object for each record.

A source is vectorized if it feeds one aggregation and nothing else (`vectorized_executors`). The keys and values of a
batch become columns, and a kernel takes them. Results of closed windows are forwarded at the end of the batch. If a
node below the window may read the time, it would notice that, so the source is processed record by record.

A record is processed alone if it cannot be put into columns, for example because its value cannot be decoded, or if it
may make a state too large. The batch is cut before and after such a record, and where a STREAM_TIME schedule is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.shared.common.records import INT64_MAX, Columns, Int64Array
from penstock.shared.streams.operators.aggregates import WindowAggregate
from penstock.shared.streams.task.batch_decoder import NO_VALUE, BatchDecoder, DecodedBatch
from penstock.shared.streams.task.operator_chain import OperatorChain, functions_before_operator
from penstock.shared.streams.topology import SourceNode

if TYPE_CHECKING:
    from penstock.shared.streams.task.processor_nodes import ProcessorNodes
    from penstock.shared.streams.task.task_context import TaskContext

COLUMNS_MIN = 32
"""Fewer records are processed one by one, because making columns of them costs more than it saves."""


def vectorized_executors(task: TaskContext, processor_nodes: ProcessorNodes) -> dict[str, VectorizedExecutor]:
    """Return the vectorized executors of a task, by topic.

    A source has one if it feeds one `WindowAggregate` or `KeyAggregate` and nothing else, directly or through an
    operator chain (`operator_chain`). The node must not have a user's aggregation. If it emits on close, no node below
    it may read the time. If it emits on update, updates must be deduplicated.
    """
    found = {}
    for source in task.topology.sources():
        nodes, name = functions_before_operator(task, processor_nodes, source)
        operator = None if name is None else processor_nodes.processors.get(name)
        if name is None or not isinstance(operator, WindowAggregate):
            continue
        # Each record must forward its own update, but a batch returns only the windows that it closed.
        in_order = operator.emit == "on_update" and not task.deduplicate_updates
        # A node below would see the time of the batch's end.
        at_moment = operator.emit == "on_close" and _sees_time(task, processor_nodes, name)
        # A user's Aggregate may raise after its windows are known. Only a batch of one record can be undone then.
        if not (operator.takes_one_by_one or in_order or at_moment):
            chain = OperatorChain(task, nodes, operator.store.key_of) if nodes else None
            found[source.topic] = VectorizedExecutor(task, source, operator, chain)
    return found


def _sees_time(task: TaskContext, processor_nodes: ProcessorNodes, name: str) -> bool:
    """Return whether a node below this one may read the time, and so see that results come at the end of a batch."""
    names = list(task.topology.children[name])
    for one in names:
        names += task.topology.children[one]
    return any(one in processor_nodes.processors and processor_nodes.processors[one].sees_time for one in names)


class VectorizedExecutor:
    """Processes the batches of one source for one task."""

    def __init__(
        self, task: TaskContext, source: SourceNode, operator: WindowAggregate, chain: OperatorChain | None = None
    ) -> None:
        self._task = task
        self._source = source
        self._operator = operator
        self._chain = chain
        self._values = BatchDecoder(source, operator.store, task.key_bytes_max, chain)

    def take(self, columns: Columns) -> None:
        """Process a batch, in parts if it must be cut. The first part is always processed.

        Without an operator chain, no other part begins once the task's `has_time` returns False. With a chain, all
        records up to the last that has passed the chain are processed. A record that the kernel rejects is processed
        with the part that it ends. The caller keeps the rest for later (`StreamTask.process`).
        """
        self._take_batch(columns)
        if self._chain is not None:
            self._chain.forget()

    def _take_batch(self, columns: Columns) -> None:
        # A window's bound would leave 64 bits. Processed alone, that record is rejected (`takes_time`).
        if not len(columns) or columns.timestamps.max() > INT64_MAX - self._operator.rule.reach_ms:
            self._take_records(columns)
            return
        values = self._values.of(columns)
        # A column cannot hold one of the numbers, although `add` accepts it.
        if values is None:
            self._take_records(columns)
            return
        # A kernel cannot read the disk. Fetch all windows that the batch can reach or close.
        self._operator.store.prepare(columns.keys, int(columns.timestamps.max()))
        if in_doubt := self._operator.in_doubt(values.codes, values.inputs):
            values.exceptional = sorted({*values.exceptional, *in_doubt})
        self._take_values(columns[: len(values.codes)], values)

    def _take_records(self, columns: Columns) -> None:
        if self._chain is None:
            self._task.take_records(columns)
            return
        seen = self._chain.seen(columns)
        # One call for each record, since a call stops when the time is used up. All of them are taken, because their
        # functions were called already.
        for index in range(seen):
            self._task.take_records(columns[index : index + 1], self._chain.forward)
        # At least one record is processed in any case.
        if seen < len(columns) and (not seen or self._task.has_time()):
            self._task.take_records(columns[seen:], self._chain.forward)

    def _take_values(self, columns: Columns, values: DecodedBatch) -> None:
        # The batch is cut before and after a record that must be processed alone, and after a record that makes a
        # STREAM_TIME schedule due.
        exceptional = iter(values.exceptional)
        next_exceptional = next(exceptional, len(columns))
        start = 0
        while start < len(columns):
            if start == next_exceptional:
                self._take_records(columns[start : start + 1])
                start += 1
                next_exceptional = next(exceptional, len(columns))
            else:
                stop = self._records_until_schedule_due(columns.timestamps[start:next_exceptional]) + start
                done = self._take_part(columns, values, start, stop)
                # The kernel stopped before a record that it rejects. Processed alone, it gets its error.
                if done < stop:
                    self._take_records(columns[done : done + 1])
                    done += 1
                start = done
            # With an operator chain the rest is taken too, because its functions were called already.
            if self._chain is None and not self._task.has_time():
                return

    def _records_until_schedule_due(self, timestamps: Int64Array) -> int:
        """Return the number of records until a STREAM_TIME schedule is due, with the record that makes it due."""
        until = len(timestamps)
        for topics, queue in self._task.schedules.stream_time.items():
            due = queue.next_due_ms() if self._source.topic in topics else None
            if due is None:
                continue
            # A schedule that was made in `init` or by a wall-clock punctuation is due already. It fires after the next
            # record.
            if due <= self._task.times.stream_time_ms(topics):
                return 1
            is_due = timestamps[:until] >= due
            until = int(np.argmax(is_due)) + 1 if is_due.any() else until
        return until

    def _take_part(self, columns: Columns, values: DecodedBatch, start: int, stop: int) -> int:
        """Process the records from `start` up to `stop` until the kernel rejects one. Return its index, or `stop`."""
        task = self._task
        operator = self._operator
        # The kernel takes many records at once. If anything raises from here on, none of them can be rejected alone.
        operator.store.touched = True
        task.set_current_record(columns.record(stop - 1))
        try:
            at = np.arange(start, stop)
            if values.is_out is not None:
                at = at[~values.is_out[start:stop]]
            is_taken = values.codes[at] >= 0
            skipped = at[~is_taken]
            at = at[is_taken]
            if len(at):
                done = operator.take(columns, at, *values.of(at))
                if done < len(at):
                    # Skipped records after the rejected one are counted in their turn.
                    stop = int(at[done])
            skipped = skipped[skipped < stop]
            has_no_value = values.codes[skipped] == NO_VALUE
            reasons = (("null key", skipped[~has_no_value]), ("null value", skipped[has_no_value]))
            # In the order of their last records, since the metrics keep the last skipped record.
            for reason, null in sorted((r for r in reasons if len(r[1])), key=lambda r: int(r[1][-1])):
                task.set_current_record(columns.record(int(null[-1])))
                task.count_skipped(reason, len(null))
        except Exception as e:
            raise task.half_processed(e) from e
        if stop > start:
            # Skipped and filtered records advance the topic's time too, as when they are processed one by one. They do
            # not advance the operator's.
            timestamp_ms = int(columns.timestamps[start:stop].max())
            task.times.advance_source(columns.topic, timestamp_ms)
            task.processed(columns.record(stop - 1), stop - start)
        return stop
