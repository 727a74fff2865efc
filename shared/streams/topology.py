"""A topology: sources, processors, sinks and stores, and their edges. Every partition has a task that runs it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import Deserializer
from penstock.shared.common.topic_names import TOPIC_NAME_MAX, is_topic_name
from penstock.shared.streams.changelog.format import STORES_MAX
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.state_store import StateStore

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

KeyType = Literal["string", "bytes"]
Encoder = Callable[[Record], tuple[bytes | None, bytes | None]]
"""Encodes a record as its key's and value's bytes."""


@dataclass(frozen=True, slots=True)
class SourceNode:
    """Reads a topic; its dead letters go to `dead_letters`, its late records to `late`."""

    name: str
    topic: str
    key: KeyType
    value: Deserializer
    dead_letters: str
    late: str
    is_json: bool = True
    """Whether `value` decodes plain JSON, so that a field of a value can be read from its bytes."""
    value_type: Any = None
    """The type that `value` decodes to if it decodes plain JSON; None otherwise."""
    is_internal: bool = False
    """Whether the topic is internal: created for the application, named after it, and purged of read records."""


@dataclass(frozen=True, slots=True)
class ProcessorNode:
    """Runs a processor that `supplier` makes for each task."""

    name: str
    supplier: Callable[[], Processor]
    stores: tuple[str, ...] = ()
    passes_all: bool = False
    """Whether it forwards every record once and unchanged."""
    global_tables: tuple[str, ...] = ()
    only_reads: bool = False
    """Whether it only reads its stores, as a join with a table does."""


@dataclass(frozen=True, slots=True)
class SinkNode:
    """Writes records to a topic."""

    name: str
    topic: str
    encode: Encoder
    is_internal: bool = False


@dataclass(frozen=True, slots=True)
class GlobalTableNode:
    """Reads a topic as a global table: every instance has the rows of all partitions."""

    name: str
    topic: str
    key: KeyType
    value: Deserializer


Node = SourceNode | ProcessorNode | SinkNode


def _escape_mermaid_label(text: str) -> str:
    """Escape text for a quoted Mermaid label, where a quote ends the label, and HTML and Markdown are interpreted.

    >>> _escape_mermaid_label('my "s"]'), _escape_mermaid_label("by-user.2")
    ('my #34;s#34;#93;', 'by-user.2')
    """
    return "".join(c if c.isalnum() or c in " -_.:,/()" else f"#{ord(c)};" for c in text)


@dataclass(slots=True)
class Topology:
    """Nodes by name, in an order in which parents come before children."""

    nodes: dict[str, Node] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    stores: dict[str, StoreBuilder] = field(default_factory=dict)
    global_tables: dict[str, GlobalTableNode] = field(default_factory=dict)
    application: str | None = None
    """The application that names the internal topics; None as long as they have no application's name."""

    def add(self, node: Node, *parents: str) -> None:
        """Add a node below its parents.

        Raises ConfigError if the name is taken, if a parent does not exist or is a sink, if a source has a parent or
        any other node has none, or if another source or a global table reads a source's topic.
        """
        if node.name in self.nodes:
            raise ConfigError(f"topology: the name {node.name!r} is taken")
        for parent in parents:
            if parent not in self.nodes:
                raise ConfigError(f"topology: {node.name!r} names a parent {parent!r} that does not exist")
            if isinstance(self.nodes[parent], SinkNode):
                raise ConfigError(f"topology: the sink {parent!r} cannot feed {node.name!r}")
        if isinstance(node, SourceNode) == bool(parents):
            raise ConfigError(f"topology: {node.name!r} must have {'no parent' if parents else 'a parent'}")
        if isinstance(node, SourceNode):
            self._require_unread(node.topic)
        self.nodes[node.name] = node
        self.children[node.name] = []
        for parent in parents:
            self.children[parent].append(node.name)

    def add_store(self, store: StoreBuilder) -> None:
        """Add a store.

        Raises ConfigError if a store or global table has the name, or if there are STORES_MAX stores already.
        """
        if store.schema.name in self.stores or store.schema.name in self.global_tables:
            raise ConfigError(f"topology: the store {store.schema.name!r} exists already; each needs its own name")
        # A changelog entry has one byte for the store's number.
        if len(self.stores) == STORES_MAX:
            raise ConfigError(f"topology: more than {STORES_MAX} stores")
        self.stores[store.schema.name] = store

    def add_global_table(self, table: GlobalTableNode) -> None:
        """Add a global table.

        Raises ConfigError if a store or global table has the name, or if a source or global table reads the topic.
        """
        if table.name in self.global_tables or table.name in self.stores:
            raise ConfigError(f"topology: the store {table.name!r} exists already")
        self._require_unread(table.topic)
        self.global_tables[table.name] = table

    def _require_unread(self, topic: str) -> None:
        if topic in self.source_topics() or any(topic == table.topic for table in self.global_tables.values()):
            raise ConfigError(f"topology: the topic {topic!r} has a source already")

    def of_application(self, application: str) -> Topology:
        """Return the topology that a task runs: its internal topics are named after the application.

        A topology whose internal topics are named after an application already is returned unchanged. Raises
        ConfigError if the name of an application's internal topic is too long.
        """
        internal = {name: f"{application}-{name}" for name in self.internal_topics()}
        if not internal or self.application is not None:
            return self
        for name in internal.values():
            if not is_topic_name(name):
                raise ConfigError(
                    f"the application {application!r} cannot have the topic {name!r}: it has {len(name)} characters, "
                    f"but at most {TOPIC_NAME_MAX} are allowed; give the key_by() before it a shorter name"
                )

        def with_internal_topic(node: Node) -> Node:
            # Only sources and sinks name topics.
            if isinstance(node, ProcessorNode) or not node.is_internal:
                return node
            return replace(node, topic=internal[node.topic])

        def with_internal_source(builder: StoreBuilder) -> StoreBuilder:
            source = internal.get(builder.schema.source, builder.schema.source)
            return replace(builder, schema=msgspec.structs.replace(builder.schema, source=source))

        nodes = {name: with_internal_topic(node) for name, node in self.nodes.items()}
        stores = {name: with_internal_source(builder) for name, builder in self.stores.items()}
        return Topology(nodes, self.children, stores, self.global_tables, application)

    def internal_topics(self) -> list[str]:
        """Return the repartition topics."""
        return [source.topic for source in self.sources() if source.is_internal]

    def sub_topologies(self) -> list[list[str]]:
        """Return the nodes in groups that forward records to each other or share a store, each in node order."""
        group = {name: {name} for name in self.nodes}

        def join_sub_topologies(a: str, b: str) -> None:
            if group[a] is not group[b]:
                group[a] |= group[b]
                for name in group[b]:
                    group[name] = group[a]

        owners: dict[str, str] = {}
        for name, node in self.nodes.items():
            for child in self.children[name]:
                join_sub_topologies(name, child)
            for store in node.stores if isinstance(node, ProcessorNode) else ():
                join_sub_topologies(owners.setdefault(store, name), name)
        # Groups are shared set objects, so their identity distinguishes them.
        found = dict.fromkeys(map(id, group.values()))
        return [[n for n in self.nodes if id(group[n]) == one] for one in found]

    def source_topics_by_node(self) -> dict[str, tuple[str, ...]]:
        """Return, for each node, the source topics of its sub-topology."""
        found: dict[str, tuple[str, ...]] = {}
        for names in self.sub_topologies():
            nodes = [self.nodes[name] for name in names]
            topics = tuple(node.topic for node in nodes if isinstance(node, SourceNode))
            found.update(dict.fromkeys(names, topics))
        return found

    def sources(self) -> list[SourceNode]:
        return [n for n in self.nodes.values() if isinstance(n, SourceNode)]

    def source_topics(self) -> list[str]:
        return [n.topic for n in self.sources()]

    def output_topics(self) -> list[str]:
        """Return the topics of sinks, late records and dead letters, without the application's internal topics."""
        topics = [n.topic for n in self.nodes.values() if isinstance(n, SinkNode) and not n.is_internal]
        for source in self.sources():
            topics += [source.dead_letters, source.late] if self.has_windows(source) else [source.dead_letters]
        return list(dict.fromkeys(topics))

    def has_windows(self, source: SourceNode) -> bool:
        """Whether the source's records can reach a store of windows or of a stream join, so that they can be late."""
        nodes = [self.nodes[name] for name in self.below(source.name)]
        stores = [store for node in nodes if isinstance(node, ProcessorNode) for store in node.stores]
        return any(not self.stores[store].schema.is_table for store in stores)

    def below(self, name: str) -> list[str]:
        """Return the node and its descendants, each once."""
        found = [name]
        for each in found:
            found += [child for child in self.children[each] if child not in found]
        return found

    def schemas(self) -> tuple[StoreSchema, ...]:
        """Return the stores' schemas by store number, with `upstream`.

        In stores below a source that is not JSON, `verbatim` is False for all aggregations.
        """
        return tuple(self._describe_store(builder.schema) for builder in self.stores.values())

    def _describe_store(self, schema: StoreSchema) -> StoreSchema:
        above = self.above([n for n, node in self.nodes.items() if schema.name in getattr(node, "stores", ())])
        upstream = [
            name
            for name, node in self.nodes.items()
            if name in above
            and not (isinstance(node, ProcessorNode) and node.passes_all)
            and not (isinstance(node, SourceNode) and node.topic == schema.source and not node.is_internal)
        ]
        opaque = any(isinstance(n, SourceNode) and not n.is_json for n in map(self.nodes.__getitem__, above))
        aggregations = schema.aggregations
        if opaque:
            aggregations = tuple(msgspec.structs.replace(a, verbatim=False) for a in aggregations)
        return msgspec.structs.replace(schema, upstream=tuple(upstream), aggregations=aggregations)

    def build_stores(self, local: LocalState | None = None) -> dict[str, StateStore]:
        """Build a task's stores by name; on disk with `local`."""
        if local is not None:
            local.begin(self.schemas())
            return {name: local.store(number, builder) for number, (name, builder) in enumerate(self.stores.items())}
        return {name: builder.build() for name, builder in self.stores.items()}

    def source_above(self, name: str) -> SourceNode:
        """Return the first source among the ancestors of a node."""
        above = self.above([name])
        return next(source for source in self.sources() if source.name in above)

    def above(self, names: Iterable[str], without: Container[str] = ()) -> set[str]:
        """Return the ancestors of the nodes `names`. Nodes of `without`, and paths through them, are left out."""
        found: set[str] = set()
        below = set(names)
        while below:
            below = {
                parent for parent, children in self.children.items() if parent not in without and below & set(children)
            } - found
            found |= below
        return found

    def describe(self, format: Literal["text", "mermaid"] = "text") -> str:
        """Describe the topology as text, with one line for each global table and each node.

        Nodes are grouped by sub-topology if there are several. With `format="mermaid"` return a Mermaid flowchart, in
        which a dotted arrow is a repartition topic. Raises ConfigError for an unknown format.
        """
        if format == "mermaid":
            return self._mermaid()
        if format != "text":
            raise ConfigError(f'describe: format must be "text" or "mermaid", got {format!r}')
        groups = self.sub_topologies()
        lines = [f"Global table: {table.name} (topic: {table.topic})" for table in self.global_tables.values()]
        for number, names in enumerate(groups):
            indent = "  " if len(groups) > 1 else ""
            if indent:
                lines.append(f"Sub-topology {number}:")
            lines += [indent + self._describe_node(name) for name in names]
        return "\n".join(lines)

    def _describe_node(self, name: str) -> str:
        match self.nodes[name]:
            case SourceNode(topic=topic):
                description = f"Source: {name} (topic: {topic})"
            case ProcessorNode(stores=stores, global_tables=tables):
                description = f"Processor: {name} (stores: [{', '.join((*stores, *tables))}])"
            case SinkNode(topic=topic):
                description = f"Sink: {name} (topic: {topic})"
        return f"{description} --> {', '.join(self.children[name]) or 'none'}"

    def _mermaid(self) -> str:
        order = list(self.nodes)
        stores = [*self.stores, *self.global_tables]
        lines = ["flowchart LR"]
        for name, node in self.nodes.items():
            shape = f"{name}: {node.topic}" if not isinstance(node, ProcessorNode) else name
            lines.append(f'  n{order.index(name)}["{_escape_mermaid_label(shape)}"]')
            own = (*node.stores, *node.global_tables) if isinstance(node, ProcessorNode) else ()
            lines += [f'  n{order.index(name)} --- s{stores.index(s)}[("{_escape_mermaid_label(s)}")]' for s in own]
        for parent, below in self.children.items():
            lines += [f"  n{order.index(parent)} --> n{order.index(child)}" for child in below]
        reads = {source.topic: source.name for source in self.sources() if source.is_internal}
        for name, node in self.nodes.items():
            if isinstance(node, SinkNode) and node.is_internal:
                lines.append(f"  n{order.index(name)} -.-> n{order.index(reads[node.topic])}")
        return "\n".join(lines)
