"""The DSL: a topology written as a chain of calls.

>>> import msgspec
>>> from datetime import timedelta
>>> from penstock.shared.streams.aggregations.aggregation import Count, Mean
>>> class Click(msgspec.Struct):
...     ms: float
>>> builder = StreamsBuilder()
>>> sessions = (
...     builder.stream("clicks", value=Click)
...     .filter(lambda record: record.value.ms < 10_000)
...     .group_by_key()
...     .session_window(gap=timedelta(minutes=30), grace=timedelta(minutes=5))
...     .aggregate("sessions", events=Count(), ms=Mean("ms"))
... )
>>> sessions.on_close().to("sessions")
>>> print(builder.build().describe())
Source: source-1 (topic: clicks) --> filter-2
Processor: filter-2 (stores: []) --> sessions
Processor: sessions (stores: [sessions]) --> sink-3
Sink: sink-3 (topic: sessions) --> none
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, TypeVar, overload

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import Deserializer
from penstock.shared.common.topic_names import dead_letter_topic, late_topic
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.joins import GlobalTable, Table
from penstock.shared.streams.dsl.node import Flow, deserializer_of, is_type
from penstock.shared.streams.dsl.stream import Stream
from penstock.shared.streams.dsl.validation import refuse_loops, require_key_type, require_name, require_topic
from penstock.shared.streams.operators.tables import RowValue, TableProcessor
from penstock.shared.streams.topology import (
    GlobalTableNode,
    KeyType,
    Node,
    ProcessorNode,
    SourceNode,
    StoreBuilder,
    Topology,
)

__all__ = ["GlobalTable", "Stream", "StreamsBuilder", "Table"]

V = TypeVar("V")
AnyJson = type[dict[Any, Any]] | UnionType
"""A `value` whose type a type checker cannot carry on: `dict` is any JSON, and `A | B` is no class."""
ValueType = type[V] | Deserializer[V | None]
"""A `value` that is a class, or a deserializer."""


class StreamsBuilder:
    """Collects the streams of one application."""

    def __init__(self) -> None:
        self._topology = Topology()
        self._named = 0
        self._repartitioned: dict[str, Stream] = {}
        self._null_kept: set[str] = set()
        self._silent: dict[str, None] = {}  # aggregates that say nothing yet: neither on_close() nor on_update()

    @overload
    def stream(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["string"] = "string",
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream[str, Any]: ...

    @overload
    def stream(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["string"] = "string",
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream[str, V]: ...

    @overload
    def stream(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["bytes"],
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream[bytes, Any]: ...

    @overload
    def stream(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["bytes"],
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream[bytes, V]: ...

    def stream(
        self,
        topic: str,
        value: Any = dict,
        *,
        key: KeyType = "string",
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream[Any, Any]:
        """A topic's records, with values decoded as `value`.

        `value` is a msgspec struct or any other type that msgspec decodes (JSON, checked field by field), `dict` (any
        JSON), `bytes` (as they are), or a deserializer, whose values are taken for dicts until a `map_values` says
        otherwise. What cannot be decoded goes to `dead_letters` (default `<topic>-dlq`), what comes after its
        window was closed to `late` (default `<topic>-late`).
        """
        source = self._source(topic, value, key, dead_letters, late)
        return Stream(self, source.name, Flow(source, value if is_type(value) else dict, key, origin=topic))

    @overload
    def table(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["string"] = "string",
        name: str | None = None,
        dead_letters: str | None = None,
    ) -> Table[str, Any]: ...

    @overload
    def table(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["string"] = "string",
        name: str | None = None,
        dead_letters: str | None = None,
    ) -> Table[str, V]: ...

    @overload
    def table(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["bytes"],
        name: str | None = None,
        dead_letters: str | None = None,
    ) -> Table[bytes, Any]: ...

    @overload
    def table(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["bytes"],
        name: str | None = None,
        dead_letters: str | None = None,
    ) -> Table[bytes, V]: ...

    def table(
        self,
        topic: str,
        value: Any = dict,
        *,
        key: KeyType = "string",
        name: str | None = None,
        dead_letters: str | None = None,
    ) -> Table[Any, Any]:
        """The last value of each key of a topic, kept in a store of that name (default: the topic's).

        A record without a value deletes its row. The topic should be compacted; `value` is as for `stream`.
        """
        require_name("table: name", name)
        source = self._source(topic, value, key, dead_letters, None)
        store, row_type = name or topic, value if is_type(value) else dict
        self._add_table_store(store, row_type, key, topic)
        self._add(ProcessorNode(store, lambda: TableProcessor(store), (store,)), (source.name,))
        return Table(Stream(self, store, Flow(source, row_type, key, origin=topic, has_deletions=True)), store)

    @overload
    def global_table(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["string"] = "string",
        name: str | None = None,
    ) -> GlobalTable[str, Any]: ...

    @overload
    def global_table(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["string"] = "string",
        name: str | None = None,
    ) -> GlobalTable[str, V]: ...

    @overload
    def global_table(
        self,
        topic: str,
        value: AnyJson = dict,
        *,
        key: Literal["bytes"],
        name: str | None = None,
    ) -> GlobalTable[bytes, Any]: ...

    @overload
    def global_table(
        self,
        topic: str,
        value: ValueType[V],
        *,
        key: Literal["bytes"],
        name: str | None = None,
    ) -> GlobalTable[bytes, V]: ...

    def global_table(
        self, topic: str, value: Any = dict, *, key: KeyType = "string", name: str | None = None
    ) -> GlobalTable[Any, Any]:
        """All partitions of a topic as one table in every instance, under that name (default: the topic's).

        It is read to its end before the first record is processed, and then along with the other topics. What cannot
        be decoded is counted, logged and left out.
        """
        require_topic("global_table: topic", topic)
        require_key_type("global_table: key", key)
        require_name("global_table: name", name)
        table = GlobalTableNode(name or topic, topic, key, deserializer_of(value))
        self._topology.add_global_table(table)
        return GlobalTable(table.name, self)

    def add_store(self, name: str, value: Any = dict, *, key: KeyType = "string") -> str:
        """A key-value store for processors of your own, with values of that type; its name, for `process`."""
        require_key_type("add_store: key", key)
        require_name("add_store: name", name)
        if name is None:
            raise ConfigError("add_store: a store needs a name")
        self._add_table_store(name, value, key, "")
        return name

    def build(self) -> Topology:
        """The topology; ConfigError where nothing was defined, an aggregate is not forwarded, or records loop."""
        if not self._topology.nodes:
            raise ConfigError("topology: no stream was defined")
        if self._silent:
            name = next(iter(self._silent))
            raise ConfigError(f"aggregate({name!r}): say when its results go out: .on_close() or .on_update()")
        refuse_loops(self._topology)
        return self._topology

    def _name(self, kind: str) -> str:
        self._named += 1
        return f"{kind}-{self._named}"

    def _add(self, node: Node, parents: tuple[str, ...]) -> None:
        self._topology.add(node, *parents)

    def _source(self, topic: str, value: Any, key: KeyType, dead_letters: str | None, late: str | None) -> SourceNode:
        require_topic("stream: topic", topic)
        require_key_type("stream: key", key)
        for argument, name in (("stream: dead_letters", dead_letters), ("stream: late", late)):
            if name is not None:
                require_topic(argument, name)
        is_json = is_type(value) and value is not bytes
        source = SourceNode(
            self._name("source"),
            topic,
            key,
            deserializer_of(value),
            dead_letters or dead_letter_topic(topic),
            late or late_topic(topic),
            is_json=is_json,
            value_type=value if is_json else None,
        )
        self._topology.add(source)
        return source

    def _add_table_store(self, name: str, value: Any, key: KeyType, topic: str) -> None:
        row = RowValue(value)
        schema = StoreSchema(
            name=name,
            kind="table",
            key=key,
            gap_ms=0,
            grace_ms=0,
            emit="on_update",
            source=topic,
            results=None,
            late=None,
            dead_letters=None,
            aggregations=(AggregationSchema.of("value", row),),
        )
        self._topology.add_store(StoreBuilder(schema, (row,)))
