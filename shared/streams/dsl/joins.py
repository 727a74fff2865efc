"""How the DSL joins, and what it puts before a join or a grouping whose key was changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.node import Flow, deserializer_of
from penstock.shared.streams.dsl.validation import (
    require_groupable,
    require_name,
    require_one_type,
    require_same_builder,
)
from penstock.shared.streams.operators.stream_join import LEFT, RIGHT, JoinRows, JoinSide, JoinWindows, StreamJoin
from penstock.shared.streams.operators.tables import Joiner, TableJoin
from penstock.shared.streams.processor import K, Processor, Record, V
from penstock.shared.streams.task.result_encoders import encode_json, result_deserializer
from penstock.shared.streams.task.user_functions import plain
from penstock.shared.streams.topology import KeyType, ProcessorNode, SinkNode, SourceNode, StoreBuilder
from penstock.shared.streams.windows.timed_processor import WindowResult

if TYPE_CHECKING:
    from penstock.shared.streams.dsl.builder import StreamsBuilder
    from penstock.shared.streams.dsl.stream import Stream


@dataclass(frozen=True, slots=True)
class Table(Generic[K, V]):
    """The last value of each key; `store` is where it is kept."""

    stream: Stream[K, V | None]
    store: str

    def to_stream(self) -> Stream[K, V | None]:
        """Each change of a row as a record; one without a value is a deletion."""
        return self.stream


@dataclass(frozen=True, slots=True)
class GlobalTable(Generic[K, V]):
    """A table that every instance has whole."""

    name: str
    builder: StreamsBuilder | None = field(default=None, repr=False, compare=False)


class Joining(NamedTuple):
    """What `Stream.join` and `Stream.left_join` were told."""

    windows: JoinWindows | None
    key: Callable[[Record], Any] | None
    value: Any
    name: str | None
    left: bool


def join(stream: Stream, other: Stream | Table | GlobalTable, joiner: Joiner, how: Joining) -> Stream:
    """The joined stream; ConfigError where the other side and what was said do not fit."""
    joiner = plain("join: joiner", joiner)
    require_name("join: name", how.name)
    if how.windows is not None and not isinstance(how.windows, JoinWindows):
        raise ConfigError(f"join: windows must be JoinWindows, such as JoinWindows.of(60_000), got {how.windows!r}")
    if (how.windows is not None) == isinstance(other, Table | GlobalTable):
        raise ConfigError("join: two streams need JoinWindows, a table takes none")
    if (how.key is not None) != isinstance(other, GlobalTable):
        raise ConfigError("join: a global table needs a key function, anything else is joined by the record's key")
    if how.key is not None:
        how = how._replace(key=plain("join: key", how.key))
    if isinstance(other, GlobalTable):
        require_same_builder("join", stream._builder, other.builder)
        return _join_global(stream, other, joiner, how)
    side = other.stream if isinstance(other, Table) else other
    require_same_builder("join", stream._builder, side._builder)
    require_groupable("join", stream._flow)
    require_groupable("join", side._flow)
    require_one_type("join", stream._flow)
    require_one_type("join", side._flow)
    if isinstance(other, Table):
        return _join_table(stream._by_key(keeps_null=how.left), other, joiner, how)
    return _join_streams(stream._by_key(keeps_null=how.left), other._by_key(), joiner, how)


def _join_global(stream: Stream, table: GlobalTable, joiner: Joiner, how: Joining) -> Stream:
    node = ProcessorNode(
        stream._builder._name("join"),
        lambda: TableJoin(table.name, joiner, left=how.left, key_of=how.key),
        global_tables=(table.name,),
    )
    stream._builder._add(node, (stream._node,))
    return stream._derived(node.name, how.value, encode_json, has_deletions=False)


def _join_table(stream: Stream, table: Table, joiner: Joiner, how: Joining) -> Stream:
    _require_same_key(stream._flow.key, table.stream._flow.key)
    supplier = lambda: TableJoin(table.store, joiner, left=how.left)  # noqa: E731
    node = ProcessorNode(stream._builder._name("join"), supplier, (table.store,))
    stream._builder._add(node, (stream._node,))
    return stream._derived(node.name, how.value, encode_json, has_deletions=False)


def _join_streams(stream: Stream, other: Stream, joiner: Joiner, how: Joining) -> Stream:
    windows, builder = how.windows, stream._builder
    assert windows is not None
    _require_same_key(stream._flow.key, other._flow.key)
    name = how.name or builder._name("join")
    stores = (f"{name}-left", f"{name}-right")
    sides = []
    for side, one in ((LEFT, stream), (RIGHT, other)):
        builder._topology.add_store(_join_store(stores[side], windows, one._flow))
        node = ProcessorNode(f"{name}-from-{('left', 'right')[side]}", _side(side), passes_all=True)
        builder._add(node, (one._node,))
        sides.append(node.name)
    supplier = lambda: StreamJoin(stores, windows, joiner, left=how.left)  # noqa: E731
    builder._add(ProcessorNode(name, supplier, stores), tuple(sides))
    return stream._derived(name, how.value, encode_json, has_deletions=False)


def _side(side: int) -> Callable[[], Processor]:
    return lambda: JoinSide(side)


def _require_same_key(own: KeyType, other: KeyType) -> None:
    if own != other:
        raise ConfigError(f"join: the keys of one side are {own}, those of the other {other}")


def _join_store(name: str, windows: JoinWindows, flow: Flow) -> StoreBuilder:
    rows = JoinRows(flow.value, flow.window_key)
    schema = StoreSchema(
        name=name,
        kind="join",
        key=flow.key,
        gap_ms=0,
        grace_ms=windows.grace_ms,
        emit="on_update",
        source=flow.source.topic,
        results=None,
        late=flow.source.late,
        dead_letters=flow.source.dead_letters,
        aggregations=(AggregationSchema.of("records", rows),),
    )
    return StoreBuilder(schema, (rows,))


class _DropNullKeys(Processor):
    """Nothing can be grouped or joined by no key; what is left joined goes on without a match."""

    sees_time = False

    def __init__(self, keeps_null: bool) -> None:
        self._keeps_null = keeps_null

    def process(self, record: Record) -> None:
        if record.key is None and not self._keeps_null:
            self.context.count_skipped("null key")
        else:
            self.context.forward(record)


def repartitioned(builder: StreamsBuilder, parent: str, flow: Flow, topic: str) -> tuple[str, Flow]:
    """The source of, and what comes back from, an internal topic that takes the records of `parent` by their keys."""
    # Asked only when a task is made: a left join may come after a grouping of the same stream.
    keyed = ProcessorNode(builder._name("keyed"), lambda: _DropNullKeys(topic in builder._null_kept))
    builder._add(keyed, (parent,))
    encode = _encode_bytes_keys if flow.key == "bytes" else _encode_text_keys
    builder._add(SinkNode(builder._name("sink"), topic, encode, is_internal=True), (keyed.name,))
    is_result = flow.value is WindowResult  # written flat, as everywhere, so no struct can read it
    is_json = flow.value is not bytes and not is_result
    source = SourceNode(
        builder._name("source"),
        topic,
        flow.key,
        result_deserializer(flow.window_key) if is_result else deserializer_of(flow.value),
        flow.source.dead_letters,
        flow.source.late,
        is_json=is_json,
        value_type=flow.value if is_json else None,
        is_internal=True,
    )
    builder._topology.add(source)
    return source.name, replace(flow, source=source, is_rekeyed=False)


def _encode_text_keys(record: Record) -> tuple[bytes | None, bytes | None]:
    if not isinstance(record.key, str | None):
        raise SerializationError(f'a key must be text, got {type(record.key).__name__}; say key="bytes" for bytes')
    return encode_json(record)


def _encode_bytes_keys(record: Record) -> tuple[bytes | None, bytes | None]:
    if not isinstance(record.key, bytes | None):
        raise SerializationError(f'a key must be bytes, got {type(record.key).__name__}; say key="string" for text')
    return encode_json(record)
