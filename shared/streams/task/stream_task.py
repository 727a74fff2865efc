"""The stream task: a topology over one partition, sans-IO.

A task takes records as columns, and the wall-clock time. It collects what is to be written, until `prepare_commit`
returns all of it as one `TaskCommit`: records for other topics (results, late records, dead letters), the changelog
entries of the stores, and a progress record that ends them. The worker writes these in one transaction, or without a
transaction in this order, and then calls `commit_succeeded`. If it cannot write them, the task is discarded and
restored from the changelog.

`process` takes records in batches. A batch is cut where a STREAM_TIME punctuation is due and around each rejected
record. So the results are the same as if each record was processed alone. If an error occurs before a store has taken
the record, all outputs of the record are dropped, and by default the record goes to the dead-letter topic. Behind a
store only one output is dropped (`output_guard`). If neither is possible, the task fails and is never committed again,
because the record is only half processed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from penstock.shared.clients.dead_letters.dead_letter import (
    STAGE_DESERIALIZE,
    STAGE_PROCESS,
    STAGE_PRODUCE,
    DeadLetter,
    dead_letter_record,
)
from penstock.shared.common.errors import DataError, IllegalState, PenstockError, ProcessingFailed
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord, coordinates_of
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.streams.changelog.entry_columns import EntryColumns
from penstock.shared.streams.changelog.format import BatchInput, Progress, encode_progress
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.error_handlers import DEAD_LETTERS, ErrorHandlers
from penstock.shared.streams.operators.tables import TableLookup
from penstock.shared.streams.processor import NO_TIME
from penstock.shared.streams.punctuation import (
    CLOSED,
    NOT_INITIALIZED,
    PunctuationType,
    Punctuator,
    Schedule,
    Start,
    TaskSchedules,
    grids_bytes_max_of,
)
from penstock.shared.streams.record import ProcessorRecordContext, Record
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.persistent_stores import PersistentRowStore
from penstock.shared.streams.state.row_store import RowStore
from penstock.shared.streams.task.callbacks import in_callback
from penstock.shared.streams.task.fetch_ahead import FetchAhead
from penstock.shared.streams.task.metrics import StreamTaskMetrics
from penstock.shared.streams.task.operator_times import OperatorTimes
from penstock.shared.streams.task.origin_headers import original_record, without_origin_headers
from penstock.shared.streams.task.output_guard import NEVER_HANDLED
from penstock.shared.streams.task.outputs import TaskCommit, TaskOutputs
from penstock.shared.streams.task.processor_nodes import NodeContext, ProcessorNodes
from penstock.shared.streams.task.store_entries import encode_stores
from penstock.shared.streams.task.task_context import Guarantee, TaskMark
from penstock.shared.streams.task.time_shares import HasTime, always_has_time
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN, VectorizedExecutor, vectorized_executors
from penstock.shared.streams.task.watermarks import Watermark
from penstock.shared.streams.topology import ProcessorNode, SourceNode, Topology
from penstock.shared.streams.user_code import plain
from penstock.shared.streams.windows.late_changelog_entries import LateRows, encode_late_rows
from penstock.shared.streams.windows.size_limits import check_row, default_key_bytes_max, default_state_bytes_max

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

ROW_STORES = (RowStore, PersistentRowStore)
"""The stores of rows; `check_row` checks each row before a store takes it."""

RECORD_BYTES_MAX = 1024 * 1024
"""The producer's default of `max_request_size`."""


@in_callback("initialize", "process", "reject", "advance_time", "punctuate_wall_clock", "prepare_commit")
class StreamTask:
    """Runs a topology over one partition; `epoch` is the owner epoch of its changelog entries.

    With `local` the state is on disk, otherwise in memory. No result and no changelog entry may have more than
    `record_bytes_max` bytes. Batches of at least `columns_min` records are processed as columns if the topology allows
    it. With `keeps_late`, late records are written to the changelog, for the lake. Aggregations and joins of two
    streams reject records more than `max_future_ms` ahead of the wall clock.
    """

    def __init__(
        self,
        topology: Topology,
        partition: int,
        *,
        application: str,
        guarantee: Guarantee = "exactly_once",
        epoch: int = 1,
        deduplicate_updates: bool = True,
        handlers: ErrorHandlers = DEAD_LETTERS,
        record_bytes_max: int = RECORD_BYTES_MAX,
        key_bytes_max: int | None = None,
        columns_min: int = COLUMNS_MIN,
        keeps_late: bool = False,
        max_future_ms: int | None = None,
        registry: CollectorRegistry | None = None,
        local: LocalState | None = None,
    ) -> None:
        # The identity of the task.
        self.topology = topology
        self.partition = partition
        self.application = application
        self.epoch = epoch
        # The topic id of the changelog; None without a changelog, as in the test driver.
        self.changelog_id: str | None = None

        # Settings and limits.
        self.guarantee = guarantee
        self.deduplicate_updates = deduplicate_updates
        self.handlers = handlers
        self.columns_min = columns_min
        self.keeps_late = keeps_late
        # `process_input_records` rejects source records that are too far ahead before they reach the task.
        self.max_future_ms = max_future_ms
        self.record_bytes_max = record_bytes_max
        # The part of `record_bytes_max` that is left for the key and states of a changelog entry.
        self.state_bytes_max = default_state_bytes_max(record_bytes_max)
        self.key_bytes_max = key_bytes_max or default_key_bytes_max(record_bytes_max)

        # State.
        self.local = local
        self.stores = topology.build_stores(local)
        self.schemas = topology.schemas()
        self.codecs = {n: StateCodec(b.schema.state_columns()) for n, b in topology.stores.items()}
        self.global_tables: Mapping[str, TableLookup] = {}
        self._all_stores = tuple(self.stores.values())
        self._ahead = FetchAhead(topology, self.stores)
        for name, store in self.stores.items():
            if isinstance(store, ROW_STORES):
                aggregations = topology.stores[name].aggregations
                store.check = partial(check_row, name, aggregations, bytes_max=self.state_bytes_max)

        # Processors, by node.
        self._processor_nodes = ProcessorNodes(topology, record_bytes_max, self.add_output, self.source_record)
        self._processors = self._processor_nodes.processors
        self._routes = {s.topic: (s, self._processor_nodes.forward_to(s.name)) for s in topology.sources()}
        self.vectorized_executors: dict[str, VectorizedExecutor] = {}

        # Progress, which each commit writes to the changelog.
        self.commit_number = 0
        # By source topic, the next offset to read, and the topic id that this offset belongs to.
        self.sources: dict[str, int] = {}
        self.source_ids: dict[str, str] = {}
        self.times = OperatorTimes(topology, self._processors)
        self.schedules = TaskSchedules(
            topology.source_topics_by_node(),
            tuple(self._routes),
            grids_bytes_max_of(record_bytes_max),
            self.times.stream_time_ms,
        )
        # The sum of all advances of time without records.
        self.idle_ms = 0
        # How far `penstock batch` has read the history in files; unset without such a history.
        self.input: BatchInput | msgspec.UnsetType = msgspec.UNSET

        # The records that are processed now.
        self.now_ms = 0
        self.has_time: HasTime = always_has_time
        self._current_record: ConsumerRecord | None = None
        self.record_metadata: ProcessorRecordContext | None = None
        self.late_records = 0
        # The stores for which the current record was sent to the late topic, with the late records before each.
        self.late_stores: dict[str, int] = {}
        self._processed_records = 0

        # What the next commit writes besides the changes of the stores, and whether a commit is needed.
        self.outputs = TaskOutputs()
        self.late_rows = list[LateRows]()
        self._uncommitted = False

        # Whether a prepared commit is not confirmed yet, and the number of windows that it closes, for the metrics.
        self._committing = False
        self._closing = 0

        # The task's lifecycle and counters.
        self.not_running_reason: str | None = NOT_INITIALIZED
        self.is_initialized = False
        self.failed: ProcessingFailed | None = None
        self.metrics = StreamTaskMetrics(registry, partition)

    def __repr__(self) -> str:
        sizes = {name: len(store) for name, store in self.stores.items()}
        at = f"epoch {self.epoch}, commit {self.commit_number}, stream time {self.stream_time_ms}"
        return f"StreamTask({self.application}-{self.partition}, {at}, sources {self.sources}, stores {sizes})"

    # --- lifecycle ---

    def initialize(self, now_ms: int) -> None:
        """Call `init` of all processors. If the task has restored state, `restore.restore_progress` must come first."""
        self.now_ms = now_ms
        self.not_running_reason = None
        for name, processor in self._processors.items():
            node = self.topology.nodes[name]
            assert isinstance(node, ProcessorNode)
            plain(f"{name!r}: init()", processor.init)(NodeContext(self, node, self._processor_nodes))
        self.is_initialized = True
        self.vectorized_executors = vectorized_executors(self, self._processor_nodes)
        self._set_gauges()

    def close(self) -> None:
        """Remove the gauges, and call `close` of all processors. Raises ProcessingFailed that names those that raised.

        From now on the task neither schedules nor commits.
        """
        self.not_running_reason = CLOSED
        self.metrics.remove_gauges(self.times.by_store())
        self._processor_nodes.close(self.partition)

    # --- processing ---

    def process(self, columns: Columns, now_ms: int, has_time: HasTime = always_has_time) -> None:
        """Process consecutive records of one source partition. Records before the task's position are skipped.

        At least one of the others is processed, if there are any. Once `has_time` returns False, the rest may be left.
        The attribute `sources` has the position of the next record.

        Raises ProcessingFailed, which names node, topic, partition and offset, for an error that the error handlers do
        not handle. ConfigError, FatalError, IllegalState and MemoryError are raised unchanged. But after a store has
        taken the record, or if a punctuation raised them, they are raised as ProcessingFailed.
        """
        self.now_ms = now_ms
        self.has_time = has_time
        position = self.sources.get(columns.topic, -1)
        self._processed_records = 0
        # Records before the position were processed before. A second time would count them twice.
        if len(columns) and columns.offsets[0] < position:
            columns = columns[int(np.searchsorted(columns.offsets, position)) :]
        executor = self.vectorized_executors.get(columns.topic)
        try:
            if executor is not None and len(columns) >= self.columns_min:
                executor.take(columns)
            else:
                self.take_records(columns)
        finally:
            self._current_record = None
            self.record_metadata = None
            late = self.late_records
            self.late_records = 0
            self.metrics.late(columns.topic, late)
            # A failed task holds half of a change and must never be committed, so it must not ask for a commit.
            if self._processed_records and self.failed is None:
                self._uncommitted = True
            self.metrics.processed(self._processed_records)

    def take_records(self, columns: Columns, forward: Callable[[Record], None] | None = None) -> None:
        """Process records one by one until `has_time` returns False, but at least one record.

        Each decoded record is passed to `forward`; the default is the nodes below the source.
        """
        source, to_nodes = self._routes[columns.topic]
        for record in self._ahead.records(columns):
            self._process_record(source, forward or to_nodes, record)
            self.processed(record, 1)
            if not self.has_time():
                return

    def processed(self, last: ConsumerRecord, count: int) -> None:
        """Set the topic's position after this record. Call the STREAM_TIME schedules that are due, if the topic drives
        them.

        `count` records were processed since the last call.
        """
        self.sources[last.topic] = last.offset + 1
        self._processed_records += count
        # No record causes the outputs of a punctuation.
        self._current_record = None
        self.record_metadata = None
        try:
            # After the very record that makes it due, as in TopologyTestDriver. Kafka Streams' StreamThread punctuates
            # after a run of up to `numIterations` records, so there the moment depends on how records were fetched.
            self._punctuate_stream_time(last.topic)
        except Exception as e:
            raise self._mark_failed(f"a STREAM_TIME punctuation after {coordinates_of(last)}", e) from e

    def set_current_record(self, record: ConsumerRecord) -> None:
        """Set the record that processors process now."""
        self._current_record = record
        self.late_stores.clear()
        self.record_metadata = ProcessorRecordContext(record.topic, record.partition, record.offset)

    def current_record(self) -> ConsumerRecord | None:
        """Return the record that processors process now, if any."""
        return self._current_record

    def source_record(self) -> ConsumerRecord | None:
        """Return the current record, if any; behind a repartition topic it has its source record's coordinates."""
        record = self._current_record
        return original_record(record) if record is not None and self._routes[record.topic][0].is_internal else record

    def source_node(self, node: str) -> SourceNode:
        """Return the source of the current record; without one, the first source whose records can reach `node`."""
        record = self._current_record
        return self.topology.source_above(node) if record is None else self._routes[record.topic][0]

    def half_processed(self, error: Exception) -> ProcessingFailed:
        """Mark the task as failed because of an error after a store had taken the record; return the error to raise."""
        assert self._current_record is not None
        return self._mark_failed(f"{coordinates_of(self._current_record)}, which a store had taken,", error)

    def _process_record(self, source: SourceNode, forward: Callable[[Record], None], record: ConsumerRecord) -> None:
        self.set_current_record(record)
        # A store sets `touched` when it takes the record. From then on the record cannot be rejected any more.
        for store in self._all_stores:
            store.touched = False
        mark = self.mark()
        time_ms = self.times.source_times_ms.get(record.topic)
        stage = STAGE_DESERIALIZE
        try:
            # Kafka Streams' RecordQueue drops and counts such a record. Here it becomes a dead letter.
            if record.timestamp < 0:
                raise DataError(f"{record.topic}: the record has no timestamp, so it has no event time")
            key = record.key if source.key == "bytes" else string_deserializer(record.topic, record.key)
            value = source.value(record.topic, record.value)
            stage = STAGE_PROCESS
            # As in RecordQueue, a record that cannot be decoded moves no time. Unlike in PartitionGroup, neither does
            # one that a node rejects: a wrong timestamp may be the reason why it is rejected.
            self.times.advance_source(record.topic, record.timestamp)
            headers = without_origin_headers(record.headers) if source.is_internal else record.headers
            forward(Record(key, value, record.timestamp, headers))
        except Exception as e:
            # A dead letter can be replayed. This record would then be counted twice.
            if any(store.touched for store in self.stores.values()):
                raise self.half_processed(e) from e
            self.roll_back(mark)
            self.times.set_source_back(record.topic, time_ms)
            self._send_to_dead_letters_or_raise(source, record, stage, e)

    def _send_to_dead_letters_or_raise(
        self, source: SourceNode, record: ConsumerRecord, stage: str, error: Exception
    ) -> None:
        """Send a record that no store has taken to the DLQ, skip it, or raise, as the error handlers decide.

        Under `fail` it raises ProcessingFailed. The errors of NEVER_HANDLED are always raised unchanged.
        """
        # The program or the machine is at fault. Each later record would meet the same error, and the whole topic would
        # be sent to the DLQ.
        if isinstance(error, NEVER_HANDLED):
            raise error
        # A sink encodes inside `forward`. As since KIP-399, the handler for production decides about that error.
        if stage == STAGE_PROCESS and self._processor_nodes.is_sink_error(error):
            stage = STAGE_PRODUCE
        handler, reason = self.handlers.of(stage, error)
        if handler == "fail":
            raise self._processor_nodes.failure(f"{coordinates_of(record)} ({reason})", error, source.name) from error
        if handler == "continue":
            self.count_skipped(f"{stage} error")
            return
        dead_letter = DeadLetter.of(record, stage, error, 1, self.application)
        self.outputs.add(dead_letter_record(source.dead_letters, dead_letter, self.changelog_id))
        self.metrics.dead_letter(record.topic, stage)
        self.metrics.rejected_at["dead_letters"] = coordinates_of(record)

    def mark(self) -> TaskMark:
        """Return the numbers of outputs and late records, for `roll_back`."""
        return TaskMark(len(self.outputs), self.late_records, len(self.late_rows))

    def roll_back(self, mark: TaskMark) -> None:
        """Drop all outputs and late records since `mark`."""
        self.outputs.roll_back(mark.outputs)
        del self.late_rows[mark.late_rows :]
        self.late_records = mark.late_records
        self.late_stores = {store: before for store, before in self.late_stores.items() if before < self.late_records}

    def _mark_failed(self, subject: str, error: Exception) -> ProcessingFailed:
        """Mark the task as failed, because it holds half of a change: it is never committed again."""
        self.failed = self._processor_nodes.failure(subject, error)
        self.needs_commit = False
        return self.failed

    def reject(self, record: ConsumerRecord, error: PenstockError, stage: str = STAGE_DESERIALIZE) -> None:
        """Reject a record without processing it, as if `error` had been raised in the stage `stage`.

        The record does not advance stream time.
        """
        # A record before the position was rejected or processed before.
        if record.offset >= self.sources.get(record.topic, -1):
            self.set_current_record(record)
            try:
                self._send_to_dead_letters_or_raise(self._routes[record.topic][0], record, stage, error)
            finally:
                # After an error the records before this one may still be committed.
                self._current_record = None
                self.record_metadata = None
            self.sources[record.topic] = record.offset + 1
            self.needs_commit = True

    def advance_time(self, ms: int) -> None:
        """Advance times without a record, if there was a record before. Call the STREAM_TIME schedules that are due.

        0 ms advances only repartition topics, and operators that are behind them or behind other operators.
        """
        if self.failed is not None or self.stream_time_ms == NO_TIME:
            return
        self.needs_commit = True
        try:
            self.times.advance(ms)
            self.idle_ms += ms
            self._punctuate_stream_time()
        except Exception as e:
            raise self._mark_failed(f"an advance of partition {self.partition}'s time by {ms} ms", e) from e

    def advance_position(self, topic: str, position: int) -> None:
        """Advance a topic's known position to `position`, over offsets without records, such as transaction markers."""
        if self.failed is None and position > self.sources.get(topic, position):
            self.sources[topic] = position
            self.needs_commit = True

    def take_watermark(self, topic: str, offset: int, watermark: Watermark) -> None:
        """Take a watermark that was read at this offset of a repartition topic; no node sees it.

        A watermark before the topic's position is skipped.
        """
        # A watermark before the position may be older than the present one of its task.
        if offset >= self.sources.get(topic, -1):
            self.times.take(topic, watermark)
            self.sources[topic] = offset + 1
            self.needs_commit = True
            # 0 ms: only the topic and the operators behind it advance, as far as the new limit allows.
            self.advance_time(0)

    @property
    def stream_time_ms(self) -> int:
        """The task's stream time: the highest of its sub-topologies, or NO_TIME before the first record."""
        return self.times.stream_time_ms(self.times.source_times_ms)

    def stream_time_of(self, node: str) -> int:
        """Return the stream time of the node's sub-topology, or NO_TIME before its first record."""
        return self.times.stream_time_ms(self.schedules.topics_of(node))

    def _punctuate_stream_time(self, topic: str | None = None) -> None:
        """Call the STREAM_TIME schedules that are due: those that this source topic drives, by default all."""
        for topics, queue in tuple(self.schedules.stream_time.items()):
            if topic is None or topic in topics:
                queue.may_punctuate(self.times.stream_time_ms(topics))

    def punctuate_wall_clock(self, now_ms: int) -> None:
        """Call the WALL_CLOCK_TIME schedules that are due.

        If one was called, `needs_commit` is set: the commit stores the next due times of the named schedules.
        """
        self.now_ms = now_ms
        try:
            fired = self.schedules.wall_clock.may_punctuate(now_ms)
        except Exception as e:
            raise self._mark_failed(f"a WALL_CLOCK_TIME punctuation of partition {self.partition}", e) from e
        if fired and self.failed is None:
            self.needs_commit = True

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start: Start = None,
        name: str | None = None,
        node: str | None = None,
    ) -> Schedule:
        """As `ProcessorContext.schedule`.

        Without `node` the schedule belongs to the task's owner, and all source topics drive its stream time.

        Raises IllegalState before `initialize` and from `close` on.
        """
        if self.not_running_reason is not None:
            raise IllegalState(self.not_running_reason)
        add = self.schedules.schedule
        return add(interval, type, callback, now_ms=self.now_ms, start=start, name=name, node=node)

    # --- commit ---

    @property
    def needs_commit(self) -> bool:
        """Whether there is work that no successful commit contains yet. False for a failed task (`failed`)."""
        # A grid that no commit contains would begin again after a restart.
        return self._uncommitted or self._committing or (self.schedules.has_new_grid and self.failed is None)

    @needs_commit.setter
    def needs_commit(self, needs: bool) -> None:
        self._uncommitted = needs
        self._committing &= needs

    @property
    def is_committing(self) -> bool:
        """Whether a commit was prepared and is not known to have succeeded. False for a failed task (`failed`)."""
        return self._committing

    def prepare_commit(self, now_ms: int) -> TaskCommit:
        """Return everything since the last commit, to be written. The task may process records meanwhile.

        The caller must call `commit_succeeded` before another commit, or discard the task if the write fails. Raises
        ProcessingFailed if the task has failed, or if `commit` of a processor or the encoding of a state raises. Raises
        IllegalState before `initialize` and from `close` on.
        """
        if self.failed is not None:
            raise self.failed
        if self.not_running_reason is not None:
            raise IllegalState(f"a commit was requested of a task that does not run: {self!r}")
        self.now_ms = now_ms
        try:
            # 1. Processors forward what they held back until now. It belongs to this commit.
            for name, processor in self._processors.items():
                plain(f"{name!r}: commit()", processor.commit)()
            # 2. Encode the changes. The processors have committed already, so an error ends the task.
            self.commit_number += 1
            changelog, closing = encode_stores(self.topology.stores, self.stores, self.epoch, self.commit_number)
            self._closing += closing
            late = EntryColumns.joined(self._late_entries())
        except Exception as e:
            before = ", ".join(f"{topic}-{self.partition}@{at}" for topic, at in sorted(self.sources.items()))
            raise self._mark_failed(f"the commit of the records before {before}", e) from e
        # 3. Drop the changes before they are written, so that the task can continue at once. If the write fails, the
        # task is discarded, and the changelog has the state of the previous commit.
        for store in self._all_stores:
            store.committed()
        progress = self.progress_record(now_ms)
        # 4. The rows for the disk wait until the commit has succeeded (`local_state`).
        if self.local is not None:
            self.local.prepare(changelog, progress)
        # 5. The progress record comes last. Without it, readers ignore all entries of the commit.
        end = EntryColumns.of([(None, encode_progress(self.epoch, self.commit_number, progress))])
        changelog = EntryColumns.joined([changelog, late, end])
        outputs = self.outputs
        self.outputs = TaskOutputs()
        self._uncommitted = False
        self._committing = True
        self.schedules.has_new_grid = False
        self.metrics.commit_prepared()
        self._set_gauges()
        # The topic of a removed source may have been deleted. Its offset could then not be committed.
        sources = {topic: at for topic, at in self.sources.items() if topic in self._routes}
        return TaskCommit(outputs, changelog, sources)

    def progress_record(self, now_ms: int) -> Progress:
        """Return a commit's progress record: the task's positions and all else that a restart needs besides stores."""
        return Progress(
            application=self.application,
            guarantee=self.guarantee,
            sources=dict(self.sources),
            operator_times_ms=self.times.by_store(),
            source_times_ms=dict(self.times.source_times_ms),
            close_times_ms=self.times.close_times(),
            grids_ms=self.schedules.grids_ms(now_ms),
            stores=self.schemas,
            wall_ms=now_ms,
            source_ids=dict(self.source_ids),
            idle_ms=self.idle_ms,
            input=self.input,
        )

    def _late_entries(self) -> list[EntryColumns]:
        """Return the changelog entries of `late_rows`, and empty it."""
        numbers = {name: number for number, name in enumerate(self.stores)}
        rows = self.late_rows
        self.late_rows = []
        return [
            encode_late_rows(one, self.codecs[one.store], numbers[one.store], self.epoch, self.commit_number)
            for one in rows
        ]

    def commit_succeeded(self, position: CommitPosition | None = None) -> None:
        """Confirm that the prepared commit is durable, at this position of the changelog; state on disk records it."""
        if self.local is not None:
            assert position is not None
            self.local.confirm(self.epoch, position)
        # Only now, because another commit after a failed `confirm` would put a checkpoint over rows that are not on
        # disk.
        self._committing = False
        self.metrics.commit_succeeded(self._closing)
        self._closing = 0

    # --- outputs and counts ---

    def _set_gauges(self) -> None:
        self.metrics.set_gauges(self.stream_time_ms, self.times.by_store(), sum(map(len, self.stores.values())))

    def add_output(self, record: ProducerRecord, source_key: bytes | None = None) -> None:
        """Add a record for a topic; `source_key`, if given, chooses its partition instead of its own key."""
        self.outputs.add(record, source_key)

    def count_skipped(self, reason: str, records: int = 1) -> None:
        """Count skipped records. The last of them is the current record, or has no source record if there is none."""
        self.metrics.skipped(reason, records)
        source = self._current_record
        self.metrics.rejected_at["skipped"] = "of no source record" if source is None else coordinates_of(source)
