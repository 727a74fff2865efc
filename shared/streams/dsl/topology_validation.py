"""Validation of a topology while it is defined. Each error names the argument or the operation.

So a mistake is found before the application starts. Without the checks, it would end a task later.

>>> require_key_type("stream: key", "int")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: stream: key must be "string" or "bytes", got 'int'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.topic_names import TOPIC_NAME_MAX, is_topic_name
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.dsl.stream_traits import StreamTraits
from penstock.shared.streams.topology import KeyType, ProcessorNode, SinkNode, SourceNode, Topology
from penstock.shared.streams.user_code import SHOWN_MAX, require_plain_methods

AGGREGATION_METHODS = ("bind", "initial", "add", "add_at", "copy", "merge", "to_columns", "from_columns", "result")


def require_key_type(argument: str, key: Any) -> None:
    """Raise ConfigError unless this argument of a topology's definition is a known type of keys."""
    if key not in get_args(KeyType):
        raise ConfigError(f'{argument} must be "string" or "bytes", got {repr(key)[:SHOWN_MAX]}')


def require_topic(argument: str, topic: Any) -> None:
    """Raise ConfigError unless this argument of a topology's definition is a valid topic name."""
    if not is_topic_name(topic):
        raise ConfigError(
            f"{argument} must be a topic's name, 1 to {TOPIC_NAME_MAX} of a-z, A-Z, 0-9, '.', '_' and '-', "
            f"got {repr(topic)[:SHOWN_MAX]}"
        )


def require_name(argument: str, name: Any) -> None:
    """Raise ConfigError unless the name of a node or a store is text that is not empty, or None (the default name)."""
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"{argument} must be text, got {repr(name)[:SHOWN_MAX]}")


def require_repartition_topic(node: str, topic: str) -> None:
    """Raise ConfigError unless `<application>-<node>-repartition` can be a topic name for some application."""
    if not is_topic_name(f"a-{topic}"):
        longest = TOPIC_NAME_MAX - len("a-") - (len(topic) - len(node))
        raise ConfigError(
            f"name={repr(node)[:SHOWN_MAX]}: its records go through a topic that is named after it, so it must be 1 to "
            f"{longest} of a-z, A-Z, 0-9, '.', '_' and '-'"
        )


def require_aggregation(argument: str, aggregation: Any) -> None:
    """Raise ConfigError unless this is an aggregation, not a class, and none of AGGREGATION_METHODS is async or a
    generator.
    """
    if isinstance(aggregation, Aggregation):
        require_plain_methods(argument, aggregation, AGGREGATION_METHODS)
        return
    if isinstance(aggregation, type) and issubclass(aggregation, Aggregation):
        name = aggregation.__name__
        raise ConfigError(f"{argument} is the class {name}; an aggregation is made of it: {name}(...)")
    raise ConfigError(f"{argument} must be an aggregation, such as Count(), got {repr(aggregation)[:SHOWN_MAX]}")


def require_same_builder(operation: str, own: object, other: object) -> None:
    """Raise ConfigError if the two sides belong to different topologies."""
    if own is not other:
        raise ConfigError(f"{operation}: the two sides were made by two StreamsBuilders; use one for a topology")


def require_groupable(operation: str, traits: StreamTraits) -> None:
    """Raise ConfigError if keys may be WindowKeys, because those cannot group records."""
    if traits.is_windowed:
        raise ConfigError(
            f"{operation}: the keys are windows (WindowKey); key_by(lambda record: record.key.key, name=...) before it "
            "gives each result its record's key"
        )


def require_one_type(operation: str, traits: StreamTraits) -> None:
    """Raise ConfigError if the values are of several types, because the next node must read them as one."""
    if traits.mixed:
        raise ConfigError(
            f"{operation}: the merged streams have values of different types ({', '.join(traits.mixed)}), but a "
            "store or repartition topic holds one type; map_values(..., value=...) before merge() makes them one type"
        )


def require_known_stores(topology: Topology) -> None:
    """Raise ConfigError if a user's processor names a store that the topology lacks, or a global table that was added
    after the processor."""
    for node in topology.nodes.values():
        for store in node.stores if isinstance(node, ProcessorNode) else ():
            if store not in topology.stores:
                raise ConfigError(
                    f"process: {node.name!r} uses the store {store!r}, which was not added; a global table must be "
                    "added before its processors"
                )


def require_no_loops(topology: Topology) -> None:
    """Raise ConfigError if records of a topic that the topology reads would be written back to it.

    The check includes results, late records and dead letters, and loops through several topics that the topology reads.
    """
    writes = {source.topic: _topics_written_from(topology, source) for source in topology.sources()}
    for topic in writes:
        path = _path_back(writes, topic)
        if path is None:
            continue
        argument = writes[path[-2]][path[-1]]
        by = f" by way of {', '.join(path[1:-1])}" if len(path) > 2 else ""
        raise ConfigError(
            f"{argument}: records of the topic {topic!r} would come back to it{by}, for ever; write to a "
            "topic that this topology does not read"
        )


def _topics_written_from(topology: Topology, source: SourceNode) -> dict[str, str]:
    """Return the topics that a source's records may be written to, each with the argument that names it."""
    nodes = map(topology.nodes.__getitem__, topology.below(source.name))
    sinks = [node for node in nodes if isinstance(node, SinkNode)]
    found = {source.dead_letters: f"stream(..., dead_letters={source.dead_letters!r})"}
    if topology.has_windows(source):
        found[source.late] = f"stream(..., late={source.late!r})"
    return found | {sink.topic: f"to({sink.topic!r})" for sink in sinks}


def _path_back(writes: Mapping[str, Mapping[str, str]], topic: str) -> list[str] | None:
    """Return the shortest path on which records of a topic come back to it, with both ends; None if there is none."""
    paths = [[topic]]
    seen = set()
    for path in paths:
        for following in writes.get(path[-1], ()):
            if following == topic:
                return [*path, following]
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return None


def require_same_key_types(operation: str, own: KeyType, other: KeyType) -> None:
    """Raise ConfigError if the two sides of an operation have keys of different types."""
    if own != other:
        raise ConfigError(f"{operation}: the keys of one side are {own}, those of the other {other}")
