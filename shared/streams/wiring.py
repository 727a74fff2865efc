"""A task's nodes and who hands to whom.

A node is a processor, made anew for each task, or a `SinkWriter`; a node's way on is its one child's method itself, so
a record costs one call a node and nothing else. Which node an error came from is therefore not kept in step with the
records but read off the error's traceback: the innermost frame that belongs to one of the nodes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from shared.clients.connection import record_size
from shared.common.errors import ConfigError, RecordTooLarge
from shared.common.records import ProducerRecord
from shared.streams.processor import Processor, Record, RecordMetadata
from shared.streams.punctuation import PunctuationType, Punctuator, Schedule
from shared.streams.state.store import StateStore
from shared.streams.tables import Lookup
from shared.streams.topology import ProcessorNode, SinkNode, Topology
from shared.streams.windowed_aggregate import WindowKey

if TYPE_CHECKING:
    from shared.streams.stream_task import StreamTask

Forward = Callable[[Record], None]
Output = Callable[[ProducerRecord, WindowKey | None], None]
"""Takes a record for a topic, and the window whose result it is."""


class SinkWriter:
    """Turns what reaches a sink into a record of its topic; RecordTooLarge where it has over `record_bytes_max`."""

    def __init__(self, node: SinkNode, record_bytes_max: int, output: Output) -> None:
        self._node, self._record_bytes_max, self._output = node, record_bytes_max, output

    def process(self, record: Record) -> None:
        key, value = self._node.encode(record)
        size = record_size(key, value, list(record.headers))
        if size > self._record_bytes_max:
            topic, limit = self._node.topic, self._record_bytes_max
            raise RecordTooLarge(f"topic {topic}: a record of {size} bytes; max_request_size={limit}")
        window = record.key if isinstance(record.key, WindowKey) else None
        self._output(ProducerRecord(self._node.topic, value, key, record.headers, None, record.timestamp), window)


class Wiring:
    """The nodes of one task by name."""

    def __init__(self, topology: Topology, record_bytes_max: int, output: Output) -> None:
        self.topology = topology
        self.processors: dict[str, Processor] = {}
        self._sinks: dict[str, SinkWriter] = {}
        for name, node in topology.nodes.items():
            if isinstance(node, ProcessorNode):
                self.processors[name] = node.supplier()
            elif isinstance(node, SinkNode):
                self._sinks[name] = SinkWriter(node, record_bytes_max, output)
        self._names = {id(node): name for name, node in (self.processors | self._sinks).items()}

    def children(self, name: str) -> dict[str, Forward]:
        """What takes a record that a node forwards, by the child's name."""
        nodes: dict[str, Processor | SinkWriter] = {**self.processors, **self._sinks}
        return {child: nodes[child].process for child in self.topology.children[name]}

    def forward_to(self, name: str) -> Forward:
        """Hand a record to all children of a node."""
        entrances = list(self.children(name).values())
        if len(entrances) == 1:
            return entrances[0]

        def to_all(record: Record) -> None:
            for entrance in entrances:
                entrance(record)

        return to_all if entrances else lambda _: None

    def node_of(self, error: BaseException) -> str | None:
        """The node in which an error was raised; None where it was in none."""
        found = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = self._names.get(id(frame.f_locals.get("self")), found)
        return found


class NodeContext:
    """What one processor sees of its task: the `ProcessorContext` of its node."""

    def __init__(self, task: StreamTask, node: ProcessorNode, wiring: Wiring) -> None:
        self._task, self._node = task, node
        self._children = wiring.children(node.name)
        self._forward_all = wiring.forward_to(node.name)

    @property
    def partition(self) -> int:
        return self._task.partition

    @property
    def deduplicate_updates(self) -> bool:
        return self._task.deduplicate_updates

    @property
    def state_bytes_max(self) -> int | None:
        return self._task.record_bytes_max if self._task.check_states else None

    @property
    def key_bytes_max(self) -> int:
        return self._task.key_bytes_max

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
        if to is None:
            self._forward_all(record)
        elif to in self._children:
            self._children[to](record)
        else:
            raise ConfigError(f"{self._node.name!r} forwards to {to!r}, which is none of its children")

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start_ms: int | None = None,
        name: str | None = None,
    ) -> Schedule:
        return self._task.schedule(interval, type, callback, start_ms=start_ms, name=name)

    def store(self, name: str) -> StateStore | Lookup:
        if name in self._node.global_tables:
            return self._task.global_tables[name]
        if name not in self._node.stores:
            raise ConfigError(f"{self._node.name!r} asks for the store {name!r}, to which it is not connected")
        return self._task.stores[name]

    def emit_late(self, record: Record, close_time_ms: int, operator_time_ms: int) -> None:
        self._task.emit_late(close_time_ms, operator_time_ms, next(iter(self._node.stores), self._node.name))

    def count_missed(self, windows: int) -> None:
        self._task.count_missed(windows)

    def count_skipped(self, reason: str) -> None:
        self._task.count_skipped(reason)
