"""The stream task: one partition of a topology, sans-IO.

Columns and the wall clock go in; what came of them is kept until `prepare_commit` hands it out as one `TaskCommit`:
records for other topics (results, late records, dead letters), the changelog entries of the stores, and a progress
record that ends them. The worker writes those in one transaction, or in order, and then says `commit_succeeded`; if
it could not, the task is discarded and restored from what the changelog holds. There is no third way.

Within `process`, each record is taken through the topology on its own and STREAM_TIME punctuation is evaluated after
it, so the test driver and production see the same moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry

from shared.clients.consumer.dead_letters import DeadLetter, dead_letter_record
from shared.common.errors import ConfigError, DataError, FatalError, IllegalState
from shared.common.records import Columns, ConsumerRecord, ProducerRecord
from shared.common.serialization import string_deserializer
from shared.streams.changelog_format import (
    Progress,
    StateCodec,
    encode_deleted,
    encode_final,
    encode_live,
    encode_progress,
)
from shared.streams.late_records import late_record
from shared.streams.processor import Record, RecordMetadata, interval_ms
from shared.streams.punctuation import PunctuationQueue, PunctuationType, Punctuator, Schedule
from shared.streams.session_windows import NO_TIME, SessionAggregate
from shared.streams.state.session_store import InMemorySessionStore
from shared.streams.task_metrics import TaskMetrics
from shared.streams.topology import ProcessorNode, SinkNode, SourceNode, Topology

Guarantee = Literal["exactly_once", "at_least_once"]


class ProcessingFailed(FatalError):
    """A record that had already taken effect could not be handled to its end; the task restores, then tries again."""


class TaskCommit(NamedTuple):
    """What one commit writes: `outputs` to their topics, `changelog` (in order) to the task's changelog partition.

    `sources` are the next offsets to read by source topic, `commit` is its number within the owner's epoch.
    """

    outputs: list[ProducerRecord]
    changelog: list[tuple[bytes | None, bytes]]
    sources: dict[str, int]
    epoch: int
    commit: int


class StreamTask:
    """Runs a topology over one partition; `epoch` is the owner epoch its changelog entries carry."""

    def __init__(
        self,
        topology: Topology,
        partition: int,
        *,
        application: str,
        guarantee: Guarantee = "exactly_once",
        epoch: int = 1,
        deduplicate_updates: bool = True,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.topology, self.partition, self.application, self.guarantee = topology, partition, application, guarantee
        self.epoch, self.commit_number, self.deduplicate_updates = epoch, 0, deduplicate_updates
        self.stream_time_ms, self.now_ms = NO_TIME, 0
        self.sources: dict[str, int] = {}
        self.needs_commit = False
        self.metrics = TaskMetrics(registry, partition)
        self.stores = {name: builder.build() for name, builder in topology.stores.items()}
        self.record_metadata: RecordMetadata | None = None
        self._codecs = {n: StateCodec(b.schema.state_columns()) for n, b in topology.stores.items()}
        self._queues = {kind: PunctuationQueue() for kind in PunctuationType}
        self._grids_ms: dict[str, int] = {}
        self._outputs: list[ProducerRecord] = []
        self._source_record: ConsumerRecord | None = None
        self._processors = {n.name: n.supplier() for n in topology.nodes.values() if isinstance(n, ProcessorNode)}
        self._routes = {s.topic: (s, self._forward_to(s.name)) for s in topology.sources()}
        self._initialized = False

    def __repr__(self) -> str:
        sizes = {name: len(store) for name, store in self.stores.items()}
        return (
            f"StreamTask({self.application}-{self.partition}, epoch {self.epoch}, commit {self.commit_number}, "
            f"stream time {self.stream_time_ms}, sources {self.sources}, stores {sizes})"
        )

    # --- life ---

    def initialize(self, now_ms: int) -> None:
        """Call the processors' `init`; after `restore_progress`, where there was something to restore."""
        self.now_ms, self._initialized = now_ms, True
        for name, processor in self._processors.items():
            node = self.topology.nodes[name]
            assert isinstance(node, ProcessorNode)
            processor.init(_NodeContext(self, node, self._forward_to(name), self._children(name)))

    def close(self) -> None:
        """Call the processors' `close`."""
        for processor in self._processors.values():
            processor.close()

    # --- restore ---

    def restore_progress(self, progress: Progress) -> None:
        """Take up time, offsets and grids from a progress record; before `initialize`."""
        self.stream_time_ms, self.sources = progress.stream_time_ms, dict(progress.sources)
        self._grids_ms = dict(progress.grids_ms)
        for operator in self._operators():
            operator.stream_time_ms = progress.operator_times_ms.get(operator.store_name, NO_TIME)

    def restore_window(self, store: str, key: bytes, start: int, end: int, columns: list[Any]) -> None:
        """Put one live window back from its state's column values."""
        states, at = [], 0
        aggregations = self._operator_of(store).aggregations
        for aggregation in aggregations:
            width = len(aggregation.state_columns)
            states.append(aggregation.from_columns(columns[at : at + width]))
            at += width
        self.stores[store].load(self._key_from_bytes(store, key), start, end, states)

    def restore_live(self, store: str, key: bytes, start: int, end: int, state: bytes) -> None:
        """Put one live window back from its changelog entry's state."""
        self.restore_window(store, key, start, end, self._codecs[store].unpack(state))

    def restore_deleted(self, store: str, key: bytes, start: int) -> None:
        """Take one window out again, as a deleted or final entry says."""
        self.stores[store].unload(self._key_from_bytes(store, key), start)

    # --- work ---

    def process(self, columns: Columns, now_ms: int) -> None:
        """Take consecutive records of one source partition. Those before the task's position are skipped."""
        self.now_ms = now_ms
        source, forward = self._routes[columns.topic]
        position = self.sources.get(columns.topic, -1)
        stream_queue = self._queues[PunctuationType.STREAM_TIME]
        taken = 0
        for record in columns.records():
            if record.offset < position:
                continue
            taken += 1
            if record.timestamp > self.stream_time_ms:
                self.stream_time_ms = record.timestamp
            self._process_one(source, forward, record)
            self.sources[columns.topic] = record.offset + 1
            stream_queue.may_punctuate(self.stream_time_ms)
        self._source_record = self.record_metadata = None
        if taken:
            self.needs_commit = True
            self.metrics.processed(taken, self.stream_time_ms, sum(map(len, self.stores.values())))

    def _process_one(self, source: SourceNode, forward: Callable[[Record], None], record: ConsumerRecord) -> None:
        self._source_record = record
        self.record_metadata = RecordMetadata(record.topic, record.partition, record.offset)
        stage = "deserialize"
        try:
            if record.timestamp < 0:
                raise DataError(f"{record.topic}: a record without a timestamp cannot be put in time")
            key = record.key if source.key == "bytes" else string_deserializer(record.topic, record.key)
            value = source.value(record.topic, record.value)
            stage = "process"
            forward(Record(key, value, record.timestamp, record.headers))
        except DataError as e:
            letter = DeadLetter.of(record, stage, e, 1, self.application)
            self._outputs.append(dead_letter_record(source.dead_letters, letter))
            self.metrics.dead_letter(record.topic, stage)

    def punctuate_wall_clock(self, now_ms: int) -> bool:
        """Evaluate WALL_CLOCK_TIME schedules; True if any fired."""
        self.now_ms = now_ms
        fired = self._queues[PunctuationType.WALL_CLOCK_TIME].may_punctuate(now_ms)
        self.needs_commit |= fired
        return fired

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start_ms: int | None = None,
        name: str | None = None,
    ) -> Schedule:
        """As `ProcessorContext.schedule`; also for what owns the task. IllegalState before `initialize`."""
        if not self._initialized:
            raise IllegalState("schedule() may be called in a processor's init() or later, not while it is made")
        ms = interval_ms(interval)
        restored = self._grids_ms.pop(name, None) if name is not None else None
        if restored is not None:
            due = restored
        elif start_ms is not None:
            due = start_ms
        else:
            due = 0 if type is PunctuationType.STREAM_TIME else self.now_ms + ms
        return self._queues[type].schedule(ms, due, callback, name)

    # --- commit ---

    def prepare_commit(self, now_ms: int) -> TaskCommit:
        """Everything since the last commit, as what is to be written."""
        self.now_ms = now_ms
        for processor in self._processors.values():
            processor.commit()
        self.commit_number += 1
        changelog = [entry for number, name in enumerate(self.stores) for entry in self._store_entries(number, name)]
        changelog.append((None, encode_progress(self.epoch, self.commit_number, self._progress(now_ms))))
        return TaskCommit(self._outputs, changelog, dict(self.sources), self.epoch, self.commit_number)

    def commit_succeeded(self) -> None:
        """What `prepare_commit` gave is durable."""
        self._outputs = []
        self.needs_commit = False
        for store in self.stores.values():
            store.committed()

    def _store_entries(self, number: int, name: str) -> list[tuple[bytes | None, bytes]]:
        changes, epoch, commit = self.stores[name].changes(), self.epoch, self.commit_number
        pack, aggregations = self._codecs[name].pack, self._operator_of(name).aggregations

        def state(states: list[Any]) -> bytes:
            return pack([v for a, s in zip(aggregations, states, strict=True) for v in a.to_columns(s)])

        entries: list[tuple[bytes | None, bytes]] = [
            (_key_to_bytes(f.key), encode_final(number, epoch, commit, f.start, f.end, f.closed_at, state(f.states)))
            for f in changes.finals
        ]
        entries += [(_key_to_bytes(k), encode_deleted(number, epoch, commit, start)) for k, start in changes.deleted]
        entries += [
            (_key_to_bytes(s.key), encode_live(number, epoch, commit, s.start, s.end, state(s.states)))
            for s in changes.live
        ]
        self.metrics.committed(len(changes.finals))
        return entries

    def _progress(self, now_ms: int) -> Progress:
        grids = dict(self._grids_ms)
        for queue in self._queues.values():
            grids |= queue.grids_ms()
        return Progress(
            application=self.application,
            guarantee=self.guarantee,
            sources=dict(self.sources),
            stream_time_ms=self.stream_time_ms,
            operator_times_ms={o.store_name: o.stream_time_ms for o in self._operators()},
            grids_ms=grids,
            stores=self.topology.schemas(),
            wall_ms=now_ms,
        )

    # --- inside ---

    def _operators(self) -> list[SessionAggregate]:
        return [p for p in self._processors.values() if isinstance(p, SessionAggregate)]

    def _operator_of(self, store: str) -> SessionAggregate:
        return next(o for o in self._operators() if o.store_name == store)

    def _key_from_bytes(self, store: str, key: bytes) -> str | bytes:
        return key.decode() if self.topology.stores[store].schema.key == "string" else key

    def _children(self, name: str) -> dict[str, Callable[[Record], None]]:
        return {child: self._entrance(child) for child in self.topology.children[name]}

    def _entrance(self, name: str) -> Callable[[Record], None]:
        node = self.topology.nodes[name]
        return self._sink(node) if isinstance(node, SinkNode) else self._processors[name].process

    def _forward_to(self, name: str) -> Callable[[Record], None]:
        entrances = list(self._children(name).values())
        if len(entrances) == 1:
            return entrances[0]

        def to_all(record: Record) -> None:
            entrances[0](record)
            with _no_way_back(name):
                for entrance in entrances[1:]:
                    entrance(record)

        return to_all if entrances else lambda _: None

    def _sink(self, node: SinkNode) -> Callable[[Record], None]:
        def write(record: Record) -> None:
            key, value = node.encode(record)
            self._outputs.append(ProducerRecord(node.topic, value, key, record.headers, None, record.timestamp))

        return write

    def emit_late(self, close_time_ms: int, operator_time_ms: int) -> None:
        """Send the record in hand to its source's late topic and count it."""
        record = self._source_record
        assert record is not None, "only a record that is being processed can be late"
        source = self._routes[record.topic][0]
        self._outputs.append(late_record(record, source.late, close_time_ms, operator_time_ms))
        self.metrics.late(record.topic)


class _NodeContext:
    """What one processor sees of its task."""

    def __init__(
        self,
        task: StreamTask,
        node: ProcessorNode,
        forward: Callable[[Record], None],
        children: dict[str, Callable[[Record], None]],
    ) -> None:
        self._task, self._node, self._children = task, node, children
        self._forward_all = forward
        self.schedule = task.schedule

    @property
    def partition(self) -> int:
        return self._task.partition

    @property
    def deduplicate_updates(self) -> bool:
        return self._task.deduplicate_updates

    @property
    def record_metadata(self) -> RecordMetadata | None:
        return self._task.record_metadata

    @property
    def stream_time_ms(self) -> int:
        return self._task.stream_time_ms

    @property
    def now_ms(self) -> int:
        return self._task.now_ms

    def forward(self, record: Record, to: str | None = None) -> None:
        if to is not None and to not in self._children:
            raise ConfigError(f"{self._node.name!r} forwards to {to!r}, which is none of its children")
        take = self._forward_all if to is None else self._children[to]
        if self._node.stores:
            with _no_way_back(self._node.name):
                take(record)
        else:
            take(record)

    def store(self, name: str) -> InMemorySessionStore:
        if name not in self._node.stores:
            raise ConfigError(f"{self._node.name!r} asks for the store {name!r}, to which it is not connected")
        return self._task.stores[name]

    def emit_late(self, record: Record, close_time_ms: int, operator_time_ms: int) -> None:
        self._task.emit_late(close_time_ms, operator_time_ms)

    def count_skipped(self, reason: str) -> None:
        self._task.metrics.skipped(reason)


@contextlib.contextmanager
def _no_way_back(node: str) -> Iterator[None]:
    """A refusal after another node or a store took the record is fatal: as a dead letter it would count twice."""
    try:
        yield
    except DataError as e:
        raise ProcessingFailed(f"what {node!r} forwarded was refused after its record had taken effect: {e}") from e


def _key_to_bytes(key: Any) -> bytes:
    return key if isinstance(key, bytes) else key.encode()
