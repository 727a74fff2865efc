"""The DSL: a topology written as a chain of calls.

>>> import msgspec
>>> from datetime import timedelta
>>> from shared.streams.aggregations import Count, Mean
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

import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from shared.common.errors import ConfigError
from shared.common.serialization import (
    Deserializer,
    bytes_deserializer,
    json_deserializer,
    struct_deserializer,
)
from shared.common.topic_names import dead_letter_topic, late_topic
from shared.streams.grouped_stream import GroupedStream
from shared.streams.processor import Processor, Record
from shared.streams.result_encoders import encode_json
from shared.streams.topology import Encoder, KeyType, Node, ProcessorNode, SinkNode, SourceNode, Topology


class StreamsBuilder:
    """Collects the streams of one application."""

    def __init__(self) -> None:
        self._topology = Topology()
        self._named = 0

    def stream(
        self,
        topic: str,
        value: Any = dict,
        *,
        key: KeyType = "string",
        dead_letters: str | None = None,
        late: str | None = None,
    ) -> Stream:
        """A topic's records, with values decoded as `value`.

        `value` is a msgspec struct or any other type that msgspec decodes (JSON, checked field by field), `dict` (any
        JSON), `bytes` (as they are), or a deserializer, whose values are taken for dicts until a `map_values` says
        otherwise. What cannot be decoded goes to `dead_letters` (default `<topic>-dlq`), what comes after its
        window was closed to `late` (default `<topic>-late`).
        """
        source = SourceNode(
            self._name("source"),
            topic,
            key,
            _deserializer(value),
            dead_letters or dead_letter_topic(topic),
            late or late_topic(topic),
            is_json=_is_type(value) and value is not bytes,
            value_type=value if _is_type(value) and value is not bytes else None,
        )
        self._topology.add(source)
        return Stream(self, source.name, source, value if _is_type(value) else dict)

    def build(self) -> Topology:
        """The topology; ConfigError where nothing was defined."""
        if not self._topology.nodes:
            raise ConfigError("topology: no stream was defined")
        return self._topology

    def _name(self, kind: str) -> str:
        self._named += 1
        return f"{kind}-{self._named}"

    def _add(self, node: Node, parents: tuple[str, ...]) -> None:
        self._topology.add(node, *parents)


class Stream:
    """Records flowing from a node."""

    def __init__(
        self, builder: StreamsBuilder, node: str, source: SourceNode, value: Any, encode: Encoder | None = None
    ) -> None:
        self._builder, self._node, self._source, self._value = builder, node, source, value
        self._encode = encode or encode_json

    def filter(self, predicate: Callable[[Record], bool]) -> Stream:
        """Only the records for which `predicate` is true."""
        return self._each("filter", lambda record, forward: forward(record) if predicate(record) else None)

    def map_values(self, mapper: Callable[[Any], Any], value: Any = dict) -> Stream:
        """Each value replaced by `mapper(value)`; `value` says what type comes out, for typed aggregations."""
        return self._each("map_values", lambda r, forward: forward(r._replace(value=mapper(r.value))), value)

    def flat_map_values(self, mapper: Callable[[Any], list[Any]], value: Any = dict) -> Stream:
        """Each value replaced by the values of `mapper(value)`."""

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            for one in mapper(record.value):
                forward(record._replace(value=one))

        return self._each("flat_map_values", each, value)

    def peek(self, action: Callable[[Record], None]) -> Stream:
        """Call `action` for each record and pass it on."""

        def each(record: Record, forward: Callable[[Record], None]) -> None:
            action(record)
            forward(record)

        return self._each("peek", each, passes_all=True)

    def branch(self, *predicates: Callable[[Record], bool]) -> list[Stream]:
        """One stream a predicate; a record goes to the first that is true of it, to none where none is."""
        return [self._branch(predicates[:i], predicate) for i, predicate in enumerate(predicates)]

    def merge(self, other: Stream) -> Stream:
        """The records of both streams."""
        node = ProcessorNode(self._builder._name("merge"), lambda: _Each(lambda record, forward: forward(record)))
        self._builder._add(node, (self._node, other._node))
        return Stream(self._builder, node.name, self._source, self._value, self._encode)

    def process(self, supplier: Callable[[], Processor], *stores: str, name: str | None = None) -> Stream:
        """What a processor of your own forwards; it may use the stores named."""
        node = ProcessorNode(name or self._builder._name("process"), supplier, stores)
        self._builder._add(node, (self._node,))
        return Stream(self._builder, node.name, self._source, dict)

    def to(self, topic: str, encode: Encoder | None = None) -> None:
        """Write to a topic: keys as UTF-8 or bytes, values as JSON, windowed results as one flat object."""
        sink = SinkNode(self._builder._name("sink"), topic, encode or self._encode)
        self._builder._add(sink, (self._node,))
        stores = self._builder._topology.stores
        if self._node in stores and encode is None:  # what is encoded otherwise cannot be compared
            builder = stores[self._node]
            stores[self._node] = replace(builder, schema=msgspec.structs.replace(builder.schema, results=topic))

    def group_by_key(self) -> GroupedStream:
        """The stream grouped by the key its records have."""
        return GroupedStream(self)

    def _derived(self, node: str, value: Any, encode: Encoder) -> Stream:
        return Stream(self._builder, node, self._source, value, encode)

    def _branch(self, earlier: tuple[Callable[[Record], bool], ...], own: Callable[[Record], bool]) -> Stream:
        return self.filter(lambda record: not any(p(record) for p in earlier) and own(record))

    def _each(self, kind: str, each: _EachFunction, value: Any = None, *, passes_all: bool = False) -> Stream:
        node = ProcessorNode(self._builder._name(kind), lambda: _Each(each), passes_all=passes_all)
        self._builder._add(node, (self._node,))
        return Stream(self._builder, node.name, self._source, self._value if value is None else value, self._encode)


_EachFunction = Callable[[Record, Callable[[Record], None]], None]


class _Each(Processor):
    """A processor without state: a function of the record and of what forwards."""

    def __init__(self, each: _EachFunction) -> None:
        self._each = each

    def process(self, record: Record) -> None:
        self._each(record, self.context.forward)


def _is_type(value: Any) -> bool:
    return isinstance(value, type) or typing.get_origin(value) is not None


def _deserializer(value: Any) -> Deserializer:
    if value is dict:
        return json_deserializer
    if value is bytes:
        return bytes_deserializer
    if _is_type(value):
        return struct_deserializer(value)
    if callable(value):
        deserializer: Deserializer = value
        return deserializer
    raise ConfigError(f"stream: value must be a type or a deserializer, got {value!r}")
