"""The output guard: after a store has taken a record, an error drops one output, and the state stays.

Before a store takes the current record, an error rejects the whole record (`stream_task`). Behind a store, and in a
punctuation or a commit, that is impossible: the store has counted the record, and a closed window stays closed. There
the output is dropped: the record that the failing node was given, and everything that the node forwarded for it. The
error handlers (`error_handlers`) decide whether the output is only counted, also becomes a dead letter
(`output_dead_letter`), or ends the task. Other outputs are not affected.

The task also ends if a node raises after it, or a node below it, has changed a store: half of a change can be neither
kept nor undone. A punctuator that raises is an exception: what it stored and forwarded before the error stays, unless
a node below it made half of a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.shared.clients.dead_letters.dead_letter import (
    ATTEMPTS,
    EXCEPTION,
    GROUP,
    MESSAGE,
    NODE,
    STAGE,
    STAGE_PROCESS,
    STAGE_PRODUCE,
    STORE,
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
    DeadLetter,
    header_text,
)
from penstock.shared.common.errors import ConfigError, FatalError, IllegalState
from penstock.shared.common.records import ConsumerRecord, Headers, ProducerRecord, coordinates_of
from penstock.shared.streams.operators.stream_join import Sided
from penstock.shared.streams.punctuation import Punctuator
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_without_error
from penstock.shared.streams.task.origin_headers import origin_headers
from penstock.shared.streams.task.outputs import record_that_fits
from penstock.shared.streams.topology import ProcessorNode, Topology
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.streams.windows.window_descriptions import describe_window

if TYPE_CHECKING:
    from penstock.shared.streams.task.task_context import TaskContext, TaskMark

Forward = Callable[[Record], None]

NEVER_HANDLED = (ConfigError, FatalError, IllegalState, MemoryError)
"""Errors of the program or the machine, which no record causes."""


class Edge(NamedTuple):
    """The edge from a node to one of its children."""

    child: str
    entrance: Forward
    """The function that passes a record to the child."""
    reached: tuple[str, ...]
    """The stores that the child and the nodes below it may change."""
    store: str | None
    """The nearest store of the node or of the nodes above it, also one that a join reads; None if there is none."""
    guarded: bool
    """Whether the output guard handles the child's errors, because a store may have taken the record before the child
    gets it."""


def guarded_edges_of(topology: Topology, name: str, entrances: dict[str, Forward]) -> list[Edge]:
    """Return the edges to a node's children, each with whether the output guard handles the child's errors.

    `entrances` has for each child the function that passes a record to it.
    """
    edges: list[Edge] = []
    store = _nearest_store(topology, name)
    is_behind_store = any(_changes_a_store(topology, node) for node in (name, *topology.above([name])))
    for child, entrance in entrances.items():
        reached = _stores_changed_from(topology, child)
        # If a branch that changes a store rejects a record that a sibling has counted, the record is half counted, so
        # that branch is not guarded. A branch that changes none only loses its output. A join with a table only reads
        # its store, so it has not counted the record.
        guarded = is_behind_store or (not reached and (store is not None or any(edge.reached for edge in edges)))
        edges.append(Edge(child, entrance, reached, store, guarded))
    return edges


def _stores_of_node(topology: Topology, name: str) -> tuple[str, ...]:
    node = topology.nodes[name]
    return node.stores if isinstance(node, ProcessorNode) else ()


def _nearest_store(topology: Topology, name: str) -> str | None:
    names = [name]
    for one in names:
        if stores := _stores_of_node(topology, one):
            return stores[0]
        names += [parent for parent, below in topology.children.items() if one in below and parent not in names]
    return None


def _changes_a_store(topology: Topology, name: str) -> bool:
    node = topology.nodes[name]
    return isinstance(node, ProcessorNode) and bool(node.stores) and not node.only_reads


def _stores_changed_from(topology: Topology, name: str) -> tuple[str, ...]:
    """Return the stores that the node and the nodes below it may change."""
    changing = [node for node in topology.below(name) if _changes_a_store(topology, node)]
    return tuple(dict.fromkeys(store for node in changing for store in _stores_of_node(topology, node)))


class OutputGuard:
    """Handles the errors of a task's nodes at the edges; `is_sink_error` recognizes errors of writing."""

    def __init__(self, is_sink_error: Callable[[BaseException], bool]) -> None:
        self.task: TaskContext
        self._is_sink_error = is_sink_error
        self._window: tuple[str | None, WindowKey] | None = None
        self._is_half_changed = False
        """Whether in the present punctuation a node has raised after it, or a node below it, had changed a store."""

    def forward(self, edge: Edge, record: Record) -> None:
        """Give a record to the child. Handle the child's error if no source record can be rejected because of it."""
        task = self.task
        if not self.is_record_kept():
            # No store has taken the record. An error rejects it as a whole (`StreamTask._process_record`).
            edge.entrance(record)
            return
        # An error may drop the output unless a store of the child or below it has changed.
        window = self._window
        stores = [task.stores[name] for name in edge.reached]
        if isinstance(record.key, WindowKey):
            self._window = (edge.store, record.key)
        touched = [store.touched for store in stores]
        mark = task.mark()
        for store in stores:
            store.touched = False
        try:
            edge.entrance(record)
        except Exception as e:
            # The child, or a node below it, has changed a store before it raised. The task ends.
            is_half_changed = any(store.touched for store in stores)
            self._is_half_changed |= is_half_changed
            if is_half_changed or isinstance(e, NEVER_HANDLED):
                raise
            self._reject_record(edge.child, edge.store, record, e, mark)
        finally:
            for store, before in zip(stores, touched, strict=True):
                # The nodes above still have to know which stores had taken something.
                store.touched |= before
            self._window = window

    def reject(self, node: str, store: str | None, record: Record, error: Exception) -> None:
        """Drop an output that a node could not make because of `error`, as the error handlers decide.

        `record` has what is known of the output, such as its key. Raises `error` if the handler is `fail`, or if
        `error` is one of NEVER_HANDLED. If no store has taken the current source record, raises `error` to reject that
        record instead.
        """
        if not self.is_record_kept() or isinstance(error, NEVER_HANDLED):
            raise error
        window = self._window
        if isinstance(record.key, WindowKey):
            self._window = (store, record.key)
        try:
            self._reject_record(node, store, record, error, self.task.mark())
        finally:
            self._window = window

    def punctuator(self, node: str, store: str | None, callback: Punctuator) -> Punctuator:
        """Wrap a callback so that its errors are handled."""

        def run_punctuator(now_ms: int) -> None:
            self._is_half_changed = False
            try:
                callback(now_ms)
            except Exception as e:
                # A node below has made half of a change. The callback's own changes do not count.
                if self._is_half_changed or isinstance(e, NEVER_HANDLED):
                    raise
                # No mark to return to: as in Kafka Streams, the punctuation ends here, and what it stored and forwarded
                # before stays.
                self._reject_record(node, store, Record(None, None, max(now_ms, 0)), e, None)

        return run_punctuator

    def is_record_kept(self) -> bool:
        """Return whether the source record cannot be rejected any more, or there is none."""
        task = self.task
        # In a punctuation or a commit there is no source record that could be rejected.
        return task.record_metadata is None or any(store.touched for store in task.stores.values())

    def _reject_record(
        self, node: str, store: str | None, record: Record, error: Exception, mark: TaskMark | None
    ) -> None:
        task = self.task
        source = self.task.source_record()
        stage = STAGE_PRODUCE if self._is_sink_error(error) else STAGE_PROCESS
        handler, _ = task.handlers.of(stage, error)
        if handler == "fail":
            raise error
        if mark is not None:
            task.roll_back(mark)
        window = None
        if self._window is not None:
            store, window = self._window
        emitted = Emitted(record, node, store, window, None if source is None else coordinates_of(source))
        if handler == "continue":
            task.metrics.skipped(f"{stage} error")
            task.metrics.rejected_at["skipped"] = str(emitted)
            return
        origin = task.source_node(node)
        topic = origin.dead_letters
        limit = task.record_bytes_max
        task.outputs.add(output_dead_letter(topic, emitted, source, stage, error, task.application, limit))
        task.metrics.dead_letter(origin.topic, stage)
        task.metrics.rejected_at["dead_letters"] = str(emitted)


class Emitted(NamedTuple):
    """The record that `node` was given, and its known origin; `source` has the source record's coordinates."""

    record: Record
    node: str
    store: str | None
    window: WindowKey | None
    source: str | None

    def __str__(self) -> str:
        parts = [f"node {self.node!r}"]
        if self.window is not None:
            parts.append(describe_window(self.store, *self.window))
        elif self.store is not None:
            parts.append(f"store {self.store!r}")
        return ", ".join([*parts, self.source or "of no source record"])


def output_dead_letter(
    topic: str,
    emitted: Emitted,
    source: ConsumerRecord | None,
    stage: str,
    error: Exception,
    application: str,
    record_bytes_max: int,
) -> ProducerRecord:
    """Return the dead letter of an output that was dropped because of an error of a node.

    Its key is the output's, or the window's record key if the output came from a window. Its value is the output's.
    Both are encoded by `encode_without_error`. Headers name the node, the store and the window, and the source record
    (`penstock.origin.*`) if there is one. A dead letter larger than `record_bytes_max` loses its value first, then its
    key and the output's own headers (`record_that_fits`).
    """
    record = emitted.record
    window = emitted.window
    dead_letter = DeadLetter.of(source or ConsumerRecord(topic, 0, 0, 0, None, None), stage, error, 1, application)
    # Without the coordinates `penstock.dlq.topic`, `.partition` and `.offset`: the dead letter must not be replayed as
    # a source record, because a store has counted the source record.
    texts = {
        STAGE: stage,
        EXCEPTION: dead_letter.exception,
        MESSAGE: dead_letter.message,
        ATTEMPTS: "1",
        GROUP: application,
        NODE: emitted.node,
        TIMESTAMP: str(record.timestamp),
    }
    if emitted.store is not None:
        texts[STORE] = emitted.store
    if window is not None:
        texts |= {WINDOW_START: str(window.start), WINDOW_END: str(window.end)}
    headers: Headers = tuple((name, header_text(text)) for name, text in texts.items())
    if source is not None:
        headers += origin_headers(source)
    key = encode_without_error(window.key if window is not None else record.key)
    # Inside a join of two streams, a value carries its side.
    value = encode_without_error(record.value.value if isinstance(record.value, Sided) else record.value)
    return record_that_fits(topic, value, key, record.headers, headers, None, record_bytes_max)
