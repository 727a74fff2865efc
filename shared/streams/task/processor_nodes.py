"""The processor nodes of a task and the edges between them.

A node is a processor, created for each task, or a `SinkNodeWriter`. If a node has one child, and the output guard
does not handle the child's errors, its `forward` calls the child's `process` directly. To keep this call cheap, the
current node is not tracked. After an error, the failed node is found in the traceback: it is the node of the innermost
frame that belongs to one.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.shared.clients.producer.record_validation import checked_headers
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import (
    ConfigError,
    DataError,
    IllegalState,
    ProcessingFailed,
    RecordTooLarge,
)
from penstock.shared.common.records import INT64_MAX, Columns, ConsumerRecord, Int64Array, ProducerRecord
from penstock.shared.streams.operators.stateless import Each
from penstock.shared.streams.operators.tables import TableLookup
from penstock.shared.streams.processor import PROCESSOR_METHODS, Processor
from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule, Start
from penstock.shared.streams.record import ProcessorRecordContext, Record, checked_record
from penstock.shared.streams.result_encoders import encode_json, encode_result_key, encode_updates
from penstock.shared.streams.state_store import StateStore
from penstock.shared.streams.task.callbacks import is_in_callback
from penstock.shared.streams.task.late_records import send_late, send_late_columns
from penstock.shared.streams.task.origin_headers import origin_headers
from penstock.shared.streams.task.output_guard import Edge, Forward, OutputGuard, guarded_edges_of
from penstock.shared.streams.task.outputs import OutputColumns
from penstock.shared.streams.topology import ProcessorNode, SinkNode, Topology
from penstock.shared.streams.user_code import belongs_to_engine, plain, require_done, require_plain_methods
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.streams.windows.late_changelog_entries import NO_OFFSET, LateRows
from penstock.shared.streams.windows.result_batch import ResultBatch
from penstock.shared.streams.windows.window_descriptions import describe_result

if TYPE_CHECKING:
    from penstock.shared.streams.task.task_context import TaskContext

Output = Callable[[ProducerRecord, bytes | None], None]
"""Takes a record for a topic, and the key that chooses its partition if that is not its own."""
CurrentRecord = Callable[[], ConsumerRecord | None]
"""Returns the current source record, or None."""


class SinkNodeWriter:
    """The node of a sink: turns the records that reach it into records of its topic.

    Raises RecordTooLarge if a record has more than `record_bytes_max` bytes, and SerializationError for an invalid
    header. A record for a repartition topic carries the coordinates of its source record, if it has one.
    """

    def __init__(self, node: SinkNode, record_bytes_max: int, output: Output, current_record: CurrentRecord) -> None:
        self._node = node
        self._record_bytes_max = record_bytes_max
        self._output = output
        self._current_record = current_record if node.is_internal else None
        self._has_window_keys = node.encode is encode_updates

    def process(self, record: Record) -> None:
        key, value = self._node.encode(record)
        source = None if self._current_record is None else self._current_record()
        if source is not None:
            record = record._replace(headers=record.headers + origin_headers(source))
        try:
            size = record_size(key, value, list(record.headers))
        except (TypeError, ValueError, AttributeError):
            # Raises an error that names the header.
            checked_headers(self._node.topic, record.headers)
            raise
        if size > self._record_bytes_max:
            topic = self._node.topic
            limit = self._record_bytes_max
            raise RecordTooLarge(f"topic {topic}: a record of {size} bytes; max_request_size={limit}")
        is_window = self._has_window_keys and isinstance(record.key, WindowKey)
        source_key = encode_result_key(record.key.key) if is_window else None
        self._output(ProducerRecord(self._node.topic, value, key, record.headers, None, record.timestamp), source_key)

    def encode(self, results: ResultBatch) -> OutputColumns | None:
        """Encode results for the sink's topic, all at once. Return None if they must be encoded one by one.

        This is so if the encoder is neither `encode_json` nor `encode_updates`, or if the sink may reject a result.
        """
        node = self._node
        if node.encode not in (encode_json, encode_updates):
            return None
        try:
            keys, values = results.encoded(whole_window_keys=self._has_window_keys)
        except Exception:
            # A value cannot be encoded. Encoding the results one by one finds and handles it.
            return None
        # An upper bound: a record of the longest key and the longest value. If it fits, all do. Otherwise encoding one
        # by one finds those that do not.
        longest = [bytes(max(int(column.lengths.max(initial=0)), 0)) for column in (keys, values)]
        if record_size(longest[0], longest[1], []) > self._record_bytes_max:
            return None
        source_keys = results.source_keys() if self._has_window_keys else None
        return OutputColumns(node.topic, keys, values, results.timestamps(), source_keys=source_keys)


class UserNode:
    """A processor of the user. Raises TypeError if its `process` returns an awaitable or a generator."""

    def __init__(self, name: str, processor: Processor) -> None:
        self._name = f"{name!r}: {type(processor).__name__}.process()"
        self._process: Callable[[Record], Any] = processor.process

    def process(self, record: Record) -> None:
        returned = self._process(record)
        if returned is not None:
            require_done(self._name, returned)


class ProcessorNodes:
    """The nodes of one task, by name."""

    def __init__(
        self, topology: Topology, record_bytes_max: int, output: Output, current_record: CurrentRecord
    ) -> None:
        self.topology = topology
        self.processors: dict[str, Processor] = {}
        self._sinks: dict[str, SinkNodeWriter] = {}
        for name, node in topology.nodes.items():
            if isinstance(node, ProcessorNode):
                made = node.supplier()
                self.processors[name] = made
                require_plain_methods(f"{name!r}: {type(made).__name__}", made, PROCESSOR_METHODS)
            elif isinstance(node, SinkNode):
                self._sinks[name] = SinkNodeWriter(node, record_bytes_max, output, current_record)
        self._users = {n: UserNode(n, p) for n, p in self.processors.items() if not belongs_to_engine(p)}
        named = [*self.processors.items(), *self._sinks.items(), *self._users.items()]
        self._names = {id(node): name for name, node in named}
        self.guard = OutputGuard(self.is_sink_error)

    def edges(self, name: str) -> list[Edge]:
        """Return the edges from a node to its children."""
        nodes: dict[str, Processor | UserNode | SinkNodeWriter] = {**self.processors, **self._users, **self._sinks}
        children = self.topology.children[name]
        return guarded_edges_of(self.topology, name, {child: nodes[child].process for child in children})

    def may_split(self, name: str) -> bool:
        """Return whether a node may forward several records for one, of which a store may take one before another."""
        processor = self.processors[name]
        if isinstance(processor, Each) and processor.at_most_once:
            return False
        return any(edge.reached and not edge.guarded for edge in self.edges(name))

    def is_behind_store(self, name: str) -> bool:
        """Return whether a node above this one may forward records from its stores.

        A join of two streams forwards pairs and earlier records, and a user's processor may do so. The join with a
        table only looks up a row.
        """
        above = map(self.topology.nodes.get, self.topology.above([name]))
        return any(isinstance(node, ProcessorNode) and node.stores and not node.only_reads for node in above)

    def writers(self, name: str) -> list[SinkNodeWriter]:
        """Return the writers of the sinks among a node's children."""
        return [self._sinks[child] for child in self.topology.children[name] if child in self._sinks]

    def forward_to(self, name: str) -> Forward:
        """Return the function that gives a record to all children of a node."""
        entrances = [
            functools.partial(self.guard.forward, edge) if edge.guarded else edge.entrance for edge in self.edges(name)
        ]
        if len(entrances) == 1:
            return entrances[0]

        def forward_to_children(record: Record) -> None:
            for entrance in entrances:
                entrance(record)

        return forward_to_children if entrances else lambda _: None

    def node_of(self, error: BaseException) -> str | None:
        """Return the node that raised an error, or None."""
        found = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # The innermost frame of a node wins: nodes call each other, so outer frames belong to nodes above it.
            found = self._names.get(id(frame.f_locals.get("self")), found)
        return found

    def is_sink_error(self, error: BaseException) -> bool:
        """Return whether a sink node raised the error."""
        return self.node_of(error) in self._sinks

    def close(self, partition: int) -> None:
        """Close all processors. If some raise, raise ProcessingFailed with all errors after the last one was closed."""
        failed: list[tuple[str, Exception]] = []
        for name, processor in self.processors.items():
            try:
                plain(f"{name!r}: close()", processor.close)()
            except Exception as e:
                failed.append((name, e))
        if failed:
            message = "; ".join(f"node {name!r}: {type(e).__name__}: {e}" for name, e in failed)
            raise ProcessingFailed(f"the processors of partition {partition} cannot be closed: {message}") from failed[
                0
            ][1]

    def failure(self, subject: str, error: Exception, node: str | None = None) -> ProcessingFailed:
        """Return the error that ends the task. It names the node that raised, or `node` if no node has raised."""
        where = self.node_of(error) or node
        kind = "" if isinstance(error, ProcessingFailed) else f"{type(error).__name__}: "
        about = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        prefix = f"node {where!r}: " if where else ""
        return ProcessingFailed(f"{prefix}{subject} cannot be processed: {about}{kind}{error}")


class NodeContext:
    """One processor's view of its task: the `ProcessorContext` of its node."""

    def __init__(self, task: TaskContext, node: ProcessorNode, nodes: ProcessorNodes) -> None:
        self._task = task
        self._node = node
        self._guard = nodes.guard
        self._guard.task = task
        self._edges = {edge.child: edge for edge in nodes.edges(node.name)}
        self._store = next((edge.store for edge in self._edges.values()), next(iter(node.stores), None))
        self._writers = nodes.writers(node.name)
        self._forward_first = nodes.forward_to(node.name)
        self._forward_all = self._forward_part if nodes.may_split(node.name) else self._forward_first
        self._is_behind_store = nodes.is_behind_store(node.name)

    @property
    def partition(self) -> int:
        return self._task.partition

    @property
    def deduplicate_updates(self) -> bool:
        return self._task.deduplicate_updates

    @property
    def state_bytes_max(self) -> int:
        return self._task.state_bytes_max

    @property
    def key_bytes_max(self) -> int:
        return self._task.key_bytes_max

    @property
    def record_metadata(self) -> ProcessorRecordContext | None:
        return self._task.record_metadata

    @property
    def stream_time_ms(self) -> int:
        return self._task.stream_time_of(self._node.name)

    @property
    def now_ms(self) -> int:
        return self._task.now_ms

    def forward(self, record: Record, to: str | None = None) -> None:
        if not is_in_callback(self._task):
            self._require_work("forward")
        if not self._task.is_initialized:
            raise IllegalState(
                f"{self._node.name!r}: forward() was called in init(), before the nodes below are initialized: forward "
                "in process(), or schedule a punctuation"
            )
        record = checked_record(record)
        if to is not None:
            if (child := self._edges.get(to)) is None:
                raise ConfigError(f"{self._node.name!r} forwards to {to!r}, which is not one of its children")
            self._forward_guarded(child, record)
        elif self._task.record_metadata is None:
            # In a punctuation or a commit there is no source record to reject.
            self._forward_part(record)
        else:
            self._forward_all(record)

    def _forward_part(self, record: Record) -> None:
        """Forward one of several records. An error does not concern the others if a store has taken one of them."""
        if not self._guard.is_record_kept():
            self._forward_first(record)
            return
        for edge in self._edges.values():
            self._forward_guarded(edge, record)

    def _forward_guarded(self, child: Edge, record: Record) -> None:
        if child.reached and not child.guarded and self._is_taken_elsewhere(child):
            # Another branch has counted the record, which must not stay half counted (`guarded_edges_of`).
            child.entrance(record)
        else:
            self._guard.forward(child, record)

    def _is_taken_elsewhere(self, child: Edge) -> bool:
        """Return whether a store that `child` does not reach has taken the source record."""
        if self._task.record_metadata is None:
            # A punctuation or a commit forwards the record, so there is no source record.
            return False
        return any(store.touched for name, store in self._task.stores.items() if name not in child.reached)

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start: Start = None,
        name: str | None = None,
    ) -> Schedule:
        self._require_work("schedule")
        callback = self._guard.punctuator(self._node.name, self._store, plain("schedule: callback", callback))
        return self._task.schedule(interval, type, callback, start=start, name=name, node=self._node.name)

    def _require_work(self, call: str) -> None:
        if not is_in_callback(self._task):
            raise IllegalState(
                f"{self._node.name!r}: {call}() was called outside of a callback: a context may only be used in its "
                "processor's methods and punctuators, in the thread that runs them. No commit follows close(), and an "
                "asyncio task or a callback of another library runs too late"
            )

    def store(self, name: str) -> StateStore | TableLookup:
        if name in self._node.global_tables:
            return self._task.global_tables[name]
        if name not in self._node.stores:
            raise ConfigError(f"{self._node.name!r} requests the store {name!r}, to which it is not connected")
        return self._task.stores[name]

    def emit_late(self, record: Record, close_time_ms: int, operator_time_ms: int) -> None:
        is_source_record = self._is_source_record()
        send_late(self._task, record, self._node.name, close_time_ms, operator_time_ms, is_source_record)

    def emit_late_columns(
        self, columns: Columns, indexes: Int64Array, close_times_ms: Int64Array, operator_times_ms: Int64Array
    ) -> None:
        send_late_columns(self._task, columns, indexes, self._node.name, close_times_ms, operator_times_ms)

    @property
    def keeps_late(self) -> bool:
        return self._task.keeps_late

    def keep_late(self, rows: LateRows) -> None:
        self._task.late_rows.append(rows.fitting(self._task.state_bytes_max))

    def late_offsets(self, source: Columns | None, offsets: Int64Array | None, count: int) -> Int64Array:
        """Return the records' offsets in the source topic of the node's store; NO_OFFSET for those without one."""
        topic = self._task.topology.stores[next(iter(self._node.stores))].schema.source
        if source is not None and offsets is not None and source.topic == topic:
            return offsets
        at = self._task.record_metadata if source is None and self._is_source_record() else None
        offset = at.offset if at is not None and at.topic == topic else NO_OFFSET
        return np.full(count, offset, np.int64)

    def _is_source_record(self) -> bool:
        """Return whether there is a source record, and no node above has a store, except joins with a table."""
        return self._task.record_metadata is not None and not self._is_behind_store

    def takes_time(self, timestamp: int, span_ms: int) -> bool:
        task = self._task
        node = self._node.name
        if timestamp > INT64_MAX - span_ms:
            message = f"{node!r}: the time {timestamp} ms with windows of {span_ms} ms leaves 64 bits"
        elif task.max_future_ms is not None and timestamp > task.now_ms + task.max_future_ms:
            ahead_ms = timestamp - task.now_ms
            message = f"{node!r}: the time lies {ahead_ms} ms in the future; max_future_ms={task.max_future_ms}"
        else:
            return True
        # In a punctuation or a commit there is no source record to send to the DLQ.
        if task.record_metadata is not None:
            raise DataError(message)
        task.count_skipped("time too far ahead")
        return False

    def reject_output(self, record: Record, error: Exception) -> None:
        self._guard.reject(self._node.name, self._store, record, error)

    def count_missed(self, windows: int) -> None:
        self._task.metrics.missed(windows)

    def count_skipped(self, reason: str, records: int = 1) -> None:
        self._task.count_skipped(reason, records)

    def forward_results(
        self,
        results: ResultBatch,
        source: Columns | None = None,
        indexes: Int64Array | None = None,
    ) -> None:
        """Forward results to all children: as columns if the only child is a sink that can encode them at once.

        `indexes` has for each result the index of the record in `source` that caused it.
        """
        # Columns for a sink need no Python object for each result.
        if len(self._edges) == 1 and self._writers and (encoded := self._writers[0].encode(results)) is not None:
            self._task.outputs.add(encoded)
            return
        for i, (record, error) in enumerate(results.records()):
            if source is not None and indexes is not None:
                # A dead letter or a message below must name the record that closed the window, and not the last one of
                # the batch.
                self._task.set_current_record(source.record(int(indexes[i])))
            try:
                if error is None:
                    self.forward(record)
                else:
                    self.reject_output(record, error)
            except Exception as e:
                e.add_note(f"the result of {describe_result(results.store, record.key)}")
                raise
