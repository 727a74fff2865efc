"""The stream task: one partition of a topology, sans-IO.

Columns and the wall clock go in; what came of them is kept until `prepare_commit` hands it out as one `TaskCommit`:
records for other topics (results, late records, dead letters), the changelog entries of the stores, and a progress
record that ends them. The worker writes those in one transaction, or in order, and then says `commit_succeeded`; if
it could not, the task is discarded and restored from what the changelog holds. There is no third way.

Within `process` records are taken in batches. A batch is cut where a STREAM_TIME punctuation is due and around each
record that is refused, so the test driver and production see the same moments. A record whose processing raises before
a store took it leaves nothing behind: what it had already sent on is dropped, and it goes to the dead-letter topic as a
whole. Behind a store an output is left out by itself (`output_guard`). Where an error lets neither be, the task fails
and is never committed again: what it holds is between two records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from penstock.shared.clients.consumer.dead_letters import (
    STAGE_DESERIALIZE,
    STAGE_PROCESS,
    STAGE_PRODUCE,
    DeadLetter,
    dead_letter_record,
)
from penstock.shared.common.errors import (
    ConfigError,
    DataError,
    FatalError,
    IllegalState,
    PenstockError,
    ProcessingFailed,
)
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.streams.changelog.entries import Entries
from penstock.shared.streams.changelog.format import BatchInput, StateCodec, encode_progress
from penstock.shared.streams.changelog.store_entries import encode_stores
from penstock.shared.streams.operators.tables import Lookup
from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule, Start
from penstock.shared.streams.record import Record, RecordMetadata
from penstock.shared.streams.runtime.time_slices import HasTime, always
from penstock.shared.streams.state.checkpoint import CommitPlace
from penstock.shared.streams.state.join_store import JoinStore
from penstock.shared.streams.state.key_value_store import KeyValueStore
from penstock.shared.streams.state.persistent_stores import PersistentJoinStore, PersistentKeyValueStore
from penstock.shared.streams.state.prefetch import FetchAhead
from penstock.shared.streams.task.callbacks import in_callback
from penstock.shared.streams.task.context import Guarantee, Mark
from penstock.shared.streams.task.error_handlers import DEAD_LETTERS, ErrorHandlers
from penstock.shared.streams.task.metrics import TaskMetrics
from penstock.shared.streams.task.operator_times import OperatorTimes
from penstock.shared.streams.task.outputs import TaskCommit, TaskOutputs
from penstock.shared.streams.task.processor_nodes import NodeContext, ProcessorNodes
from penstock.shared.streams.task.progress import progress_of
from penstock.shared.streams.task.repartition_headers import original, without_origin
from penstock.shared.streams.task.schedules import NOT_INITIALIZED, TaskSchedules
from penstock.shared.streams.task.user_functions import plain
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN, VectorizedExecutor, vectorized_executors
from penstock.shared.streams.topology import ProcessorNode, SourceNode, Topology
from penstock.shared.streams.windows.late_entries import LateRows, encode_late_rows
from penstock.shared.streams.windows.late_records import place_of
from penstock.shared.streams.windows.timed_processor import NO_TIME, TimedProcessor
from penstock.shared.streams.windows.window_limits import check_states, default_key_bytes_max, default_state_bytes_max

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

ROW_STORES = (KeyValueStore, JoinStore, PersistentKeyValueStore, PersistentJoinStore)
"""The stores that are given rows, each measured before a store has it."""

RECORD_BYTES_MAX = 1024 * 1024
"""The producer's default of `max_request_size`."""


@in_callback("initialize", "close", "process", "refuse", "advance_time", "punctuate_wall_clock", "prepare_commit")
class StreamTask:
    """Runs a topology over one partition; `epoch` is the owner epoch its changelog entries carry.

    With `local` its state is on disk, otherwise in memory.

    `handlers` say what becomes of a record that cannot be handled. No output may take more than `record_bytes_max` as a
    record; for the key and states of a changelog entry `state_bytes_max` is what that leaves. `columns_min` records or
    more are taken as columns where the topology allows it. With `keeps_late` the changelog gets late records, for the
    lake.
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
        registry: CollectorRegistry | None = None,
        local: LocalState | None = None,
    ) -> None:
        self.topology, self.partition, self.application, self.guarantee = topology, partition, application, guarantee
        self.epoch, self.commit_number, self.deduplicate_updates = epoch, 0, deduplicate_updates
        self.stream_time_ms, self.now_ms, self._uncommitted, self._committing = NO_TIME, 0, False, False
        self.sources: dict[str, int] = {}
        self.source_ids: dict[str, str] = {}
        self.input: BatchInput | msgspec.UnsetType = msgspec.UNSET
        self.global_tables: Mapping[str, Lookup] = {}
        self.changelog_id: str | None = None
        self.failed: ProcessingFailed | None = None
        self.metrics, self.local = TaskMetrics(registry, partition), local
        self.stores = topology.build_stores(local)
        self.codecs = {n: StateCodec(b.schema.state_columns()) for n, b in topology.stores.items()}
        self._all_stores, self._ahead = tuple(self.stores.values()), FetchAhead(topology, self.stores)
        self.record_metadata: RecordMetadata | None = None
        self.schedules, self.outputs, self.idle_ms = TaskSchedules(), TaskOutputs(), 0
        self.late_records, self._closing, self._taken, self._prepared = 0, 0, 0, self.metrics.committed
        self.max_future_ms: int | None = None
        self.has_time: HasTime = always
        self._source_record: ConsumerRecord | None = None
        self.handlers, self.record_bytes_max, self.columns_min = handlers, record_bytes_max, columns_min
        self.keeps_late, self.late_rows = keeps_late, list[LateRows]()
        self.state_bytes_max = default_state_bytes_max(record_bytes_max)
        self.key_bytes_max = key_bytes_max or default_key_bytes_max(record_bytes_max)
        for name, store in self.stores.items():
            if isinstance(store, ROW_STORES):
                aggregations = topology.stores[name].aggregations
                store.check = partial(check_states, name, aggregations, bytes_max=self.state_bytes_max)
        self._processor_nodes = ProcessorNodes(topology, record_bytes_max, self.add_output, self.source_record)
        self._processors = self._processor_nodes.processors
        self.times = OperatorTimes(topology, self._processors)
        self._routes = {s.topic: (s, self._processor_nodes.forward_to(s.name)) for s in topology.sources()}
        self.schedule_refusal: str | None = NOT_INITIALIZED
        self.vectorized_executors: dict[str, VectorizedExecutor] = {}

    def __repr__(self) -> str:
        sizes = {name: len(store) for name, store in self.stores.items()}
        at = f"epoch {self.epoch}, commit {self.commit_number}, stream time {self.stream_time_ms}"
        return f"StreamTask({self.application}-{self.partition}, {at}, sources {self.sources}, stores {sizes})"

    # --- life ---

    def initialize(self, now_ms: int) -> None:
        """Call the processors' `init`; after `restore.restore_progress`, where there was something to restore."""
        self.now_ms, self.schedule_refusal = now_ms, None
        for name, processor in self._processors.items():
            node = self.topology.nodes[name]
            assert isinstance(node, ProcessorNode)
            plain(f"{name!r}: init()", processor.init)(NodeContext(self, node, self._processor_nodes))
        self.vectorized_executors = vectorized_executors(self, self._processor_nodes)

    def close(self) -> None:
        """Call the processors' `close`, of all of them; ProcessingFailed names those that raised."""
        self._processor_nodes.close(self.partition)

    # --- work ---

    def process(self, columns: Columns, now_ms: int, has_time: HasTime = always) -> None:
        """Take consecutive records of one source partition. Those before the task's position are skipped.

        At least one is taken; once `has_time` says no, the others are not: `sources` says how far it came.

        Raises ProcessingFailed that names node, topic, partition and offset; ConfigError and FatalError as they are.
        """
        self.now_ms, self.has_time = now_ms, has_time
        position, self._taken = self.sources.get(columns.topic, -1), 0
        if len(columns) and columns.offsets[0] < position:
            columns = columns[int(np.searchsorted(columns.offsets, position)) :]
        path = self.vectorized_executors.get(columns.topic)
        try:
            if path is not None and len(columns) >= path.records_min:
                path.take(columns)
            else:
                self.take_records(columns)
        finally:
            self._source_record = self.record_metadata = None
            late, self.late_records = self.late_records, 0
            self.metrics.late(columns.topic, late)
            if self._taken and self.failed is None:
                self._uncommitted = True
            self.metrics.processed(self._taken, self.stream_time_ms, sum(map(len, self.stores.values())))
            self.metrics.operator_times(self.times.by_store())

    def take_records(self, columns: Columns, forward: Callable[[Record], None] | None = None) -> None:
        """Take records one by one, as long as there is time; `forward` takes what was decoded, if not the nodes do."""
        source, to_nodes = self._routes[columns.topic]
        for record in self._ahead.records(columns):
            self._process_one(source, forward or to_nodes, record)
            self.taken(record, 1)
            if not self.has_time():
                return

    def taken(self, last: ConsumerRecord, count: int) -> None:
        """Records up to this one are done: evaluate STREAM_TIME punctuation."""
        self.sources[last.topic] = last.offset + 1
        self._taken += count
        self._source_record = self.record_metadata = None  # what a punctuation forwards comes of no record
        try:
            self.schedules.stream_time.may_punctuate(self.stream_time_ms)
        except Exception as e:
            raise self._fail(f"a STREAM_TIME punctuation after {place_of(last)}", e) from e

    def set_current_record(self, record: ConsumerRecord) -> None:
        """This record is what a processor is at now."""
        self._source_record = record
        self.record_metadata = RecordMetadata(record.topic, record.partition, record.offset)

    def source_record(self) -> ConsumerRecord | None:
        """The record in hand, if there is one; behind a repartition topic by its source record's place and key."""
        record = self._source_record
        return original(record) if record is not None and self._routes[record.topic][0].is_internal else record

    def source_node(self, node: str) -> SourceNode:
        """Where the record in hand was read; without one the first source from which a record can come to `node`."""
        record = self._source_record
        return self.topology.source_above(node) if record is None else self._routes[record.topic][0]

    def half_processed(self, error: Exception) -> ProcessingFailed:
        """An error where a store had taken the record in hand: the task is unfit for any commit."""
        assert self._source_record is not None
        return self._fail(f"{place_of(self._source_record)}, which a store had taken,", error)

    def _process_one(self, source: SourceNode, forward: Callable[[Record], None], record: ConsumerRecord) -> None:
        self.set_current_record(record)
        for store in self._all_stores:
            store.touched = False
        mark, stage = self.mark(), STAGE_DESERIALIZE
        try:
            if record.timestamp < 0:
                raise DataError(f"{record.topic}: a record without a timestamp cannot be put in time")
            key = record.key if source.key == "bytes" else string_deserializer(record.topic, record.key)
            value = source.value(record.topic, record.value)
            stage = STAGE_PROCESS
            if record.timestamp > self.stream_time_ms:  # only now: what cannot be decoded moves no time
                self.stream_time_ms = record.timestamp
            headers = without_origin(record.headers) if source.is_internal else record.headers
            forward(Record(key, value, record.timestamp, headers))
        except Exception as e:
            if any(store.touched for store in self.stores.values()):
                raise self.half_processed(e) from e
            self.take_back(mark)
            self._refuse(source, record, stage, e)

    def _refuse(self, source: SourceNode, record: ConsumerRecord, stage: str, error: Exception) -> None:
        """Make a dead letter of a record that no store has taken, or raise what must not become one."""
        if isinstance(error, ConfigError | FatalError | IllegalState | MemoryError):
            raise error
        if stage == STAGE_PROCESS and self._processor_nodes.is_of_sink(error):
            stage = STAGE_PRODUCE
        handler, reason = self.handlers.of(stage, error)
        if handler == "fail":
            raise self._processor_nodes.failure(f"{place_of(record)} ({reason})", error, source.name) from error
        if handler == "continue":
            self.count_skipped(f"{stage} error")
            return
        letter = DeadLetter.of(record, stage, error, 1, self.application)
        self.outputs.add(dead_letter_record(source.dead_letters, letter, self.changelog_id))
        self.metrics.dead_letter(record.topic, stage)
        self.metrics.refused_at["dead_letters"] = place_of(record)

    def mark(self) -> Mark:
        """How much there is of what a record brings about, and stream time, for `take_back`."""
        return Mark(len(self.outputs), self.late_records, len(self.late_rows), self.stream_time_ms)

    def take_back(self, mark: Mark) -> None:
        """Forget what came of a record since `mark`: a dead letter moves no time."""
        outputs, self.late_records, late_rows, self.stream_time_ms = mark
        self.outputs.take_back(outputs)
        del self.late_rows[late_rows:]

    def _fail(self, what: str, error: Exception) -> ProcessingFailed:
        """The task holds half of something: it must not be committed, and takes nothing more."""
        self.failed, self.needs_commit = self._processor_nodes.failure(what, error), False
        return self.failed

    def refuse(self, record: ConsumerRecord, error: PenstockError, stage: str = STAGE_DESERIALIZE) -> None:
        """Refuse a record as if it failed at this stage, but it moves no time, and no node sees it."""
        if record.offset >= self.sources.get(record.topic, -1):
            self.set_current_record(record)
            self._refuse(self._routes[record.topic][0], record, stage, error)
            self._source_record = self.record_metadata = None
            self.sources[record.topic] = record.offset + 1
            self.needs_commit = True

    def advance_time(self, ms: int) -> None:
        """Move times on without a record, where there was one before; by 0 ms those that go by other tasks' marks."""
        if self.failed is not None or self.stream_time_ms == NO_TIME:
            return
        self.stream_time_ms += ms
        self.needs_commit = True
        try:
            self.times.advance(ms)
            self.idle_ms += ms
            self.schedules.stream_time.may_punctuate(self.stream_time_ms)
        except Exception as e:
            raise self._fail(f"an advance of partition {self.partition}'s time by {ms} ms", e) from e

    def advance(self, topic: str, position: int) -> None:
        """Take it that everything before `position` is read: offsets without a record, as transactions' marks are."""
        if self.failed is None and position > self.sources.get(topic, position):
            self.sources[topic] = position
            self.needs_commit = True

    def punctuate_wall_clock(self, now_ms: int) -> bool:
        """Evaluate WALL_CLOCK_TIME schedules; True if any fired: then a commit is needed, if only for the grids."""
        self.now_ms = now_ms
        try:
            fired = self.schedules.wall_clock.may_punctuate(now_ms)
        except Exception as e:
            raise self._fail(f"a WALL_CLOCK_TIME punctuation of partition {self.partition}", e) from e
        if fired and self.failed is None:
            self.needs_commit = True
        return fired

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
        """As `ProcessorContext.schedule`; without a `node` for what owns the task. IllegalState before `initialize`."""
        if self.schedule_refusal is not None:
            raise IllegalState(self.schedule_refusal)
        add = self.schedules.schedule
        return add(interval, type, callback, now_ms=self.now_ms, start=start, name=name, node=node)

    # --- commit ---

    @property
    def needs_commit(self) -> bool:
        """Whether there is something that no commit holds yet; one that was prepared may not."""
        return self._uncommitted or self._committing or (self.schedules.has_new_grid and self.failed is None)

    @needs_commit.setter
    def needs_commit(self, needs: bool) -> None:
        self._uncommitted = needs
        self._committing &= needs

    @property
    def is_committing(self) -> bool:
        """Whether a commit was prepared of which it is not known that it holds."""
        return self._committing

    def prepare_commit(self, now_ms: int) -> TaskCommit:
        """Everything since the last one, as what is to be written; ProcessingFailed where it cannot be.

        The task may go on at once. Until `commit_succeeded` no other commit is prepared; where it never comes, the
        task is discarded.
        """
        if self.failed is not None:
            raise self.failed
        if self.schedule_refusal is not None:
            raise IllegalState(f"a commit was asked of a task that does not run: {self!r}")
        self.now_ms = now_ms
        try:
            for name, processor in self._processors.items():
                plain(f"{name!r}: commit()", processor.commit)()
            self.commit_number += 1
            changelog, closing = encode_stores(self.topology.stores, self.stores, self.epoch, self.commit_number)
            self._closing += closing
            late = Entries.joined(self._late_entries())
        except Exception as e:
            sources = ", ".join(f"{topic}-{self.partition}@{at}" for topic, at in sorted(self.sources.items()))
            raise self._fail(f"the commit of what lies before {sources}", e) from e
        for store in self._all_stores:
            store.committed()
        progress = progress_of(self, now_ms)
        if self.local is not None:
            self.local.prepare(changelog, progress)
        end = Entries.of([(None, encode_progress(self.epoch, self.commit_number, progress))])
        changelog = Entries.joined([changelog, late, end])
        outputs, self.outputs = self.outputs, TaskOutputs()
        self._uncommitted, self._committing, self.schedules.has_new_grid = False, True, False
        self._prepared = self.metrics.totals()
        return TaskCommit(outputs, changelog, dict(self.sources), self.epoch, self.commit_number)

    def _late_entries(self) -> list[Entries]:
        """The changelog entries of late records."""
        numbers = {name: number for number, name in enumerate(self.stores)}
        rows, self.late_rows = self.late_rows, []
        return [
            encode_late_rows(one, self.codecs[one.store], numbers[one.store], self.epoch, self.commit_number)
            for one in rows
        ]

    def commit_succeeded(self, place: CommitPlace | None = None) -> None:
        """What `prepare_commit` gave is durable, at that place of the changelog; what is on disk needs to know it."""
        self._committing = False
        if self.local is not None:
            assert place is not None
            self.local.confirm(self.epoch, place)
        self.metrics.commit_succeeded(self._prepared, self._closing)
        self._closing = 0

    # --- inside ---

    def add_output(self, record: ProducerRecord, source_key: bytes | None = None) -> None:
        """A record for a topic; its partition is chosen by `source_key`, if not by its own."""
        self.outputs.add(record, source_key)

    def operators(self) -> list[TimedProcessor]:
        """The processors that have a time of their own."""
        return self.times.operators

    def count_skipped(self, reason: str, records: int = 1) -> None:
        """Count the record in hand, and others of its batch before it, as skipped."""
        self.metrics.skipped(reason, records)
        if self._source_record is not None:
            self.metrics.refused_at["skipped"] = place_of(self._source_record)
