"""What the DSL refuses while a topology is written, each in words that name the argument and the way out.

A mistake that is found here costs a look at one line; found by a task it costs the task, and what it has done by then.

>>> require_key_type("stream: key", "int")
Traceback (most recent call last):
    ...
shared.common.errors.ConfigError: stream: key must be "string" or "bytes", got 'int'
"""

from __future__ import annotations

from typing import Any, get_args

from shared.common.errors import ConfigError
from shared.common.topic_names import TOPIC_NAME_MAX, is_topic_name
from shared.streams.aggregations import Aggregation
from shared.streams.flow import Flow
from shared.streams.topology import KeyType, SinkNode, SourceNode, Topology
from shared.streams.user_functions import SHOWN_MAX, require_plain_methods

AGGREGATION_METHODS = ("initial", "add", "add_at", "merge", "to_columns", "from_columns", "result")


def require_key_type(argument: str, key: Any) -> None:
    """ConfigError for a kind of keys that there is not."""
    if key not in get_args(KeyType):
        raise ConfigError(f'{argument} must be "string" or "bytes", got {repr(key)[:SHOWN_MAX]}')


def require_topic(argument: str, topic: Any) -> None:
    """ConfigError for what no topic can be called."""
    if not is_topic_name(topic):
        raise ConfigError(
            f"{argument} must be a topic's name, 1 to {TOPIC_NAME_MAX} of a-z, A-Z, 0-9, '.', '_' and '-', "
            f"got {repr(topic)[:SHOWN_MAX]}"
        )


def require_aggregation(argument: str, aggregation: Any) -> None:
    """ConfigError for what is no aggregation, such as a class of them."""
    if isinstance(aggregation, Aggregation):
        require_plain_methods(argument, aggregation, AGGREGATION_METHODS)
        return
    if isinstance(aggregation, type) and issubclass(aggregation, Aggregation):
        name = aggregation.__name__
        raise ConfigError(f"{argument} is the class {name}; an aggregation is made of it: {name}(...)")
    raise ConfigError(f"{argument} must be an aggregation, such as Count(), got {repr(aggregation)[:SHOWN_MAX]}")


def require_same_builder(what: str, own: object, other: object) -> None:
    """ConfigError where the two sides are parts of two topologies."""
    if own is not other:
        raise ConfigError(f"{what}: the two sides are of two StreamsBuilders; a topology is built by one")


def require_groupable(what: str, flow: Flow) -> None:
    """ConfigError where the records have no key to go by: a window's is no record's."""
    if flow.is_windowed:
        raise ConfigError(
            f"{what}: the keys are windows (WindowKey); key_by(lambda record: record.key.key, name=...) before it "
            "gives each result its record's key"
        )


def require_one_type(what: str, flow: Flow) -> None:
    """ConfigError where the values are of several types, and something has to read them as one."""
    if flow.mixed:
        raise ConfigError(
            f"{what}: the merged streams have values of different types ({', '.join(flow.mixed)}), and no state or "
            "topic between can hold both; map_values(..., value=...) before merge() makes them one type"
        )


def refuse_loops(topology: Topology) -> None:
    """ConfigError for a sink whose records come back to it: written to a topic that they were read from."""
    for name, node in topology.nodes.items():
        if isinstance(node, SinkNode) and not node.is_internal and node.topic in _topics_above(topology, name):
            raise ConfigError(
                f"to({node.topic!r}): its records come from this topic and would come back for ever; "
                "write to another topic"
            )


def _topics_above(topology: Topology, name: str) -> set[str]:
    """All topics from which a record can come to a node, by way of internal ones too."""
    found: set[str] = set()
    names = {name}
    while names:
        above = {topology.nodes[one] for one in topology.above(names)}
        new = {one.topic for one in above if isinstance(one, SourceNode)} - found
        found |= new
        sinks = (one for one in topology.nodes.values() if isinstance(one, SinkNode) and one.is_internal)
        names = {sink.name for sink in sinks if sink.topic in new}
    return found
