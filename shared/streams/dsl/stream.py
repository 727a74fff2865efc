"""The DSL's stream: records flowing from a node, and all that can be done with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.topic_names import REPARTITION_SUFFIX
from penstock.shared.streams.dsl.grouped_stream import GroupedStream
from penstock.shared.streams.dsl.joins import GlobalTable, Joining, Table, join, repartitioned
from penstock.shared.streams.dsl.node import Flow, type_name
from penstock.shared.streams.dsl.validation import (
    require_groupable,
    require_key_type,
    require_name,
    require_one_type,
    require_repartition_topic,
    require_same_builder,
    require_topic,
)
from penstock.shared.streams.operators.stateless import DropDeletions, Each, EachFunction, SameKey, Split, pass_on
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.operators.tables import Joiner
from penstock.shared.streams.processor import PROCESSOR_METHODS, K, Processor, Record, V
from penstock.shared.streams.task.result_encoders import encode_json
from penstock.shared.streams.task.user_functions import plain, require_callable, require_plain_methods
from penstock.shared.streams.topology import Encoder, KeyType, ProcessorNode, SinkNode

if TYPE_CHECKING:
    from penstock.shared.streams.dsl.builder import StreamsBuilder

KR = TypeVar("KR")
VR = TypeVar("VR")
"""The keys and values of a result."""
KO = TypeVar("KO")
VO = TypeVar("VO")
"""The keys and values of the other side, and of a join's row."""


class Stream(Generic[K, V]):
    """Records flowing from a node.

    The type parameters are those of the records that have a key and a value. As in Kafka Streams each record of a topic
    may lack either, and then it is None.
    """

    def __init__(self, builder: StreamsBuilder, node: str, flow: Flow) -> None:
        self._builder, self._node, self._flow = builder, node, flow

    def filter(self, predicate: Callable[[Record[K, V]], bool]) -> Stream[K, V]:
        """Only the records for which `predicate` is true."""
        predicate = plain("filter: predicate", predicate)
        return self._each(
            "filter", lambda record, forward: forward(record) if predicate(record) else None, at_most_once=True
        )

    def filter_not(self, predicate: Callable[[Record[K, V]], bool]) -> Stream[K, V]:
        """Only the records for which `predicate` is false."""
        predicate = plain("filter_not: predicate", predicate)
        return self._each(
            "filter_not", lambda record, forward: None if predicate(record) else forward(record), at_most_once=True
        )

    def map_values(self, mapper: Callable[[V], VR], value: Any = dict) -> Stream[K, VR]:
        """Each value replaced by `mapper(value)`; `value` says what type comes out, for typed aggregations."""
        mapper = plain("map_values: mapper", mapper)
        return self._each(
            "map_values", lambda r, forward: forward(r._replace(value=mapper(r.value))), value, at_most_once=True
        )

    def flat_map_values(self, mapper: Callable[[V], Iterable[VR]], value: Any = dict) -> Stream[K, VR]:
        """Each value replaced by the values of `mapper(value)`."""
        mapper = plain("flat_map_values: mapper", mapper, may_yield=True)

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            for one in mapper(record.value):
                forward(record._replace(value=one))

        return self._each("flat_map_values", each, value)

    def map(
        self,
        mapper: Callable[[Record[K, V]], Record[KR, VR]],
        value: Any = dict,
        *,
        key: KeyType = "string",
        name: str | None = None,
    ) -> Stream[KR, VR]:
        """Each record replaced by `mapper(record)`: key, value, timestamp and headers. For `key`, `name`: `key_by`."""
        mapper = plain("map: mapper", mapper)
        return self._rekeyed("map", lambda record, forward: forward(mapper(record)), value, key, name)

    def flat_map(
        self,
        mapper: Callable[[Record[K, V]], Iterable[Record[KR, VR]]],
        value: Any = dict,
        *,
        key: KeyType = "string",
        name: str | None = None,
    ) -> Stream[KR, VR]:
        """Each record replaced by the records of `mapper(record)`. For `key`, `name`: `key_by`."""
        mapper = plain("flat_map: mapper", mapper, may_yield=True)

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            for one in mapper(record):
                forward(one)

        return self._rekeyed("flat_map", each, value, key, name)

    def key_by(
        self, selector: Callable[[Record[K, V]], KR], *, key: KeyType = "string", name: str | None = None
    ) -> Stream[KR, V]:
        """Each record under the key `selector(record)`, text or bytes as `key` says.

        Before it is grouped or joined by that key, the stream goes through a topic of the application's own,
        `<application>-<name>-repartition`, so that all records of a key come to one task. Give it a `name` to keep the
        topic when the topology around it changes. A record without a key is skipped there, and counted.
        """
        selector = plain("key_by: selector", selector)

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            forward(record._replace(key=selector(record)))

        return self._rekeyed("key_by", each, self._flow.value, key, name)

    select_key = key_by

    def peek(self, action: Callable[[Record[K, V]], None]) -> Stream[K, V]:
        """Call `action` for each record and pass it on."""
        action = plain("peek: action", action)

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            action(record)
            forward(record)

        return self._each("peek", each, passes_all=True, at_most_once=True)

    def foreach(self, action: Callable[[Record[K, V]], None]) -> None:
        """Call `action` for each record; nothing comes after it."""
        action = plain("foreach: action", action)
        self._each("foreach", lambda record, forward: action(record))

    def branch(self, *predicates: Callable[[Record[K, V]], bool]) -> list[Stream[K, V]]:
        """One stream a predicate; a record goes to the first that is true of it, to none where none is."""
        if not predicates:
            raise ConfigError("branch: at least one predicate is needed")
        checked = [plain("branch: predicate", predicate) for predicate in predicates]
        names = [self._builder._name("branch") for _ in predicates]
        split = ProcessorNode(
            names[0].replace("branch", "split"), lambda: Split(tuple(zip(checked, names, strict=True)))
        )
        self._builder._add(split, (self._node,))
        for name in names:
            self._builder._add(ProcessorNode(name, lambda: Each(pass_on), passes_all=True), (split.name,))
        return [Stream(self._builder, name, self._flow) for name in names]

    def merge(self, other: Stream[KO, VO]) -> Stream[K | KO, V | VO]:
        """The records of both streams; ConfigError where one has text as keys and the other bytes.

        Streams with values of different types can be merged, and their records counted; to go through a topic, into a
        join or an aggregation of a field they need one type, which `map_values` says.
        """
        require_same_builder("merge", self._builder, other._builder)
        if self._flow.key != other._flow.key:
            raise ConfigError(f"merge: the keys of one are {self._flow.key}, those of the other {other._flow.key}")
        node = ProcessorNode(self._builder._name("merge"), lambda: Each(pass_on))
        self._builder._add(node, (self._node, other._node))
        own, its = self._flow, other._flow
        mixed = own.mixed + its.mixed
        if own.value != its.value:
            mixed += (type_name(own.value), type_name(its.value))
        flow = replace(
            own,
            is_rekeyed=own.is_rekeyed or its.is_rekeyed,
            is_windowed=own.is_windowed or its.is_windowed,
            has_deletions=own.has_deletions or its.has_deletions,
            mixed=tuple(dict.fromkeys(mixed)),
        )
        return Stream(self._builder, node.name, flow)

    def process(
        self,
        supplier: Callable[[], Processor[K, V, KR, VR]],
        *stores: str,
        name: str | None = None,
        value: Any = dict,
        key: KeyType | None = None,
    ) -> Stream[KR, VR]:
        """What a processor of your own forwards, with values of type `value`; it may use the stores named.

        It may give its records any key, text or bytes as `key` says (default: as they are). So they go through a
        repartition topic before they are grouped or joined, as after `key_by`; `process_values` spares them that.
        """
        if key is not None:
            require_key_type("process: key", key)
        node = self._processed("process", supplier, stores, name)
        flow = replace(self._flow, value=value, key=key or self._flow.key, is_rekeyed=True, encode=encode_json)
        return Stream(self._builder, node, replace(flow, is_windowed=False, mixed=()))

    def process_values(
        self,
        supplier: Callable[[], Processor[K, V, Any, VR]],
        *stores: str,
        name: str | None = None,
        value: Any = dict,
    ) -> Stream[K, VR]:
        """As `process`, by a processor that leaves the keys as they are: the records stay in their partition.

        ConfigError ends the worker where it forwards another key than that of the record it processes. What it
        forwards in a punctuation or a commit has the key of a record that came to it before; that is not checked.
        """
        node = self._processed("process_values", lambda: SameKey(supplier()), stores, name, supplier)
        return Stream(self._builder, node, replace(self._flow, value=value, mixed=()))

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
        """The records that the other side has a match for, with the value `joiner(own value, other value)`.

        Another stream: records of one key within `windows`. A table: the row of the record's key. A global table: the
        row of the key `key(record)`. `value` says what type comes out; `name` names the stores of a stream's join.
        """
        return join(self, other, joiner, Joining(windows, key, value, name, left=False))

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
        """As `join`, but a record without a match goes on as `joiner(own value, None)`, as does one without a key."""
        return join(self, other, joiner, Joining(windows, key, value, name, left=True))

    def to(self, topic: str, encode: Callable[[Record[K, V]], tuple[bytes | None, bytes | None]] | None = None) -> None:
        """Write to a topic: keys as UTF-8 or bytes, values as JSON, windowed results as one flat object."""
        require_topic("to: topic", topic)
        if encode is not None:
            require_callable("to: encode", encode)
        sink = SinkNode(self._builder._name("sink"), topic, encode or self._flow.encode)
        self._builder._add(sink, (self._node,))
        stores = self._builder._topology.stores
        if self._node in stores and encode is None:  # what is encoded otherwise cannot be compared
            builder = stores[self._node]
            stores[self._node] = replace(builder, schema=msgspec.structs.replace(builder.schema, results=topic))

    def repartition(self) -> Stream[K, V]:
        """The stream by way of a topic of the application's own, with all records of a key in one partition."""
        require_groupable("repartition", self._flow)
        require_one_type("repartition", self._flow)
        builder, flow, topic = self._builder, self._flow, self._node + REPARTITION_SUFFIX
        require_repartition_topic(self._node, topic)
        if topic not in builder._repartitioned:
            builder._repartitioned[topic] = Stream(builder, *repartitioned(builder, self._node, flow, topic))
        return builder._repartitioned[topic]

    def group_by_key(self: Stream[KR | None, V]) -> GroupedStream[KR, V]:
        """The stream grouped by the key its records have.

        A record without a value that tells of a retracted window or a deleted row is no event to aggregate: it is
        skipped, and counted.
        """
        require_groupable("group_by_key", self._flow)
        keyed = self._by_key()
        if not keyed._flow.has_deletions:
            return GroupedStream(keyed)
        node = ProcessorNode(self._builder._name("present"), DropDeletions)
        self._builder._add(node, (keyed._node,))
        return GroupedStream(Stream(self._builder, node.name, replace(keyed._flow, has_deletions=False)))

    def group_by(
        self, selector: Callable[[Record[K, V]], KR | None], *, key: KeyType = "string", name: str | None = None
    ) -> GroupedStream[KR, V]:
        """The stream grouped by the key that `key_by` gives its records."""
        return self.key_by(selector, key=key, name=name).group_by_key()

    def _by_key(self, *, keeps_null: bool = False) -> Stream[K, V]:
        if not self._flow.is_rekeyed:
            return self
        if keeps_null:
            self._builder._null_kept.add(self._node + REPARTITION_SUFFIX)
        return self.repartition()

    def _processed(
        self,
        kind: str,
        supplier: Callable[[], Processor],
        stores: tuple[str, ...],
        name: str | None,
        given: object = None,
    ) -> str:
        require_name(f"{kind}: name", name)
        own_supplier: Any = given or supplier
        require_callable(f"{kind}: supplier, which makes a processor for each task,", own_supplier)
        if isinstance(own_supplier, type):
            require_plain_methods(f"{kind}: {own_supplier.__name__}", own_supplier, PROCESSOR_METHODS)
        own = self._builder._topology
        tables = tuple(store for store in stores if store in own.global_tables)
        own_stores = tuple(store for store in stores if store not in tables)
        node = ProcessorNode(name or self._builder._name(kind), supplier, own_stores, global_tables=tables)
        self._builder._add(node, (self._node,))
        return node.name

    def _derived(self, node: str, value: Any, encode: Encoder, **changed: Any) -> Stream:
        return Stream(self._builder, node, replace(self._flow, value=value, encode=encode, mixed=(), **changed))

    def _rekeyed(self, kind: str, each: EachFunction, value: Any, key: KeyType, name: str | None) -> Stream:
        require_key_type(f"{kind}: key", key)
        require_name(f"{kind}: name", name)
        node = ProcessorNode(name or self._builder._name(kind), lambda: Each(each))
        self._builder._add(node, (self._node,))
        mixed = self._flow.mixed if kind == "key_by" else ()
        flow = replace(self._flow, value=value, key=key, is_rekeyed=True, encode=encode_json)
        flow = replace(flow, is_windowed=False, mixed=mixed)
        return Stream(self._builder, node.name, flow)

    def _each(
        self,
        kind: str,
        each: EachFunction,
        value: Any = None,
        *,
        passes_all: bool = False,
        at_most_once: bool = False,
    ) -> Stream:
        supplier = functools.partial(Each, each, at_most_once=at_most_once)
        node = ProcessorNode(self._builder._name(kind), supplier, passes_all=passes_all)
        self._builder._add(node, (self._node,))
        flow = self._flow if value is None else replace(self._flow, value=value, mixed=())
        return Stream(self._builder, node.name, flow)
