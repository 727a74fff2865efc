"""The DSL: defines a topology by chained calls.

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

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import UnionType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import msgspec

from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.serialization import Deserializer
from penstock.shared.common.topic_names import REPARTITION_SUFFIX, dead_letter_topic, late_topic
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.stream_traits import StreamTraits
from penstock.shared.streams.dsl.topology_validation import (
    require_aggregation,
    require_groupable,
    require_key_type,
    require_known_stores,
    require_name,
    require_no_loops,
    require_one_type,
    require_repartition_topic,
    require_same_builder,
    require_same_key_types,
    require_topic,
)
from penstock.shared.streams.dsl.value_types import (
    is_value_type,
    row_deserializer,
    value_deserializer,
    value_type_name,
    without_deserializer,
)
from penstock.shared.streams.durations import duration_ms
from penstock.shared.streams.operators.aggregates import KeyAggregate, WindowAggregate
from penstock.shared.streams.operators.stateless import (
    DropDeletions,
    Each,
    EachFunction,
    SameKey,
    Split,
    forward_unchanged,
)
from penstock.shared.streams.operators.stream_join import LEFT, RIGHT, JoinRows, JoinSide, JoinWindows, StreamJoin
from penstock.shared.streams.operators.tables import Joiner, RowValue, TableJoin, TableProcessor
from penstock.shared.streams.processor import PROCESSOR_METHODS, Processor
from penstock.shared.streams.record import K, Record, V
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.topology import (
    Encoder,
    GlobalTableNode,
    KeyType,
    ProcessorNode,
    SinkNode,
    SourceNode,
    Topology,
)
from penstock.shared.streams.user_code import (
    SHOWN_MAX,
    plain,
    require_callable,
    require_no_arguments,
    require_plain_methods,
)
from penstock.shared.streams.window_result import WindowKey, WindowResult, result_deserializer
from penstock.shared.streams.windows.window_rule import Emit, WindowRule, hopping_windows

__all__ = ["GlobalTable", "Stream", "StreamsBuilder", "Table"]

AnyJson = type[dict[Any, Any]] | UnionType
"""A `value` from which a type checker cannot infer the type of a stream's values: `dict` or a union `A | B`."""
ValueType = type[V] | Deserializer[V | None]
"""A `value` that is a class or a deserializer."""


class StreamsBuilder:
    """Defines the streams of one application."""

    def __init__(self) -> None:
        self._topology = Topology()
        self._named = 0
        # Maps each repartition topic to the node before it and the stream behind it.
        self._repartitioned: dict[str, tuple[str, Stream]] = {}
        self._null_key_topics: set[str] = set()
        # These aggregates still need a call of on_close() or on_update(). Two of them may have the same default name.
        self._without_emission: list[str] = []

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
        """Read a topic as a stream, with values decoded as `value`.

        `value` is one of these:
        - a msgspec struct or any other type that msgspec decodes: JSON, checked field by field,
        - `dict`: any JSON,
        - `bytes`: the bytes of the record's value, unchanged,
        - a deserializer, which is a function of the topic and the bytes. `struct_deserializer(User)` is as `User`, and
          `json_deserializer` as `dict`. Aggregations treat the values of other deserializers as dicts until a
          `map_values` declares another type. Tables and joins of streams take only plain JSON from them, and reject a
          record with any other value.

        By default, records that cannot be decoded or processed go to the topic `dead_letters`, or `<topic>-dlq` if it
        is None. Late records go to the topic `late`, or `<topic>-late` if it is None.
        """
        value = without_deserializer(value)
        source = self._make_source_node(topic, value, value_deserializer, key, dead_letters, late)
        return Stream(
            self, source.name, StreamTraits(source, value if is_value_type(value) else dict, key, origin=topic)
        )

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
        """Read a topic as a table: the last value of each key, kept in a store of this name (default: the topic's).

        A record without a value, or with JSON's `null`, deletes its row. The topic should be compacted. `value` is as
        for `stream`.
        """
        require_name("table: name", name)
        value = without_deserializer(value)
        source = self._make_source_node(topic, value, row_deserializer, key, dead_letters, None)
        store = name or topic
        row_type = value if is_value_type(value) else dict
        self._add_table_store(store, row_type, key, topic)
        self._topology.add(ProcessorNode(store, lambda: TableProcessor(store), (store,)), source.name)
        return Table(Stream(self, store, StreamTraits(source, row_type, key, origin=topic, has_deletions=True)), store)

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
        """Read all partitions of a topic as one table in every instance, under this name (default: the topic's).

        An instance reads the topic to its end before it processes the first record, and then follows the topic. Records
        that cannot be decoded are logged and skipped.
        """
        require_topic("global_table: topic", topic)
        require_key_type("global_table: key", key)
        require_name("global_table: name", name)
        table = GlobalTableNode(name or topic, topic, key, row_deserializer(value))
        self._topology.add_global_table(table)
        return GlobalTable(table.name, self)

    def add_store(self, name: str, value: Any = dict, *, key: KeyType = "string") -> str:
        """Add a key-value store with values of this type for your own processors. Return its name, for `process`."""
        require_key_type("add_store: key", key)
        require_name("add_store: name", name)
        if name is None:
            raise ConfigError("add_store: a store needs a name")
        value = without_deserializer(value)
        if not is_value_type(value):
            raise ConfigError(f"add_store: value must be a type, got {value!r}: a store has JSON or bytes")
        # Raises ConfigError for a class that cannot be decoded.
        value_deserializer(value)
        self._add_table_store(name, value, key, "")
        return name

    def build(self) -> Topology:
        """Return the topology.

        Raises ConfigError if it has no source node (a global table has none), if a windowed aggregate has neither
        `on_close` nor `on_update`, if a processor names an unknown store, or if records would be written back to their
        topic.
        """
        if not self._topology.nodes:
            raise ConfigError("topology: no stream was defined")
        if self._without_emission:
            name = self._without_emission[0]
            raise ConfigError(f"aggregate({name!r}): say when to forward its results: .on_close() or .on_update()")
        require_known_stores(self._topology)
        require_no_loops(self._topology)
        return self._topology

    def _generate_node_name(self, kind: str) -> str:
        self._named += 1
        name = f"{kind}-{self._named}"
        # A user may have given the name to keep the repartition topic of an earlier topology.
        return name if name not in self._topology.nodes else self._generate_node_name(kind)

    def _make_source_node(
        self,
        topic: str,
        value: Any,
        deserializer_of: Callable[[Any], Deserializer],
        key: KeyType,
        dead_letters: str | None,
        late: str | None,
    ) -> SourceNode:
        require_topic("stream: topic", topic)
        require_key_type("stream: key", key)
        for argument, name in (("stream: dead_letters", dead_letters), ("stream: late", late)):
            if name is not None:
                require_topic(argument, name)
        is_json = is_value_type(value) and value is not bytes
        source = SourceNode(
            self._generate_node_name("source"),
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


# --- a stream ---

KR = TypeVar("KR")
VR = TypeVar("VR")
"""The types of a result's keys and values."""
KO = TypeVar("KO")
VO = TypeVar("VO")
"""The types of the other stream's or table's keys and values."""


class Stream(Generic[K, V]):
    """The records that a node forwards.

    The type parameters are the types of keys and values. As in Kafka Streams, a record of a topic may lack its key or
    its value, which is then None; the type parameters do not show that.
    """

    def __init__(self, builder: StreamsBuilder, node: str, traits: StreamTraits) -> None:
        self._builder = builder
        self._node = node
        self._traits = traits

    def filter(self, predicate: Callable[[Record[K, V]], bool]) -> Stream[K, V]:
        """Keep only the records for which `predicate` is true."""
        predicate = plain("filter: predicate", predicate)
        return self._add_each_node(
            "filter", lambda record, forward: forward(record) if predicate(record) else None, at_most_once=True
        )

    def filter_not(self, predicate: Callable[[Record[K, V]], bool]) -> Stream[K, V]:
        """Keep only the records for which `predicate` is false."""
        predicate = plain("filter_not: predicate", predicate)
        return self._add_each_node(
            "filter_not", lambda record, forward: None if predicate(record) else forward(record), at_most_once=True
        )

    def map_values(self, mapper: Callable[[V], VR], value: Any = dict) -> Stream[K, VR]:
        """Replace each value by `mapper(value)`; `value` is the type of the results, for typed aggregations."""
        mapper = plain("map_values: mapper", mapper)
        return self._add_each_node(
            "map_values", lambda r, forward: forward(r._replace(value=mapper(r.value))), value, at_most_once=True
        )

    def flat_map_values(self, mapper: Callable[[V], Iterable[VR]], value: Any = dict) -> Stream[K, VR]:
        """Replace each value by the values of `mapper(value)`."""
        mapper = plain("flat_map_values: mapper", mapper, may_yield=True)

        def forward_mapped_values(record: Record, forward: Callable[[Record], None]) -> None:
            # All of them first: if the mapper raises at a later one, no store has taken an earlier one.
            for one in list(mapper(record.value)):
                forward(record._replace(value=one))

        return self._add_each_node("flat_map_values", forward_mapped_values, value)

    def map(
        self,
        mapper: Callable[[Record[K, V]], Record[KR, VR]],
        value: Any = dict,
        *,
        key: KeyType = "string",
        name: str | None = None,
    ) -> Stream[KR, VR]:
        """Replace each record by the record `mapper(record)`. `value` is the type of the new values.

        `key`, `name` and the repartition topic are as for `key_by`.
        """
        mapper = plain("map: mapper", mapper)
        return self._rekey_stream("map", lambda record, forward: forward(mapper(record)), value, key, name)

    def flat_map(
        self,
        mapper: Callable[[Record[K, V]], Iterable[Record[KR, VR]]],
        value: Any = dict,
        *,
        key: KeyType = "string",
        name: str | None = None,
    ) -> Stream[KR, VR]:
        """Replace each record by the records of `mapper(record)`. For the other arguments see `map`."""
        mapper = plain("flat_map: mapper", mapper, may_yield=True)

        def forward_mapped_records(record: Record, forward: Callable[[Record], None]) -> None:
            # All of them first, as in `flat_map_values`.
            for one in list(mapper(record)):
                forward(one)

        return self._rekey_stream("flat_map", forward_mapped_records, value, key, name)

    def key_by(
        self, selector: Callable[[Record[K, V]], KR], *, key: KeyType = "string", name: str | None = None
    ) -> Stream[KR, V]:
        """Replace each record's key by `selector(record)`; `key` is the type of the new keys, `string` or `bytes`.

        Before a grouping, or a join with a stream or a table, the stream passes through the repartition topic
        `<application>-<name>-repartition`. A later change of keys replaces `name` by its own. A merge with a stream of
        another name sets `name` to None. If `name` is None, `<name>` is the last node of the grouped or joined stream,
        whose default name depends on its position in the topology.

        Streams derived from one `key_by` with a `name` cannot each have a repartition topic: the second one raises
        ConfigError, unless another `key_by` gives it another name.

        A record whose new key is None is skipped and counted before the repartition topic, unless the stream is the
        left side of a left join.
        """
        selector = plain("key_by: selector", selector)

        def forward_with_new_key(record: Record, forward: Callable[[Record], None]) -> None:
            forward(record._replace(key=selector(record)))

        return self._rekey_stream("key_by", forward_with_new_key, self._traits.value, key, name)

    select_key = key_by

    def peek(self, action: Callable[[Record[K, V]], None]) -> Stream[K, V]:
        """Call `action` for each record and pass it on."""
        action = plain("peek: action", action)

        def act_and_forward(record: Record, forward: Callable[[Record], None]) -> None:
            action(record)
            forward(record)

        return self._add_each_node("peek", act_and_forward, passes_all=True, at_most_once=True)

    def foreach(self, action: Callable[[Record[K, V]], None]) -> None:
        """Call `action` for each record and forward nothing."""
        action = plain("foreach: action", action)
        self._add_each_node("foreach", lambda record, forward: action(record))

    def branch(self, *predicates: Callable[[Record[K, V]], bool]) -> list[Stream[K, V]]:
        """Return one stream for each predicate. A record goes only to the stream of the first predicate that holds."""
        if not predicates:
            raise ConfigError("branch: at least one predicate is needed")
        checked = [plain("branch: predicate", predicate) for predicate in predicates]
        names = [self._builder._generate_node_name("branch") for _ in predicates]
        # One node calls the predicates, so that a later one is not called after a match. The branches only pass records
        # on.
        split = ProcessorNode(
            names[0].replace("branch", "split"), lambda: Split(tuple(zip(checked, names, strict=True)))
        )
        self._builder._topology.add(split, self._node)
        for name in names:
            node = ProcessorNode(name, lambda: Each(forward_unchanged), passes_all=True)
            self._builder._topology.add(node, split.name)
        return [Stream(self._builder, name, self._traits) for name in names]

    def merge(self, other: Stream[KO, VO]) -> Stream[K | KO, V | VO]:
        """Merge two streams. Raises ConfigError if the keys of one are text and those of the other bytes.

        The values may have different types. Then a repartition topic, a join with a stream or a table, or any
        aggregation but `Count` raises ConfigError, until `map_values` gives all values one type.

        If one of the streams has results of `on_update`, `to()` writes the whole window as the key of all windowed
        results.
        """
        require_same_builder("merge", self._builder, other._builder)
        require_same_key_types("merge", self._traits.key, other._traits.key)
        node = ProcessorNode(self._builder._generate_node_name("merge"), lambda: Each(forward_unchanged))
        self._builder._topology.add(node, self._node, other._node)
        own = self._traits
        its = other._traits
        mixed = own.mixed + its.mixed
        if own.value != its.value:
            mixed += (value_type_name(own.value), value_type_name(its.value))
        traits = replace(
            own,
            # A retraction under the source key would delete the other stream's result.
            encode=encode_updates if encode_updates in (own.encode, its.encode) else own.encode,
            is_rekeyed=own.is_rekeyed or its.is_rekeyed,
            # With different names, the topic is named as without a name.
            rekeyed_by=own.rekeyed_by if own.rekeyed_by == its.rekeyed_by else None,
            is_windowed=own.is_windowed or its.is_windowed,
            has_deletions=own.has_deletions or its.has_deletions,
            mixed=tuple(dict.fromkeys(mixed)),
        )
        return Stream(self._builder, node.name, traits)

    def process(
        self,
        supplier: Callable[[], Processor[K, V, KR, VR]],
        *stores: str,
        name: str | None = None,
        value: Any = dict,
        key: KeyType | None = None,
    ) -> Stream[KR, VR]:
        """Return the records that a user's processor forwards, as a stream. The processor may use `stores`.

        `supplier` makes a processor for each task. It is also called here, to check that it returns a new one each
        time. `value` is the type of the forwarded values, `key` that of the keys (None: unchanged). A later grouping or
        join uses a repartition topic, as after `key_by`.
        """
        if key is not None:
            require_key_type("process: key", key)
        node = self._add_processor_node("process", supplier, stores, name)
        # As KStream.process: the processor may have changed keys, so the next grouping or join repartitions.
        # `process_values` avoids that.
        return self._derive_rekeyed_stream(node, value, key or self._traits.key, name)

    def process_values(
        self,
        supplier: Callable[[], Processor[K, V, Any, VR]],
        *stores: str,
        name: str | None = None,
        value: Any = dict,
    ) -> Stream[K, VR]:
        """As `process`, for a processor that does not change keys. It adds no repartition topic.

        If the processor's `process` forwards another key than its record's, the worker ends with an error. In a
        punctuation or a commit, the key must be an earlier record's; this is not checked.
        """
        node = self._add_processor_node("process_values", lambda: SameKey(supplier()), stores, name, supplier)
        return Stream(self._builder, node, replace(self._traits, value=value, mixed=()))

    @overload
    def join(
        self,
        other: Stream[Any, VO],
        joiner: Callable[[V, VO], VR],
        windows: JoinWindows,
        *,
        value: Any = dict,
        name: str | None = None,
    ) -> Stream[K, VR]: ...

    @overload
    def join(self, other: Table[Any, VO], joiner: Callable[[V, VO], VR], *, value: Any = dict) -> Stream[K, VR]: ...

    @overload
    def join(
        self,
        other: GlobalTable[Any, VO],
        joiner: Callable[[V, VO], VR],
        *,
        key: Callable[[Record[K, V]], Any],
        value: Any = dict,
    ) -> Stream[K, VR]: ...

    def join(
        self,
        other: Stream[Any, Any] | Table[Any, Any] | GlobalTable[Any, Any],
        joiner: Joiner,
        windows: JoinWindows | None = None,
        *,
        key: Callable[[Record[K, V]], Any] | None = None,
        value: Any = dict,
        name: str | None = None,
    ) -> Stream[K, Any]:
        """Forward a record with the value `joiner(own value, other value)` for each match with the other side.

        - With a stream, two records match if they have the same key and their timestamps are within `windows`.
        - With a table, a record matches the row of its key; with a global table, the row of the key `key(record)`.

        `value` is the type of the results. `name` is for the node and the stores of a join with a stream, by default
        `<topic>-<other topic>-join`, where a side's topic is where its records entered the topology.
        """
        return add_join(self, other, joiner, JoinOptions(windows, key, value, name, left=False))

    @overload
    def left_join(
        self,
        other: Stream[Any, VO],
        joiner: Callable[[V, VO | None], VR],
        windows: JoinWindows,
        *,
        value: Any = dict,
        name: str | None = None,
    ) -> Stream[K, VR]: ...

    @overload
    def left_join(
        self, other: Table[Any, VO], joiner: Callable[[V, VO | None], VR], *, value: Any = dict
    ) -> Stream[K, VR]: ...

    @overload
    def left_join(
        self,
        other: GlobalTable[Any, VO],
        joiner: Callable[[V, VO | None], VR],
        *,
        key: Callable[[Record[K, V]], Any],
        value: Any = dict,
    ) -> Stream[K, VR]: ...

    def left_join(
        self,
        other: Stream[Any, Any] | Table[Any, Any] | GlobalTable[Any, Any],
        joiner: Joiner,
        windows: JoinWindows | None = None,
        *,
        key: Callable[[Record[K, V]], Any] | None = None,
        value: Any = dict,
        name: str | None = None,
    ) -> Stream[K, Any]:
        """As `join`, but a record without a match is forwarded as `joiner(own value, None)`, even one without a key.

        A record without a value is skipped.
        """
        return add_join(self, other, joiner, JoinOptions(windows, key, value, name, left=True))

    def to(self, topic: str, encode: Callable[[Record[K, V]], tuple[bytes | None, bytes | None]] | None = None) -> None:
        """Write to a topic: text keys as UTF-8, values as JSON, windowed results as one flat object.

        Keys and values that are bytes are unchanged. With `encode`, that function encodes the records instead.
        """
        require_topic("to: topic", topic)
        if encode is not None:
            require_callable("to: encode", encode)
        sink = SinkNode(self._builder._generate_node_name("sink"), topic, encode or self._traits.encode)
        self._builder._topology.add(sink, self._node)
        stores = self._builder._topology.stores
        # Results of a custom encoder cannot be compared with the store by the audit.
        if self._node in stores and encode is None:
            builder = stores[self._node]
            stores[self._node] = replace(builder, schema=msgspec.structs.replace(builder.schema, results=topic))

    def repartition(self) -> Stream[K, V]:
        """Pass the stream through a topic of the application itself, so that a key's records are in one partition.

        Raises ConfigError if another stream, derived from the same named node that changes keys, has the topic already.
        """
        require_groupable("repartition", self._traits)
        require_one_type("repartition", self._traits)
        builder = self._builder
        traits = self._traits
        name = self._repartition_name
        topic = name + REPARTITION_SUFFIX
        require_repartition_topic(name, topic)
        # Several groupings and joins of one stream share the topic.
        if topic not in builder._repartitioned:
            stream = Stream(builder, *repartitioned(builder, self._node, traits, topic))
            builder._repartitioned[topic] = (self._node, stream)
        node, stream = builder._repartitioned[topic]
        if node != self._node:
            key = "" if traits.key == "string" else f', key="{traits.key}"'
            raise ConfigError(
                f"the repartition topic {topic!r} has the records of {node!r} and cannot have those of {self._node!r} "
                f"as well; key_by(lambda record: record.key{key}, name=...) before the grouping or join gives them "
                "their own"
            )
        return stream

    def group_by_key(self: Stream[KR | None, V]) -> GroupedStream[KR, V]:
        """Group the stream by its records' keys.

        In a stream of window results or table rows, a record without a value is a retracted window or a deleted row.
        Such records cannot be aggregated. They are skipped, and `penstock_streams_skipped_records_total` counts them
        with the reason `null value`.
        """
        require_groupable("group_by_key", self._traits)
        keyed = self._partitioned_by_key()
        # Windows other than sliding ones would count a retraction or a deletion as one more record.
        if not keyed._traits.has_deletions:
            return GroupedStream(keyed)
        node = ProcessorNode(self._builder._generate_node_name("present"), DropDeletions)
        self._builder._topology.add(node, keyed._node)
        return GroupedStream(Stream(self._builder, node.name, replace(keyed._traits, has_deletions=False)))

    def group_by(
        self, selector: Callable[[Record[K, V]], KR | None], *, key: KeyType = "string", name: str | None = None
    ) -> GroupedStream[KR, V]:
        """Group the stream by the key that `key_by` with this selector sets."""
        return self.key_by(selector, key=key, name=name).group_by_key()

    @property
    def _repartition_name(self) -> str:
        # A join without a name names its topic after the node in Kafka Streams as well (`KStreamImpl`).
        return self._traits.rekeyed_by or self._node

    def _partitioned_by_key(self, *, keeps_null: bool = False) -> Stream[K, V]:
        if not self._traits.is_rekeyed:
            return self
        # Only left joins need records without a key (KIP-962).
        if keeps_null:
            self._builder._null_key_topics.add(self._repartition_name + REPARTITION_SUFFIX)
        return self.repartition()

    def _add_processor_node(
        self,
        kind: str,
        supplier: Callable[[], Processor],
        stores: tuple[str, ...],
        name: str | None,
        user_supplier: object = None,
    ) -> str:
        require_name(f"{kind}: name", name)
        own_supplier: Any = user_supplier or supplier
        require_callable(f"{kind}: supplier, which makes a processor for each task,", own_supplier)
        require_no_arguments(f"{kind}: supplier", own_supplier)
        if isinstance(own_supplier, type):
            if not issubclass(own_supplier, Processor):
                raise ConfigError(f"{kind}: supplier is the class {own_supplier.__name__}, not a subclass of Processor")
            require_plain_methods(f"{kind}: {own_supplier.__name__}", own_supplier, PROCESSOR_METHODS)
        # As ApiUtils.checkSupplier of Kafka Streams: tasks that share a processor would write to one task's stores.
        elif not isinstance(made := own_supplier(), Processor):
            raise ConfigError(f"{kind}: supplier returned {repr(made)[:SHOWN_MAX]}, not a Processor")
        elif own_supplier() is made:
            raise ConfigError(f"{kind}: supplier returned the same object twice; each task needs its own processor")
        own = self._builder._topology
        tables = tuple(store for store in stores if store in own.global_tables)
        own_stores = tuple(store for store in stores if store not in tables)
        node = ProcessorNode(
            name or self._builder._generate_node_name(kind), supplier, own_stores, global_tables=tables
        )
        self._builder._topology.add(node, self._node)
        return node.name

    def _derive_stream(self, node: str, value: Any, encode: Encoder, **changed: Any) -> Stream:
        return Stream(self._builder, node, replace(self._traits, value=value, encode=encode, mixed=(), **changed))

    def _rekey_stream(self, kind: str, each: EachFunction, value: Any, key: KeyType, name: str | None) -> Stream:
        require_key_type(f"{kind}: key", key)
        require_name(f"{kind}: name", name)
        node = ProcessorNode(name or self._builder._generate_node_name(kind), lambda: Each(each))
        self._builder._topology.add(node, self._node)
        mixed = self._traits.mixed if kind == "key_by" else ()
        return self._derive_rekeyed_stream(node.name, value, key, name, mixed)

    def _derive_rekeyed_stream(
        self, node: str, value: Any, key: KeyType, name: str | None, mixed: tuple[str, ...] = ()
    ) -> Stream:
        traits = replace(
            self._traits,
            value=value,
            key=key,
            is_rekeyed=True,
            rekeyed_by=name,
            is_windowed=False,
            mixed=mixed,
        )
        return Stream(self._builder, node, traits)

    def _add_each_node(
        self,
        kind: str,
        each: EachFunction,
        value: Any = None,
        *,
        passes_all: bool = False,
        at_most_once: bool = False,
    ) -> Stream:
        supplier = functools.partial(Each, each, at_most_once=at_most_once)
        node = ProcessorNode(self._builder._generate_node_name(kind), supplier, passes_all=passes_all)
        self._builder._topology.add(node, self._node)
        traits = self._traits if value is None else replace(self._traits, value=value, mixed=())
        return Stream(self._builder, node.name, traits)


# --- grouped streams and windows ---

RESERVED_RESULTS = frozenset(("partition", "key", "start", "end", LATEST))
"""The fields of windows' rows and results besides the results of aggregations."""


class GroupedStream(Generic[K, V]):
    """A stream grouped by key; durations are timedelta or ms."""

    def __init__(self, stream: Stream[K | None, V]) -> None:
        self._stream = stream

    def session_window(self, gap: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Group into sessions, which end after a gap of inactivity."""
        return WindowedGroup(
            self._stream, WindowRule("session", duration_ms(gap, "session_window: gap"), duration_ms(grace, "grace", 0))
        )

    def tumbling_window(self, size: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Group into windows of one size; each begins where the previous one ends."""
        size_ms = duration_ms(size, "tumbling_window: size")
        return WindowedGroup(self._stream, WindowRule("tumbling", size_ms, duration_ms(grace, "grace", 0), size_ms))

    def hopping_window(
        self, size: timedelta | int, advance: timedelta | int, grace: timedelta | int = 0
    ) -> WindowedGroup[K, V]:
        """Group into windows of one size that begin every `advance`, which is at most the size."""
        size_ms = duration_ms(size, "hopping_window: size")
        advance_ms = duration_ms(advance, "hopping_window: advance")
        return WindowedGroup(self._stream, hopping_windows(size_ms, advance_ms, duration_ms(grace, "grace", 0)))

    def sliding_window(self, difference: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Group into windows whose records are at most `difference` apart. They skip records without a value."""
        difference_ms = duration_ms(difference, "sliding_window: difference", 0)
        return WindowedGroup(self._stream, WindowRule("sliding", difference_ms, duration_ms(grace, "grace", 0)))

    def aggregate(self, name: str | None = None, /, **aggregations: Aggregation[Any]) -> Table[K, dict[str, Any]]:
        """Aggregate all records of each key that have a value into a table, kept in a store of this name.

        A row is a dict of `key` (base64 if keys are bytes) and the results by name. A worker forwards only a row's last
        change of each commit. The forwarded record has the highest timestamp of all records of the key so far, also
        from earlier commits. The default `name` is `<topic>-aggregate`, where `<topic>` is where the records entered
        the topology.
        """
        stream = self._stream
        name, bound = _bind_aggregations(stream, name, "aggregate", aggregations)
        bound = {LATEST: Latest(), **bound}
        _add_aggregate_store(
            stream, _aggregate_store_schema(stream, name, WindowRule("table"), "on_update", bound), bound
        )
        stream._builder._topology.add(ProcessorNode(name, lambda: KeyAggregate(name, bound), (name,)), stream._node)
        return Table(stream._derive_stream(name, dict, encode_json, is_windowed=False, has_deletions=False), name)


Bound = Mapping[str, Aggregation[Any]]


def _bind_aggregations(
    stream: Stream, name: str | None, kind: str, aggregations: Mapping[str, Aggregation[Any]]
) -> tuple[str, Bound]:
    """Return the store's name, and the aggregations bound to the type of the stream's values."""
    traits = stream._traits
    if name is None:
        # Not the number of the node: the store's name must stay if nodes above are added.
        name = f"{traits.origin}-{kind}"
    if not isinstance(name, str) or not name:
        raise ConfigError(f"aggregate: name must be text, got {name!r}; results are named: n=Count()")
    if not aggregations:
        raise ConfigError(f"aggregate({name!r}): at least one aggregation is needed")
    if reserved := RESERVED_RESULTS & aggregations.keys():
        raise ConfigError(f"aggregate({name!r}): {', '.join(sorted(reserved))}: these names are a result's own")
    for result, aggregation in aggregations.items():
        require_aggregation(f"aggregate({name!r}): {result}", aggregation)
    if not all(isinstance(aggregation, Count) for aggregation in aggregations.values()):
        require_one_type(f"aggregate({name!r})", traits)
    return name, {n: a.bind(traits.value) for n, a in aggregations.items()}


def _aggregate_store_schema(stream: Stream, name: str, rule: WindowRule, emit: Emit, bound: Bound) -> StoreSchema:
    """Return the schema of the store of an aggregation, with or without windows."""
    source = stream._traits.source
    is_table = rule.kind == "table"
    return StoreSchema(
        name=name,
        kind="aggregate" if is_table else rule.kind,
        key=stream._traits.key,
        gap_ms=rule.gap_ms,
        grace_ms=rule.grace_ms,
        emit=emit,
        source=source.topic,
        results=None,
        late=None if is_table else source.late,
        dead_letters=source.dead_letters,
        aggregations=tuple(AggregationSchema.of(n, a) for n, a in bound.items()),
        size_ms=rule.size_ms,
        advance_ms=rule.advance_ms,
    )


def _add_aggregate_store(stream: Stream, schema: StoreSchema, bound: Bound) -> None:
    """Add the store of an aggregation to the topology.

    Raises ConfigError if a store or a global table has the name already.
    """
    topology = stream._builder._topology
    name = schema.name
    if name in topology.stores:
        raise ConfigError(
            f"aggregate({name!r}): the store {name!r} exists already; another aggregate needs a name of its "
            "own, and one aggregate is forwarded either on_close() or on_update()"
        )
    topology.add_store(StoreBuilder(schema, tuple(bound.values())))


class WindowedGroup(Generic[K, V]):
    """A grouped stream divided into windows."""

    def __init__(self, stream: Stream[K | None, V], rule: WindowRule) -> None:
        self._stream = stream
        self._rule = rule

    def aggregate(self, name: str | None = None, /, **aggregations: Aggregation[Any]) -> WindowedTable[K]:
        """Aggregate each window, in a store of this name.

        The default `name` is `<topic>-<kind>`, such as `clicks-session`, where `<topic>` is where the records entered
        the topology. If a store has the name already, `on_close` and `on_update` of the result raise ConfigError.
        """
        name, bound = _bind_aggregations(self._stream, name, self._rule.kind, aggregations)
        # A session's result has the session's end as its timestamp. Other results have the time of their latest record,
        # which must be kept.
        if self._rule.kind != "session":
            bound = {LATEST: Latest(), **bound}
        self._stream._builder._without_emission.append(name)
        return WindowedTable(self._stream, name, self._rule, bound)


class WindowedTable(Generic[K]):
    """Windowed results; `on_close` or `on_update` decides when they are forwarded."""

    def __init__(self, stream: Stream[K | None, Any], name: str, rule: WindowRule, bound: Bound) -> None:
        self._stream = stream
        self._name = name
        self._rule = rule
        self._bound = bound

    def on_close(self) -> Stream[WindowKey[K], WindowResult[K]]:
        """Forward each window once, when it closes: a record's key is a `WindowKey`, its value a `WindowResult`."""
        return self._add_window_aggregate("on_close")

    def on_update(self) -> Stream[WindowKey[K], WindowResult[K] | None]:
        """Forward each changed window's last result at each commit.

        Also forwards None for the old bounds of sessions that grew or merged, if a result with these was forwarded.
        """
        return self._add_window_aggregate("on_update")

    def _add_window_aggregate(self, emit: Emit) -> Stream:
        stream = self._stream
        name = self._name
        rule = self._rule
        bound = self._bound
        builder = stream._builder
        schema = _aggregate_store_schema(stream, name, rule, emit, bound)
        _add_aggregate_store(stream, schema, bound)
        builder._without_emission.remove(name)
        node = ProcessorNode(name, lambda: WindowAggregate(name, rule, bound, emit), (name,))
        builder._topology.add(node, stream._node)
        encode = encode_json if emit == "on_close" else encode_updates
        key = stream._traits.key
        deletes = emit == "on_update"
        return stream._derive_stream(
            name, WindowResult, encode, is_windowed=True, window_key=key, has_deletions=deletes
        )


# --- tables and joins ---


@dataclass(frozen=True, slots=True)
class Table(Generic[K, V]):
    """The last value of each key; `store` is the name of its store."""

    stream: Stream[K, V | None]
    store: str

    def to_stream(self) -> Stream[K, V | None]:
        """Return the changes of rows as a stream of records; a record without a value is a deletion."""
        return self.stream


@dataclass(frozen=True, slots=True)
class GlobalTable(Generic[K, V]):
    """A table of which every instance has all rows."""

    name: str
    builder: StreamsBuilder = field(repr=False, compare=False)


class JoinOptions(NamedTuple):
    """The arguments of `Stream.join` and `Stream.left_join`."""

    windows: JoinWindows | None
    key: Callable[[Record], Any] | None
    value: Any
    name: str | None
    left: bool


def add_join(stream: Stream, other: Stream | Table | GlobalTable, joiner: Joiner, options: JoinOptions) -> Stream:
    """Add the nodes of a join to the builder's topology, and return the joined stream.

    Raises ConfigError if the two sides, or a side and the arguments, do not fit together.
    """
    joiner = plain("join: joiner", joiner)
    require_name("join: name", options.name)
    if options.windows is not None and not isinstance(options.windows, JoinWindows):
        raise ConfigError(f"join: windows must be JoinWindows, such as JoinWindows.of(60_000), got {options.windows!r}")
    if (options.windows is not None) == isinstance(other, Table | GlobalTable):
        raise ConfigError("join: a join of two streams needs JoinWindows, a join with a table takes none")
    if (options.key is not None) != isinstance(other, GlobalTable):
        raise ConfigError("join: a global table needs a key function, anything else is joined by the record's key")
    if options.key is not None:
        options = options._replace(key=plain("join: key", options.key))
    if isinstance(other, GlobalTable):
        require_same_builder("join", stream._builder, other.builder)
        return _add_global_join(stream, other, joiner, options)
    side = other.stream if isinstance(other, Table) else other
    require_same_builder("join", stream._builder, side._builder)
    require_groupable("join", stream._traits)
    require_groupable("join", side._traits)
    require_one_type("join", stream._traits)
    require_one_type("join", side._traits)
    if isinstance(other, Table):
        return _add_table_join(stream._partitioned_by_key(keeps_null=options.left), other, joiner, options)
    return _add_stream_join(
        stream._partitioned_by_key(keeps_null=options.left), other._partitioned_by_key(), joiner, options
    )


def _add_global_join(stream: Stream, table: GlobalTable, joiner: Joiner, options: JoinOptions) -> Stream:
    # Updates keep their window keys, so the join passes their retractions on.
    retracts = stream._traits.is_windowed and stream._traits.has_deletions
    node = ProcessorNode(
        stream._builder._generate_node_name("join"),
        lambda: TableJoin(table.name, joiner, left=options.left, key_of=options.key, keeps_deletions=retracts),
        global_tables=(table.name,),
    )
    stream._builder._topology.add(node, stream._node)
    return stream._derive_stream(node.name, options.value, stream._traits.encode, has_deletions=retracts)


def _add_table_join(stream: Stream, table: Table, joiner: Joiner, options: JoinOptions) -> Stream:
    require_same_key_types("join", stream._traits.key, table.stream._traits.key)
    supplier = lambda: TableJoin(table.store, joiner, left=options.left)  # noqa: E731
    node = ProcessorNode(stream._builder._generate_node_name("join"), supplier, (table.store,), only_reads=True)
    stream._builder._topology.add(node, stream._node)
    return stream._derive_stream(node.name, options.value, encode_json, has_deletions=False)


def _add_stream_join(stream: Stream, other: Stream, joiner: Joiner, options: JoinOptions) -> Stream:
    windows = options.windows
    builder = stream._builder
    assert windows is not None
    require_same_key_types("join", stream._traits.key, other._traits.key)
    # As for aggregations, the stores' names must stay if nodes above are added.
    name = options.name or f"{stream._traits.origin}-{other._traits.origin}-join"
    stores = (f"{name}-left", f"{name}-right")
    sides = []
    for side, one in ((LEFT, stream), (RIGHT, other)):
        builder._topology.add_store(_stream_join_store(stores[side], windows, one._traits))
        node = ProcessorNode(
            f"{name}-from-{('left', 'right')[side]}", functools.partial(JoinSide, side), passes_all=True
        )
        builder._topology.add(node, one._node)
        sides.append(node.name)
    supplier = lambda: StreamJoin(stores, windows, joiner, left=options.left)  # noqa: E731
    # Both sides feed one processor, which has one time, as KStreamKStreamJoin has a shared TimeTracker.
    builder._topology.add(ProcessorNode(name, supplier, stores), *sides)
    return stream._derive_stream(name, options.value, encode_json, has_deletions=False)


def _stream_join_store(name: str, windows: JoinWindows, traits: StreamTraits) -> StoreBuilder:
    """Return the store of one side of a join of two streams."""
    rows = JoinRows(traits.value, traits.window_key)
    schema = StoreSchema(
        name=name,
        kind="join",
        key=traits.key,
        gap_ms=0,
        grace_ms=windows.grace_ms,
        emit="on_update",
        source=traits.source.topic,
        results=None,
        late=traits.source.late,
        dead_letters=traits.source.dead_letters,
        aggregations=(AggregationSchema.of("records", rows),),
    )
    return StoreBuilder(schema, (rows,))


class _DropNullKeys(Processor):
    """Drops records without a key, which cannot be grouped or joined, unless a left join needs them (`keeps_null`)."""

    sees_time = False

    def __init__(self, keeps_null: bool) -> None:
        self._keeps_null = keeps_null

    def process(self, record: Record) -> None:
        if record.key is None and not self._keeps_null:
            self.context.count_skipped("null key")
        else:
            self.context.forward(record)


def repartitioned(builder: StreamsBuilder, parent: str, traits: StreamTraits, topic: str) -> tuple[str, StreamTraits]:
    """Add an internal topic that repartitions the records of `parent` by key; return its source's name and traits."""
    # `_null_key_topics` is read when a task is made: a left join may come after a grouping of the same stream.
    keyed = ProcessorNode(
        builder._generate_node_name("keyed"), lambda: _DropNullKeys(topic in builder._null_key_topics)
    )
    builder._topology.add(keyed, parent)
    encode = _encode_bytes_keys if traits.key == "bytes" else _encode_text_keys
    builder._topology.add(SinkNode(builder._generate_node_name("sink"), topic, encode, is_internal=True), keyed.name)
    # Results are always written as flat objects, which no struct can read.
    is_result = traits.value is WindowResult
    is_json = traits.value is not bytes and not is_result
    source = SourceNode(
        builder._generate_node_name("source"),
        topic,
        traits.key,
        result_deserializer(traits.window_key) if is_result else value_deserializer(traits.value),
        traits.source.dead_letters,
        traits.source.late,
        is_json=is_json,
        value_type=traits.value if is_json else None,
        is_internal=True,
    )
    builder._topology.add(source)
    return source.name, replace(traits, source=source, is_rekeyed=False, rekeyed_by=None)


def _encode_text_keys(record: Record) -> tuple[bytes | None, bytes | None]:
    if not isinstance(record.key, str | None):
        raise SerializationError(f'a key must be text, got {type(record.key).__name__}; use str(), or key="bytes"')
    return encode_json(record)


def _encode_bytes_keys(record: Record) -> tuple[bytes | None, bytes | None]:
    if not isinstance(record.key, bytes | None):
        raise SerializationError(f'a key must be bytes, got {type(record.key).__name__}; say key="string" for text')
    return encode_json(record)
