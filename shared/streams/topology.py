"""A topology: sources, processors, sinks and stores, and who feeds whom. Built once, run by one task a partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shared.common.errors import ConfigError
from shared.common.serialization import Deserializer
from shared.streams.aggregations import Aggregation
from shared.streams.changelog_format import STORES_MAX, StoreSchema
from shared.streams.processor import Processor, Record
from shared.streams.state.session_store import InMemorySessionStore
from shared.streams.state.store import StateStore
from shared.streams.state.window_store import InMemoryWindowStore

KeyType = Literal["string", "bytes"]
Encoder = Callable[[Record], tuple[bytes | None, bytes | None]]
"""A record to its key's and value's bytes."""


@dataclass(frozen=True, slots=True)
class SourceNode:
    """Reads a topic; what cannot be decoded goes to `dead_letters`, what is late to `late`."""

    name: str
    topic: str
    key: KeyType
    value: Deserializer
    dead_letters: str
    late: str
    is_json: bool = True
    """Whether `value` decodes JSON as it is: what a field of a value is can then be told from its bytes."""
    value_type: Any = None
    """The type that `value` decodes to; None where it is a deserializer of the user's own, or bytes."""


@dataclass(frozen=True, slots=True)
class ProcessorNode:
    """Runs a processor that `supplier` makes for each task."""

    name: str
    supplier: Callable[[], Processor]
    stores: tuple[str, ...] = ()
    passes_all: bool = False
    """Whether it forwards every record once, as it came."""


@dataclass(frozen=True, slots=True)
class SinkNode:
    """Writes to a topic."""

    name: str
    topic: str
    encode: Encoder


Node = SourceNode | ProcessorNode | SinkNode


@dataclass(frozen=True, slots=True)
class StoreBuilder:
    """A store and what readers of its changelog must know."""

    schema: StoreSchema
    aggregations: tuple[Aggregation[Any], ...] = ()
    """What the store's states are made of, bound to the stream's value type."""

    def build(self) -> StateStore:
        if self.schema.kind == "session":
            return InMemorySessionStore(self.schema.name)
        return InMemoryWindowStore(self.schema.name, keeps_closed=self.schema.kind == "sliding")


@dataclass(slots=True)
class Topology:
    """Nodes by name, in an order in which parents come before children."""

    nodes: dict[str, Node] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    stores: dict[str, StoreBuilder] = field(default_factory=dict)

    def add(self, node: Node, *parents: str) -> None:
        """Add a node below its parents; ConfigError for a name that is taken, or a parent that is not there."""
        if node.name in self.nodes:
            raise ConfigError(f"topology: the name {node.name!r} is taken")
        for parent in parents:
            if parent not in self.nodes:
                raise ConfigError(f"topology: {node.name!r} names a parent {parent!r} that is not there")
            if isinstance(self.nodes[parent], SinkNode):
                raise ConfigError(f"topology: the sink {parent!r} cannot feed {node.name!r}")
        if isinstance(node, SourceNode) == bool(parents):
            raise ConfigError(f"topology: {node.name!r} must have {'no parent' if parents else 'a parent'}")
        if isinstance(node, SourceNode) and node.topic in self.source_topics():
            raise ConfigError(f"topology: the topic {node.topic!r} has a source already")
        self.nodes[node.name] = node
        self.children[node.name] = []
        for parent in parents:
            self.children[parent].append(node.name)

    def add_store(self, store: StoreBuilder) -> None:
        """Add a store; ConfigError for a name that is taken, or one store too many."""
        if store.schema.name in self.stores:
            raise ConfigError(f"topology: the store {store.schema.name!r} is there already")
        if len(self.stores) == STORES_MAX:
            raise ConfigError(f"topology: more than {STORES_MAX} stores")
        self.stores[store.schema.name] = store

    def sources(self) -> list[SourceNode]:
        return [n for n in self.nodes.values() if isinstance(n, SourceNode)]

    def source_topics(self) -> list[str]:
        return [n.topic for n in self.sources()]

    def output_topics(self) -> list[str]:
        """All topics that tasks write to, the changelog aside: sinks', late and dead-letter topics, each once."""
        topics = [n.topic for n in self.nodes.values() if isinstance(n, SinkNode)]
        for source in self.sources():
            topics += [source.dead_letters, source.late] if self.stores else [source.dead_letters]
        return list(dict.fromkeys(topics))

    def schemas(self) -> tuple[StoreSchema, ...]:
        """The stores' schemas in their order, with what lies between each and its source."""
        return tuple(self._described(builder.schema) for builder in self.stores.values())

    def _described(self, schema: StoreSchema) -> StoreSchema:
        above = self._above([n for n, node in self.nodes.items() if schema.name in getattr(node, "stores", ())])
        upstream = [
            name
            for name, node in self.nodes.items()
            if name in above
            and not (isinstance(node, ProcessorNode) and node.passes_all)
            and not (isinstance(node, SourceNode) and node.topic == schema.source)
        ]
        opaque = any(isinstance(n, SourceNode) and not n.is_json for n in map(self.nodes.__getitem__, above))
        aggregations = schema.aggregations
        if opaque:
            aggregations = tuple(msgspec.structs.replace(a, verbatim=False) for a in aggregations)
        return msgspec.structs.replace(schema, upstream=tuple(upstream), aggregations=aggregations)

    def _above(self, names: list[str]) -> set[str]:
        """All nodes from which a record can come to one of these."""
        found: set[str] = set()
        below = set(names)
        while below:
            below = {parent for parent, children in self.children.items() if below & set(children)} - found
            found |= below
        return found

    def describe(self) -> str:
        """The topology as text: one line a node, with what it is connected to."""
        lines = []
        for name, node in self.nodes.items():
            match node:
                case SourceNode(topic=topic):
                    what = f"Source: {name} (topic: {topic})"
                case ProcessorNode(stores=stores):
                    what = f"Processor: {name} (stores: [{', '.join(stores)}])"
                case SinkNode(topic=topic):
                    what = f"Sink: {name} (topic: {topic})"
            lines.append(f"{what} --> {', '.join(self.children[name]) or 'none'}")
        return "\n".join(lines)

    def mermaid(self) -> str:
        """The topology as a Mermaid flowchart."""
        order = list(self.nodes)
        lines = ["flowchart LR"]
        for name, node in self.nodes.items():
            shape = f"{name}: {node.topic}" if not isinstance(node, ProcessorNode) else name
            lines.append(f'  n{order.index(name)}["{shape}"]')
            stores = node.stores if isinstance(node, ProcessorNode) else ()
            lines += [f'  n{order.index(name)} --- s{list(self.stores).index(s)}[("{s}")]' for s in stores]
        for parent, below in self.children.items():
            lines += [f"  n{order.index(parent)} --> n{order.index(child)}" for child in below]
        return "\n".join(lines)
