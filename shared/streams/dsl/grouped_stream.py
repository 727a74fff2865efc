"""What a grouped stream is aggregated into: a table by key, or windows, and when their results go out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.joins import Table
from penstock.shared.streams.dsl.validation import require_aggregation, require_one_type
from penstock.shared.streams.processor import K, V, interval_ms
from penstock.shared.streams.task.result_encoders import encode_json, encode_updates
from penstock.shared.streams.topology import ProcessorNode, StoreBuilder
from penstock.shared.streams.windows.key_aggregate import KeyAggregate
from penstock.shared.streams.windows.kinds import Rule, hopping_windows
from penstock.shared.streams.windows.timed_processor import Emit, WindowKey, WindowResult
from penstock.shared.streams.windows.window_aggregate import WindowAggregate

if TYPE_CHECKING:
    from penstock.shared.streams.dsl.stream import Stream

RESERVED_RESULTS = frozenset(("partition", "key", "start", "end", LATEST))
"""What rows and results of windows have beside the results of aggregations."""


class GroupedStream(Generic[K, V]):
    """A stream whose records of one key belong together; durations are timedelta or ms."""

    def __init__(self, stream: Stream[K | None, V]) -> None:
        self._stream = stream

    def session_window(self, gap: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Sessions that a gap of inactivity ends."""
        return WindowedGroup(self._stream, Rule("session", interval_ms(gap, "session_window: gap"), _grace_ms(grace)))

    def tumbling_window(self, size: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Windows of one size, each beginning where the one before ends."""
        size_ms = interval_ms(size, "tumbling_window: size")
        return WindowedGroup(self._stream, Rule("tumbling", size_ms, _grace_ms(grace), size_ms))

    def hopping_window(
        self, size: timedelta | int, advance: timedelta | int, grace: timedelta | int = 0
    ) -> WindowedGroup[K, V]:
        """Windows of one size that begin every `advance`, and so overlap."""
        size_ms, advance_ms = interval_ms(size, "hopping_window: size"), interval_ms(advance, "hopping_window: advance")
        return WindowedGroup(self._stream, hopping_windows(size_ms, advance_ms, _grace_ms(grace)))

    def sliding_window(self, difference: timedelta | int, grace: timedelta | int = 0) -> WindowedGroup[K, V]:
        """Windows that hold records no further apart than `difference`; see `sliding_windows`."""
        difference_ms = interval_ms(difference, "sliding_window: difference", 0)
        return WindowedGroup(self._stream, Rule("sliding", difference_ms, _grace_ms(grace)))

    def aggregate(self, name: str | None = None, /, **aggregations: Aggregation[Any]) -> Table[K, dict[str, Any]]:
        """The named results of each key over all its records: a table, kept in a store of this name.

        A row is a dict of `key` (base64 of keys of bytes) and the results by name, as JSON has it. Each change goes on
        as a record with the row as value, at the time of the key's latest record; a worker sends the last of a commit.
        Without a name the store is named after the topic where the records entered the topology, such as
        `clicks-aggregate`.
        """
        stream = self._stream
        name, bound = _bound(stream, name, "aggregate", aggregations)
        bound = {LATEST: Latest(), **bound}
        _add_store(stream, _schema(stream, name, Rule("table"), "on_update", bound), bound)
        stream._builder._add(ProcessorNode(name, lambda: KeyAggregate(name, bound), (name,)), (stream._node,))
        return Table(stream._derived(name, dict, encode_json, is_windowed=False, has_deletions=False), name)


def _grace_ms(grace: timedelta | int) -> int:
    return interval_ms(grace, "grace", 0)


Bound = Mapping[str, Aggregation[Any]]


def _bound(
    stream: Stream, name: str | None, kind: str, aggregations: Mapping[str, Aggregation[Any]]
) -> tuple[str, Bound]:
    """The store's name, and the aggregations as they are of the stream's values."""
    flow = stream._flow
    if name is None:
        name = f"{flow.origin or flow.source.topic}-{kind}"
    if not isinstance(name, str) or not name:
        raise ConfigError(f"aggregate: name must be text, got {name!r}; results are named: n=Count()")
    if not aggregations:
        raise ConfigError(f"aggregate({name!r}): at least one aggregation is needed")
    if reserved := RESERVED_RESULTS & aggregations.keys():
        raise ConfigError(f"aggregate({name!r}): {', '.join(sorted(reserved))}: these names are a result's own")
    for result, aggregation in aggregations.items():
        require_aggregation(f"aggregate({name!r}): {result}", aggregation)
    if not all(isinstance(aggregation, Count) for aggregation in aggregations.values()):
        require_one_type(f"aggregate({name!r})", flow)
    return name, {n: a.bind(flow.value) for n, a in aggregations.items()}


def _schema(stream: Stream, name: str, rule: Rule, emit: Emit, bound: Bound) -> StoreSchema:
    source, is_table = stream._flow.source, rule.kind == "table"
    return StoreSchema(
        name=name,
        kind="aggregate" if rule.kind == "table" else rule.kind,
        key=stream._flow.key,
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


def _add_store(stream: Stream, schema: StoreSchema, bound: Bound) -> None:
    topology, name = stream._builder._topology, schema.name
    if name in topology.stores:
        raise ConfigError(
            f"aggregate({name!r}): the store {name!r} is there already; another aggregate needs a name of its "
            "own, and one aggregate is forwarded either on_close() or on_update()"
        )
    topology.add_store(StoreBuilder(schema, tuple(bound.values())))


class WindowedGroup(Generic[K, V]):
    """A grouped stream cut into windows."""

    def __init__(self, stream: Stream[K | None, V], rule: Rule) -> None:
        self._stream, self._rule = stream, rule

    def aggregate(self, name: str | None = None, /, **aggregations: Aggregation[Any]) -> WindowedTable[K]:
        """The named results of each window, kept in a store of this name.

        Without one the store is named after the topic where the records entered the topology and the kind of window,
        such as `clicks-session`: the name stays when what lies between is changed. Two stores of one name are refused.
        """
        name, bound = _bound(self._stream, name, self._rule.kind, aggregations)
        if self._rule.kind != "session":
            bound = {LATEST: Latest(), **bound}
        self._stream._builder._silent[name] = None
        return WindowedTable(self._stream, name, self._rule, bound)


class WindowedTable(Generic[K]):
    """Windowed results; say when they are forwarded."""

    def __init__(self, stream: Stream[K | None, Any], name: str, rule: Rule, bound: Bound) -> None:
        self._stream, self._name, self._rule, self._bound = stream, name, rule, bound

    def on_close(self) -> Stream[WindowKey[K], WindowResult[K]]:
        """Each window once, when it is closed: a record's key is a `WindowKey`, its value a `WindowResult`."""
        return self._emit("on_close")

    def on_update(self) -> Stream[WindowKey[K], WindowResult[K] | None]:
        """Each window's last result of every commit, and None for a window that was merged into another."""
        return self._emit("on_update")

    def _emit(self, emit: Emit) -> Stream:
        stream, name, rule, bound = self._stream, self._name, self._rule, self._bound
        builder = stream._builder
        schema = _schema(stream, name, rule, emit, bound)
        _add_store(stream, schema, bound)
        builder._silent.pop(name, None)
        node = ProcessorNode(name, lambda: WindowAggregate(name, rule, bound, emit), (name,))
        builder._add(node, (stream._node,))
        encode = encode_json if emit == "on_close" else encode_updates
        key, deletes = stream._flow.key, emit == "on_update"
        return stream._derived(name, WindowResult, encode, is_windowed=True, window_key=key, has_deletions=deletes)
